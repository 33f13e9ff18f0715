// Vectors of 64 bytes, four for each of the 16 rows of a panel (panels.h): a register of AVX-512 with VNNI, or else two
// of AVX2. Processors with VNNI multiply bytes and add the products in one instruction.
#pragma once

#include "gemm/panels.h"

#if defined(STOKER_PANELS)
namespace panels {

#if defined(__AVX512VNNI__)
#define STOKER_VNNI 1

typedef __m512i Bytes64;  // bytes, or words of two or four bytes
typedef __m512 Floats16;

inline Bytes64 bytes_at(const void* from) { return _mm512_loadu_si512(from); }
inline Bytes64 all_bytes(int x) { return _mm512_set1_epi8(x); }
inline Bytes64 all_words(int32_t x) { return _mm512_set1_epi32(x); }
inline Bytes64 both(Bytes64 a, Bytes64 b) { return _mm512_and_si512(a, b); }
inline Bytes64 either(Bytes64 a, Bytes64 b) { return _mm512_or_si512(a, b); }
inline Bytes64 flipped(Bytes64 a, Bytes64 b) { return _mm512_xor_si512(a, b); }
inline Bytes64 sum_of_words(Bytes64 a, Bytes64 b) { return _mm512_add_epi32(a, b); }
inline Bytes64 product_of_words(Bytes64 a, Bytes64 b) { return _mm512_mullo_epi32(a, b); }
inline Bytes64 shifted(Bytes64 halves, int by) { return _mm512_srl_epi16(halves, _mm_cvtsi32_si128(by)); }
inline Bytes64 shifted_left(Bytes64 halves, int by) { return _mm512_sll_epi16(halves, _mm_cvtsi32_si128(by)); }

// Byte `byte` of each row, four times.
inline Bytes64 repeated_byte(Bytes64 bytes, int byte) {
  return _mm512_shuffle_epi8(
      bytes, _mm512_add_epi32(_mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0), _mm512_set1_epi8(byte)));
}

// Adds 16 to `codes` where the bit of `bits` selected by `mask` is set.
inline Bytes64 with_fifth_bit(Bytes64 codes, Bytes64 bits, Bytes64 mask) {
  return _mm512_mask_add_epi8(codes, _mm512_test_epi8_mask(bits, mask), codes, _mm512_set1_epi8(16));
}

// Joins each row's two bytes of one line of 16 rows with its two bytes of the next line.
inline Bytes64 interleaved_at(const void* from) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, _mm512_loadu_si512(from));
}

inline Floats16 all_floats(float x) { return _mm512_set1_ps(x); }
inline Floats16 floats_at(const void* from) { return _mm512_loadu_ps(from); }
inline Floats16 floats_of_halves(__m256i halves) { return _mm512_cvtph_ps(halves); }
inline Floats16 floats_of_bf16(__m256i elements) {
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(elements), 16);
}
inline Floats16 floats_of_integers(__m256i halves) { return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(halves)); }
inline Floats16 floats_of_words(Bytes64 words) { return _mm512_cvtepi32_ps(words); }
inline Floats16 multiplied(Floats16 a, Floats16 b) { return _mm512_mul_ps(a, b); }
inline Floats16 multiply_add(Floats16 a, Floats16 b, Floats16 sum) { return _mm512_fmadd_ps(a, b, sum); }
#else
struct Bytes64 {
  __m256i half[2];
};
struct Floats16 {
  __m256 half[2];
};

template <class Operation>
inline Bytes64 each_half(Operation of) {
  return {of(0), of(1)};
}

inline Bytes64 bytes_at(const void* from) {
  return each_half([&](int i) { return _mm256_loadu_si256((const __m256i*)from + i); });
}
inline Bytes64 all_bytes(int x) { return {_mm256_set1_epi8(x), _mm256_set1_epi8(x)}; }
inline Bytes64 all_words(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Bytes64 both(Bytes64 a, Bytes64 b) {
  return each_half([&](int i) { return _mm256_and_si256(a.half[i], b.half[i]); });
}
inline Bytes64 either(Bytes64 a, Bytes64 b) {
  return each_half([&](int i) { return _mm256_or_si256(a.half[i], b.half[i]); });
}
inline Bytes64 flipped(Bytes64 a, Bytes64 b) {
  return each_half([&](int i) { return _mm256_xor_si256(a.half[i], b.half[i]); });
}
inline Bytes64 sum_of_words(Bytes64 a, Bytes64 b) {
  return each_half([&](int i) { return _mm256_add_epi32(a.half[i], b.half[i]); });
}
inline Bytes64 product_of_words(Bytes64 a, Bytes64 b) {
  return each_half([&](int i) { return _mm256_mullo_epi32(a.half[i], b.half[i]); });
}
inline Bytes64 shifted(Bytes64 halves, int by) {
  return each_half([&](int i) { return _mm256_srl_epi16(halves.half[i], _mm_cvtsi32_si128(by)); });
}
inline Bytes64 shifted_left(Bytes64 halves, int by) {
  return each_half([&](int i) { return _mm256_sll_epi16(halves.half[i], _mm_cvtsi32_si128(by)); });
}

inline Bytes64 repeated_byte(Bytes64 bytes, int byte) {
  const __m256i from =
      _mm256_add_epi32(_mm256_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0, 0x0c0c0c0c, 0x08080808, 0x04040404, 0),
                       _mm256_set1_epi8(byte));
  return each_half([&](int i) { return _mm256_shuffle_epi8(bytes.half[i], from); });
}

inline Bytes64 with_fifth_bit(Bytes64 codes, Bytes64 bits, Bytes64 mask) {
  return each_half([&](int i) {
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(bits.half[i], mask.half[i]), mask.half[i]);
    return _mm256_or_si256(codes.half[i], _mm256_and_si256(is_set, _mm256_set1_epi8(16)));
  });
}

inline Bytes64 interleaved_at(const void* from) {
  const Bytes64 pairs = bytes_at(from);
  const __m256i even = _mm256_unpacklo_epi16(pairs.half[0], pairs.half[1]);  // rows 0 … 3 and 8 … 11
  const __m256i odd = _mm256_unpackhi_epi16(pairs.half[0], pairs.half[1]);
  return {_mm256_permute2x128_si256(even, odd, 0x20), _mm256_permute2x128_si256(even, odd, 0x31)};
}

inline Floats16 all_floats(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats16 floats_at(const void* from) {
  return {_mm256_loadu_ps((const float*)from), _mm256_loadu_ps((const float*)from + 8)};
}
inline __m128i half_of(__m256i v, int i) { return i ? _mm256_extracti128_si256(v, 1) : _mm256_castsi256_si128(v); }
inline Floats16 floats_of_halves(__m256i halves) {
  return {_mm256_cvtph_ps(half_of(halves, 0)), _mm256_cvtph_ps(half_of(halves, 1))};
}
inline Floats16 floats_of_words(Bytes64 words) {
  return {_mm256_cvtepi32_ps(words.half[0]), _mm256_cvtepi32_ps(words.half[1])};
}
inline Floats16 floats_of_bf16(__m256i elements) {
  const auto widened = [&](int i) {
    return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half_of(elements, i)), 16);
  };
  return {widened(0), widened(1)};
}
inline Floats16 floats_of_integers(__m256i halves) {
  return floats_of_words(each_half([&](int i) { return _mm256_cvtepi16_epi32(half_of(halves, i)); }));
}
inline Floats16 multiplied(Floats16 a, Floats16 b) {
  return {_mm256_mul_ps(a.half[0], b.half[0]), _mm256_mul_ps(a.half[1], b.half[1])};
}
inline Floats16 multiply_add(Floats16 a, Floats16 b, Floats16 sum) {
  return {_mm256_fmadd_ps(a.half[0], b.half[0], sum.half[0]), _mm256_fmadd_ps(a.half[1], b.half[1], sum.half[1])};
}
#if defined(__AVXVNNI__)
#define STOKER_VNNI 1
#endif
#endif

// Extracts codes of four bits from the low or the high halves of bytes.
inline Bytes64 four_bits(Bytes64 bytes, bool high) { return both(high ? shifted(bytes, 4) : bytes, all_bytes(15)); }

#if defined(STOKER_VNNI)
// Whether codes of eight bits are multiplied as signed bytes.
constexpr bool SIGNED_CODES = false;

// sum + the products of four bytes of each row, of unsigned codes with signed bytes of x.
inline Bytes64 add_products(Bytes64 sum, Bytes64 codes, Bytes64 x) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sum, codes, x);
#else
  return each_half([&](int i) { return _mm256_dpbusd_avx_epi32(sum.half[i], codes.half[i], x.half[i]); });
#endif
}

// sum + the products of the lower and of the upper halves of words, which are signed.
inline Bytes64 add_products_of_halves(Bytes64 sum, Bytes64 a, Bytes64 b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return each_half([&](int i) { return _mm256_dpwssd_avx_epi32(sum.half[i], a.half[i], b.half[i]); });
#endif
}
#else
constexpr bool SIGNED_CODES = true;

// Sums of the products of two bytes, of unsigned codes with signed bytes of x, in words of 16 bits.
inline Bytes64 pairs_of_products(Bytes64 codes, Bytes64 x) {
  return each_half([&](int i) { return _mm256_maddubs_epi16(codes.half[i], x.half[i]); });
}
// The same for signed codes.
inline Bytes64 pairs_of_signed_products(Bytes64 codes, Bytes64 magnitudes, Bytes64 x) {
  return each_half(
      [&](int i) { return _mm256_maddubs_epi16(magnitudes.half[i], _mm256_sign_epi8(x.half[i], codes.half[i])); });
}
inline Bytes64 magnitudes_of(Bytes64 codes) {
  return each_half([&](int i) { return _mm256_abs_epi8(codes.half[i]); });
}
inline Bytes64 sum_of_halves(Bytes64 a, Bytes64 b) {
  return each_half([&](int i) { return _mm256_add_epi16(a.half[i], b.half[i]); });
}
inline Bytes64 add_products_of_halves(Bytes64 sum, Bytes64 a, Bytes64 b) {
  return each_half([&](int i) { return _mm256_add_epi32(sum.half[i], _mm256_madd_epi16(a.half[i], b.half[i])); });
}
#endif

}  // namespace panels
#endif
