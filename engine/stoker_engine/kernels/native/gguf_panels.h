// GGUF's blocks in panels (panels.h): the blocks of 16 rows beside each other, two bytes of each at a time.
//
//   panel of rows n … n + 15      [blocks of a row][words of a block][16], words of two bytes
//
// So what a register is loaded with holds the same bytes of 16 rows, and scales are a number a lane. Numbers have the bits
// that they have when their row is read (blocks.h), and are multiplied in the order in which panels are.
//
// A format is a class of
//   WORDS                of a block of 32 numbers, the first of them its scale, a float16
//   codes(block, pair)   signed bytes, two of each row: of numbers 2 × pair and the one after it
#pragma once

#include "blocks.h"
#include "panels.h"

#if defined(STOKER_PANELS)
namespace panels {

inline __m256i words_at(const uint16_t* block, long word) {
  return _mm256_loadu_si256((const __m256i*)(block + word * PANEL));
}

template <class Format>
struct BlockPanels {
  static constexpr long STEP = UNIT, DIRECT_ROWS = 12, DEPTH = 256, ROWS = 192;
  static constexpr int width(long) { return GROUP; }
  // The scales of the first eight rows and of the last, each twice.
  struct Header {
    __m512 low, high;
  };
  const uint16_t* at;
  long panel;  // words from one to the next

  const uint16_t* block(long j, long k) const { return at + j * panel + k / UNIT * Format::WORDS * PANEL; }

  Header header(long j, long k) const {
    const __m512 scales = _mm512_cvtph_ps(words_at(block(j, k), 0));
    const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    return {_mm512_permutexvar_ps(low, scales), _mm512_permutexvar_ps(high, scales)};
  }

  Pack<bf16>::Type load(long j, long k, const Header& scales) const {
    const __m256i codes = Format::codes(block(j, k), k % UNIT / 2);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
    return (Pack<bf16>::Type)_mm512_cvtne2ps_pbh(high * scales.high, low * scales.low);
  }

  BlockPanels from(long j) const { return {at + j * panel, panel}; }
  const char* begin(long j) const { return (const char*)(at + j * panel); }
};

struct Q8_0 {
  static constexpr long WORDS = 17;
  static __m256i codes(const uint16_t* block, long pair) { return words_at(block, 1 + pair); }
};

// The first sixteen numbers of a block are in the low halves of bytes.
inline __m256i four_bits(__m256i words, bool high) {
  return _mm256_and_si256(high ? _mm256_srli_epi16(words, 4) : words, _mm256_set1_epi8(15));
}

struct Q4_0 {
  static constexpr long WORDS = 9;
  static __m256i codes(const uint16_t* block, long pair) {
    return _mm256_sub_epi8(four_bits(words_at(block, 1 + pair % 8), pair >= 8), _mm256_set1_epi8(8));
  }
};

struct Q5_0 {
  static constexpr long WORDS = 11;
  static __m256i codes(const uint16_t* block, long pair) {
    // The fifth bits of numbers 2 n and 2 n + 1, where each byte has its own.
    const __m256i bits = _mm256_srlv_epi16(words_at(block, 1 + pair / 8), _mm256_set1_epi16(pair % 8 * 2));
    const __m256i first = _mm256_and_si256(_mm256_slli_epi16(bits, 4), _mm256_set1_epi16(0x10));
    const __m256i second = _mm256_and_si256(_mm256_slli_epi16(bits, 11), _mm256_set1_epi16(0x1000));
    const __m256i low = four_bits(words_at(block, 3 + pair % 8), pair >= 8);
    return _mm256_sub_epi8(_mm256_or_si256(low, _mm256_or_si256(first, second)), _mm256_set1_epi8(16));
  }
};

// W's rows beyond the last whole panel are blocks of `Rows`.
template <class Rows, class Format>
void multiply_blocks(const BlockProduct& p) {
  const auto* bias = (const bf16*)p.bias;
  multiply(Product<bf16, ::Blocks<bf16, Rows>>{(const bf16*)p.x, p.x_stride, {p.w, p.w_stride, {}}, bias, (bf16*)p.y,
                                               p.outputs, p.rows, p.outputs, p.inner},
           BlockPanels<Format>{(const uint16_t*)p.w, p.w_stride / 2 * PANEL});
}

}  // namespace panels
#endif
