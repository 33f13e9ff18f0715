// Helpers to decode block formats: convert a unit's codes, in bytes, to elements.
#pragma once

#include "quant/blocks.h"

// A unit's codes, or bytes with some of their bits.
typedef uint8_t Codes __attribute__((vector_size(32)));
typedef uint8_t HalfCodes __attribute__((vector_size(16)));
typedef int8_t SmallIntegers __attribute__((vector_size(16)));

// Number of vectors that hold the elements of half a unit.
constexpr int HALF_VECS = UNIT_VECS / 2;

inline Codes load_codes(const uint8_t* from) {
  Codes codes;
  memcpy(&codes, from, sizeof codes);
  return codes;
}

// Extracts bits of each byte: (byte >> shift) & mask; the mask has at most 8 - shift bits.
inline Codes bits_of(Codes bytes, long shift, uint8_t mask) {
  typedef uint16_t Shorts __attribute__((vector_size(32)));  // processors cannot shift bytes
  return (Codes)((Shorts)bytes >> (uint16_t)shift) & mask;
}

// Shifts codes left; the result must fit into a byte.
inline Codes moved_up(Codes codes, int shift) {
  typedef uint16_t Shorts __attribute__((vector_size(32)));
  return (Codes)((Shorts)codes << (uint16_t)shift);
}

// Splits sixteen bytes: the low halves, then the high halves.
inline Codes halves(const uint8_t* from) {
#if defined(__AVX2__)
  const __m128i bytes = _mm_loadu_si128((const __m128i*)from);
  return (Codes)_mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1) & 15;
#else
  uint64_t words[4];
  memcpy(words, from, 16);
  words[2] = words[0] >> 4, words[3] = words[1] >> 4;
  return load_codes((const uint8_t*)words) & 15;
#endif
}

// Expands 32 bits, the lowest first, to bytes of `set_byte` or 0.
inline Codes spread(const uint8_t* bits, uint8_t set_byte) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  uint32_t mask;
  memcpy(&mask, bits, sizeof mask);
  return (Codes)_mm256_maskz_set1_epi8(mask, set_byte);
#else
  uint64_t words[4];
  for (int i = 0; i < 4; i++) words[i] = bits[i] * 0x0101010101010101u & 0x8040201008040201u;
  return (Codes)(load_codes((const uint8_t*)words) != 0) & set_byte;
#endif
}

// Converts bytes as signed integers; codes of fewer than eight bits are never negative.
inline void to_floats(HalfCodes codes, Vec* out) {
#if defined(__AVX512F__)
  out[0] = (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)codes));
#elif defined(__AVX2__)
  out[0] = (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)codes));
  out[1] = (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_bsrli_si128((__m128i)codes, 8)));
#else
  typedef int16_t Shorts __attribute__((vector_size(LANES * 2)));
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  Bytes parts[HALF_VECS];
  memcpy(parts, &codes, sizeof parts);
  for (int s = 0; s < HALF_VECS; s++)
    out[s] = __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(parts[s], Shorts), IntVec), Vec);
#endif
}

inline void to_floats(Codes codes, Vec* out) {
#if defined(__AVX2__)
  to_floats((HalfCodes)_mm256_castsi256_si128((__m256i)codes), out);
  to_floats((HalfCodes)_mm256_extracti128_si256((__m256i)codes, 1), out + HALF_VECS);
#else
  HalfCodes parts[2];
  memcpy(parts, &codes, sizeof parts);
  to_floats(parts[0], out);
  to_floats(parts[1], out + HALF_VECS);
#endif
}

// code × scale
inline void scaled(Codes codes, Vec scale, Vec* out) {
  to_floats(codes, out);
  for (int s = 0; s < UNIT_VECS; s++) out[s] *= scale;
}

// code × scale + offset; the product is exact, so fusing the operations does not change the result.
inline void scaled(Codes codes, Vec scale, Vec offset, Vec* out) {
  to_floats(codes, out);
  for (int s = 0; s < UNIT_VECS; s++) out[s] = out[s] * scale + offset;
}

// The same with a scale, and optionally an offset, for each half of the unit.
inline void scaled_by_halves(Codes codes, const float* scales, Vec* out) {
  to_floats(codes, out);
  for (int s = 0; s < UNIT_VECS; s++) out[s] *= broadcast(scales[s * LANES / 16]);
}

inline void scaled_by_halves(Codes codes, const float* scales, const float* offsets, Vec* out) {
  to_floats(codes, out);
  for (int s = 0; s < UNIT_VECS; s++)
    out[s] = out[s] * broadcast(scales[s * LANES / 16]) + broadcast(offsets[s * LANES / 16]);
}

// The values of four-bit codes. A unit has its first sixteen codes in the low halves of bytes.
struct Table {
  SmallIntegers values;

#if defined(__AVX512F__)
  // The table fits into a register, so it is scaled instead of the results.
  void decode(const uint8_t* from, Vec scale, Vec* out) const { look_up(from, floats() * scale, out); }
  void decode(const uint8_t* from, Vec scale, Vec offset, Vec* out) const {
    look_up(from, floats() * scale + offset, out);
  }

  Vec floats() const { return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)values)); }

  static void look_up(const uint8_t* from, Vec table, Vec* out) {  // indexed by the low four bits of integers
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
    out[0] = (Vec)_mm512_permutexvar_ps(codes, (__m512)table);
    out[1] = (Vec)_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), (__m512)table);
  }
#else
  void decode(const uint8_t* from, Vec scale, Vec* out) const { scaled(looked_up(halves(from)), scale, out); }
  void decode(const uint8_t* from, Vec scale, Vec offset, Vec* out) const {
    scaled(looked_up(halves(from)), scale, offset, out);
  }

  Codes looked_up(Codes codes) const {
    SmallIntegers parts[2];
    memcpy(parts, &codes, sizeof parts);
    for (SmallIntegers& part : parts) part = __builtin_shuffle(values, part);
    return load_codes((const uint8_t*)parts);
  }
#endif
};

// Loads a float16.
inline float half_at(const uint8_t* from) {
  uint16_t half;
  memcpy(&half, from, sizeof half);
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
  uint32_t bits = (exponent + 112) << 23 | fraction << 13;
  if (exponent == 31) bits |= 0x7f800000;
  float value;
  memcpy(&value, &bits, sizeof value);
  if (exponent == 0) value = fraction * 0x1p-24f;
  return sign ? -value : value;
#endif
}

// Loads a float16 into all lanes.
inline Vec half_of(const uint8_t* from) {
#if defined(__AVX512F__)
  uint16_t half;
  memcpy(&half, from, sizeof half);
  return (Vec)_mm512_cvtph_ps(_mm256_set1_epi16(half));
#else
  return broadcast(half_at(from));
#endif
}
