// Storage formats of the KV cache: float, bf16, and three 8-bit formats with scales. Every 8-bit element can be
// represented in bf16, so keys are multiplied as bf16 without loss.
//
//     e4m3     float8: 4 exponent bits (normal from 2⁻⁶), 3 mantissa bits; largest ±448, 0x7f is NaN
//     e5m2     float8: 5 exponent bits (normal from 2⁻¹⁴), 2 mantissa bits; largest ±57344; codes above 0x7b are NaN
//     int8     largest ±127
#pragma once

#include "common/rows.h"

// Values of AttentionCall::stored.
enum Stored : long { FLOAT, BF16, E4M3, E5M2, INT8 };

inline long size_of(long stored) { return stored == FLOAT ? 4 : stored == BF16 ? 2 : 1; }

struct e4m3 {
  static constexpr int MANTISSA = 3, BIAS = 7, LARGEST_CODE = 0x7e;
  static constexpr float LARGEST = 448;
  uint8_t bits;
};

struct e5m2 {
  static constexpr int MANTISSA = 2, BIAS = 15, LARGEST_CODE = 0x7b;
  static constexpr float LARGEST = 57344;
  uint8_t bits;
};

struct int8 {
  static constexpr float LARGEST = 127;
  int8_t bits;
};

typedef uint8_t ByteVec __attribute__((vector_size(LANES)));
typedef uint8_t TwoByteVecs __attribute__((vector_size(LANES * 2)));
typedef uint16_t TwoHalfVecs __attribute__((vector_size(LANES * 4)));

// The bf16 of a positive subnormal float8 `code` (exponent bits are 0): code × 2^(1 - BIAS - MANTISSA).
template <class Float8>
constexpr uint16_t bf16_of_small(int code) {
  constexpr int LOWEST = 1 - Float8::BIAS - Float8::MANTISSA + 127;
  for (int bit = Float8::MANTISSA - 1; bit >= 0; bit--)
    if (code >> bit & 1) return ((LOWEST + bit) << 7) | ((code - (1 << bit)) << (7 - bit));
  return 0;
}

// Converts float8 codes, one in each lane of 16 bits, to bf16.
template <class Float8, class Halves>
inline Halves bf16_of(Halves codes) {
  constexpr int MANTISSA = Float8::MANTISSA, SMALL = 1 << MANTISSA;
  const Halves code = codes & 0x7f;
  Halves bits = (code << (7 - MANTISSA)) + ((127 - Float8::BIAS) << 7);
  Halves small;
  if constexpr (sizeof(Halves) / 2 >= SMALL) {
    Halves table;
    for (unsigned i = 0; i < sizeof(Halves) / 2; i++) table[i] = bf16_of_small<Float8>(i % SMALL);
    small = __builtin_shuffle(table, code);  // indexed by the code modulo the number of lanes
  } else {
    small = Halves{};
    for (uint16_t i = 1; i < SMALL; i++) small = code == i ? Halves{} + bf16_of_small<Float8>(i) : small;
  }
  bits = code < SMALL ? small : bits;
  bits = code > Float8::LARGEST_CODE ? Halves{} + 0x7fc0 : bits;
  return bits | ((codes & 0x80) << 8);
}

// Rounds v, which is within ±LARGEST or NaN, to the nearest code, ties to even.
template <class Float8>
inline ByteVec float8_codes(Vec v) {
  constexpr int SHIFT = 23 - Float8::MANTISSA;
  const WordVec bits = (WordVec)v, magnitude = bits & 0x7fffffffu;
  const WordVec rounded = (magnitude + ((1u << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)) >> SHIFT;
  const WordVec normal = rounded - ((127 - Float8::BIAS) << Float8::MANTISSA);
  // Subnormal codes are multiples of the smallest value, which is the spacing of floats from ANCHOR on.
  constexpr uint32_t ANCHOR = (1 - Float8::BIAS - Float8::MANTISSA + 23 + 127) << 23;
  const WordVec small = (WordVec)((Vec)magnitude + (Vec)(WordVec{} + ANCHOR)) - ANCHOR;
  constexpr uint32_t SMALLEST_NORMAL = (1 - Float8::BIAS + 127) << 23;
  WordVec codes = magnitude < SMALLEST_NORMAL ? small : normal;
  codes = v == v ? codes : WordVec{} + 0x7f;
  return __builtin_convertvector(codes | ((bits >> 24) & 0x80), ByteVec);
}

inline void store(e4m3* to, Vec v) {
  const ByteVec codes = float8_codes<e4m3>(v);
  memcpy(to, &codes, sizeof codes);
}
inline void store(e5m2* to, Vec v) {
  const ByteVec codes = float8_codes<e5m2>(v);
  memcpy(to, &codes, sizeof codes);
}
// NaN becomes 0.
inline void store(int8* to, Vec v) {
  const Vec anchor = broadcast(12582912.0f);  // 1.5 × 2²³: adding it rounds to an integer in the low bits
  const WordVec integers = (WordVec)((v == v ? v : Vec{}) + anchor) - 0x4b400000u;
  const ByteVec codes = __builtin_convertvector(integers & 0xffu, ByteVec);
  memcpy(to, &codes, sizeof codes);
}

// Loads LANES words of elements: one float each, or two bf16, to which 8-bit elements are converted.
inline WordVec words(const float* from) {
  WordVec v;
  memcpy(&v, from, sizeof v);
  return v;
}
inline WordVec words(const bf16* from) {
  WordVec v;
  memcpy(&v, from, sizeof v);
  return v;
}
template <class Float8>
inline WordVec words_of_float8(const Float8* from) {
  TwoByteVecs codes;
  memcpy(&codes, from, sizeof codes);
  return (WordVec)bf16_of<Float8>(__builtin_convertvector(codes, TwoHalfVecs));
}
inline WordVec words(const e4m3* from) { return words_of_float8(from); }
inline WordVec words(const e5m2* from) { return words_of_float8(from); }
inline WordVec words(const int8* from) {
  HalfVec pairs;
  memcpy(&pairs, from, sizeof pairs);
  const WordVec both = zero_extended(pairs);
  const Vec first = __builtin_convertvector((IntVec)(both << 24) >> 24, Vec);
  const Vec second = __builtin_convertvector((IntVec)(both << 16) >> 24, Vec);
  return ((WordVec)first >> 16) | (WordVec)second;  // the lower half of a float that holds an 8-bit integer is 0
}

// The same for the first `count` elements; the others are 0.
template <class S>
inline WordVec words_part(const S* from, long count) {
  S padded[LANES * 2] = {};
  memcpy((void*)padded, from, count * sizeof(S));
  return words(padded);
}

// Converts `count` elements to floats, padded with 0 to a multiple of LANES.
template <class S>
inline void to_floats(float* to, const S* from, long count) {
  if constexpr (sizeof(S) == 1) {
    for (long d = 0; d < count; d += 2 * LANES) {
      const WordVec pairs = count - d >= 2 * LANES ? words(from + d) : words_part(from + d, count - d);
      bf16 elements[2 * LANES];
      memcpy(elements, &pairs, sizeof elements);
      store(to + d, load(elements));
      if (count - d > LANES) store(to + d + LANES, load(elements + LANES));
    }
  } else {
    for (long d = 0; d < count; d += LANES) store(to + d, load_up_to(from + d, count - d));
  }
}
