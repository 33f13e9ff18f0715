// A thread's buffers: an item's queries, and a tile of keys and values, rearranged for the multiplication.
#pragma once

#include "attention/arithmetic.h"
#include "attention/attention.h"
#include "attention/attention_tile.h"

namespace {

inline long rounded_up(long n, long to) { return (n + to - 1) / to * to; }

// A is an arithmetic (arithmetic.h).
template <class A>
struct Workspace {
  typedef typename A::Word Word;

#if defined(STOKER_AMX)
  TileUnit unit;
#endif
  long depth, width;             // elements of a query and key, and of a value, padded to whole vectors
  Word* queries;                 // [rows][query_words()], padded with 0
  uint32_t* columns;             // [depth / 2][16]: words of up to 16 rows, transposed; only with AMX
  uint32_t* keys;                // [depth / A::WORD][TILE]: a vector holds one word of LANES keys
  Word* values;                  // [TILE / A::UNIT][width]
  const Word* value_rows[TILE];  // values of each unit, in `values` or in a cache of floats; unused for pairs
  float key_scales[TILE], value_scales[TILE];

  static long depth_of(const AttentionCall& call) { return rounded_up(call.head_dim, LANES * A::WORD); }
  static long width_of(const AttentionCall& call) { return rounded_up(call.value_dim, LANES * A::UNIT); }
  // Number of floats of memory.
  static long size(const AttentionCall& call, long rows) {
    return (LANES / 2 + rows) * depth_of(call) + TILE * (depth_of(call) + width_of(call));
  }
  Workspace(const AttentionCall& call, float* memory, long rows)
      : depth(depth_of(call)),
        width(width_of(call)),
        queries((Word*)(memory + LANES / 2 * depth)),
        columns((uint32_t*)memory),
        keys((uint32_t*)(queries + rows * depth)),
        values(queries + (rows + TILE) * depth) {}

  long query_words() const { return depth / A::WORD * A::QUERY_WORDS; }
  const Word* values_of(long unit) const {
    if constexpr (A::UNIT == 1) return value_rows[unit];
    return values + unit * width;
  }
};

}  // namespace
