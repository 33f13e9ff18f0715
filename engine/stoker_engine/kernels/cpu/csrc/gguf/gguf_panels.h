// GGUF blocks in panels (panels.h): the blocks of 16 rows are interleaved, two bytes of each at a time.
//
//   panel of rows n … n + 15      [blocks of a row][words of a block][16], words of two bytes
//
// So a register is loaded with the same bytes of 16 rows. A format is a class with
//   ELEMENTS, WORDS       elements and words of a block
//   STEP, ZERO, HAS_OFFSET, first(i)      see quant_panels.h
//   header(block, k)     scales and offsets of elements k … k + STEP - 1 of the block
//   codes(block, k, i)   codes of the i-th group of four of each row, as unsigned bytes
#pragma once

#include "quant/blocks.h"
#include "gemm/quant_panels.h"

#if defined(STOKER_PANELS)
namespace panels {

inline __m256i words_at(const uint16_t* block, long word) {
  return _mm256_loadu_si256((const __m256i*)(block + word * PANEL));
}

inline __m512 halves_at(const uint16_t* block, long word) { return _mm512_cvtph_ps(words_at(block, word)); }

// Loads two words of each row, this one and the next.
inline __m512i fours_at(const uint16_t* block, long word) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, _mm512_loadu_si512(block + word * PANEL));
}

// Adds 16 to `codes` where the bit of `bits` selected by `mask` is set.
inline __m512i with_fifth_bit(__m512i codes, __m512i bits, __m512i mask) {
  return _mm512_mask_add_epi8(codes, _mm512_test_epi8_mask(bits, mask), codes, _mm512_set1_epi8(16));
}

// Blocks of 32 elements, which start with their scale and, if OFFSET, an offset.
template <long BLOCK_WORDS, int CODE_OF_ZERO, bool OFFSET = false>
struct Small {
  static constexpr long ELEMENTS = 32, WORDS = BLOCK_WORDS, STEP = 32;
  static constexpr int ZERO = CODE_OF_ZERO;
  static constexpr bool HAS_OFFSET = OFFSET;
  static Header header(const uint16_t* block, long) {
    return {halves_at(block, 0), OFFSET ? halves_at(block, 1) : _mm512_setzero_ps()};
  }
};

struct Q8_0 : Small<17, 128> {
  static constexpr int first(int i) { return i * 4; }
  static __m512i codes(const uint16_t* block, long, int i) {
    return _mm512_xor_si512(fours_at(block, 1 + i * 2), _mm512_set1_epi8(-128));
  }
};

// Four-bit codes: the first half of the elements is in the low halves of bytes, the second half in the high ones. Codes are
// multiplied in the order of bytes: of four bytes, first the low halves, then the high ones.
struct Nibbles {
  static constexpr int first(int i) { return i % 2 * 16 + i / 2 * 4; }
  static __m512i codes_at(const uint16_t* block, long word, int i) {
    return four_bits(fours_at(block, word + i / 2 * 2), i % 2);
  }

  // The same with the fifth bits of 32 elements in two words.
  static __m512i codes_at(const uint16_t* block, long word, long bits, int i) {
    const int byte = first(i) / 8, bit = first(i) % 8;
    const __m512i group_bits = _mm512_shuffle_epi8(
        fours_at(block, bits),
        _mm512_add_epi32(_mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0), _mm512_set1_epi8(byte)));
    return with_fifth_bit(codes_at(block, word, i), group_bits, _mm512_set1_epi32(0x08040201 << bit));
  }
};

struct Q4_0 : Small<9, 8>, Nibbles {
  static __m512i codes(const uint16_t* block, long, int i) { return codes_at(block, 1, i); }
};

struct Q4_1 : Small<10, 0, true>, Nibbles {
  static __m512i codes(const uint16_t* block, long, int i) { return codes_at(block, 2, i); }
};

struct Q5_0 : Small<11, 16>, Nibbles {
  static __m512i codes(const uint16_t* block, long, int i) { return codes_at(block, 3, 1, i); }
};

struct Q5_1 : Small<12, 0, true>, Nibbles {
  static __m512i codes(const uint16_t* block, long, int i) { return codes_at(block, 4, 2, i); }
};

// Converts small integers, a byte in each word.
inline __m512 integers(__m256i words) { return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(words)); }

// Blocks of 256 elements; 32 share a scale and an offset of 6 bits each, see `six_bits` (gguf_k.h).
template <long BLOCK_WORDS>
struct SixBits {
  static constexpr long ELEMENTS = 256, WORDS = BLOCK_WORDS, STEP = 32;
  static constexpr int ZERO = 0;
  static constexpr bool HAS_OFFSET = true;

  static constexpr int first(int i) { return i * 4; }

  static Header header(const uint16_t* block, long k) {
    const auto bytes = [&](long i, int shift, int mask) {
      const __m128i total_shift = _mm_cvtsi32_si128(i % 2 * 8 + shift);
      return _mm256_and_si256(_mm256_srl_epi16(words_at(block, 2 + i / 2), total_shift), _mm256_set1_epi16(mask));
    };
    const auto joined = [](__m256i low, __m256i high) { return _mm256_or_si256(low, _mm256_slli_epi16(high, 4)); };
    const long unit = k / 32;
    const bool first = unit < 4;
    const __m256i scale = first ? bytes(unit, 0, 63) : joined(bytes(unit + 4, 0, 15), bytes(unit - 4, 6, 3));
    const __m256i offset = first ? bytes(unit + 4, 0, 63) : joined(bytes(unit + 4, 4, 15), bytes(unit, 6, 3));
    return {integers(scale) * halves_at(block, 0), integers(offset) * -halves_at(block, 1)};
  }

  // Two groups of 32 share 32 bytes, in the low and the high halves.
  static __m512i codes_at(const uint16_t* block, long word, long k, int i) {
    return four_bits(fours_at(block, word + k / 64 * 16 + i * 2), k / 32 % 2);
  }
};

struct Q4_K : SixBits<72> {
  static __m512i codes(const uint16_t* block, long k, int i) { return codes_at(block, 8, k, i); }
};

struct Q5_K : SixBits<88> {
  static __m512i codes(const uint16_t* block, long k, int i) {
    return with_fifth_bit(codes_at(block, 24, k, i), fours_at(block, 8 + i * 2), _mm512_set1_epi8(1 << k / 32));
  }
};

// 16 elements share a scale of 8 bits.
struct Q6_K {
  static constexpr long ELEMENTS = 256, WORDS = 105, STEP = 16;
  static constexpr int ZERO = 32;
  static constexpr bool HAS_OFFSET = false;

  static constexpr int first(int i) { return i * 4; }

  static Header header(const uint16_t* block, long k) {
    const __m256i words = words_at(block, 96 + k / 32);
    const __m256i scale = _mm256_srai_epi16(k / 16 % 2 ? words : _mm256_slli_epi16(words, 8), 8);
    return {integers(scale) * halves_at(block, 104), _mm512_setzero_ps()};
  }

  static __m512i codes(const uint16_t* block, long k, int i) {
    const long half = k / 128, quarter = k / 32 % 4, word = k / 16 % 2 * 8 + i * 2;
    const __m512i four = four_bits(fours_at(block, half * 32 + quarter % 2 * 16 + word), quarter / 2);
    const __m512i two = shifted(fours_at(block, 64 + half * 16 + word), quarter * 2);
    return _mm512_or_si512(four, _mm512_and_si512(_mm512_slli_epi16(two, 4), _mm512_set1_epi8(0x30)));
  }
};

// Panels of one format in memory.
template <class Format>
struct PackedBlocks : KindOf<Format::STEP, Format::HAS_OFFSET> {
  using Kind = KindOf<Format::STEP, Format::HAS_OFFSET>;
  static constexpr int ZERO = Format::ZERO;
  static constexpr long block_size = Int8Group::SIZE;

  const uint16_t* at;
  long words;  // words of a panel

  static PackedBlocks of(const void* w, long inner) {
    return {{}, (const uint16_t*)w, inner / Format::ELEMENTS * Format::WORDS * PANEL};
  }
  const char* begin(long panel) const { return (const char*)(at + panel * words); }
  PackedBlocks from(long panel) const { return {{}, at + panel * words, words}; }

  const uint16_t* block(long j, long group) const {
    return at + j * words + group * Int8Group::SIZE / Format::ELEMENTS * Format::WORDS * PANEL;
  }
  static long within(long group, int part) { return group * Int8Group::SIZE % Format::ELEMENTS + part * Format::STEP; }
  Header header(long j, long group, int part) const { return Format::header(block(j, group), within(group, part)); }
  __m512i codes(long j, long group, int part, int four) const {
    return Format::codes(block(j, group), within(group, part), four);
  }
  static constexpr int first(int four) { return Format::first(four); }
};

}  // namespace panels
#endif
