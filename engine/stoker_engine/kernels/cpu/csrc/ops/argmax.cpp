// Where the largest number of each row is; see kernels/argmax.py.
#include "common/rows.h"
#include "common/threads.h"

namespace {

template <class T>
void argmax(const T* x, long stride, int64_t* out, float* largest_of, long rows, long size) {
  parallel_for(rows * size >= WORTH_SHARING && rows > 1, rows, [&](long r) {
    const T* row = x + r * stride;
    Vec largest = broadcast(-INFINITY);
    IntVec at = {}, odd = {}, here;
    for (int i = 0; i < LANES; i++) here[i] = i;
    long i = 0;
    for (; i + LANES <= size; i += LANES, here += LANES) {
      const Vec v = load(row + i);
      const IntVec more = v > largest;
      largest = more ? v : largest;
      odd |= v != v;
      at = more ? here : at;
    }
    float best = largest[0];
    long index = at[0];
    bool is_odd = odd[0];
    for (int lane = 1; lane < LANES; lane++) is_odd |= odd[lane] != 0;
    for (int lane = 1; lane < LANES; lane++)
      if (largest[lane] > best || (largest[lane] == best && at[lane] < index)) best = largest[lane], index = at[lane];
    for (; i < size; i++) {
      const float v = to_float(row[i]);
      if (v > best) best = v, index = i;
      is_odd |= v != v;
    }
    out[r] = index;
    largest_of[r] = is_odd ? NAN : best;
  });
}

}  // namespace

// x [rows, size] of bf16 or floats, rows `stride` elements apart → out [rows]: the first of the largest, and
// largest_of [rows]: that number; not-a-number where the row holds one.
extern "C" void stoker_argmax(int is_bf16, const void* x, long stride, int64_t* out, float* largest_of, long rows,
                              long size) {
  is_bf16 ? argmax((const bf16*)x, stride, out, largest_of, rows, size)
          : argmax((const float*)x, stride, out, largest_of, rows, size);
}
