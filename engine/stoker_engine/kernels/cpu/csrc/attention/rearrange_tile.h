// Copies a tile of keys and values from the cache into the workspace, in the order in which they are multiplied, and
// prefetches the next tile.
#pragma once

#include "attention/attention_tile.h"
#include "attention/kv_dtypes.h"
#include "attention/workspace.h"

namespace {

// Interleaves `count` values of two keys into `width` words. Of each 2 × LANES elements, those at even indices come
// first, then the odd ones.
template <class S>
inline void pair_values(const S* first, const S* second, long count, uint32_t* to, long width) {
  for (long d = 0; d < width; d += 2 * LANES) {
    const long remaining = count - d;
    const bool whole = remaining >= 2 * LANES;
    const WordVec a = whole ? words(first + d) : words_part(first + d, remaining);
    const WordVec b = whole ? words(second + d) : words_part(second + d, remaining);
    const WordVec even = (a & 0xffffu) | (b << 16), odd = (a >> 16) | (b & 0xffff0000u);
    memcpy(to + d, &even, sizeof even);
    memcpy(to + d + LANES, &odd, sizeof odd);
  }
}

// Transposes `keys` keys, so that a vector holds one word of LANES keys.
template <class S, class A>
inline void rearrange_keys(const AttentionCall& call, const Tile& tile, const Tile* next, long keys,
                           Workspace<A>& work) {
  for (long j = 0; j < keys; j += LANES) {
    if (next)
      for (long k = j; k < j + LANES; k++) fetch(next->keys[k], call.head_dim * sizeof(S));
    for (long d = 0; d < work.depth; d += LANES * A::WORD) {
      WordVec taken[LANES];
      const long remaining = call.head_dim - d;
      for (int k = 0; k < LANES; k++) {
        const S* from = (const S*)tile.keys[j + k] + d;
        taken[k] = remaining >= LANES * A::WORD ? words(from) : words_part(from, remaining);
      }
      transpose(taken);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) memcpy(work.keys + (d / A::WORD + i) * TILE + j, &taken[i], sizeof(WordVec));
    }
  }
}

// Converts values to floats, or interleaves pairs of them. Floats in whole vectors are used in place.
template <class S, class A>
inline void rearrange_values(const AttentionCall& call, const Tile& tile, const Tile* next, long keys,
                             Workspace<A>& work) {
  const long width = work.width, size = call.value_dim * sizeof(S);
  for (long j = 0; j < keys; j += A::UNIT) {
    const auto value = [&](long i) { return (const S*)tile.values[j + i]; };
    for (long i = 0; i < A::UNIT; i++)
      if (next) fetch(next->values[j + i], size);
    if constexpr (A::UNIT == 2) {
      pair_values(value(0), value(1), call.value_dim, work.values + j / 2 * width, width);
    } else {
      work.value_rows[j] = (const float*)value(0);
      if (sizeof(S) == sizeof(float) && call.value_dim % LANES == 0) continue;
      work.value_rows[j] = work.values + j * width;
      to_floats(work.values + j * width, value(0), call.value_dim);
    }
  }
}

template <class S, class A>
FLATTEN void rearrange_stored(const AttentionCall& call, const Tile& tile, const Tile* next, long keys,
                              Workspace<A>& work) {
  rearrange_keys<S>(call, tile, next, keys, work);
  rearrange_values<S>(call, tile, next, keys, work);
  if (!call.key_scales) return;
  for (long j = 0; j < TILE; j++) {
    if (next) fetch((const char*)next->key_scales[j], 4), fetch((const char*)next->value_scales[j], 4);
    work.key_scales[j] = *tile.key_scales[j];
    work.value_scales[j] = *tile.value_scales[j];
  }
}

// Rearranges `keys` keys of the tile and their values.
template <class A>
inline void rearrange_tile(const AttentionCall& call, const Tile& tile, const Tile* next, long keys,
                           Workspace<A>& work) {
  if constexpr (sizeof(typename A::Key) == sizeof(float)) return rearrange_stored<float>(call, tile, next, keys, work);
  switch (call.stored) {
    case BF16: return rearrange_stored<bf16>(call, tile, next, keys, work);
    case E4M3: return rearrange_stored<e4m3>(call, tile, next, keys, work);
    case E5M2: return rearrange_stored<e5m2>(call, tile, next, keys, work);
    case INT8: return rearrange_stored<int8>(call, tile, next, keys, work);
  }
}

}  // namespace
