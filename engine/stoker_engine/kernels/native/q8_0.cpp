// Weights in GGUF's format Q8_0 (kernels/q8_0.py draws it): products with them, and what they stand for.
//
// A weight is d·q, which float32 holds exactly, rounded to what x is of. So few rows of x are multiplied with weights
// that are unpacked in registers, half the bytes of bfloat16; for more, a piece of W is unpacked once for all of them.
#include "product.h"
#include "rows.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr long BLOCK_SIZE = 32, BLOCK_BYTES = 34;

typedef int8_t ByteVec __attribute__((vector_size(LANES)));
typedef int16_t ShortVec __attribute__((vector_size(LANES * 2)));

// A block's scale, in all lanes.
inline Vec scale_of(const uint8_t* block) {
  uint16_t half;
  memcpy(&half, block, sizeof half);
#if defined(__F16C__) && defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_set1_epi16(half));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_set1_epi16(half));
#else
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
  uint32_t bits = (exponent + 112) << 23 | fraction << 13;
  if (exponent == 31) bits |= 0x7f800000;
  float value;
  memcpy(&value, &bits, sizeof value);
  if (exponent == 0) value = fraction * 0x1p-24f;
  return broadcast(sign ? -value : value);
#endif
}

inline IntVec load_integers(const uint8_t* from) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  ByteVec bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, ShortVec), IntVec);
#endif
}

// LANES weights, not yet rounded.
inline Vec weights(const uint8_t* integers, Vec scale) {
  return __builtin_convertvector(load_integers(integers), Vec) * scale;
}

// A register of weights, rounded to T.
inline void pack(const uint8_t* integers, Vec scale, Vec& to, float) { to = weights(integers, scale); }

#if defined(__AVX512BF16__)
inline void pack(const uint8_t* integers, Vec scale, Pack<bf16>::Type& to, bf16) {
  to = (Pack<bf16>::Type)_mm512_cvtne2ps_pbh((__m512)weights(integers + LANES, scale), (__m512)weights(integers, scale));
}
#else
inline void pack(const uint8_t* integers, Vec scale, Vec& to, bf16) { to = rounded(weights(integers, scale)); }
#endif

inline void put(float* to, Vec v) { store(to, v); }
#if defined(__AVX512BF16__)
inline void put(bf16* to, Pack<bf16>::Type v) { memcpy((void*)to, &v, sizeof v); }
#else
inline void put(bf16* to, Vec v) {  // rounded already
  const HalfVec half = __builtin_convertvector((WordVec)v >> 16, HalfVec);
  memcpy((void*)to, &half, sizeof half);
}
#endif

// The stride in bytes.
template <class T>
struct Q8_0 {
  static constexpr long STEP = BLOCK_SIZE, DIRECT_ROWS = 4, BLOCK = 256, AMX_BLOCK = 1024;
  static constexpr bool HAS_REST = false;
  using P = Pack<T>;
  const uint8_t* at;
  long stride;

  struct Row {
    const uint8_t* at;
    long ahead;
    void load(long k, typename P::Type* to) const {
      const uint8_t* block = at + k / BLOCK_SIZE * BLOCK_BYTES;
      // Many short streams are more than processors foresee.
      __builtin_prefetch(block + ahead, 0, 2);
      const Vec scale = scale_of(block);
#pragma GCC unroll 16
      for (int s = 0; s < STEP / P::SIZE; s++) pack(block + 2 + s * P::SIZE, scale, to[s], T{});
    }
  };
  Row row(long n) const { return {at + n * stride, LANES * stride}; }

  void unpack(long n, T* to, long inner) const {
    for (long k = 0; k < inner; k += STEP) {
      typename P::Type packs[STEP / P::SIZE];
      row(n).load(k, packs);
      for (int s = 0; s < STEP / P::SIZE; s++) put(to + k + s * P::SIZE, packs[s]);
    }
  }

  Plain<T> numbers(long n, long n_end, long inner) const {
    thread_local std::vector<T> buffer;
    if ((long)buffer.size() < (n_end - n) * inner) buffer.resize((n_end - n) * inner);
    for (long i = n; i < n_end; i++) unpack(i, buffer.data() + (i - n) * inner, inner);
    return {buffer.data(), inner};
  }
};

template <class T>
void product(const void* x, long x_stride, const uint8_t* w, long w_stride, const void* bias, void* y, long rows,
             long outputs, long inner) {
  multiply(
      Product<T, Q8_0<T>>{(const T*)x, x_stride, {w, w_stride}, (const T*)bias, (T*)y, outputs, rows, outputs, inner});
}

template <class T>
void dequantize(const uint8_t* w, long w_stride, void* y, long rows, long inner) {
  parallel_for(rows * inner > WORTH_SHARING, rows,
               [&](long row) { Q8_0<T>{w, w_stride}.unpack(row, (T*)y + row * inner, inner); });
}

}  // namespace

// x's stride in elements, w's in bytes; `bias` may be null.
extern "C" void stoker_q8_0_product(int is_bf16, const void* x, long x_stride, const uint8_t* w, long w_stride,
                                    const void* bias, void* y, long rows, long outputs, long inner) {
  (is_bf16 ? product<bf16> : product<float>)(x, x_stride, w, w_stride, bias, y, rows, outputs, inner);
}

// Rows of w, their stride in bytes → y [rows, inner].
extern "C" void stoker_q8_0_dequantize(int is_bf16, const uint8_t* w, long w_stride, void* y, long rows, long inner) {
  (is_bf16 ? dequantize<bf16> : dequantize<float>)(w, w_stride, y, rows, inner);
}
