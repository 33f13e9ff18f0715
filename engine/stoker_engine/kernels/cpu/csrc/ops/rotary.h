// Rotary position embedding; see kernels/rotary.py.
#pragma once

#include <algorithm>

#include "common/rows.h"

// Rotates one head by the cos and sin of its token; `to` may be `from`.
template <class T>
inline void rotate(bool interleaved, const T* from, const T* cos, const T* sin, T* to, long size, long pairs) {
  for (long i = 0; i < pairs; i += LANES) {
    const long remaining = std::min<long>(pairs - i, LANES);
    const Vec cs = load_up_to(cos + i, remaining), sn = load_up_to(sin + i, remaining);
    if (!interleaved && remaining == LANES) {
      const Vec a = load(from + i), b = load(from + pairs + i);
      store(to + i, a * cs - b * sn);
      store(to + pairs + i, b * cs + a * sn);
      continue;
    }
    T pair[2][LANES];
    if (interleaved)
      for (long j = 0; j < remaining; j++) pair[0][j] = from[2 * (i + j)], pair[1][j] = from[2 * (i + j) + 1];
    else
      for (long j = 0; j < remaining; j++) pair[0][j] = from[i + j], pair[1][j] = from[pairs + i + j];
    const Vec a = load(pair[0]), b = load(pair[1]);
    store(pair[0], a * cs - b * sn);
    store(pair[1], b * cs + a * sn);
    if (interleaved)
      for (long j = 0; j < remaining; j++) to[2 * (i + j)] = pair[0][j], to[2 * (i + j) + 1] = pair[1][j];
    else
      for (long j = 0; j < remaining; j++) to[i + j] = pair[0][j], to[pairs + i + j] = pair[1][j];
  }
  if (to != from) memcpy((void*)(to + 2 * pairs), from + 2 * pairs, (size - 2 * pairs) * sizeof(T));
}
