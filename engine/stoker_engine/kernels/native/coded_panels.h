// Codes of numbers in panels (panels.h), multiplied as integers by x, which is rounded to 8 bits (eight_bits.h), 4 inner numbers
// at a time; what numbers that share a scale add up to, without an error, is scaled and added to a float. A row's result depends
// on nothing but the row.
//
// What lies in memory is `Packed`, a class of
//   STEP                 numbers that share a scale, 32 or 16
//   ZERO                 the code that means 0, before an offset
//   HAS_OFFSET           numbers are code × scale + offset
//   first(i)             of numbers that share a scale, the first of the i-th four
//   begin(panel)         where it begins, panels lying behind each other
//   from(panel)          the same, of the panels from this one on; of what it gives the first is panel 0
//   header(j, group, part)       scales of panel j's numbers 32 × group + STEP × part and on, and offsets: a number a lane
//   codes(j, group, part, i)     codes of the i-th four of each row, bytes from 0 on
#pragma once

#include "eight_bits.h"
#include "panels.h"

#if defined(STOKER_PANELS)
namespace panels {

inline __m512i shifted(__m512i words, int by) { return _mm512_srl_epi16(words, _mm_cvtsi32_si128(by)); }

// Codes of four bits in the low halves of bytes, or in the high ones.
inline __m512i four_bits(__m512i bytes, bool high) {
  return _mm512_and_si512(high ? shifted(bytes, 4) : bytes, _mm512_set1_epi8(15));
}

struct Header {
  __m512 scale, offset;
};

// N panels of any format whose scales are of so many numbers, put into the form in which they are multiplied: codes in the order
// of the numbers. Worth it for many rows.
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
  template <class Packed>
  Unpacked(const Packed& from, long groups) {
    thread_local Memory memory;
    Part* to = (Part*)memory.of(groups * N * PARTS * sizeof(Part));
    at = to;
    for (long group = 0; group < groups; group++)
      for (long j = 0; j < N; j++)
        with_each<PARTS>([&](auto part) {
          to->header = from.header(j, group, part);
          with_each<FOURS>([&](auto four) { to->codes[Packed::first(four) / 4] = from.codes(j, group, part, four); });
          to++;
        });
  }
  const Part& of(long j, long group, int part) const { return at[(group * N + j) * PARTS + part]; }
  Header header(long j, long group, int part) const { return of(j, group, part).header; }
  __m512i codes(long j, long group, int part, int four) const { return of(j, group, part).codes[four]; }
  static constexpr int first(int four) { return four * 4; }
};

// Rows of x with panels of any format, packed or unpacked.
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
template <class Packed>
struct CodedPanels : CodedRows {
  static constexpr long STREAMED = 8;
  static constexpr long ROWS = 192, MOST_ROWS = 6;  // of a block; of a tile with two panels, as registers hold sums
  static constexpr long DIRECT_TILES = 4;           // up to so many, panels are multiplied as they lie
  using Unit = Nothing;

  Packed w;

  static constexpr long rows() { return ROWS; }
  const char* begin(long panel) const { return w.begin(panel); }

  template <int N>
  void block(long panel, long m, long m_end, Bytes next) const {
    const long tiles = (m_end - m + MOST_ROWS - 1) / MOST_ROWS;
    Ahead ahead(next, tiles * (inner / (N == 1 ? 4 : Packed::STEP)), MOST_AHEAD);  // see tile
    if (tiles <= DIRECT_TILES)
      return in_tiles<N, MOST_ROWS>(w.from(panel), panel, m, m_end, tiles, ahead);
    const Unpacked<Packed::STEP, Packed::HAS_OFFSET, N> unpacked(w.from(panel), inner / EightBits::NUMBERS);
    in_tiles<N, MOST_ROWS>(unpacked, panel, m, m_end, tiles, ahead);
  }

  long steps() const { return inner / 4; }

  // Each panel is one tile, read from front to back.
  void stream(Unit&, long panel, long end, long rows, Ahead& ahead) const {
    for (; panel < end; panel++) in_tiles<1, STREAMED>(w.from(panel), panel, 0, rows, 1, ahead);
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
