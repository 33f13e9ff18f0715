// GGUF's blocks in panels (panels.h): the blocks of 16 rows beside each other, two bytes of each at a time.
//
//   panel of rows n … n + 15      [blocks of a row][words of a block][16], words of two bytes
//
// So what a register is loaded with holds the same bytes of 16 rows, and scales are a number a lane. Numbers have the bits
// that they have when their row is read (blocks.h), and are multiplied in the order in which panels are.
//
// A format is a class of
//   NUMBERS, WORDS         of a block
//   STEP                   numbers that share a scale
//   Header, header(block, k)   the scales of numbers k … k + STEP of a block, and offsets where it has such
//   codes(block, pair)     signed bytes, two of each row: of numbers 2 × pair and the one after it
#pragma once

#include "blocks.h"
#include "panels.h"

#if defined(STOKER_PANELS)
namespace panels {

inline __m256i words_at(const uint16_t* block, long word) {
  return _mm256_loadu_si256((const __m256i*)(block + word * PANEL));
}

inline __m512 halves_at(const uint16_t* block, long word) { return _mm512_cvtph_ps(words_at(block, word)); }

// A number of each row, beside each of its two codes: of the first eight rows and of the last.
struct Twice {
  __m512 low, high;

  Twice() = default;
  explicit Twice(__m512 numbers) {
    const __m512i first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    low = _mm512_permutexvar_ps(first, numbers);
    high = _mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(8)), numbers);
  }
};

struct Scale {
  Twice scale;
  __m512 low(__m512 codes) const { return codes * scale.low; }
  __m512 high(__m512 codes) const { return codes * scale.high; }
};

struct ScaleAndOffset {
  Twice scale, offset;
  __m512 low(__m512 codes) const { return codes * scale.low + offset.low; }
  __m512 high(__m512 codes) const { return codes * scale.high + offset.high; }
};

template <class Format>
struct BlockPanels {
  static constexpr long STEP = Format::STEP, DIRECT_ROWS = 12, DEPTH = 256, ROWS = 192;
  static constexpr int width(long) { return GROUP; }
  typedef typename Format::Header Header;
  const uint16_t* at;
  long panel;  // words from one to the next

  const uint16_t* block(long j, long k) const { return at + j * panel + k / Format::NUMBERS * Format::WORDS * PANEL; }

  Header header(long j, long k) const { return Format::header(block(j, k), k % Format::NUMBERS); }

  Pack<bf16>::Type load(long j, long k, const Header& header) const {
    const __m256i codes = Format::codes(block(j, k), k % Format::NUMBERS / 2);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
    return (Pack<bf16>::Type)_mm512_cvtne2ps_pbh(header.high(high), header.low(low));
  }

  BlockPanels from(long j) const { return {at + j * panel, panel}; }
  const char* begin(long j) const { return (const char*)(at + j * panel); }
};

// Codes of four bits in the low halves of bytes, or in the high ones.
inline __m256i four_bits(__m256i words, bool high) {
  return _mm256_and_si256(high ? _mm256_srli_epi16(words, 4) : words, _mm256_set1_epi8(15));
}

// Those of numbers 2 × pair and the one after it, of 32 whose first half is in the low halves of the words from `first` on.
inline __m256i four_bits_of(const uint16_t* block, long first, long pair) {
  return four_bits(words_at(block, first + pair % 8), pair >= 8);
}

// Bits 2 × pair and the one after it, of 32 in two words, as the fifth of bytes.
inline __m256i fifth_bits_of(const uint16_t* block, long first, long pair) {
  const __m256i bits = _mm256_srlv_epi16(words_at(block, first + pair / 8), _mm256_set1_epi16(pair % 8 * 2));
  return _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(bits, 4), _mm256_set1_epi16(0x10)),
                         _mm256_and_si256(_mm256_slli_epi16(bits, 11), _mm256_set1_epi16(0x1000)));
}

// Blocks of 32 numbers, which begin with their scale.
template <long BLOCK_WORDS>
struct Scaled {
  static constexpr long NUMBERS = 32, WORDS = BLOCK_WORDS, STEP = 32;
  typedef Scale Header;
  static Header header(const uint16_t* block, long) { return {Twice(halves_at(block, 0))}; }
};

// And an offset.
template <long BLOCK_WORDS>
struct ScaledWithOffset {
  static constexpr long NUMBERS = 32, WORDS = BLOCK_WORDS, STEP = 32;
  typedef ScaleAndOffset Header;
  static Header header(const uint16_t* block, long) { return {Twice(halves_at(block, 0)), Twice(halves_at(block, 1))}; }
};

struct Q8_0 : Scaled<17> {
  static __m256i codes(const uint16_t* block, long pair) { return words_at(block, 1 + pair); }
};

struct Q4_0 : Scaled<9> {
  static __m256i codes(const uint16_t* block, long pair) {
    return _mm256_sub_epi8(four_bits_of(block, 1, pair), _mm256_set1_epi8(8));
  }
};

struct Q4_1 : ScaledWithOffset<10> {
  static __m256i codes(const uint16_t* block, long pair) { return four_bits_of(block, 2, pair); }
};

struct Q5_0 : Scaled<11> {
  static __m256i codes(const uint16_t* block, long pair) {
    const __m256i five = _mm256_or_si256(four_bits_of(block, 3, pair), fifth_bits_of(block, 1, pair));
    return _mm256_sub_epi8(five, _mm256_set1_epi8(16));
  }
};

struct Q5_1 : ScaledWithOffset<12> {
  static __m256i codes(const uint16_t* block, long pair) {
    return _mm256_or_si256(four_bits_of(block, 4, pair), fifth_bits_of(block, 2, pair));
  }
};

// Small integers, a byte in each word.
inline __m512 integers(__m256i words) { return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(words)); }

// Blocks of 256 numbers; 32 share a scale and an offset of 6 bits each, as `six_bits` (gguf_k.h) says.
template <long BLOCK_WORDS>
struct SixBits {
  static constexpr long NUMBERS = 256, WORDS = BLOCK_WORDS, STEP = 32;
  typedef ScaleAndOffset Header;

  static Header header(const uint16_t* block, long k) {
    const auto bytes = [&](long i, int shift, int mask) {
      const __m128i places = _mm_cvtsi32_si128(i % 2 * 8 + shift);
      return _mm256_and_si256(_mm256_srl_epi16(words_at(block, 2 + i / 2), places), _mm256_set1_epi16(mask));
    };
    const auto joined = [](__m256i low, __m256i high) { return _mm256_or_si256(low, _mm256_slli_epi16(high, 4)); };
    const long unit = k / 32;
    const bool first = unit < 4;
    const __m256i scale = first ? bytes(unit, 0, 63) : joined(bytes(unit + 4, 0, 15), bytes(unit - 4, 6, 3));
    const __m256i offset = first ? bytes(unit + 4, 0, 63) : joined(bytes(unit + 4, 4, 15), bytes(unit, 6, 3));
    return {Twice(integers(scale) * halves_at(block, 0)), Twice(integers(offset) * -halves_at(block, 1))};
  }

  // Pairs of units lie in the low and the high halves of 32 bytes.
  static __m256i four_bits_of(const uint16_t* block, long first, long pair) {
    return four_bits(words_at(block, first + pair / 32 * 16 + pair % 16), pair / 16 % 2);
  }
};

struct Q4_K : SixBits<72> {
  static __m256i codes(const uint16_t* block, long pair) { return four_bits_of(block, 8, pair); }
};

struct Q5_K : SixBits<88> {
  static __m256i codes(const uint16_t* block, long pair) {
    const __m256i bits = _mm256_srl_epi16(words_at(block, 8 + pair % 16), _mm_cvtsi32_si128(pair / 16));
    const __m256i fifth = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi8(1)), 4);
    return _mm256_or_si256(four_bits_of(block, 24, pair), fifth);
  }
};

// 16 numbers share a scale of 8 bits.
struct Q6_K {
  static constexpr long NUMBERS = 256, WORDS = 105, STEP = 16;
  typedef Scale Header;

  static Header header(const uint16_t* block, long k) {
    const __m256i words = words_at(block, 96 + k / 32);
    const __m256i scale = _mm256_srai_epi16(k / 16 % 2 ? words : _mm256_slli_epi16(words, 8), 8);
    return {Twice(integers(scale) * halves_at(block, 104))};
  }

  static __m256i codes(const uint16_t* block, long pair) {
    const long half = pair / 64, quarter = pair / 16 % 4, word = pair % 16;
    const __m256i four = four_bits(words_at(block, half * 32 + quarter % 2 * 16 + word), quarter / 2);
    const __m256i bits = _mm256_srl_epi16(words_at(block, 64 + half * 16 + word), _mm_cvtsi32_si128(quarter * 2));
    const __m256i two = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi8(3)), 4);
    return _mm256_sub_epi8(_mm256_or_si256(four, two), _mm256_set1_epi8(32));
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
