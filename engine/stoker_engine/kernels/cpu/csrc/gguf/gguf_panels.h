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

inline Floats16 halves_at(const uint16_t* block, long word) { return floats_of_halves(words_at(block, word)); }

// Loads two words of each row, this one and the next.
inline Bytes64 fours_at(const uint16_t* block, long word) { return interleaved_at(block + word * PANEL); }

// Blocks of 32 elements, which start with their scale and, if OFFSET, an offset.
template <long BLOCK_WORDS, int BITS_OF_CODE, int CODE_OF_ZERO, bool OFFSET = false>
struct Small {
  static constexpr long ELEMENTS = 32, WORDS = BLOCK_WORDS, STEP = 32;
  static constexpr int BITS = BITS_OF_CODE, ZERO = CODE_OF_ZERO;
  static constexpr bool HAS_OFFSET = OFFSET;
  static Header header(const uint16_t* block, long) {
    return {halves_at(block, 0), OFFSET ? halves_at(block, 1) : all_floats(0)};
  }
};

struct Q8_0 : Small<17, 8, SIGNED_CODES ? 0 : 128> {
  static constexpr int first(int i) { return i * 4; }
  static Bytes64 codes(const uint16_t* block, long, int i) {
    return flipped(fours_at(block, 1 + i * 2), all_bytes(-ZERO));
  }
};

// Four-bit codes: the first half of the elements is in the low halves of bytes, the second half in the high ones. Codes
// are multiplied in the order of bytes: of four bytes, first the low halves, then the high ones.
struct Nibbles {
  static constexpr int first(int i) { return i % 2 * 16 + i / 2 * 4; }
  static Bytes64 codes_at(const uint16_t* block, long word, int i) {
    return four_bits(fours_at(block, word + i / 2 * 2), i % 2);
  }

  // The same with the fifth bits of 32 elements in two words.
  static Bytes64 codes_at(const uint16_t* block, long word, long bits, int i) {
    const int byte = first(i) / 8, bit = first(i) % 8;
    const Bytes64 group_bits = repeated_byte(fours_at(block, bits), byte);
    return with_fifth_bit(codes_at(block, word, i), group_bits, all_words(0x08040201 << bit));
  }
};

struct Q4_0 : Small<9, 4, 8>, Nibbles {
  static Bytes64 codes(const uint16_t* block, long, int i) { return codes_at(block, 1, i); }
};

struct Q4_1 : Small<10, 4, 0, true>, Nibbles {
  static Bytes64 codes(const uint16_t* block, long, int i) { return codes_at(block, 2, i); }
};

struct Q5_0 : Small<11, 5, 16>, Nibbles {
  static Bytes64 codes(const uint16_t* block, long, int i) { return codes_at(block, 3, 1, i); }
};

struct Q5_1 : Small<12, 5, 0, true>, Nibbles {
  static Bytes64 codes(const uint16_t* block, long, int i) { return codes_at(block, 4, 2, i); }
};

// Blocks of 256 elements; 32 share a scale and an offset of 6 bits each, see `six_bits` (gguf_k.h).
template <long BLOCK_WORDS, int BITS_OF_CODE>
struct SixBits {
  static constexpr long ELEMENTS = 256, WORDS = BLOCK_WORDS, STEP = 32;
  static constexpr int BITS = BITS_OF_CODE, ZERO = 0;
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
    const Floats16 negative = multiplied(halves_at(block, 1), all_floats(-1));
    return {multiplied(floats_of_integers(scale), halves_at(block, 0)),
            multiplied(floats_of_integers(offset), negative)};
  }

  // Two groups of 32 share 32 bytes, in the low and the high halves.
  static Bytes64 codes_at(const uint16_t* block, long word, long k, int i) {
    return four_bits(fours_at(block, word + k / 64 * 16 + i * 2), k / 32 % 2);
  }
};

struct Q4_K : SixBits<72, 4> {
  static Bytes64 codes(const uint16_t* block, long k, int i) { return codes_at(block, 8, k, i); }
};

struct Q5_K : SixBits<88, 5> {
  static Bytes64 codes(const uint16_t* block, long k, int i) {
    return with_fifth_bit(codes_at(block, 24, k, i), fours_at(block, 8 + i * 2), all_bytes(1 << k / 32));
  }
};

// 16 elements share a scale of 8 bits.
struct Q6_K {
  static constexpr long ELEMENTS = 256, WORDS = 105, STEP = 16;
  static constexpr int BITS = 6, ZERO = 32;
  static constexpr bool HAS_OFFSET = false;

  static constexpr int first(int i) { return i * 4; }

  static Header header(const uint16_t* block, long k) {
    const __m256i words = words_at(block, 96 + k / 32);
    const __m256i scale = _mm256_srai_epi16(k / 16 % 2 ? words : _mm256_slli_epi16(words, 8), 8);
    return {multiplied(floats_of_integers(scale), halves_at(block, 104)), all_floats(0)};
  }

  static Bytes64 codes(const uint16_t* block, long k, int i) {
    const long half = k / 128, quarter = k / 32 % 4, word = k / 16 % 2 * 8 + i * 2;
    const Bytes64 four = four_bits(fours_at(block, half * 32 + quarter % 2 * 16 + word), quarter / 2);
    const Bytes64 two = shifted(fours_at(block, 64 + half * 16 + word), quarter * 2);
    return either(four, both(shifted_left(two, 4), all_bytes(0x30)));
  }
};

// Panels of one format in memory.
template <class Format>
struct PackedBlocks : KindOf<Format::STEP, Format::HAS_OFFSET, Format::BITS> {
  using Kind = KindOf<Format::STEP, Format::HAS_OFFSET, Format::BITS>;
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
  Bytes64 codes(long j, long group, int part, int four) const {
    return Format::codes(block(j, group), within(group, part), four);
  }
  static constexpr int first(int four) { return Format::first(four); }
};

}  // namespace panels
#endif
