// GEMM with codes in panels (panels.h) by integer arithmetic, 4 inner elements at a time; x is rounded to 8 bits
// (int8_activations.h). The sum of elements that share a scale is exact; it is scaled and added to a float. A row's result
// depends only on the row.
//
// The memory layout is described by a class `Packed` with
//   STEP                 number of elements that share a scale, 32 or 16
//   ZERO                 code that means 0, before an offset
//   HAS_OFFSET           whether elements are code × scale + offset
//   IN_BLOCKS            whether up to 256 elements share a scale, `block_size` of them also x's (int8_activations.h); STEP is 32
//   FEW_BITS             whether codes have four bits, so that the sum of 32 fits into 16 bits
//   first(i)             first element of the i-th group of four among those that share a scale
//   begin(panel)         address of a panel; panels are contiguous
//   from(panel)          the same object for the panels from this one on, which becomes panel 0
//   header(j, group, part)       scales and offsets of panel j's elements 32 × group + STEP × part and on, a lane for each row
//   codes(j, group, part, i)     codes of the i-th group of four of each row, as unsigned bytes
#pragma once

#include "gemm/int8_activations.h"
#include "gemm/panels.h"

#if defined(STOKER_PANELS)
namespace panels {

inline __m512i shifted(__m512i words, int by) { return _mm512_srl_epi16(words, _mm_cvtsi32_si128(by)); }

// Extracts codes of four bits from the low or the high halves of bytes.
inline __m512i four_bits(__m512i bytes, bool high) {
  return _mm512_and_si512(high ? shifted(bytes, 4) : bytes, _mm512_set1_epi8(15));
}

struct Header {
  __m512 scale, offset;
};

// The properties of a format that determine how it is multiplied.
template <long ELEMENTS_PER_SCALE, bool OFFSET, bool BLOCKS = false, bool OF_FEW_BITS = false>
struct KindOf {
  static constexpr long STEP = ELEMENTS_PER_SCALE;
  static constexpr bool HAS_OFFSET = OFFSET, IN_BLOCKS = BLOCKS, FEW_BITS = OF_FEW_BITS;
};

// N unpacked panels of any format of a kind, with codes in the order of elements. Worthwhile for many rows.
template <class Kind, int N>
struct Unpacked : Kind {
  static constexpr long PARTS = Int8Group::SIZE / Kind::STEP, FOURS = Kind::STEP / 4;
  struct Part {
    __m512i codes[FOURS];
    Header header;
  };
  const Part* at;  // [groups][N][PARTS]
  long block_size;

  // Valid until this thread unpacks other panels of this shape.
  template <class Packed>
  Unpacked(const Packed& from, long groups) : block_size(from.block_size) {
    thread_local Memory memory;
    Part* to = (Part*)memory.of(groups * N * PARTS * sizeof(Part));
    at = to;
    for (long group = 0; group < groups; group++)
      for (long j = 0; j < N; j++)
        unroll<PARTS>([&](auto part) {
          to->header = from.header(j, group, part);
          unroll<FOURS>([&](auto four) { to->codes[Packed::first(four) / 4] = from.codes(j, group, part, four); });
          to++;
        });
  }
  const Part& of(long j, long group, int part) const { return at[(group * N + j) * PARTS + part]; }
  Header header(long j, long group, int part) const { return of(j, group, part).header; }
  __m512i codes(long j, long group, int part, int four) const { return of(j, group, part).codes[four]; }
  static constexpr int first(int four) { return four * 4; }
};

// Multiplies rows of x with panels of any format, packed or unpacked.
struct QuantRows {
  const Int8Group* x;
  const bf16* bias;
  bf16* y;
  long y_stride, inner;

  // Integer dot products of STEP elements of rows of x and panels of `source`; calls `prefetcher` in between.
  template <int M, int N, class Source>
  static FLATTEN void multiply(const Source& source, const Int8Group* const* rows, long group, int part,
                               Prefetcher& prefetcher, __m512i* accumulators) {
    constexpr long STEP = Source::STEP;
    unroll<M * N>([&](auto i) { accumulators[i] = _mm512_set1_epi32(rows[i / N]->initial_sums[part]); });
    unroll<STEP / 4>([&](auto four) {
      if (N == 1 || four == 0) prefetcher.fetch();  // few rows are bound by memory, so prefetch evenly
      __m512i codes[N];
      unroll<N>([&](auto j) { codes[j] = source.codes(j, group, part, four); });
      unroll<M>([&](auto i) {
        int32_t bytes;
        memcpy(&bytes, rows[i]->codes + part * STEP + Source::first(four), sizeof bytes);
        const __m512i each = _mm512_set1_epi32(bytes);
        unroll<N>(
            [&](auto j) { accumulators[i * N + j] = _mm512_dpbusd_epi32(accumulators[i * N + j], codes[j], each); });
      });
    });
  }

  // Scales integer dot products by the scales of `activations` and `header`, and adds them to `sum`.
  template <bool HAS_OFFSET>
  static FLATTEN __m512 added(__m512 sum, __m512i accumulator, const Header& header, const Int8Group& activations) {
    const __m512 scale = _mm512_mul_ps(header.scale, _mm512_set1_ps(activations.scale));
    sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(accumulator), scale, sum);
    return HAS_OFFSET ? _mm512_fmadd_ps(header.offset, _mm512_set1_ps(activations.sum), sum) : sum;
  }

  // Multiplies rows m … m + M - 1 of x with the N panels of `source`, which are those from `panel` on.
  template <int M, int N, class Source>
  FLATTEN void tile(const Source& source, long panel, long m, Prefetcher& prefetcher) const {
    constexpr long STEP = Source::STEP;
    const long groups = inner / Int8Group::SIZE;
    const Int8Group* rows[M];
    unroll<M>([&](auto i) { rows[i] = x + (m + i) * groups; });
    Vec sums[M * N] = {};
    const auto add = [&](const __m512i* accumulators, long group, int part) {
      unroll<N>([&](auto j) {
        const Header header = source.header(j, group, part);
        unroll<M>([&](auto i) {
          Vec& sum = sums[i * N + j];
          sum = (Vec)added<Source::HAS_OFFSET>((__m512)sum, accumulators[i * N + j], header, *rows[i]);
        });
      });
    };
    if constexpr (Source::IN_BLOCKS) {
      for (long group = 0; group < groups;) {
        __m512i totals[M * N] = {};
        const long first = group, end = std::min(group + source.block_size / Int8Group::SIZE, groups);
        for (; group < end; group++) {
          __m512i accumulators[M * N];
          multiply<M, N>(source, rows, group, 0, prefetcher, accumulators);
          unroll<M>([&](auto i) {
            const __m512i factor = _mm512_set1_epi32(rows[i]->factor());
            unroll<N>([&](auto j) {
              __m512i &total = totals[i * N + j], accumulator = accumulators[i * N + j];
              if (Source::FEW_BITS)  // the factor's upper half is 0
                total = _mm512_dpwssd_epi32(total, accumulator, factor);
              else
                total = _mm512_add_epi32(total, _mm512_mullo_epi32(accumulator, factor));
            });
          });
          if (group + 1 < end) unroll<M>([&](auto i) { rows[i]++; });
        }
        add(totals, first, 0);
        unroll<M>([&](auto i) { rows[i]++; });
      }
    } else {
      for (long group = 0; group < groups; group++) {
        unroll<Int8Group::SIZE / STEP>([&](auto part) {
          __m512i accumulators[M * N];
          multiply<M, N>(source, rows, group, part, prefetcher, accumulators);
          add(accumulators, group, part);
        });
        unroll<M>([&](auto i) { rows[i]++; });
      }
    }
    unroll<N>([&](auto j) {
      const long n = (panel + j) * PANEL;
      const Vec added = bias ? load(bias + n) : Vec{};
      unroll<M>([&](auto i) { store(y + (m + i) * y_stride + n, sums[i * N + j] + added); });
    });
  }

  // Multiplies rows m … m_end - 1 in tiles whose numbers of rows differ by at most one.
  template <int N, long MAX_ROWS, class Source>
  void in_tiles(const Source& source, long panel, long m, long m_end, long tiles, Prefetcher& prefetcher) const {
    for (; tiles > 0; tiles--) {
      const long rows = (m_end - m + tiles - 1) / tiles;
      switch (rows) {
        case 1: tile<1, N>(source, panel, m, prefetcher); break;
        case 2: tile<2, N>(source, panel, m, prefetcher); break;
        case 3: tile<3, N>(source, panel, m, prefetcher); break;
        case 4: tile<4, N>(source, panel, m, prefetcher); break;
        case 5: tile<5, N>(source, panel, m, prefetcher); break;
        case 6: tile<6, N>(source, panel, m, prefetcher); break;
      }
      if constexpr (MAX_ROWS > 6) {
        if (rows == 7) tile<7, N>(source, panel, m, prefetcher);
        if (rows == 8) tile<8, N>(source, panel, m, prefetcher);
      }
      m += rows;
    }
  }
};

// Class W of `share_out`.
template <class Packed>
struct QuantPanels : QuantRows {
  static constexpr long STREAMED = 8;
  // Rows of a block; rows of a tile with two panels, limited by registers.
  static constexpr long ROWS = 192, MAX_TILE_ROWS = 6;
  static constexpr long DIRECT_TILES = 4;  // up to this number of tiles, panels are not unpacked
#if defined(__AMX_BF16__)
  static constexpr bool HAS_AMX_PATH = Packed::STEP == Int8Group::SIZE;  // whether AMX multiplies many rows
#else
  static constexpr bool HAS_AMX_PATH = false;
#endif
  using Unit = NoUnit;

  Packed w;

  static constexpr long rows() { return ROWS; }
  const char* begin(long panel) const { return w.begin(panel); }

  template <int N>
  void block(long panel, long m, long m_end, Bytes next) const {
    const long tiles = (m_end - m + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    Prefetcher prefetcher(next, tiles * (inner / (N == 1 ? 4 : Packed::STEP)), MAX_PREFETCH_BYTES);  // see tile
    // 8-bit codes with scales of blocks gain nothing from unpacking.
    if constexpr (!HAS_AMX_PATH && (!Packed::IN_BLOCKS || Packed::FEW_BITS))
      if (tiles > DIRECT_TILES) return unpacked<N>(panel, m, m_end, tiles, prefetcher);
    in_tiles<N, MAX_TILE_ROWS>(w.from(panel), panel, m, m_end, tiles, prefetcher);
  }

  template <int N>
  void unpacked(long panel, long m, long m_end, long tiles, Prefetcher& prefetcher) const {
    const Unpacked<typename Packed::Kind, N> unpacked(w.from(panel), inner / Int8Group::SIZE);
    in_tiles<N, MAX_TILE_ROWS>(unpacked, panel, m, m_end, tiles, prefetcher);
  }

  long steps() const { return inner / 4; }

  // Each panel is one tile, read sequentially.
  void stream(Unit&, long panel, long end, long rows, Prefetcher& prefetcher) const {
    for (; panel < end; panel++) in_tiles<1, STREAMED>(w.from(panel), panel, 0, rows, 1, prefetcher);
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
