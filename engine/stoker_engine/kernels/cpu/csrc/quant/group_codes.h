// Decodes weights in groups (kernels/group_blocks.py has the layout), a unit of 32 elements at a time.
//
// 8-bit codes are converted arithmetically. A group of codes with fewer bits has at most 16 different values: they are
// computed once for each group, scaled and rounded, and kept in a table in a register, which codes index.
//
// A kind of codes is a class, with an object for each row, and with
//   BYTES                        bytes of a unit
//   DIRECT_ROWS                  see gemm.h
//   begin(scales, location)      called where another group starts
//   load(codes, scales, location, to)     loads the elements of a unit, rounded to T
#pragma once

#include "quant/blocks.h"

// Position of a unit in any row.
struct GroupLocation {
  // Offsets from the row's first codes: of the unit's codes, and of the bytes to prefetch.
  long at, ahead;
  // Indices of the scales and zero points of the unit's halves in the row's buffer.
  long scale[2], zero[2];
  // Whether another group starts at this unit.
  bool begins;
};

// Converts LANES float16 values.
inline Vec halves(HalfVec v) {
#if defined(__F16C__) && defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps((__m256i)v);
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps((__m128i)v);
#else
  const WordVec bits = __builtin_convertvector(v, WordVec), magnitude = bits & 0x7fff;
  const WordVec rebiased =
      (magnitude << 13) + (magnitude >= 0x7c00 ? WordVec{} + (224u << 23) : WordVec{} + (112u << 23));
  const Vec small = __builtin_convertvector((IntVec)magnitude, Vec) * 0x1p-24f;
  return (Vec)((magnitude < 0x400 ? (WordVec)small : rebiased) | (bits & 0x8000) << 16);
#endif
}

typedef int8_t ByteVec __attribute__((vector_size(LANES)));
typedef int16_t ShortVec __attribute__((vector_size(LANES * 2)));
typedef uint8_t UnsignedByteVec __attribute__((vector_size(LANES)));

// Converts LANES int8 to float.
inline Vec signed_bytes(const uint8_t* from) {
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

// Converts LANES uint8 to uint16.
inline HalfVec unsigned_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (HalfVec)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (HalfVec)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from));
#else
  UnsignedByteVec bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, HalfVec);
#endif
}

// Convert LANES bytes of OCP's FP8 to float16: e5m2 is its high byte; for e4m3 the result is the value times 2^-8,
// since the exponent biases differ. NaN codes of e4m3 are rejected when weights are loaded, so they are not handled
// here.
inline HalfVec halves_of_e5m2(const uint8_t* from) { return unsigned_bytes(from) << 8; }
inline HalfVec halves_of_e4m3(const uint8_t* from) {
  const HalfVec bytes = unsigned_bytes(from);
  return (bytes & 0x80) << 8 | (bytes & 0x7f) << 7;
}
constexpr float E4M3_FACTOR = 256.0f;

inline WordVec widened(const uint8_t* from) {
#if defined(__AVX512F__)
  return (WordVec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (WordVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return __builtin_convertvector(unsigned_bytes(from), WordVec);
#endif
}

template <class T>
struct Int8 {
  static constexpr long BYTES = 32, DIRECT_ROWS = 4;

  void begin(const float*, const GroupLocation&) {}
  void load(const uint8_t* codes, const float* scales, const GroupLocation& location,
            typename Pack<T>::Type* to) const {
    Vec elements[UNIT_VECS];
    for (int s = 0; s < UNIT_VECS; s++)
      elements[s] = signed_bytes(codes + s * LANES) * scales[location.scale[s * LANES / 16]];
    pack_unit(elements, to, T{});
  }
};

template <class T>
struct UInt8 {
  static constexpr long BYTES = 32, DIRECT_ROWS = 4;

  void begin(const float*, const GroupLocation&) {}
  void load(const uint8_t* codes, const float* scales, const GroupLocation& location,
            typename Pack<T>::Type* to) const {
    Vec elements[UNIT_VECS];
    for (int s = 0; s < UNIT_VECS; s++) {
      const int half = s * LANES / 16;
      const Vec code = __builtin_convertvector((IntVec)widened(codes + s * LANES), Vec);
      elements[s] = (code - scales[location.zero[half]]) * scales[location.scale[half]];
    }
    pack_unit(elements, to, T{});
  }
};

// FP8 codes; for e4m3 the scales include the factor 2^8.
template <class T, bool E4M3>
struct Fp8 {
  static constexpr long BYTES = 32, DIRECT_ROWS = 4;

  void begin(const float*, const GroupLocation&) {}
  void load(const uint8_t* codes, const float* scales, const GroupLocation& location,
            typename Pack<T>::Type* to) const {
    HalfVec words[UNIT_VECS];
#if defined(__AVX512F__)
    const __m512i bytes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)codes));
    const __m512i all = E4M3 ? _mm512_and_si512(_mm512_slli_epi16(bytes, 7), _mm512_set1_epi16((short)0xbfff))
                             : _mm512_slli_epi16(bytes, 8);
    memcpy(words, &all, sizeof all);
#else
    for (int s = 0; s < UNIT_VECS; s++)
      words[s] = E4M3 ? halves_of_e4m3(codes + s * LANES) : halves_of_e5m2(codes + s * LANES);
#endif
    Vec elements[UNIT_VECS];
    for (int s = 0; s < UNIT_VECS; s++) elements[s] = halves(words[s]) * scales[location.scale[s * LANES / 16]];
    pack_unit(elements, to, T{});
  }
};

struct Table {
  static constexpr int VECS = 16 / LANES;
  Vec elements[VECS];

  void make(const float* values, float scale, float zero) {
    for (int i = 0; i < VECS; i++) elements[i] = (::load(values + i * LANES) - zero) * scale;
  }
  // Looks up the values at indices `at`, which are below 16.
  Vec find(WordVec at) const {
#if defined(__AVX512F__)
    return (Vec)_mm512_permutexvar_ps((__m512i)at, (__m512)elements[0]);
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps((__m256)elements[0], (__m256i)at);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)elements[1], (__m256i)at);
    return (Vec)_mm256_blendv_ps(low, high, (__m256)(at << 28));
#else
    Vec found;
    for (int i = 0; i < LANES; i++) found[i] = elements[at[i] / LANES][at[i] % LANES];
    return found;
#endif
  }
};

// The codes of LANES elements of a unit, from element s × LANES on.
template <int BITS>
inline WordVec codes_of(const uint8_t* unit, int s) {
  if constexpr (BITS == 4) {
    return widened(unit + s * LANES % 16) >> s * LANES / 16 * 4 & 15;
  } else {
    uint8_t pairs[16];
    memcpy(pairs, unit, 8);
    memcpy(pairs + 8, unit, 8);
    IntVec shift, bit;
    for (int i = 0; i < LANES; i++) shift[i] = (s * LANES + i) / 8 * 2, bit[i] = s * LANES + i;
    const WordVec low = widened(pairs + s * LANES % 8) >> (WordVec)shift & 3;
    if constexpr (BITS == 2) return low;
    uint32_t high;
    memcpy(&high, unit + 8, sizeof high);
    return low | ((WordVec{} + high) >> (WordVec)bit & 1) << 2;
  }
}

template <class T, int BITS, bool SPLIT>
struct LookupCodes {
  static constexpr long BYTES = BITS * 4, DIRECT_ROWS = BITS == 4 ? 4 : 0;
  const float* values;
  Table tables[SPLIT ? 2 : 1];

  void begin(const float* scales, const GroupLocation& location) {
    for (int h = 0; h < 1 + SPLIT; h++) {
      tables[h].make(values, scales[location.scale[h]], scales[location.zero[h]]);
      if constexpr (sizeof(T) == 2)
        for (Vec& each : tables[h].elements) each = rounded(each);
    }
  }
  void load(const uint8_t* codes, const float*, const GroupLocation&, typename Pack<T>::Type* to) const {
    for (int s = 0; s < UNIT_VECS; s++) to[s] = tables[SPLIT ? s * LANES / 16 : 0].find(codes_of<BITS>(codes, s));
  }
};

#if defined(__AVX512BF16__)
// The table has 32 entries: the values of one group twice, so that bits above a code are ignored, or those of two
// groups.
template <int BITS, bool SPLIT>
struct LookupCodes<bf16, BITS, SPLIT> {
  static constexpr long BYTES = BITS * 4, DIRECT_ROWS = BITS == 4 ? 4 : 0;
  const float* values;
  __m512i table;

  void begin(const float* scales, const GroupLocation& location) {
    Table low, high;
    low.make(values, scales[location.scale[0]], scales[location.zero[0]]);
    if constexpr (SPLIT)
      high.make(values, scales[location.scale[1]], scales[location.zero[1]]);
    else
      high = low;
    table = (__m512i)_mm512_cvtne2ps_pbh((__m512)high.elements[0], (__m512)low.elements[0]);
  }
  void load(const uint8_t* codes, const float*, const GroupLocation&, Pack<bf16>::Type* to) const {
    __m512i at;
    if constexpr (BITS == 4) {
      const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)codes));
      at = _mm512_inserti64x4(_mm512_castsi256_si512(bytes), _mm256_srli_epi16(bytes, 4), 1);
    } else {
      const __m512i bytes = _mm512_broadcast_i32x4(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)codes)));
      at = _mm512_srlv_epi16(bytes, _mm512_set_epi64(0x0006000600060006, 0x0006000600060006, 0x0004000400040004,
                                                     0x0004000400040004, 0x0002000200020002, 0x0002000200020002, 0, 0));
      if constexpr (BITS == 3) {
        uint32_t high;
        memcpy(&high, codes + 8, sizeof high);
        at = _mm512_and_si512(at, _mm512_set1_epi16(3));
        at = _mm512_mask_add_epi16(at, high, at, _mm512_set1_epi16(4));
      }
    }
    if constexpr (SPLIT) {
      const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
      at = _mm512_or_si512(_mm512_and_si512(at, _mm512_set1_epi16(15)), second);
    }
    to[0] = (Pack<bf16>::Type)_mm512_permutexvar_epi16(at, table);
  }
};
#endif
