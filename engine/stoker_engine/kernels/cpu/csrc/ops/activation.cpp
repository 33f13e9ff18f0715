#include "ops/activation.h"

#include "common/threads.h"

namespace {

// See ClampedSwiGLU in architectures/activation.py; keeps NaN.
template <class T>
void clamped_swiglu(float alpha, float limit, const T* x, long stride, T* out, long tokens, long size) {
  const Vec upper = broadcast(limit), lower = -upper;
  parallel_for(tokens * size >= GRAIN_SIZE / 4, tokens, [&](long t) {
    const T *gates = x + t * stride, *ups = gates + size;
    for (long i = 0; i < size; i += LANES) {
      Vec gate = load_up_to(gates + i, size - i), up = load_up_to(ups + i, size - i);
      gate = gate > upper ? upper : gate;
      up = up > upper ? upper : up;
      up = up < lower ? lower : up;
      store_up_to(out + t * size + i, gate / (1.0f + exp_for<T>(gate * -alpha)) * (up + 1.0f), size - i);
    }
  });
}

template <class T>
void run(long kind, bool gated, const T* x, long stride, T* out, long tokens, long size) {
  parallel_for(tokens * size >= GRAIN_SIZE / 4, tokens, [&](long t) {
    const T* gate = x + t * stride;
    activate(kind, gate, gated ? gate + size : nullptr, out + t * size, size);
  });
}

}  // namespace

// x [tokens, size], or if gated [tokens, 2 × size] with the gates first → out [tokens, size]; tokens of x are `stride`
// elements apart. `kind` is an ActivationKind.
extern "C" void stoker_activation(int is_bf16, int kind, int gated, const void* x, long stride, void* out, long tokens,
                                  long size) {
  if (is_bf16)
    run(kind, gated, (const bf16*)x, stride, (bf16*)out, tokens, size);
  else
    run(kind, gated, (const float*)x, stride, (float*)out, tokens, size);
}

// x [tokens, 2 × size] with the gates first → out [tokens, size]; tokens of x are `stride` elements apart.
extern "C" void stoker_clamped_swiglu(int is_bf16, float alpha, float limit, const void* x, long stride, void* out,
                                      long tokens, long size) {
  if (is_bf16)
    clamped_swiglu(alpha, limit, (const bf16*)x, stride, (bf16*)out, tokens, size);
  else
    clamped_swiglu(alpha, limit, (const float*)x, stride, (float*)out, tokens, size);
}
