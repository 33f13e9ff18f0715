#include "ops/rms_norm.h"

#include "common/threads.h"

template <class T, class W>
static void rows(const T* x, long x_stride, long heads, const W* weight, float eps, T* out, long tokens, long size) {
  parallel_for(tokens * heads * size >= GRAIN_SIZE, tokens * heads, [&](long row) {
    rms_norm(x + row / heads * x_stride + row % heads * size, weight, eps, out + row * size, size);
  });
}

// x [tokens, heads, size], tokens `x_stride` elements apart → contiguous out of the same shape. `weight` [size] is
// float32 if is_wide, else of x's dtype.
extern "C" void stoker_rms_norm(int is_bf16, int is_wide, const void* x, long x_stride, long heads, const void* weight,
                                float eps, void* out, long tokens, long size) {
  if (!is_bf16)
    rows((const float*)x, x_stride, heads, (const float*)weight, eps, (float*)out, tokens, size);
  else if (is_wide)
    rows((const bf16*)x, x_stride, heads, (const float*)weight, eps, (bf16*)out, tokens, size);
  else
    rows((const bf16*)x, x_stride, heads, (const bf16*)weight, eps, (bf16*)out, tokens, size);
}
