// GGUF's types, each a format of blocks (blocks.h). What their bytes mean is drawn in kernels/gguf_blocks.py; the
// layouts are ggml's (ggml-common.h).
#pragma once

#include "quant/blocks.h"
#include "quant/codes.h"

// What can be done with one type; the first of each for float, the second for bf16.
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

// Those of a type by ggml's number, where the file that is named has it; else null.
const GGUFOperations* gguf_small(int type);    // gguf_small.cpp: blocks of 32 elements
const GGUFOperations* gguf_k(int type);        // gguf_k.cpp: blocks of 256, in which scales are quantized too
const GGUFOperations* gguf_tables(int type);   // gguf_tables.cpp: codes are indices into a table
const GGUFOperations* gguf_float16(int type);  // gguf_float16.cpp: elements of 16 bits

// A block for each unit; nothing is kept from one to the next.
template <long BYTES>
struct SmallBlocks {
  static constexpr bool HAS_TAIL = false;
  using Header = NoHeader;
  struct Location {
    long at;
  };
  Location location(long u) const { return {u * BYTES}; }
};

// Eight units a block.
template <long BYTES>
struct LargeBlocks {
  static constexpr bool HAS_TAIL = false;
  struct Location {
    long at, block, unit;
  };
  Location location(long u) const { return {u * BYTES / 8, u / 8 * BYTES, u % 8}; }
  bool begins(const Location& location) const { return location.unit == 0; }
};
