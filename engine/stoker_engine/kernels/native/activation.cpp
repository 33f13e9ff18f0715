// Activations, gated or not; see kernels/activation.py.
#include "rows.h"
#include "threads.h"

namespace {

struct Silu {
  static Vec of(Vec x) { return x / (1.0f + exp_of(-x)); }
};

// 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))) = x σ(2 √(2/π) (x + 0.044715 x³))
struct GeluTanh {
  static Vec of(Vec x) { return x / (1.0f + exp_of((x + 0.044715f * x * x * x) * -1.5957691216057308f)); }
};

// 0.5 x (1 + erf(x / √2)); erf to 1.5e-7 by Abramowitz & Stegun 7.1.26.
struct Gelu {
  static Vec of(Vec x) {
    const Vec z = x * 0.70710678118654752f, size = z < Vec{} ? -z : z, t = 1.0f / (1.0f + 0.3275911f * size);
    Vec p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const Vec tail = p * t * exp_of(-(size * size));  // 1 - erf(|z|)
    return 0.5f * x * (z < Vec{} ? tail : 2.0f - tail);
  }
};

template <class Act, class T>
void activate(bool gated, const T* x, long stride, T* out, long tokens, long size) {
  parallel_for(tokens * size >= WORTH_SHARING / 4, tokens, [&](long t) {
    const T *gate = x + t * stride, *up = gate + size;
    for (long i = 0; i < size; i += LANES) {
      Vec v = Act::of(load_up_to(gate + i, size - i));
      if (gated) v *= load_up_to(up + i, size - i);
      store_up_to(out + t * size + i, v, size - i);
    }
  });
}

// See ClampedSwiGLU in architectures/activation.py; what is no number stays that.
template <class T>
void clamped_swiglu(float alpha, float limit, const T* x, long stride, T* out, long tokens, long size) {
  const Vec most = broadcast(limit), least = -most;
  parallel_for(tokens * size >= WORTH_SHARING / 4, tokens, [&](long t) {
    const T *gates = x + t * stride, *ups = gates + size;
    for (long i = 0; i < size; i += LANES) {
      Vec gate = load_up_to(gates + i, size - i), up = load_up_to(ups + i, size - i);
      gate = gate > most ? most : gate;
      up = up > most ? most : up;
      up = up < least ? least : up;
      store_up_to(out + t * size + i, gate / (1.0f + exp_of(gate * -alpha)) * (up + 1.0f), size - i);
    }
  });
}

template <class T>
void run(int kind, bool gated, const T* x, long stride, T* out, long tokens, long size) {
  if (kind == 0)
    activate<Silu>(gated, x, stride, out, tokens, size);
  else if (kind == 1)
    activate<GeluTanh>(gated, x, stride, out, tokens, size);
  else
    activate<Gelu>(gated, x, stride, out, tokens, size);
}

}  // namespace

// x [tokens, size], or [tokens, 2 × size] with the gates first → out [tokens, size]; tokens of x lie `stride` elements
// apart. Kind 0: SiLU, 1: GELU by tanh, 2: GELU.
extern "C" void stoker_activation(int is_bf16, int kind, int gated, const void* x, long stride, void* out, long tokens,
                                  long size) {
  if (is_bf16)
    run(kind, gated, (const bf16*)x, stride, (bf16*)out, tokens, size);
  else
    run(kind, gated, (const float*)x, stride, (float*)out, tokens, size);
}

// x [tokens, 2 × size] with the gates first → out [tokens, size]; tokens of x lie `stride` elements apart.
extern "C" void stoker_clamped_swiglu(int is_bf16, float alpha, float limit, const void* x, long stride, void* out,
                                      long tokens, long size) {
  if (is_bf16)
    clamped_swiglu(alpha, limit, (const bf16*)x, stride, (bf16*)out, tokens, size);
  else
    clamped_swiglu(alpha, limit, (const float*)x, stride, (float*)out, tokens, size);
}
