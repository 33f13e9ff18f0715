// States of the online softmax after some keys, and their merging.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "common/simd.h"

namespace {

// Rows that are processed together, which share keys in registers. AVX2 has 16 registers, of which the rows' sums take
// 12 (vector_attention.h); fewer sums would wait for each other.
constexpr int ROWS = LANES == 8 ? 6 : 4;
constexpr int ROW_LANES = LANES == 8 ? 8 : 4;  // lanes for one value of each row: a power of two
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

// Of each row, the largest score, the sum of weights exp(score - largest), and the weighted sum of the values,
// [rows][width].
struct State {
  float *largest, *weight, *values;
  long width;

  // Rows of values are aligned to cache lines if `memory` is and the width is a multiple of 16.
  static long before_values(long rows) { return (2 * rows + 15) / 16 * 16; }
  static long size(long rows, long width) { return before_values(rows) + (rows * width + 15) / 16 * 16; }
  State(float* memory, long rows, long width)
      : largest(memory), weight(memory + rows), values(memory + before_values(rows)), width(width) {}
  // The state of rows from `row` on.
  State from(long row) const {
    State later = *this;
    later.largest += row, later.weight += row, later.values += row * width;
    return later;
  }
  void clear(long rows) const {
    std::fill(largest, largest + rows, NEG_INF);
    std::fill(weight, weight + rows, 0.0f);
    std::fill(values, values + rows * width, 0.0f);
  }
};

inline float exp_of(float x) { return ::exp_of(broadcast(x))[0]; }

// Factor of a state's sums when its largest score changes from `from` to `to`.
inline float correction(float from, float to) {
  if (from == to) return 1.0f;
  return from == NEG_INF ? 0.0f : exp_of(from - to);
}

// Calls `run` with `count`, 1 … R, as a compile-time constant.
template <int R = ROWS, class Run>
inline void with_rows(long count, Run run) {
  if (count == R) return run(std::integral_constant<int, R>());
  if constexpr (R > 1) with_rows<R - 1>(count, run);
}

// Loads one value of each of R rows into a vector, lane i from row i % ROW_LANES; and stores them.
template <int R>
inline Vec row_values(const float* from) {
  typedef float Rows __attribute__((vector_size(ROW_LANES * 4)));
  Rows rows;
  for (int i = 0; i < ROW_LANES; i++) rows[i] = from[std::min(i, R - 1)];
  if constexpr (R == ROW_LANES) memcpy(&rows, from, sizeof rows);  // the usual case, a single load
#if defined(__AVX512F__)
  return (Vec)_mm512_broadcast_f32x4((__m128)rows);
#else
  Vec v;
  for (int i = 0; i < LANES; i++) v[i] = rows[i % ROW_LANES];
  return v;
#endif
}
template <int R>
inline void put_row_values(float* to, Vec v) {
  float all[LANES];
  store(all, v);
  std::copy(all, all + R, to);
}

void merge(const State& total, const State& part, long rows) {
  for (long r = 0; r < rows; r++) {
    const float largest = std::max(total.largest[r], part.largest[r]);
    const float a = correction(total.largest[r], largest), b = correction(part.largest[r], largest);
    total.largest[r] = largest;
    total.weight[r] = total.weight[r] * a + part.weight[r] * b;
    float *to = total.values + r * total.width, *from = part.values + r * part.width;
    for (long i = 0; i < total.width; i += LANES) store(to + i, load(to + i) * a + load(from + i) * b);
  }
}

}  // namespace
