// Activations; see kernels/activation.py.
#pragma once

#include "common/rows.h"

template <class T>
struct Silu {
  static Vec of(Vec x) { return x / (1.0f + exp_for<T>(-x)); }
};

// 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))) = x σ(2 √(2/π) (x + 0.044715 x³))
template <class T>
struct GeluTanh {
  static Vec of(Vec x) { return x / (1.0f + exp_for<T>((x + 0.044715f * x * x * x) * -1.5957691216057308f)); }
};

// 0.5 x (1 + erf(x / √2)); erf to 1.5e-7 by Abramowitz & Stegun 7.1.26.
template <class T>
struct Gelu {
  static Vec of(Vec x) {
    const Vec z = x * 0.70710678118654752f, size = z < Vec{} ? -z : z, t = 1.0f / (1.0f + 0.3275911f * size);
    Vec p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const Vec tail = p * t * exp_for<T>(-(size * size));  // 1 - erf(|z|)
    return 0.5f * x * (z < Vec{} ? tail : 2.0f - tail);
  }
};

// Values of `kind`.
enum ActivationKind : long { SILU, GELU_TANH, GELU };

// Computes one row: act(gate), times `up` unless it is null; `to` may be `gate`.
template <class Act, class T>
inline void activate_by(const T* gate, const T* up, T* to, long size) {
  for (long i = 0; i < size; i += LANES) {
    Vec v = Act::of(load_up_to(gate + i, size - i));
    if (up) v *= load_up_to(up + i, size - i);
    store_up_to(to + i, v, size - i);
  }
}

template <class T>
inline void activate(long kind, const T* gate, const T* up, T* to, long size) {
  switch (kind) {
    case SILU: return activate_by<Silu<T>>(gate, up, to, size);
    case GELU_TANH: return activate_by<GeluTanh<T>>(gate, up, to, size);
    case GELU: return activate_by<Gelu<T>>(gate, up, to, size);
  }
}
