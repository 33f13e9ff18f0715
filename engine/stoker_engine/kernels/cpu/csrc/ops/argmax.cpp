// The index of each row's largest element; see kernels/argmax.py.
#include "common/rows.h"
#include "common/threads.h"

namespace {

template <class T>
void argmax(const T* x, long stride, int64_t* out, float* maxima, long rows, long size) {
  parallel_for(rows * size >= GRAIN_SIZE && rows > 1, rows, [&](long r) {
    const T* row = x + r * stride;
    Vec largest = broadcast(-INFINITY);
    IntVec at = {}, is_nan = {}, indices;
    for (int i = 0; i < LANES; i++) indices[i] = i;
    long i = 0;
    for (; i + LANES <= size; i += LANES, indices += LANES) {
      const Vec v = load(row + i);
      const IntVec is_larger = v > largest;
      largest = is_larger ? v : largest;
      is_nan |= v != v;
      at = is_larger ? indices : at;
    }
    float best = largest[0];
    long index = at[0];
    bool has_nan = is_nan[0];
    for (int lane = 1; lane < LANES; lane++) has_nan |= is_nan[lane] != 0;
    for (int lane = 1; lane < LANES; lane++)
      if (largest[lane] > best || (largest[lane] == best && at[lane] < index)) best = largest[lane], index = at[lane];
    for (; i < size; i++) {
      const float v = to_float(row[i]);
      if (v > best) best = v, index = i;
      has_nan |= v != v;
    }
    out[r] = index;
    maxima[r] = has_nan ? NAN : best;
  });
}

}  // namespace

// x [rows, size], bf16 or float, rows `stride` elements apart → out [rows]: index of the first largest element, and
// maxima [rows]: its value, or NaN if the row contains NaN.
extern "C" void stoker_argmax(int is_bf16, const void* x, long stride, int64_t* out, float* maxima, long rows,
                              long size) {
  is_bf16 ? argmax((const bf16*)x, stride, out, maxima, rows, size)
          : argmax((const float*)x, stride, out, maxima, rows, size);
}
