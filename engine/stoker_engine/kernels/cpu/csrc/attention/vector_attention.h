// Attention of up to ROWS rows to a rearranged tile by vectors, whose sums stay in registers.
#pragma once

#include "attention/query_rows.h"
#include "attention/softmax.h"
#include "attention/softmax_state.h"
#include "attention/workspace.h"

namespace {

constexpr int VECTORS = LANES == 16 ? 4 : 2;  // vectors in registers for each of ROWS rows

// Computes scores of R rows from `r` on for the tile's first keys: queries × keys.
template <int R, class A>
inline void score(const Workspace<A>& work, long r, float (*scores)[TILE], long keys) {
  const long stride = work.query_words();
  for (long j = 0; j < keys; j += VECTORS * LANES) {
    Vec sums[R][VECTORS] = {};
    const auto* query = work.queries + r * stride;
    for (long d = 0; d < work.depth / A::WORD; d++)
      for (int n = 0; n < A::QUERY_WORDS; n++) {  // outside of the loop over rows, so that few registers hold keys
        typename A::ValueVec parts[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
          WordVec words;
          memcpy(&words, work.keys + d * TILE + j + v * LANES, sizeof words);
          parts[v] = A::part_of(words, n);
        }
        for (int i = 0; i < R; i++)
          for (int v = 0; v < VECTORS; v++)
            sums[i][v] = A::add_products(sums[i][v], parts[v], query[i * stride + d * A::QUERY_WORDS + n]);
      }
    for (int i = 0; i < R; i++)
      for (int v = 0; v < VECTORS; v++) store(scores[i] + j + v * LANES, sums[i][v]);
  }
}

// Multiplies V vectors of the sums of R rows, from element `d` on, by `factors`, and adds weights × values for the
// units begin … end - 1 of the tile. If R is 1, words of pairs are masked by `seen`.
template <int R, int V, class A>
inline void add_vectors(const Workspace<A>& work, float* to, const Weights<A>* weights, const float* factors, long d,
                        long begin, long end, uint32_t seen) {
  const long width = work.width;
  Vec sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = load(to + r * width + d + v * LANES) * factors[r];
  const auto value_of = [&](long k, int v) {
    typename A::ValueVec value;
    memcpy(&value, work.values_of(k) + d + v * LANES, sizeof value);
    if constexpr (A::UNIT == 2 && R == 1) value &= seen;
    return value;
  };
  for (long k = begin; k < end; k++)
    if constexpr (LANES == 8) {  // all values in registers, and one weight: R weights would be too many
      typename A::ValueVec values[V];
      for (int v = 0; v < V; v++) values[v] = value_of(k, v);
      for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = A::add_weighted(sums[r][v], values[v], weights[r].of + k);
    } else {
      for (int v = 0; v < V; v++) {
        const auto value = value_of(k, v);
        for (int r = 0; r < R; r++) sums[r][v] = A::add_weighted(sums[r][v], value, weights[r].of + k);
      }
    }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(to + r * width + d + v * LANES, sums[r][v]);
}

// The same for all elements.
template <int R, class A>
inline void add_values(const Workspace<A>& work, float* to, const Weights<A>* weights, const float* factors, long begin,
                       long end, uint32_t seen = ~0u) {
  long d = 0;
  for (; d + VECTORS * LANES <= work.width; d += VECTORS * LANES)
    add_vectors<R, VECTORS>(work, to, weights, factors, d, begin, end, seen);
  for (; d < work.width; d += LANES) add_vectors<R, 1>(work, to, weights, factors, d, begin, end, seen);
}

// The same for one row that sees only the keys first … last, which the units begin … end - 1 contain.
template <class A>
inline void add_values_of_row(const Workspace<A>& work, float* to, const Weights<A>& weights, float factor, long first,
                              long last, long begin, long end) {
  if constexpr (A::UNIT == 2) {
    for (long k = begin; k < end; k++, factor = 1.0f) {
      const uint32_t seen = (2 * k < first ? 0xffff0000u : ~0u) & (2 * k + 1 > last ? 0x0000ffffu : ~0u);
      add_values<1>(work, to, &weights, &factor, k, k + 1, seen);
    }
    if (begin >= end && factor != 1.0f) add_values<1>(work, to, &weights, &factor, 0, 0);
  } else {
    add_values<1>(work, to, &weights, &factor, begin, end);
  }
}

// Adds the values of the keys first[i] … last[i] that each of R rows sees. Other values must be skipped, not multiplied
// by 0, since they may be NaN. Therefore units that not all rows see completely, at either end, are added row by row.
template <int R, class A>
inline void add_seen_values(const Workspace<A>& work, float* to, const Weights<A>* weights, float* factors,
                            const long* first, const long* last) {
  const long begin = (first[R - 1] + A::UNIT - 1) / A::UNIT, end = (last[0] + 1) / A::UNIT;
  const auto first_of = [&](int i) { return first[i] / A::UNIT; };
  const auto end_of = [&](int i) { return last[i] < first[i] ? first_of(i) : last[i] / A::UNIT + 1; };
  const bool have_same_keys = first[0] == first[R - 1] && last[0] == last[R - 1];
  const bool are_units_whole = have_same_keys && first_of(0) == begin && end_of(0) == end;
  if (!are_units_whole) {
    for (int i = 0; i < R; i++)
      add_values_of_row(work, to + i * work.width, weights[i], factors[i], first[i], last[i], first_of(i),
                        std::min(end_of(i), begin));
    std::fill(factors, factors + R, 1.0f);
  }
  if (begin < end) add_values<R>(work, to, weights, factors, begin, end);
  if (are_units_whole) return;
  for (int i = 0; i < R; i++)
    add_values_of_row(work, to + i * work.width, weights[i], 1.0f, first[i], last[i],
                      std::max(std::max(begin, end), first_of(i)), end_of(i));
}

// Processes the tile from key `start` on for R rows from `r` on.
template <int R, class A>
FLATTEN void attend_by_vectors(const QueryRows& rows, const Workspace<A>& work, long r, long start,
                               const State& state) {
  long first[R], last[R];  // keys of the tile that a row sees, none if first > last; both are ascending
  for (int i = 0; i < R; i++) {
    first[i] = std::max(0l, rows.oldest_of(r + i) - start);
    last[i] = std::min(TILE - 1, rows.position_of(r + i) - start);
  }
  if (first[0] > last[R - 1]) return;
  float scores[R][TILE], factors[R];
  Weights<A> weights[R];
  const long keys = rounded_up(last[R - 1] + 1, LANES);
  score<R>(work, r, scores, keys);
  softmax_weights<R>(rows, work, r, scores, start, keys, state, weights, factors);
  add_seen_values<R>(work, state.values + r * work.width, weights, factors, first, last);
}

}  // namespace
