// Vectors of floats, as wide as the processor's registers. The compiler's vector extension makes the source portable;
// intrinsics are used where it has no equivalent or is slower.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Inlines everything that a function calls, for functions whose sums stay in registers: compilers call large lambdas,
// which spills all registers. Empty with sanitizers, with which compiling would take minutes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FLATTEN
#else
#define FLATTEN __attribute__((flatten))
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint32_t WordVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2)));

struct bf16 {
  uint16_t bits;
};

inline Vec broadcast(float x) { return x - Vec{}; }

inline Vec load(const float* from) {
  Vec v;
  memcpy(&v, from, sizeof v);
  return v;
}

// Extends each element to 32 bits.
inline WordVec zero_extended(HalfVec v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (WordVec)_mm256_cvtepu16_epi32((__m128i)v);  // compilers emit three instructions for the conversion
#else
  return __builtin_convertvector(v, WordVec);
#endif
}

inline Vec load(const bf16* from) {
  HalfVec half;
  memcpy(&half, from, sizeof half);
  return (Vec)(zero_extended(half) << 16);
}

inline void store(float* to, Vec v) { memcpy(to, &v, sizeof v); }

// Rounds to bf16, to the nearest, ties to even; keeps NaN.
inline WordVec bf16_bits(Vec v) {
  const WordVec bits = (WordVec)v;
  const WordVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return v == v ? rounded : (WordVec{} + 0x7fc0);
}

inline Vec rounded(Vec v) { return (Vec)(bf16_bits(v) << 16); }

// Stores decoded elements; keeps those that are subnormal in T.
inline void store_decoded(float* to, Vec v) { store(to, v); }
inline void store_decoded(bf16* to, Vec v) {
  const HalfVec half = __builtin_convertvector(bf16_bits(v), HalfVec);
  memcpy((void*)to, &half, sizeof half);
}

// Rounds computed elements to bf16, by an instruction if available, which flushes subnormals to 0.
#if defined(__AVX512BF16__)
inline HalfVec nearest_bf16(Vec v) { return (HalfVec)_mm512_cvtneps_pbh((__m512)v); }
#else
inline HalfVec nearest_bf16(Vec v) { return __builtin_convertvector(bf16_bits(v), HalfVec); }
#endif

inline void store(bf16* to, Vec v) {
  const HalfVec half = nearest_bf16(v);
  memcpy((void*)to, &half, sizeof half);
}

// Loads the first `count` elements; the rest of the vector is 0.
template <class T>
inline Vec load_part(const T* from, long count) {
  T padded[LANES] = {};
  memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <class T>
inline void store_part(T* to, Vec v, long count) {
  T padded[LANES];
  store(padded, v);
  memcpy(to, padded, count * sizeof(T));
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The elementwise maximum; b where a or b is NaN.
#if defined(__AVX512F__)
inline Vec larger(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
#else
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
#endif

// Permutes the lanes of v: lane i of the result is lane from[i] of v.
template <class Order>
inline Vec reordered(Vec v, Order from) {
  IntVec lanes;
  for (int i = 0; i < LANES; i++) lanes[i] = from(i);
  return __builtin_shuffle(v, lanes);
}

inline float sum_of(Vec v) {
  for (int half = LANES / 2; half > 0; half /= 2) v += reordered(v, [&](int i) { return i ^ half; });
  return v[0];
}

inline float max_of(Vec v) {
  for (int half = LANES / 2; half > 0; half /= 2) v = larger(v, reordered(v, [&](int i) { return i ^ half; }));
  return v[0];
}

// Reduces each of N vectors to one value by a commutative operation: lane i of the result is the value of v[i % N]. All
// vectors are reduced in the same order of lanes.
template <int N, int BY = 1, class Operation>
inline Vec reduce_each(const Vec* v, Operation of) {
  const auto exchanged = [](Vec from, int by) { return reordered(from, [&](int i) { return i ^ by; }); };
  if constexpr (N == 1) {
    Vec all = v[0];
    for (int by = BY; by < LANES; by *= 2) all = of(all, exchanged(all, by));
    return all;
  } else {
    IntVec second;
    for (int i = 0; i < LANES; i++) second[i] = i & BY ? -1 : 0;
    Vec half[N / 2];
    for (int i = 0; i < N / 2; i++) {
      const Vec even = v[2 * i], odd = v[2 * i + 1];
      half[i] = of(second ? odd : even, exchanged(second ? even : odd, BY));
    }
    return reduce_each<N / 2, 2 * BY>(half, of);
  }
}

// eʳ for |r| ≤ ln 2 / 2.
inline Vec exp_polynomial(Vec r) {
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + r + 1.0f;
}

#if defined(__AVX512F__)
// element × 2ⁿ, with n rounded down; 0 where x is less than `least`. There the product may be subnormal, for which
// Intel's processors take sixty times as long (100 ns for a vector).
inline Vec scaled_from(float least, Vec x, Vec element, Vec n) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(is_normal, (__m512)element, (__m512)n);
}
#endif

#if defined(__AVX512BF16__)
// 2ˣ with a relative error of 3e-6, for results rounded to bf16: 2ʳ for 0 ≤ r < 1, times an integer power of 2, or 0
// for x < −126.
inline Vec power_of_2(Vec x) {
  const Vec r = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec p = r * 1.3426648e-2f + 5.2242532e-2f;
  p = p * r + 2.4128018e-1f;
  p = p * r + 6.9304484e-1f;
  return scaled_from(-126, x, p * r + 1.0f, x);
}
#endif

// eˣ to about 1 ulp (Cephes' expf): x = n ln 2 + r, a polynomial for eʳ, times 2ⁿ. e⁰ is exactly 1; NaN stays NaN. The
// result is 0 for x < −87, and infinity if it is too large (without AVX-512: for x > 88).
#if defined(__AVX512F__)
inline Vec exp_of(Vec x) {
  // This instruction returns the second operand if either is NaN.
  const __m512 bounded = _mm512_min_ps(_mm512_set1_ps(200), (__m512)x);
  const __m512 n = _mm512_roundscale_ps(bounded * _mm512_set1_ps(1.44269504088896341f), 0);
  const Vec r = (Vec)(bounded - n * _mm512_set1_ps(0.693359375f) + n * _mm512_set1_ps(2.12194440e-4f));
  return scaled_from(-87, x, exp_polynomial(r), (Vec)n);
}
inline Vec exp_up_to_88(Vec x) { return exp_of(x); }
#else
// The same for x ≤ 88, which takes fewer instructions.
inline Vec exp_up_to_88(Vec x) {
  const Vec least = broadcast(-87.0f), bounded = larger(least, x);
  const Vec shifted = bounded * 1.44269504088896341f + 12582912.0f;  // 1.5 × 2²³: rounds to an integer in the low bits
  const IntVec n = (IntVec)shifted - 0x4b400000;
  const Vec whole = shifted - 12582912.0f, power = (Vec)((n + 127) << 23);
  const Vec r = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
  return (Vec)((IntVec)(exp_polynomial(r) * power) & ~(x < least));
}
inline Vec exp_of(Vec x) {
  const Vec most = broadcast(88.0f);
  return x > most ? broadcast(INFINITY) : exp_up_to_88(x);
}
#endif

// eˣ for a result that is rounded to T.
template <class T>
inline Vec exp_for(Vec x) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == sizeof(bf16)) return power_of_2(x * 1.44269504f);
#endif
  return exp_of(x);
}

inline Vec tanh_of(Vec x) { return 1.0f - 2.0f / (exp_of(x * 2.0f) + 1.0f); }

// A register of elements of T, and the multiply-add of two such registers.
template <class T>
struct Pack {
  typedef Vec Type;
  static constexpr int SIZE = LANES;
  static Type load(const T* from) { return ::load(from); }
  static Vec multiply_add(Vec sum, Type a, Type b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
template <>
struct Pack<bf16> {
  typedef __m512bh Type;
  static constexpr int SIZE = 32;
  static Type load(const bf16* from) {
    __m512i v = _mm512_loadu_si512(from);
    return (Type)v;
  }
  static Vec multiply_add(Vec sum, Type a, Type b) { return (Vec)_mm512_dpbf16_ps((__m512)sum, a, b); }
};
#endif

template <class T>
inline typename Pack<T>::Type pack_part(const T* from, long count) {
  T padded[Pack<T>::SIZE] = {};
  memcpy(padded, from, count * sizeof(T));
  return Pack<T>::load(padded);
}

// Sums each of LANES vectors: result[i] is the sum of v[i]. In a tree, each step folds two vectors into one with the
// partial sums of both, so that all sums cost LANES - 1 steps. Every sum is computed in the same order, in any lane.
template <int WIDTH = LANES>
inline Vec sums_of(const Vec* v) {
  if constexpr (WIDTH == 1) {
    return v[0];
  } else {
    constexpr int HALF = WIDTH / 2;
    Vec folded[HALF];
    IntVec low, across;
    for (int lane = 0; lane < LANES; lane++) {
      low[lane] = lane % WIDTH < HALF ? -1 : 0;
      across[lane] = lane ^ HALF;
    }
    for (int i = 0; i < HALF; i++) {  // blends and one shuffle within a register, which cost less than shuffles of two
      const Vec kept = low ? v[i] : v[i + HALF], moved = low ? v[i + HALF] : v[i];
      folded[i] = kept + __builtin_shuffle(moved, across);
    }
    return sums_of<HALF>(folded);
  }
}

// Transposes LANES vectors of LANES words.
#if defined(__AVX512F__)
inline void transpose(WordVec* v) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {  // words of neighbours, within quarters
    a[i] = _mm512_unpacklo_epi32((__m512i)v[i], (__m512i)v[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)v[i], (__m512i)v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // pairs of those: each quarter holds a column of four rows
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 16; i += 8)  // whole quarters
    for (int j = i; j < i + 4; j++) {
      a[j] = _mm512_shuffle_i32x4(b[j], b[j + 4], 0x88);
      a[j + 4] = _mm512_shuffle_i32x4(b[j], b[j + 4], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    v[j] = (WordVec)_mm512_shuffle_i32x4(a[j], a[j + 8], 0x88);
    v[j + 8] = (WordVec)_mm512_shuffle_i32x4(a[j], a[j + 8], 0xdd);
  }
}
#elif defined(__AVX2__)
inline void transpose(WordVec* v) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; i += 2) {  // words of neighbours, within halves
    a[i] = _mm256_unpacklo_epi32((__m256i)v[i], (__m256i)v[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32((__m256i)v[i], (__m256i)v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {  // pairs of those: each half holds a column of four rows
    b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int j = 0; j < 4; j++) {  // whole halves
    v[j] = (WordVec)_mm256_permute2x128_si256(b[j], b[j + 4], 0x20);
    v[j + 4] = (WordVec)_mm256_permute2x128_si256(b[j], b[j + 4], 0x31);
  }
}
#else
// Swaps words between neighbouring blocks of W words, for each power of two W below LANES.
template <int W = 1>
inline void transpose(WordVec* v) {
  if constexpr (W < LANES) {
    IntVec upper, lower;
    for (int lane = 0; lane < LANES; lane++) {
      const bool low = lane / W % 2 == 0;
      upper[lane] = low ? lane : LANES + lane - W;
      lower[lane] = low ? lane + W : LANES + lane;
    }
    for (int i = 0; i < LANES; i++)
      if (i / W % 2 == 0) {
        WordVec a = v[i], b = v[i + W];
        v[i] = __builtin_shuffle(a, b, upper);
        v[i + W] = __builtin_shuffle(a, b, lower);
      }
    transpose<W * 2>(v);
  }
}
#endif
