// The online softmax of some rows for a tile: scores → weights, and the rows' new states (softmax_state.h).
#pragma once

#include "attention/query_rows.h"
#include "attention/softmax_state.h"
#include "attention/workspace.h"

namespace {

// A row's softmax weights, 4 bytes for each unit of keys.
template <class A>
struct Weights {
  alignas(64) float of[TILE / A::UNIT];
};

// Whether the softmax's inputs are the scores times a positive constant, which `weight_of` then applies.
template <class A>
inline bool is_scale_deferred(const AttentionCall& call) {
  return !call.key_scales && !call.alibi_slopes && call.soft_cap == 0 && call.scale > 0;
}

// Converts the scores of row `r` for `keys` keys from `start` to inputs of the softmax: scaled unless
// `is_scale_deferred`, NEG_INF for keys that the row does not see. Returns the largest input of each lane.
template <class A>
inline Vec scale_and_mask(const QueryRows& rows, const Workspace<A>& work, long r, float* scores, long start,
                          long keys) {
  const AttentionCall& call = rows.call;
  const bool all_seen = rows.see_all(r, 1, start, keys), is_deferred = is_scale_deferred<A>(call);
  Vec maxima = broadcast(NEG_INF);
  if (is_deferred && all_seen) {
    for (long j = 0; j < keys; j += LANES) maxima = larger(maxima, load(scores + j));
    return maxima;
  }
  const float at = (float)rows.position_of(r), oldest = (float)rows.oldest_of(r);
  const float slope = call.alibi_slopes ? call.alibi_slopes[rows.head_of(r)] : 0.0f;
  const float scale = is_deferred ? 1.0f : call.scale;
  Vec steps;
  for (int i = 0; i < LANES; i++) steps[i] = (float)i;
  for (long j = 0; j < keys; j += LANES) {
    Vec s = load(scores + j) * scale;
    if (call.key_scales) s *= load(work.key_scales + j);
    if (call.soft_cap != 0) s = tanh_of(s / call.soft_cap) * call.soft_cap;
    if (!all_seen || slope != 0) {
      // Positions are below 2²⁴, so floats hold them exactly.
      const Vec positions = steps + (float)(start + j);
      if (slope != 0) s += slope * (positions - at);
      s = positions <= at ? s : broadcast(NEG_INF);
      s = positions >= oldest ? s : broadcast(NEG_INF);
    }
    store(scores + j, s);
    maxima = larger(maxima, s);
  }
  return maxima;
}

// Computes the weights exp(scores - largest) of `keys` keys, times the values' scales; returns each lane's sum of the
// weights without these scales.
template <class A>
inline Vec exponentials(const AttentionCall& call, const Workspace<A>& work, const float* scores, float largest,
                        Weights<A>& weights, long keys) {
  const float scale = is_scale_deferred<A>(call) ? call.scale : 1.0f;
  Vec sum = {};
  if (!call.key_scales) {
    for (long j = 0; j < keys; j += LANES) {
      const Vec p = A::weight_of(load(scores + j), largest, scale);
      sum += p;
      A::put_weights(weights.of, j, p);
    }
    return sum;
  }
  for (long j = 0; j < keys; j += LANES) {
    const Vec s = load(scores + j), p = A::weight_of(s, largest, scale);
    sum += p;
    // The scale of a key that the row does not see may be NaN.
    A::put_weights(weights.of, j, s == NEG_INF ? Vec{} : p * load(work.value_scales + j));
  }
  return sum;
}

// Scores of R rows for `keys` keys (a multiple of LANES) from `start` → weights (0 for keys that a row does not see),
// and factors that correct earlier sums. A vector's lanes hold one value for each row.
template <int R, class A>
inline void softmax_weights(const QueryRows& rows, const Workspace<A>& work, long r, float (*scores)[TILE], long start,
                            long keys, const State& state, Weights<A>* weights, float* factors) {
  Vec maxima[ROW_LANES], sums[ROW_LANES];
  for (int i = 0; i < R; i++) maxima[i] = scale_and_mask(rows, work, r + i, scores[i], start, keys);
  for (int i = R; i < ROW_LANES; i++) maxima[i] = maxima[0];
  Vec current = reduce_each<ROW_LANES>(maxima, [](Vec a, Vec b) { return larger(a, b); });
  if (is_scale_deferred<A>(rows.call)) current *= rows.call.scale;
  const Vec previous = row_values<R>(state.largest + r), largest = larger(previous, current);
  // A row that has seen no key yet has a largest score of NEG_INF; its weights are 0. A NaN score makes its row NaN.
  float shifts[LANES], corrections[LANES];
  store(shifts, largest == NEG_INF ? Vec{} : largest);
  for (int i = 0; i < R; i++) sums[i] = exponentials(rows.call, work, scores[i], shifts[i], weights[i], keys);
  for (int i = R; i < ROW_LANES; i++) sums[i] = sums[0];
  const Vec factor = previous == largest ? broadcast(1) : ::exp_of(previous - largest);
  const Vec sum = reduce_each<ROW_LANES>(sums, [](Vec a, Vec b) { return a + b; });
  put_row_values<R>(state.largest + r, largest);
  put_row_values<R>(state.weight + r, row_values<R>(state.weight + r) * factor + sum);
  store(corrections, factor);
  std::copy(corrections, corrections + R, factors);
}

}  // namespace
