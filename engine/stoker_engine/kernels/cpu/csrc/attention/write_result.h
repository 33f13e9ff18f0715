// Writes an item's result: the sums of weighted values, divided by the sum of weights.
#pragma once

#include "attention/arithmetic.h"
#include "attention/query_rows.h"
#include "attention/softmax_state.h"

namespace {

// The final factor of row `r`'s values. A sink is a key without a value, which each row of its head sees last.
inline float norm_of(const QueryRows& rows, long r, const State& state) {
  if (!rows.call.sinks) return 1.0f / state.weight[r];
  const float sink = rows.call.sinks[rows.head_of(r)], largest = std::max(state.largest[r], sink);
  const float factor = correction(state.largest[r], largest);
  return factor / (state.weight[r] * factor + correction(sink, largest));
}

// Writes `count` of a row's values times `norm`.
template <class A, class T>
inline void write_row(const float* values, float norm, T* to, long count) {
  if constexpr (A::UNIT == 1) {
    for (long d = 0; d < count; d += LANES) store_up_to(to + d, load(values + d) * norm, count - d);
    return;
  }
  for (long d = 0; d < count; d += 2 * LANES) {  // even indices, then odd ones: see pair_values
    const auto words = [&](long i) {
      return __builtin_convertvector(nearest_bf16(load(values + d + i) * norm), WordVec);
    };
    const WordVec both = words(0) | words(LANES) << 16;
    const long remaining = count - d;
    if (remaining >= 2 * LANES)
      memcpy((void*)(to + d), &both, sizeof both);  // usual; constant size, so no call
    else
      memcpy((void*)(to + d), &both, remaining * sizeof(bf16));
  }
}

template <class A, class T>
inline void write_rows(const QueryRows& rows, const State& state) {
  const AttentionCall& call = rows.call;
  for (long r = 0; r < rows.num_rows; r++) {
    T* to = (T*)call.out + (rows.query_of(r) * call.heads + rows.head_of(r)) * call.value_dim;
    write_row<A>(state.values + r * state.width, norm_of(rows, r, state), to, call.value_dim);
  }
}

template <class A>
inline void write_result(const QueryRows& rows, const State& state) {
  rows.call.is_bf16 ? write_rows<A, bf16>(rows, state) : write_rows<A, float>(rows, state);
}

}  // namespace
