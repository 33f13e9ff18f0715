// GGUF's types, each a format of blocks (blocks.h). What their bytes mean is drawn in kernels/gguf_blocks.py; the
// layouts are ggml's (ggml-common.h).
#pragma once

#include "quant/blocks.h"
#include "quant/codes.h"

// What can be done with one type; the first of each for float, the second for bf16.
struct GGUFOperations {
  void (*product[2])(const BlockProduct&);
  void (*dequantize[2])(const uint8_t* w, long w_stride, void* y, long rows, long inner);
};

template <class T, class Format>
void gguf_product(const BlockProduct& p) {
  multiply_blocks<T>(p, Format{});
}

template <class T, class Format>
void gguf_dequantize(const uint8_t* w, long w_stride, void* y, long rows, long inner) {
  dequantize_blocks<T>(w, w_stride, y, rows, inner, Format{});
}

template <class Format>
constexpr GGUFOperations gguf_operations = {{gguf_product<float, Format>, gguf_product<bf16, Format>},
                                            {gguf_dequantize<float, Format>, gguf_dequantize<bf16, Format>}};

// Those of a type by ggml's number, where the file that is named has it; else null.
const GGUFOperations* gguf_small(int type);    // gguf_small.cpp: blocks of 32 numbers
const GGUFOperations* gguf_k(int type);        // gguf_k.cpp: blocks of 256, in which scales are quantized too
const GGUFOperations* gguf_tables(int type);   // gguf_tables.cpp: codes are places in a table
const GGUFOperations* gguf_numbers(int type);  // gguf_float16.cpp: numbers of 16 bits

// A block for each unit; nothing is kept from one to the next.
template <long BYTES>
struct SmallBlocks {
  static constexpr bool HAS_REST = false;
  using Header = NoHeader;
  struct Place {
    long at;
  };
  Place place(long u) const { return {u * BYTES}; }
};

// Eight units a block.
template <long BYTES>
struct LargeBlocks {
  static constexpr bool HAS_REST = false;
  struct Place {
    long at, block, unit;
  };
  Place place(long u) const { return {u * BYTES / 8, u / 8 * BYTES, u % 8}; }
  bool begins(const Place& place) const { return place.unit == 0; }
};
