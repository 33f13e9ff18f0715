// Loads and stores of a row's vectors. The last one may be partial: its unused lanes are loaded as 0, and not stored.
#pragma once

#include "common/simd.h"

template <class T>
inline Vec load_up_to(const T* from, long count) {
  return count >= LANES ? load(from) : load_part(from, count);
}

template <class T>
inline void store_up_to(T* to, Vec v, long count) {
  if (count >= LANES)
    store(to, v);
  else
    store_part(to, v, count);
}

// Number of elements below which waking other threads costs more than it saves.
constexpr long GRAIN_SIZE = 32768;
