// What formats of blocks are decoded with: sixteen codes at a time, in bytes, become numbers.
#pragma once

#include "simd.h"

typedef uint8_t Codes __attribute__((vector_size(16)));
typedef int8_t SmallIntegers __attribute__((vector_size(16)));

// So many vectors hold the numbers of sixteen codes.
constexpr int CODE_VECS = 16 / LANES;

inline Codes load_codes(const uint8_t* from) {
  Codes codes;
  memcpy(&codes, from, sizeof codes);
  return codes;
}

// Sixteen bytes as signed integers; codes of fewer than eight bits are none below 0.
inline void to_floats(Codes codes, Vec* out) {
#if defined(__AVX512F__)
  out[0] = (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)codes));
#elif defined(__AVX2__)
  out[0] = (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)codes));
  out[1] = (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_bsrli_si128((__m128i)codes, 8)));
#else
  typedef int16_t Shorts __attribute__((vector_size(LANES * 2)));
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  Bytes parts[CODE_VECS];
  memcpy(parts, &codes, sizeof parts);
  for (int s = 0; s < CODE_VECS; s++)
    out[s] = __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(parts[s], Shorts), IntVec), Vec);
#endif
}

// code × scale
inline void scaled(Codes codes, Vec scale, Vec* out) {
  to_floats(codes, out);
  for (int s = 0; s < CODE_VECS; s++) out[s] *= scale;
}

// code × scale + offset; the product is exact, so it does not matter whether that is one instruction.
inline void scaled(Codes codes, Vec scale, Vec offset, Vec* out) {
  to_floats(codes, out);
  for (int s = 0; s < CODE_VECS; s++) out[s] = out[s] * scale + offset;
}

// Some bits of each byte: those that `mask` leaves when all are moved down by `shift`, at most 8 - shift.
inline Codes bits_of(Codes bytes, long shift, uint8_t mask) {
  typedef uint16_t Shorts __attribute__((vector_size(16)));  // processors have no shift of bytes
  return (Codes)((Shorts)bytes >> (uint16_t)shift) & mask;
}

inline Codes low_halves(Codes bytes) { return bytes & 15; }
inline Codes high_halves(Codes bytes) { return bits_of(bytes, 4, 15); }

// Sixteen bits, the lowest first, each as a byte `one` or 0.
inline Codes spread(const uint8_t* bits, uint8_t one) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  uint16_t mask;
  memcpy(&mask, bits, sizeof mask);
  return (Codes)_mm_maskz_set1_epi8(mask, one);
#else
  const Codes place = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint64_t first = bits[0] * 0x0101010101010101u, second = bits[1] * 0x0101010101010101u;
  Codes bytes;
  memcpy(&bytes, &first, 8);
  memcpy((char*)&bytes + 8, &second, 8);
  return (Codes)((bytes & place) != 0) & one;
#endif
}

// Sixteen integers, the values of codes of four bits; the numbers of a unit of such codes are value × scale + offset.
// The low halves of bytes are the codes of the first sixteen numbers.
struct Table {
  SmallIntegers values;

#if defined(__AVX512F__)
  // The table fits a register: it is scaled, not what is looked up.
  void decode(const uint8_t* from, Vec scale, Vec* out) const { look_up(from, floats() * scale, out); }
  void decode(const uint8_t* from, Vec scale, Vec offset, Vec* out) const {
    look_up(from, floats() * scale + offset, out);
  }

  Vec floats() const { return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)values)); }

  static void look_up(const uint8_t* from, Vec table, Vec* out) {  // by the low four bits of an integer
    const __m512i codes = _mm512_cvtepu8_epi32((__m128i)load_codes(from));
    out[0] = (Vec)_mm512_permutexvar_ps(codes, (__m512)table);
    out[1] = (Vec)_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), (__m512)table);
  }
#else
  void decode(const uint8_t* from, Vec scale, Vec* out) const {
    const Codes codes = load_codes(from);
    scaled(looked_up(low_halves(codes)), scale, out);
    scaled(looked_up(high_halves(codes)), scale, out + CODE_VECS);
  }
  void decode(const uint8_t* from, Vec scale, Vec offset, Vec* out) const {
    const Codes codes = load_codes(from);
    scaled(looked_up(low_halves(codes)), scale, offset, out);
    scaled(looked_up(high_halves(codes)), scale, offset, out + CODE_VECS);
  }

  Codes looked_up(Codes codes) const { return (Codes)__builtin_shuffle(values, (SmallIntegers)codes); }
#endif
};

// A float16.
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

// A float16, in all lanes.
inline Vec half_of(const uint8_t* from) {
#if defined(__AVX512F__)
  uint16_t half;
  memcpy(&half, from, sizeof half);
  return (Vec)_mm512_cvtph_ps(_mm256_set1_epi16(half));
#else
  return broadcast(half_at(from));
#endif
}
