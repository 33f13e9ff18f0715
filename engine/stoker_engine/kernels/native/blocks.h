// A matrix in blocks as what products take for W: numbers are made of a format's codes in registers.
//
// A number is computed in float32 and rounded to what x is of, so a product has the bits of the product with the
// dequantized matrix. Few rows of x are multiplied with numbers that are made on the way to them, and W is read at the
// size that it is stored in; for more rows, a piece of W is unpacked once for all of them.
//
// A format makes 32 numbers at a time, a unit. It is a class, whose objects may have fields, of
//   HAS_REST                 whether rows may end within a unit
//   Header                   what units of a row share, kept from one to the next; `NoHeader` if there is nothing
//   place(u)                 → Place: where unit u lies, in any row. Its `at`, a number of bytes, is what is prefetched
//   begin(row, place, header)     called at every unit before it is decoded: reads the header where another begins
//   decode(row, place, header, out)   the 32 numbers of a unit → Vec out[UNIT_VECS], not yet rounded
//   decode_rest(row, place, header, count, out)   where HAS_REST: of the last unit, `count` < 32 numbers; out's others
//                            may be anything, and no byte behind the row is read
#pragma once

#include "product.h"
#include "rows.h"

constexpr long UNIT = 32;
constexpr int UNIT_VECS = UNIT / LANES;

struct NoHeader {};

// A unit's numbers, rounded to T.
template <class T>
constexpr int UNIT_PACKS = UNIT / Pack<T>::SIZE;

inline void pack_unit(const Vec* numbers, Pack<float>::Type* to, float) {
  for (int s = 0; s < UNIT_VECS; s++) to[s] = numbers[s];
}

#if defined(__AVX512BF16__)
inline void pack_unit(const Vec* numbers, Pack<bf16>::Type* to, bf16) {
  to[0] = (Pack<bf16>::Type)_mm512_cvtne2ps_pbh((__m512)numbers[1], (__m512)numbers[0]);
}
#else
inline void pack_unit(const Vec* numbers, Pack<bf16>::Type* to, bf16) {
  for (int s = 0; s < UNIT_VECS; s++) to[s] = rounded(numbers[s]);
}
#endif

inline void put_pack(float* to, Vec v) { store(to, v); }
#if defined(__AVX512BF16__)
inline void put_pack(bf16* to, Pack<bf16>::Type v) { memcpy((void*)to, &v, sizeof v); }
#else
inline void put_pack(bf16* to, Vec v) {  // rounded already
  const HalfVec half = __builtin_convertvector((WordVec)v >> 16, HalfVec);
  memcpy((void*)to, &half, sizeof half);
}
#endif

// The stride in bytes.
template <class T, class Format>
struct Blocks {
  static constexpr long STEP = UNIT, DIRECT_ROWS = 4, BLOCK = 256, AMX_BLOCK = 1024;
  static constexpr bool HAS_REST = Format::HAS_REST;
  using P = Pack<T>;
  using Place = decltype(Format().place(0));
  const uint8_t* at;
  long stride;
  Format format;

  struct Row {
    const uint8_t* at;
    long ahead;
    Format format;
    typename Format::Header header;

    void load(const Place& place, typename P::Type* to) {
      // Many short streams are more than processors foresee.
      __builtin_prefetch(at + place.at + ahead, 0, 2);
      Vec numbers[UNIT_VECS];
      format.begin(at, place, header);
      format.decode(at, place, header, numbers);
      pack_unit(numbers, to, T{});
    }

    // Of the last unit the first `count` numbers; zeros follow.
    void rest(const Place& place, long count, typename P::Type* to) {
      T numbers[UNIT] = {};
      unpack_rest(place, count, numbers);
      memset((void*)(numbers + count), 0, (UNIT - count) * sizeof(T));
      for (int s = 0; s < UNIT_PACKS<T>; s++) to[s] = P::load(numbers + s * P::SIZE);
    }

    // `to` has room for a unit.
    void unpack_rest(const Place& place, long count, T* to) {
      Vec numbers[UNIT_VECS] = {};
      typename P::Type packs[UNIT_PACKS<T>];
      format.begin(at, place, header);
      format.decode_rest(at, place, header, count, numbers);
      pack_unit(numbers, packs, T{});
      for (int s = 0; s < UNIT_PACKS<T>; s++) put_pack(to + s * P::SIZE, packs[s]);
    }
  };

  Place place(long k) const { return format.place(k / UNIT); }
  Row row(long n) const { return {at + n * stride, LANES * stride, format, {}}; }

  void unpack(long n, T* to, long inner) const {
    Row from = row(n);
    long k = 0;
    for (; k + UNIT <= inner; k += UNIT) {
      typename P::Type packs[UNIT_PACKS<T>];
      from.load(place(k), packs);
      for (int s = 0; s < UNIT_PACKS<T>; s++) put_pack(to + k + s * P::SIZE, packs[s]);
    }
    if constexpr (HAS_REST)
      if (k < inner) {
        T numbers[UNIT];
        from.unpack_rest(place(k), inner - k, numbers);
        memcpy((void*)(to + k), numbers, (inner - k) * sizeof(T));
      }
  }

  Plain<T> numbers(long n, long n_end, long inner) const {
    thread_local std::vector<T> buffer;
    if ((long)buffer.size() < (n_end - n) * inner) buffer.resize((n_end - n) * inner);
    for (long i = n; i < n_end; i++) unpack(i, buffer.data() + (i - n) * inner, inner);
    return {buffer.data(), inner};
  }
};

// What a product takes and gives. Strides of x in elements, of w in bytes; `bias` may be null.
struct BlockProduct {
  const void* x;
  long x_stride;
  const uint8_t* w;
  long w_stride;
  const void* bias;
  void* y;
  long rows, outputs, inner;
};

template <class T, class Format>
void multiply_blocks(const BlockProduct& p, const Format& format) {
  multiply(Product<T, Blocks<T, Format>>{(const T*)p.x, p.x_stride, {p.w, p.w_stride, format}, (const T*)p.bias,
                                         (T*)p.y, p.outputs, p.rows, p.outputs, p.inner});
}

// Rows of w, their stride in bytes → y [rows, inner].
template <class T, class Format>
void dequantize_blocks(const uint8_t* w, long w_stride, void* y, long rows, long inner, const Format& format) {
  parallel_for(rows * inner > WORTH_SHARING, rows, [&](long row) {
    Blocks<T, Format>{w, w_stride, format}.unpack(row, (T*)y + row * inner, inner);
  });
}

// What formats share.

// A float16, in all lanes.
inline Vec half_of(const uint8_t* from) {
  uint16_t half;
  memcpy(&half, from, sizeof half);
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

typedef int8_t ByteVec __attribute__((vector_size(LANES)));
typedef int16_t ShortVec __attribute__((vector_size(LANES * 2)));

// LANES bytes, as signed integers.
inline Vec signed_bytes(const int8_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  ByteVec bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(bytes, ShortVec), IntVec), Vec);
#endif
}
