// Root-mean-square normalisation; see kernels/rms_norm.py for where each family rounds.
#include "rows.h"
#include "threads.h"

namespace {

template <class T>
inline Vec rounded_to(Vec v) {
  T buffer[LANES];
  store(buffer, v);
  return load(buffer);
}

template <class T, class W>
void rms_norm(const T* x, long x_stride, long heads, const W* weight, float eps, T* out, long tokens, long size) {
  parallel_for(tokens * heads * size >= WORTH_SHARING, tokens * heads, [&](long row) {
    const T* from = x + row / heads * x_stride + row % heads * size;
    T* to = out + row * size;
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
  });
}

}  // namespace

// x [tokens, heads, size], tokens lying `x_stride` elements apart; out likewise without gaps. `weight` [size] is float32
// where is_wide, else in x's dtype.
extern "C" void stoker_rms_norm(int is_bf16, int is_wide, const void* x, long x_stride, long heads, const void* weight,
                                float eps, void* out, long tokens, long size) {
  if (!is_bf16)
    rms_norm((const float*)x, x_stride, heads, (const float*)weight, eps, (float*)out, tokens, size);
  else if (is_wide)
    rms_norm((const bf16*)x, x_stride, heads, (const float*)weight, eps, (bf16*)out, tokens, size);
  else
    rms_norm((const bf16*)x, x_stride, heads, (const bf16*)weight, eps, (bf16*)out, tokens, size);
}
