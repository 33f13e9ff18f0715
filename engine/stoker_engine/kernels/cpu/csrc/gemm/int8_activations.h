// Rounds rows of bfloat16 to 8 bits with a scale for each 32 elements, so that products with small integers are exact:
// an element is about code × scale, where the largest of 32 has the code ±127. NaN, infinity, and elements whose sum
// exceeds the largest float make the row's outputs NaN or infinite.
//
// If 128 or 256 weights share a scale, as many elements of x form a block: an element is about code × factor × scale,
// with a factor from 1 to 255 for each 32. So integers can be accumulated over a block, and the rounding error is that
// of separate scales, apart from the rounding of the factor. Code × factor fits into 16 bits.
#pragma once

#include <cmath>

#include "common/memory.h"
#include "common/rows.h"
#include "common/threads.h"

#if defined(__AVX2__)

// 32 elements of a row.
struct Int8Group {
  static constexpr long SIZE = 32;

  int8_t codes[SIZE];
  int32_t initial_sums[2];  // −`zero` × the sum of all codes, or if `step` is 16 of each half
  float scale, sum;         // sum: scale × the sum of codes (in a block: of codes × factor of the whole block)

  int32_t& factor() { return initial_sums[1]; }  // only for blocks of more than 32, which use one initial sum
  int32_t factor() const { return initial_sums[1]; }
};

// The largest of 16 magnitudes of bfloat16.
inline float largest_of(__m256i magnitudes) {
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(magnitudes), _mm256_extracti128_si256(magnitudes, 1));
  const __m128i smallest = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
  bf16 largest;
  largest.bits = ~_mm_extract_epi16(smallest, 0);
  return to_float(largest);
}

// The sums of codes of the two halves, 16 elements each.
struct Halves {
  int32_t first, second;
};

#if defined(__AVX512F__)
typedef __m512i Elements32;  // 32 elements of a row

inline Elements32 elements_at(const bf16* from) { return _mm512_loadu_si512(from); }

// The largest magnitude of 32 elements; NaN if there is one.
inline float largest_of(Elements32 elements) {
  const __m512i bits = _mm512_and_si512(elements, _mm512_set1_epi16(0x7fff));
  return largest_of(_mm256_max_epu16(_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64(bits, 1)));
}

// Rounds the elements to multiples of a scale, given its inverse; NaN becomes the smallest code.
inline __m256i codes_of(Elements32 elements, float inverse_scale) {
  const __m512 inverse = _mm512_set1_ps(inverse_scale);
  const auto half = [&](__m256i words) {
    const __m512 floats = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
    return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(floats, inverse)));
  };
  const __m128i first = half(_mm512_castsi512_si256(elements)), last = half(_mm512_extracti64x4_epi64(elements, 1));
  return _mm256_set_m128i(last, first);
}
#else
struct Elements32 {
  __m256i half[2];
};

inline Elements32 elements_at(const bf16* from) {
  return {_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)from + 1)};
}

inline float largest_of(const Elements32& elements) {
  const __m256i sign = _mm256_set1_epi16(0x7fff);
  return largest_of(
      _mm256_max_epu16(_mm256_and_si256(elements.half[0], sign), _mm256_and_si256(elements.half[1], sign)));
}

inline __m256i codes_of(const Elements32& elements, float inverse_scale) {
  const __m256 inverse = _mm256_set1_ps(inverse_scale);
  const auto rounded = [&](__m256i widened) { return _mm256_cvtps_epi32(_mm256_mul_ps((__m256)widened, inverse)); };
  const auto half = [&](__m256i elements) {
    const __m256i zero = _mm256_setzero_si256();
    return _mm256_packs_epi32(rounded(_mm256_unpacklo_epi16(zero, elements)),
                              rounded(_mm256_unpackhi_epi16(zero, elements)));
  };
  const __m256i codes = _mm256_packs_epi16(half(elements.half[0]), half(elements.half[1]));
  return _mm256_permute4x64_epi64(codes, 0xd8);
}
#endif

// Rounds 32 elements to multiples of a scale, given its inverse.
inline Halves round_group(Elements32 elements, float inverse_scale, Int8Group* to) {
  const __m256i codes = codes_of(elements, inverse_scale);
  _mm256_storeu_si256((__m256i*)to->codes, codes);
  __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), codes), _mm256_set1_epi16(1));
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
  return {_mm256_extract_epi32(sums, 0), _mm256_extract_epi32(sums, 4)};
}

// All elements become 0 if the largest magnitude is below this, since the inverse of the scale might be infinite.
constexpr float MIN_ROUNDED = 1e-30f;

// `zero` is the code of weights that means 0; `step` weights, 16 or 32, share a scale.
inline void round_row(const bf16* from, long inner, int zero, long step, Int8Group* to) {
  for (long k = 0; k < inner; k += Int8Group::SIZE, to++) {
    const Elements32 elements = elements_at(from + k);
    const float largest = largest_of(elements);
    const auto [first, second] = round_group(elements, largest < MIN_ROUNDED ? 0.0f : 127.0f / largest, to);
    to->initial_sums[0] = -zero * (step == 16 ? first : first + second), to->initial_sums[1] = -zero * second;
    to->scale = largest / 127.0f;
    to->sum = to->scale * (float)(first + second);
  }
}

// The same in blocks of `block` elements, a multiple of 32 and at most 256; the last block may be smaller.
inline void round_row_in_blocks(const bf16* from, long inner, int zero, long block, Int8Group* to) {
  constexpr float MAX_FACTOR = 255;
  for (long k = 0; k < inner; k += block) {
    const long groups = std::min(block, inner - k) / Int8Group::SIZE;
    float group_maxima[256 / Int8Group::SIZE], largest = 0;
    for (long group = 0; group < groups; group++) {
      group_maxima[group] = largest_of(elements_at(from + k + group * Int8Group::SIZE));
      if (largest == largest && !(group_maxima[group] <= largest)) largest = group_maxima[group];  // keeps NaN
    }
    const float scale = largest / (127.0f * MAX_FACTOR), factors = MAX_FACTOR / largest;
    int32_t sum = 0;
    for (long group = 0; group < groups; group++) {
      Int8Group& unit = to[group];
      // If a magnitude is NaN, the factor is 1.
      unit.factor() = (int32_t)std::ceil(std::min(std::max(1.0f, group_maxima[group] * factors), MAX_FACTOR));
      const float inverse = largest < MIN_ROUNDED ? 0.0f : 1.0f / (scale * (float)unit.factor());
      const auto [first, second] = round_group(elements_at(from + k + group * Int8Group::SIZE), inverse, &unit);
      unit.initial_sums[0] = -zero * (first + second);
      sum += unit.factor() * (first + second);
    }
    for (long group = 0; group < groups; group++) to[group].scale = scale, to[group].sum = scale * (float)sum;
    to += groups;
  }
}

// Rounds x [rows, inner], rows `stride` apart, `inner` a multiple of 32 → [rows][inner / 32]; valid until this thread's
// next call.
inline const Int8Group* rounded(const bf16* x, long stride, long rows, long inner, int zero, long step,
                                long block = Int8Group::SIZE) {
  static thread_local Memory memory;
  const long groups = inner / Int8Group::SIZE;
  Int8Group* const found = (Int8Group*)memory.of(rows * groups * sizeof(Int8Group));
  parallel_for(rows * inner >= GRAIN_SIZE, rows, [=](long m) {
    if (block == Int8Group::SIZE)
      round_row(x + m * stride, inner, zero, step, found + m * groups);
    else
      round_row_in_blocks(x + m * stride, inner, zero, block, found + m * groups);
  });
  return found;
}

#endif
