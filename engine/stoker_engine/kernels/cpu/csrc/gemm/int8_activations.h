// Rows of bfloat16 rounded to 8 bits, 32 numbers by a scale of their own, to be multiplied with small integers exactly:
// a number is about code × scale, where the largest of its 32 has the code 127 or −127. What is no number, or infinite,
// makes its row's products so.
//
// Where up to 256 numbers of what is multiplied with share a scale, so do as many of x, a block: a number is about
// code × factor × scale, its 32 having a factor from 1 to 255. So integers add up over a block, and rounding to 8 bits is
// what it is for 32 alone, but for the factor's own. Code × factor is an integer of 16 bits.
#pragma once

#include <cmath>

#include "common/memory.h"
#include "common/rows.h"
#include "common/threads.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)

// Of 32 numbers of a row.
struct EightBits {
  static constexpr long NUMBERS = 32;

  int8_t codes[NUMBERS];
  int32_t starts[2];  // −`zero` × the sum of the codes of so many as share a scale with `zero`: of all, or of each half
  float scale, sum;   // sum: scale × the sum of codes; both of a whole block, if it is of more than 32

  int32_t& factor() { return starts[1]; }  // of blocks of more than 32, where `starts` is one number
  int32_t factor() const { return starts[1]; }
};

// The largest of 32 numbers, without its sign; what is no number is the largest of all.
inline float largest_of(__m512i numbers) {
  const __m512i bits = _mm512_and_si512(numbers, _mm512_set1_epi16(0x7fff));
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64(bits, 1));
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
  bf16 largest;
  largest.bits = ~_mm_extract_epi16(least, 0);
  return to_float(largest);
}

// The sums of the codes of 16 numbers each.
struct Halves {
  int32_t one, other;
};

// Rounds 32 numbers to multiples of a scale, whose inverse is given.
inline Halves round_unit(__m512i numbers, float inverse_scale, EightBits* to) {
  const __m512 inverse = _mm512_set1_ps(inverse_scale);
  const auto half = [&](__m256i words) {
    const __m512 floats = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
    // What is no number becomes the least code.
    return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(floats, inverse)));
  };
  const __m128i first = half(_mm512_castsi512_si256(numbers)), last = half(_mm512_extracti64x4_epi64(numbers, 1));
  const __m256i codes = _mm256_set_m128i(last, first);
  _mm256_storeu_si256((__m256i*)to->codes, codes);
  __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), codes);
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
  return {_mm256_extract_epi32(sums, 0), _mm256_extract_epi32(sums, 4)};
}

// Where the largest number is below it, all become 0: its inverse would be infinite.
constexpr float LEAST_ROUNDED = 1e-30f;

// `zero` is the code of what is multiplied with that means 0; `step` of its numbers, 16 or 32, share a scale.
inline void round_row(const bf16* from, long inner, int zero, long step, EightBits* to) {
  for (long k = 0; k < inner; k += EightBits::NUMBERS, to++) {
    const __m512i numbers = _mm512_loadu_si512(from + k);
    const float largest = largest_of(numbers);
    const auto [one, other] = round_unit(numbers, largest < LEAST_ROUNDED ? 0.0f : 127.0f / largest, to);
    to->starts[0] = -zero * (step == 16 ? one : one + other), to->starts[1] = -zero * other;
    to->scale = largest / 127.0f;
    to->sum = to->scale * (float)(one + other);
  }
}

// The same in blocks of `block` numbers, a multiple of 32 and at most 256, the last one of what is left.
inline void round_row_in_blocks(const bf16* from, long inner, int zero, long block, EightBits* to) {
  constexpr float MOST = 255;  // of factors
  for (long k = 0; k < inner; k += block) {
    const long units = std::min(block, inner - k) / EightBits::NUMBERS;
    float of_units[256 / EightBits::NUMBERS], largest = 0;
    for (long unit = 0; unit < units; unit++) {
      of_units[unit] = largest_of(_mm512_loadu_si512(from + k + unit * EightBits::NUMBERS));
      if (largest == largest && !(of_units[unit] <= largest)) largest = of_units[unit];  // what is no number stays
    }
    const float scale = largest / (127.0f * MOST), factors = MOST / largest;
    int32_t sum = 0;
    for (long unit = 0; unit < units; unit++) {
      EightBits& own = to[unit];
      own.factor() = (int32_t)std::ceil(std::min(std::max(1.0f, of_units[unit] * factors), MOST));  // 1 for no number
      const float inverse = largest < LEAST_ROUNDED ? 0.0f : 1.0f / (scale * (float)own.factor());
      const auto [one, other] = round_unit(_mm512_loadu_si512(from + k + unit * EightBits::NUMBERS), inverse, &own);
      own.starts[0] = -zero * (one + other);
      sum += own.factor() * (one + other);
    }
    for (long unit = 0; unit < units; unit++) to[unit].scale = scale, to[unit].sum = scale * (float)sum;
    to += units;
  }
}

// x [rows, inner], rows `stride` apart, `inner` a multiple of 32 → [rows][inner / 32], until this thread calls it again.
inline const EightBits* rounded(const bf16* x, long stride, long rows, long inner, int zero, long step,
                                long block = EightBits::NUMBERS) {
  static thread_local Memory memory;
  const long groups = inner / EightBits::NUMBERS;
  EightBits* const found = (EightBits*)memory.of(rows * groups * sizeof(EightBits));
  parallel_for(rows * inner >= WORTH_SHARING, rows, [=](long m) {
    if (block == EightBits::NUMBERS)
      round_row(x + m * stride, inner, zero, step, found + m * groups);
    else
      round_row_in_blocks(x + m * stride, inner, zero, block, found + m * groups);
  });
  return found;
}

#endif
