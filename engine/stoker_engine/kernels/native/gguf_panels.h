// GGUF's blocks in panels (panels.h): the blocks of 16 rows beside each other, two bytes of each at a time.
//
//   panel of rows n … n + 15      [blocks of a row][words of a block][16], words of two bytes
//
// So what a register is loaded with holds the same bytes of 16 rows, and scales are a number a lane. x is rounded to 8 bits
// (eight_bits.h) and multiplied as integers, 4 inner numbers at a time; what numbers that share a scale add up to, without an
// error, is scaled and added to a float. A row's result depends on nothing but the row.
//
// A format is a class of
//   NUMBERS, WORDS       of a block
//   STEP                 numbers that share a scale, 32 or 16
//   ZERO                 the code that means 0, before an offset
//   HAS_OFFSET           numbers are code × scale + offset
//   header(block, k)     scales of numbers k … k + STEP of the block, and offsets
//   first(i)             of these numbers, the first of the i-th four
//   codes(block, k, i)   codes of the i-th four of each row, bytes from 0 on
#pragma once

#include "blocks.h"
#include "eight_bits.h"
#include "panels.h"

#if defined(STOKER_PANELS)
namespace panels {

inline __m256i words_at(const uint16_t* block, long word) {
  return _mm256_loadu_si256((const __m256i*)(block + word * PANEL));
}

inline __m512 halves_at(const uint16_t* block, long word) { return _mm512_cvtph_ps(words_at(block, word)); }

// Two words of each row beside each other, this one and the next.
inline __m512i fours_at(const uint16_t* block, long word) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, _mm512_loadu_si512(block + word * PANEL));
}

inline __m512i shifted(__m512i words, int by) { return _mm512_srl_epi16(words, _mm_cvtsi32_si128(by)); }

// Codes of four bits in the low halves of bytes, or in the high ones.
inline __m512i four_bits(__m512i bytes, bool high) {
  return _mm512_and_si512(high ? shifted(bytes, 4) : bytes, _mm512_set1_epi8(15));
}

// `codes` plus 16 where a bit of `bits` that `mask` names is set.
inline __m512i with_fifth_bit(__m512i codes, __m512i bits, __m512i mask) {
  return _mm512_mask_add_epi8(codes, _mm512_test_epi8_mask(bits, mask), codes, _mm512_set1_epi8(16));
}

struct Header {
  __m512 scale, offset;
};

// Blocks of 32 numbers, which begin with their scale, and an offset.
template <long BLOCK_WORDS, int CODE_OF_ZERO, bool OFFSET = false>
struct Small {
  static constexpr long NUMBERS = 32, WORDS = BLOCK_WORDS, STEP = 32;
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

// The first half of numbers is in the low halves of bytes, the second in the high ones; those of a byte come one after
// the other.
struct Nibbles {
  static constexpr int first(int i) { return i % 2 * 16 + i / 2 * 4; }
  static __m512i codes_at(const uint16_t* block, long word, int i) {
    return four_bits(fours_at(block, word + i / 2 * 2), i % 2);
  }

  // And the fifth bits of 32 numbers in two words.
  static __m512i codes_at(const uint16_t* block, long word, long bits, int i) {
    const int byte = first(i) / 8, bit = first(i) % 8;
    const __m512i own = _mm512_shuffle_epi8(fours_at(block, bits),
                                            _mm512_add_epi32(_mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0),
                                                             _mm512_set1_epi8(byte)));
    return with_fifth_bit(codes_at(block, word, i), own, _mm512_set1_epi32(0x08040201 << bit));
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

// Small integers, a byte in each word.
inline __m512 integers(__m256i words) { return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(words)); }

// Blocks of 256 numbers; 32 share a scale and an offset of 6 bits each, as `six_bits` (gguf_k.h) says.
template <long BLOCK_WORDS>
struct SixBits {
  static constexpr long NUMBERS = 256, WORDS = BLOCK_WORDS, STEP = 32;
  static constexpr int ZERO = 0;
  static constexpr bool HAS_OFFSET = true;

  static constexpr int first(int i) { return i * 4; }

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
    return {integers(scale) * halves_at(block, 0), integers(offset) * -halves_at(block, 1)};
  }

  // Pairs of 32 lie in the low and the high halves of 32 bytes.
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

// 16 numbers share a scale of 8 bits.
struct Q6_K {
  static constexpr long NUMBERS = 256, WORDS = 105, STEP = 16;
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

// N panels of one format, as they lie in memory: what numbers 32 × group + STEP × part and on have.
template <class Format, int N>
struct Packed {
  static constexpr long STEP = Format::STEP;
  static constexpr bool HAS_OFFSET = Format::HAS_OFFSET;

  const uint16_t* at;
  long panel;  // words from one to the next

  const uint16_t* block(long j, long group) const {
    return at + j * panel + group * EightBits::NUMBERS / Format::NUMBERS * Format::WORDS * PANEL;
  }
  static long within(long group, int part) {
    return group * EightBits::NUMBERS % Format::NUMBERS + part * Format::STEP;
  }
  Header header(long j, long group, int part) const { return Format::header(block(j, group), within(group, part)); }
  __m512i codes(long j, long group, int part, int four) const {
    return Format::codes(block(j, group), within(group, part), four);
  }
  static constexpr int first(int four) { return Format::first(four); }
};

// Likewise, of any format whose scales are of so many numbers, put into the form in which they are multiplied: codes in the
// order of the numbers. Worth it for many rows.
template <long NUMBERS_OF_A_SCALE, bool OFFSET, int N>
struct Unpacked {
  static constexpr long STEP = NUMBERS_OF_A_SCALE, PARTS = EightBits::NUMBERS / STEP, FOURS = STEP / 4;
  static constexpr bool HAS_OFFSET = OFFSET;
  struct Part {
    __m512i codes[FOURS];
    Header header;
  };
  const Part* at;  // [groups][N][PARTS]

  // Valid for as long as this thread unpacks no others of this shape.
  template <class Format>
  Unpacked(const Packed<Format, N>& from, long groups) {
    thread_local Memory memory;
    Part* to = (Part*)memory.of(groups * N * PARTS * sizeof(Part));
    at = to;
    for (long group = 0; group < groups; group++)
      for (long j = 0; j < N; j++)
        with_each<PARTS>([&](auto part) {
          to->header = from.header(j, group, part);
          with_each<FOURS>([&](auto four) { to->codes[Format::first(four) / 4] = from.codes(j, group, part, four); });
          to++;
        });
  }
  const Part& of(long j, long group, int part) const { return at[(group * N + j) * PARTS + part]; }
  Header header(long j, long group, int part) const { return of(j, group, part).header; }
  __m512i codes(long j, long group, int part, int four) const { return of(j, group, part).codes[four]; }
  static constexpr int first(int four) { return four * 4; }
};

// Rows of x with panels of any format, which are Packed or Unpacked.
struct CodedRows {
  const EightBits* x;
  const bf16* bias;
  bf16* y;
  long y_stride, inner;

  // Rows m … m + M of x with the N panels of `source`, which are those from `panel` on.
  template <int M, int N, class Source>
  INLINED_INTO void tile(const Source& source, long panel, long m, Ahead& ahead) const {
    constexpr long STEP = Source::STEP;
    const long groups = inner / EightBits::NUMBERS;
    const EightBits* rows[M];
    with_each<M>([&](auto i) { rows[i] = x + (m + i) * groups; });
    Vec sums[M * N] = {};
    for (long group = 0; group < groups; group++) {
      with_each<EightBits::NUMBERS / STEP>([&](auto part) {
        __m512i products[M * N];
        with_each<M * N>([&](auto i) { products[i] = _mm512_set1_epi32(rows[i / N]->starts[part]); });
        with_each<STEP / 4>([&](auto four) {
          if (N == 1 || four == 0) ahead.fetch();  // few rows wait for memory: evenly then
          __m512i codes[N];
          with_each<N>([&](auto j) { codes[j] = source.codes(j, group, part, four); });
          with_each<M>([&](auto i) {
            int32_t bytes;
            memcpy(&bytes, rows[i]->codes + part * STEP + Source::first(four), sizeof bytes);
            const __m512i each = _mm512_set1_epi32(bytes);
            with_each<N>([&](auto j) { products[i * N + j] = _mm512_dpbusd_epi32(products[i * N + j], codes[j], each); });
          });
        });
        with_each<N>([&](auto j) {
          const Header header = source.header(j, group, part);
          with_each<M>([&](auto i) {
            const __m512 scale = _mm512_mul_ps(header.scale, _mm512_set1_ps(rows[i]->scale));
            __m512 sum = (__m512)sums[i * N + j];
            sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[i * N + j]), scale, sum);
            if (Source::HAS_OFFSET) sum = _mm512_fmadd_ps(header.offset, _mm512_set1_ps(rows[i]->sum), sum);
            sums[i * N + j] = (Vec)sum;
          });
        });
      });
      with_each<M>([&](auto i) { rows[i]++; });
    }
    with_each<N>([&](auto j) {
      const long n = (panel + j) * PANEL;
      const Vec added = bias ? load(bias + n) : Vec{};
      with_each<M>([&](auto i) { store(y + (m + i) * y_stride + n, sums[i * N + j] + added); });
    });
  }

  // Rows m … m_end in so many tiles of up to MOST, of as many rows as each other, within one.
  template <int N, long MOST, class Source>
  void in_tiles(const Source& source, long panel, long m, long m_end, long tiles, Ahead& ahead) const {
    for (; tiles > 0; tiles--) {
      const long rows = (m_end - m + tiles - 1) / tiles;
      switch (rows) {
        case 1: tile<1, N>(source, panel, m, ahead); break;
        case 2: tile<2, N>(source, panel, m, ahead); break;
        case 3: tile<3, N>(source, panel, m, ahead); break;
        case 4: tile<4, N>(source, panel, m, ahead); break;
        case 5: tile<5, N>(source, panel, m, ahead); break;
        case 6: tile<6, N>(source, panel, m, ahead); break;
      }
      if constexpr (MOST > 6) {
        if (rows == 7) tile<7, N>(source, panel, m, ahead);
        if (rows == 8) tile<8, N>(source, panel, m, ahead);
      }
      m += rows;
    }
  }
};

// Of `share_out`.
template <class Format>
struct BlockPanels : CodedRows {
  static constexpr long STREAMED = 8;
  static constexpr long ROWS = 192, MOST_ROWS = 6;  // of a block; of a tile with two panels, as registers hold sums
  static constexpr long DIRECT_TILES = 4;           // up to so many, panels are multiplied as they lie
  using Unit = Nothing;

  const uint16_t* w;

  long panel_words() const { return inner / Format::NUMBERS * Format::WORDS * PANEL; }
  static constexpr long rows() { return ROWS; }
  const char* begin(long panel) const { return (const char*)(w + panel * panel_words()); }

  template <int N>
  void block(long panel, long m, long m_end, Bytes next) const {
    const long tiles = (m_end - m + MOST_ROWS - 1) / MOST_ROWS;
    Ahead ahead(next, tiles * (inner / (N == 1 ? 4 : Format::STEP)), MOST_AHEAD);  // see tile
    const Packed<Format, N> packed{w + panel * panel_words(), panel_words()};
    if (tiles <= DIRECT_TILES)
      in_tiles<N, MOST_ROWS>(packed, panel, m, m_end, tiles, ahead);
    else
      in_tiles<N, MOST_ROWS>(Unpacked<Format::STEP, Format::HAS_OFFSET, N>(packed, inner / EightBits::NUMBERS), panel, m, m_end,
                             tiles, ahead);
  }

  long steps() const { return inner / 4; }

  // Each panel is one tile, read from front to back.
  void stream(Unit&, long panel, long end, long rows, Ahead& ahead) const {
    for (; panel < end; panel++)
      in_tiles<1, STREAMED>(Packed<Format, 1>{w + panel * panel_words(), panel_words()}, panel, 0, rows, 1, ahead);
  }

  void multiply(Unit&, long panel, long count, long m, long m_end, Bytes next) const {
    for (long j = 0; j < count; j += 2) {
      if (count - j >= 2)
        block<2>(panel + j, m, m_end, part_of(next, j, 2, count));
      else
        block<1>(panel + j, m, m_end, part_of(next, j, 1, count));
    }
  }
};

}  // namespace panels
#endif
