// Masks tokens; see kernels/token_mask.py.
#include <cmath>
#include <cstdint>

#include "common/rows.h"
#include "common/threads.h"

// x [.., size], rows `stride` elements apart. Sets elements of the `count` rows `rows` to -inf if their bits in allowed
// [count, words] are 0.
extern "C" void stoker_keep_allowed(float* x, long stride, long size, const int64_t* rows, const uint32_t* allowed,
                                    long count, long words) {
  parallel_for(count * size >= GRAIN_SIZE && count > 1, count, [&](long r) {
    float* row = x + rows[r] * stride;
    const uint32_t* bits = allowed + r * words;
    const long whole = size / 32;
    for (long w = 0; w < whole; w++) {
      if (bits[w] == ~0u) continue;
      float* elements = row + w * 32;
      for (int i = 0; i < 32; i++) elements[i] = bits[w] >> i & 1 ? elements[i] : -INFINITY;
    }
    for (long i = whole * 32; i < size; i++)
      if (!(bits[whole] >> (i % 32) & 1)) row[i] = -INFINITY;
  });
}
