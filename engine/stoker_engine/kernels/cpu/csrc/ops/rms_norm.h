// RMS normalisation; see kernels/rms_norm.py for where each model family rounds.
#pragma once

#include "common/rows.h"

template <class T>
inline Vec rounded_to(Vec v) {
  if constexpr (sizeof(T) == sizeof(float)) return v;
  return (Vec)(__builtin_convertvector(nearest_bf16(v), WordVec) << 16);
}

// Normalises one row; `to` may be `from`.
template <class T, class W>
inline void rms_norm(const T* from, const W* weight, float eps, T* to, long size) {
  Vec squares = {};
  for (long i = 0; i < size; i += LANES) {
    Vec v = load_up_to(from + i, size - i);
    squares += v * v;
  }
  const float scale = 1.0f / sqrtf(sum_of(squares) / (float)size + eps);
  for (long i = 0; i < size; i += LANES) {
    Vec v = load_up_to(from + i, size - i) * scale;
    if (sizeof(W) == sizeof(T)) v = rounded_to<T>(v);
    store_up_to(to + i, v * load_up_to(weight + i, size - i), size - i);
  }
}
