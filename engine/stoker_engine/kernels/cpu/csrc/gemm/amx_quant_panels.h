// Products of many rows with codes in panels by Intel's tile unit. Codes of 32 numbers are a tile's columns, unpacked once for
// a block of rows, and what they add up to with a row's codes is the integer that quant_panels.h computes; it becomes
// a float, is scaled and added in the same order, so that bits are those of few rows.
#pragma once

#include "gemm/quant_panels.h"
#include "gemm/amx_tiles.h"

#if defined(STOKER_AMX)
namespace panels {

// Of `share_out`; for a format whose scales are of 32 numbers.
template <class Packed>
struct TiledCodes : CodedPanels<Packed> {
  typedef CodedPanels<Packed> Vectors;
  using Vectors::bias, Vectors::inner, Vectors::w, Vectors::x, Vectors::y, Vectors::y_stride;
  using Unit = TileUnit;

  static_assert(Packed::STEP == EightBits::NUMBERS);
  static constexpr long WORDS = EightBits::NUMBERS / 4;  // of a step
  static constexpr long BLOCK_BYTES = 512 * 1024;        // of rows of x, which stay in the second-level cache

  // What 32 numbers of each of TILE_ROWS rows have, beside each other.
  struct Scales {
    float scales[TILE_ROWS], sums[TILE_ROWS];
  };
  const Scales* scales = nullptr;  // [rows / TILE_ROWS][groups]

  // Valid until this thread makes another.
  TiledCodes(const Vectors& vectors, long rows) : Vectors(vectors) {
    if (rows <= Vectors::STREAMED) return;
    static thread_local Memory memory;
    const long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    Scales* const to = (Scales*)memory.of(tiles * groups() * sizeof(Scales));
    scales = to;
    parallel_for(rows * inner >= WORTH_SHARING, tiles, [&](long tile) {
      for (long group = 0; group < groups(); group++)
        for (long i = 0; i < TILE_ROWS; i++) {
          const EightBits& from = x[std::min(tile * TILE_ROWS + i, rows - 1) * groups() + group];
          to[tile * groups() + group].scales[i] = from.scale, to[tile * groups() + group].sums[i] = from.sum;
        }
    });
  }

  long groups() const { return inner / EightBits::NUMBERS; }
  long rows() const {
    return std::max(BLOCK_BYTES / (groups() * (long)sizeof(EightBits)) / TILE_ROWS, 1l) * TILE_ROWS;
  }

  // 32 numbers of each row of a panel: signed codes in the order of the numbers, and their scales.
  struct Group {
    int8_t codes[WORDS][PANEL][4];
    Header header;
  };

  // Valid for as long as this thread unpacks no others of this format.
  const Group* unpacked(long panel) const {
    thread_local Memory memory;
    Group* const found = (Group*)memory.of(groups() * sizeof(Group));
    const Packed from = w.from(panel);
    for (long group = 0; group < groups(); group++) {
      found[group].header = from.header(0, group, 0);
      with_each<WORDS>([&](auto four) {
        const __m512i codes = _mm512_sub_epi8(from.codes(0, group, 0, four), _mm512_set1_epi8(Packed::ZERO));
        _mm512_store_si512(found[group].codes[Packed::first(four) / 4], codes);
      });
    }
    TileUnit::wrote(found);
    return found;
  }

  // Products of 16 rows with 16 outputs. Two are in the making at a time, since a tile is loaded only after it was read.
  struct alignas(64) Products {
    int32_t of[TILE_ROWS][PANEL];
  };

  // Rows m … m + rows of x, for which the unit is set, with a panel.
  INLINED_INTO void tile(const Group* columns, long panel, long m, long rows, Ahead& ahead) const {
    Products products[2];
    const EightBits* const from = x + m * groups();
    const Scales* const own = scales + m / TILE_ROWS * groups();
    const long count = groups();
    const auto multiply = [&](auto which, long group) {
      if (group >= count) return;
      multiply_codes<which>(from[group].codes, count * sizeof(EightBits), columns[group].codes, products[which].of[0]);
    };
    Vec sums[TILE_ROWS] = {};
    const auto add = [&](auto which, long group) {
      if (group >= count) return;
      const Header& header = columns[group].header;
      with_each<TILE_ROWS>([&](auto i) {
        const __m512 product = _mm512_cvtepi32_ps(_mm512_load_si512(products[which].of[i]));
        __m512 sum = (__m512)sums[i];
        sum = _mm512_fmadd_ps(product, _mm512_mul_ps(header.scale, _mm512_set1_ps(own[group].scales[i])), sum);
        if (Packed::HAS_OFFSET) sum = _mm512_fmadd_ps(header.offset, _mm512_set1_ps(own[group].sums[i]), sum);
        sums[i] = (Vec)sum;
      });
    };
    constexpr std::integral_constant<int, 0> one;
    constexpr std::integral_constant<int, 1> other;
    multiply(one, 0);
    for (long group = 0; group < count; group += 2) {
      ahead.fetch();
      multiply(other, group + 1);
      add(one, group);
      multiply(one, group + 2);
      add(other, group + 1);
    }
    Vec kept[TILE_ROWS];
    with_each<TILE_ROWS>([&](auto i) { kept[i] = sums[i]; });
    const Vec added = bias ? load(bias + panel * PANEL) : Vec{};
    for (long i = 0; i < rows; i++) store(y + (m + i) * y_stride + panel * PANEL, kept[i] + added);
  }

  void multiply(Unit& unit, long panel, long count, long m, long m_end, Bytes next) const {
    Nothing nothing;
    if (m_end - m < TILE_ROWS) return Vectors::multiply(nothing, panel, count, m, m_end, next);  // it is faster then
    Ahead ahead(next, (m_end - m + TILE_ROWS - 1) / TILE_ROWS * count * ((groups() + 1) / 2), MOST_AHEAD);
    for (long end = panel + count; panel < end; panel++) {
      const Group* const columns = unpacked(panel);
      for (long row = m, rows; row < m_end; row += rows) {
        rows = std::min(m_end - row, TILE_ROWS);
        unit.set_for(rows, rows, WORDS);
        tile(columns, panel, row, rows, ahead);
      }
    }
  }

  void stream(Unit&, long panel, long end, long rows, Ahead& ahead) const {
    Nothing nothing;
    Vectors::stream(nothing, panel, end, rows, ahead);
  }
};

}  // namespace panels
#endif
