// Attention of rows to a rearranged tile by AMX, up to 32 rows at a time. For few rows see also amx_keys_in_place.h.
#pragma once

#include <utility>

#include "attention/attention_tile.h"
#include "attention/query_rows.h"
#include "attention/softmax.h"
#include "attention/softmax_state.h"
#include "attention/workspace.h"
#include "common/memory.h"
#include "gemm/amx_tiles.h"

#if defined(STOKER_AMX)
namespace {

typedef Workspace<PairArithmetic> AmxWorkspace;
typedef Weights<PairArithmetic> AmxWeights;
constexpr long UNIT = PairArithmetic::UNIT, SCORED_KEYS = PairArithmetic::SCORED_KEYS;

// Cost estimates for TilePrefetcher, relative to interleaving two vectors of values.
constexpr long STEP_WEIGHT = 16;    // two products of tiles, including their loads
constexpr long SOFTMAX_WEIGHT = 9;  // softmax of ROWS rows and LANES keys

// Scores and weights of up to 32 rows for a tile.
struct Scored {
  alignas(64) float scores[2 * TILE_ROWS][TILE];
  AmxWeights weights[2 * TILE_ROWS];
  float factors[2 * TILE_ROWS];
};

// The rows [first, end) that see keys of the tile. Excluding others makes a row's steps independent of the item.
inline std::pair<long, long> rows_that_see(const QueryRows& rows, long start) {
  long r = 0, end = rows.num_rows;
  while (rows.position_of(r) < start) r++;
  while (end > r && rows.oldest_of(end - 1) >= start + TILE) end--;
  return {r, end};
}

// Number of the tile's first keys that are computed for `count` rows from `r` on: up to the last that any of them sees,
// rounded up.
inline long keys_seen(const QueryRows& rows, long r, long count, long start) {
  return rounded_up(std::min(TILE - 1, rows.position_of(r + count - 1) - start) + 1, SCORED_KEYS);
}

// Computes scores of up to M × 16 rows from `r` on for the tile's first keys: queries × keys.
template <int M>
inline void score_by_amx(const AmxWorkspace& work, long r, float (*scores)[TILE], long keys) {
  const long words = work.query_words(), stride = words * sizeof(uint32_t);
  const uint32_t* queries = work.queries + r * words;
  for (long j = 0; j < keys; j += SCORED_KEYS) {
    clear_sums<M, 2>();
    for (long d = 0; d < words; d += TILE_WORDS) {
      const uint32_t* columns = work.keys + d * TILE + j;
      multiply_tiles<M, 2>(queries + d, stride, columns, columns + TILE_COLUMNS, TILE * sizeof(uint32_t));
    }
    store_sums<M, 2>(scores[0] + j, sizeof scores[0]);
  }
}

// Adds weights × values of the tile's first keys to the rows' sums.
template <int M>
inline void add_values_by_amx(const uint32_t* values, long width, float* to, const AmxWeights* weights, long keys,
                              TilePrefetcher& prefetcher) {
  const long stride = width * sizeof(uint32_t);
  TileUnit::compiler_barrier(weights);
  for (long d = 0; d < width; d += 2 * TILE_COLUMNS) {
    load_sums<M, 2>(to + d, stride);
    for (long k = 0; k < keys / UNIT; k += TILE_WORDS) {
      prefetcher.fetch(STEP_WEIGHT);
      const uint32_t* columns = values + k * width + d;
      multiply_tiles<M, 2>(weights[0].of + k, sizeof(AmxWeights), columns, columns + TILE_COLUMNS, stride);
    }
    store_sums<M, 2>(to + d, stride);
  }
}

// Whether `count` words of values are all finite.
inline bool are_finite(const uint32_t* values, long count) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 non_finite = 0;
  for (long i = 0; i < count; i += LANES)
    non_finite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(values + i), exponent), exponent);
  return non_finite == 0;
}

// Like add_values_by_amx, row by row: values that a row does not see are replaced by 0, since their weight, 0, times
// infinity would be NaN.
inline void add_seen_values_by_amx(const QueryRows& rows, AmxWorkspace& work, long r, long count, long start, float* to,
                                   const AmxWeights* weights, long keys) {
  static thread_local Memory memory;
  TilePrefetcher no_prefetcher;
  const long width = work.width;
  bf16* const seen = (bf16*)memory.of(TILE / UNIT * width * sizeof(uint32_t));
  work.unit.set_for(1, 0);
  for (long i = 0; i < count; i++) {
    memcpy((void*)seen, work.values, keys / UNIT * width * sizeof(uint32_t));
    for (long j = 0; j < keys; j++) {
      if (rows.see_all(r + i, 1, start + j, 1)) continue;
      for (long d = 0; d < width; d++) seen[(j / 2 * width + d) * 2 + j % 2] = bf16{};
    }
    TileUnit::compiler_barrier(seen);
    add_values_by_amx<1>((const uint32_t*)seen, width, to + i * width, weights + i, keys, no_prefetcher);
  }
}

// Applies the softmax to the scores, and adds the weighted values to the rows' sums.
template <int M>
inline void add_scored(const QueryRows& rows, AmxWorkspace& work, long r, long count, long start, long keys,
                       Scored& scored, const State& state, TilePrefetcher& prefetcher) {
  for (long i = 0; i < count; i += ROWS) {
    prefetcher.fetch(keys / LANES * SOFTMAX_WEIGHT);
    with_rows(std::min<long>(ROWS, count - i), [&](auto some) {
      softmax_weights<some>(rows, work, r + i, scored.scores + i, start, keys, state, scored.weights + i,
                            scored.factors + i);
    });
  }
  const long width = work.width;
  float* const to = state.values + r * width;
  for (long i = 0; i < count; i++) {
    if (scored.factors[i] == 1.0f) continue;
    for (long d = 0; d < width; d += LANES) store(to + i * width + d, load(to + i * width + d) * scored.factors[i]);
  }
  if (rows.see_all(r, count, start, keys) || are_finite(work.values, keys / UNIT * width))
    add_values_by_amx<M>(work.values, width, to, scored.weights, keys, prefetcher);
  else
    add_seen_values_by_amx(rows, work, r, count, start, to, scored.weights, keys);
}

// Processes a rearranged tile for up to M × 16 rows from `r` on.
template <int M>
inline void attend_rows_by_amx(const QueryRows& rows, AmxWorkspace& work, long r, long count, long start,
                               const State& state) {
  const long keys = keys_seen(rows, r, count, start);
  Scored scored;
  TilePrefetcher no_prefetcher;
  work.unit.set_for(std::min(count, TILE_ROWS), std::max(count - TILE_ROWS, 0l));
  score_by_amx<M>(work, r, scored.scores, keys);
  add_scored<M>(rows, work, r, count, start, keys, scored, state, no_prefetcher);
}

// Processes a rearranged tile for all rows.
inline void attend_by_amx(const QueryRows& rows, AmxWorkspace& work, long start, const State& state) {
  auto [r, end] = rows_that_see(rows, start);
  for (long count; r < end; r += count) {
    count = std::min(2 * TILE_ROWS, end - r);
    if (count > TILE_ROWS)
      attend_rows_by_amx<2>(rows, work, r, count, start, state);
    else
      attend_rows_by_amx<1>(rows, work, r, count, start, state);
  }
}

}  // namespace
#endif
