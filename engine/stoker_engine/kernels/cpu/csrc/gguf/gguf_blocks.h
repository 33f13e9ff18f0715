// GGUF's types as block formats (blocks.h). For their layouts, which are ggml's (ggml-common.h), see
// kernels/gguf_blocks.py.
#pragma once

#include "quant/blocks.h"
#include "quant/codes.h"

// The operations of a type; the first of each is for float, the second for bf16.
struct GGUFOperations {
  void (*linear[2])(const BlockGemm&);
  void (*dequantize[2])(const uint8_t* w, long w_stride, void* y, long rows, long inner);
};

template <class T, class Format>
void gguf_linear(const BlockGemm& p) {
  block_gemm<T>(p, Format{});
}

template <class T, class Format>
void gguf_dequantize(const uint8_t* w, long w_stride, void* y, long rows, long inner) {
  dequantize_blocks<T>(w, w_stride, y, rows, inner, Format{});
}

template <class Format>
constexpr GGUFOperations gguf_operations = {{gguf_linear<float, Format>, gguf_linear<bf16, Format>},
                                            {gguf_dequantize<float, Format>, gguf_dequantize<bf16, Format>}};

// The operations of a type, by ggml's type number; null if the named file does not implement it.
const GGUFOperations* gguf_small(int type);    // gguf_small.cpp: blocks of 32 elements
const GGUFOperations* gguf_k(int type);        // gguf_k.cpp: blocks of 256 elements with quantized scales
const GGUFOperations* gguf_tables(int type);   // gguf_tables.cpp: codes are indices into a table
const GGUFOperations* gguf_float16(int type);  // gguf_float16.cpp: elements of 16 bits

// Formats in which a block is a unit; nothing is kept between units.
template <long BYTES>
struct SmallBlocks {
  static constexpr bool HAS_TAIL = false;
  using Header = NoHeader;
  struct Location {
    long at;
  };
  Location location(long u) const { return {u * BYTES}; }
};

// Formats with eight units in a block.
template <long BYTES>
struct LargeBlocks {
  static constexpr bool HAS_TAIL = false;
  struct Location {
    long at, block, unit;
  };
  Location location(long u) const { return {u * BYTES / 8, u / 8 * BYTES, u % 8}; }
  bool begins(const Location& location) const { return location.unit == 0; }
};
