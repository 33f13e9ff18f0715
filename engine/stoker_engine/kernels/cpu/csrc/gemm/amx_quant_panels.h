// AMX GEMM of many rows with codes in panels. Each column of a tile holds the codes of 32 elements; a tile is unpacked
// once for a block of rows. Their dot products with a row's codes are the integers that quant_panels.h computes; they
// are converted to float, scaled and added in the same order, so results are bit-identical to those for few rows.
#pragma once

#include "gemm/quant_panels.h"
#include "gemm/amx_tiles.h"

#if defined(STOKER_AMX)
namespace panels {

// Class W of `share_out`, for formats with a scale for 32 elements.
template <class Packed>
struct AmxQuantPanels : QuantPanels<Packed> {
  typedef QuantPanels<Packed> Vectors;
  using Vectors::bias, Vectors::inner, Vectors::w, Vectors::x, Vectors::y, Vectors::y_stride;
  using Unit = TileUnit;

  static_assert(Packed::STEP == Int8Group::SIZE);
  static constexpr long WORDS = Int8Group::SIZE / 4;  // words of a step
  // Bytes of rows of x in a block, which stay in the second-level cache.
  static constexpr long BLOCK_BYTES = 512 * 1024;

  // Scales and sums of 32 elements of each of TILE_ROWS rows.
  struct Scales {
    float scales[TILE_ROWS], sums[TILE_ROWS];
  };
  const Scales* scales = nullptr;  // [rows / TILE_ROWS][groups]

  // Valid until this thread creates another object.
  AmxQuantPanels(const Vectors& vectors, long rows) : Vectors(vectors) {
    if (rows <= Vectors::STREAMED) return;
    static thread_local Memory memory;
    const long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    Scales* const to = (Scales*)memory.of(tiles * groups() * sizeof(Scales));
    scales = to;
    parallel_for(rows * inner >= GRAIN_SIZE, tiles, [&](long tile) {
      for (long group = 0; group < groups(); group++)
        for (long i = 0; i < TILE_ROWS; i++) {
          const Int8Group& from = x[std::min(tile * TILE_ROWS + i, rows - 1) * groups() + group];
          to[tile * groups() + group].scales[i] = from.scale, to[tile * groups() + group].sums[i] = from.sum;
        }
    });
  }

  long groups() const { return inner / Int8Group::SIZE; }
  long rows() const { return std::max(BLOCK_BYTES / (groups() * (long)sizeof(Int8Group)) / TILE_ROWS, 1l) * TILE_ROWS; }

  // Signed codes of 32 elements of each row of a panel, in order, and their scales.
  struct Group {
    int8_t codes[WORDS][PANEL][4];
    Header header;
  };

  // Valid until this thread unpacks another panel of this format.
  const Group* unpacked(long panel) const {
    thread_local Memory memory;
    Group* const found = (Group*)memory.of(groups() * sizeof(Group));
    const Packed from = w.from(panel);
    for (long group = 0; group < groups(); group++) {
      found[group].header = from.header(0, group, 0);
      unroll<WORDS>([&](auto four) {
        const __m512i codes = _mm512_sub_epi8(from.codes(0, group, 0, four), _mm512_set1_epi8(Packed::ZERO));
        _mm512_store_si512(found[group].codes[Packed::first(four) / 4], codes);
      });
    }
    TileUnit::compiler_barrier(found);
    return found;
  }

  // Dot products of 16 rows with 16 outputs. `tile` has two, with separate tile registers, so that one group is
  // multiplied while the previous one is added to the sums.
  struct alignas(64) Accumulators {
    int32_t of[TILE_ROWS][PANEL];
  };

  // Multiplies rows m … m + rows - 1 of x, for which the tile unit is set, with a panel.
  FLATTEN void tile(const Group* columns, long panel, long m, long rows, Prefetcher& prefetcher) const {
    Accumulators accumulators[2];
    const Int8Group* const from = x + m * groups();
    const Scales* const tile_scales = scales + m / TILE_ROWS * groups();
    const long count = groups();
    const auto multiply = [&](auto which, long group) {
      if (group >= count) return;
      multiply_codes<which>(from[group].codes, count * sizeof(Int8Group), columns[group].codes,
                            accumulators[which].of[0]);
    };
    Vec sums[TILE_ROWS] = {};
    const auto add = [&](auto which, long group) {
      if (group >= count) return;
      const Header& header = columns[group].header;
      unroll<TILE_ROWS>([&](auto i) {
        const __m512 accumulator = _mm512_cvtepi32_ps(_mm512_load_si512(accumulators[which].of[i]));
        __m512 sum = (__m512)sums[i];
        sum = _mm512_fmadd_ps(accumulator, _mm512_mul_ps(header.scale, _mm512_set1_ps(tile_scales[group].scales[i])),
                              sum);
        if (Packed::HAS_OFFSET) sum = _mm512_fmadd_ps(header.offset, _mm512_set1_ps(tile_scales[group].sums[i]), sum);
        sums[i] = (Vec)sum;
      });
    };
    constexpr std::integral_constant<int, 0> even;
    constexpr std::integral_constant<int, 1> odd;
    multiply(even, 0);
    for (long group = 0; group < count; group += 2) {
      prefetcher.fetch();
      multiply(odd, group + 1);
      add(even, group);
      multiply(even, group + 2);
      add(odd, group + 1);
    }
    Vec kept[TILE_ROWS];
    unroll<TILE_ROWS>([&](auto i) { kept[i] = sums[i]; });
    const Vec added = bias ? load(bias + panel * PANEL) : Vec{};
    for (long i = 0; i < rows; i++) store(y + (m + i) * y_stride + panel * PANEL, kept[i] + added);
  }

  void multiply(Unit& unit, long panel, long count, long m, long m_end, Bytes next) const {
    NoUnit no_unit;
    // Vectors are faster for so few rows.
    if (m_end - m < TILE_ROWS) return Vectors::multiply(no_unit, panel, count, m, m_end, next);
    Prefetcher prefetcher(next, (m_end - m + TILE_ROWS - 1) / TILE_ROWS * count * ((groups() + 1) / 2),
                          MAX_PREFETCH_BYTES);
    for (long end = panel + count; panel < end; panel++) {
      const Group* const columns = unpacked(panel);
      for (long row = m, rows; row < m_end; row += rows) {
        rows = std::min(m_end - row, TILE_ROWS);
        unit.set_for(rows, rows, WORDS);
        tile(columns, panel, row, rows, prefetcher);
      }
    }
  }

  void stream(Unit&, long panel, long end, long rows, Prefetcher& prefetcher) const {
    NoUnit no_unit;
    Vectors::stream(no_unit, panel, end, rows, prefetcher);
  }
};

}  // namespace panels
#endif
