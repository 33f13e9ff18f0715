// GEMM with panels by AMX: `step` inner elements of a panel (32, or fewer in LoRA matrices), and the same ones of 16
// rows of x, are each loaded as a tile without rearranging. Every y[m][n] is one sum, to which the products of a step
// are added in order, for any number of rows.
#pragma once

#include "gemm/bf16_panels.h"
#include "gemm/amx_tiles.h"

#if defined(STOKER_AMX)
namespace panels {

// bfloat16 elements; `inner` is a multiple of `step`.
struct AmxBf16Panels : Bf16Panels {
  static constexpr long STEP = 2 * TILE_WORDS;  // inner elements, at most
  static constexpr long PAIR = 2 * TILE_ROWS;   // rows of two tiles
  static constexpr long STREAMED = PAIR;
  // Bytes of rows of x in a block, which stay in the second-level cache.
  static constexpr long BLOCK_BYTES = 512 * 1024;
  using Unit = TileUnit;

  long step = STEP;  // inner elements of a step, even

  // The step that divides `inner` into the fewest equal steps, or 0 if that is not an even integer.
  static long step_for(long inner) {
    const long steps = (inner + STEP - 1) / STEP;
    return inner % (2 * steps) == 0 ? inner / steps : 0;
  }

  long rows() const { return std::max(BLOCK_BYTES / (inner * 2) / PAIR, 1l) * PAIR; }
  long steps() const { return inner / step; }

  // Multiplies up to M × 16 rows of x from m on, for which the tile unit is set, with N panels from `panel` on.
  template <int M, int N>
  void tile(long panel, long m, long rows, Prefetcher& prefetcher) const {
    const bf16 *weights = w + panel * PANEL * inner, *rows_from = x + m * x_stride;
    clear_sums<M, N>();
    for (long k = 0; k < inner; k += step) {
      prefetcher.fetch();
      const bf16* columns = weights + k * PANEL;
      multiply_tiles<M, N>(rows_from + k, x_stride * 2, columns, columns + PANEL * inner, 4 * PANEL);
    }
    alignas(64) float sums[M * TILE_ROWS][N * PANEL];
    store_sums<M, N>(sums[0], sizeof sums[0]);
    put<N>(sums, panel * PANEL, m, rows);
  }

  template <int N>
  void put(const float (*sums)[N * PANEL], long n, long m, long rows) const {
    Vec added[N] = {};
    for (int j = 0; bias && j < N; j++) added[j] = load(bias + n + j * PANEL);
    for (long i = 0; i < rows; i++) {
      bf16* to = y + (m + i) * y_stride + n;
      const __m512 first = (__m512)(load(sums[i]) + added[0]);
      if constexpr (N > 1) {
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)(load(sums[i] + PANEL) + added[1]), first);
        memcpy((void*)to, &both, sizeof both);
      } else {
        store(to, (Vec)first);
      }
    }
  }

  // Multiplies rows m … m_end - 1 with the panels from `panel` on.
  template <int N>
  void pairs(Unit& unit, long panel, long m, long m_end, Prefetcher& prefetcher) const {
    for (long rows; m < m_end; m += rows) {
      rows = std::min(m_end - m, PAIR);
      unit.set_for(std::min(rows, TILE_ROWS), std::max(rows - TILE_ROWS, 0l), step / 2);
      rows > TILE_ROWS ? tile<2, N>(panel, m, rows, prefetcher) : tile<1, N>(panel, m, rows, prefetcher);
    }
  }

  void stream(Unit& unit, long panel, long end, long rows, Prefetcher& prefetcher) const {
    for (; panel < end; panel++) pairs<1>(unit, panel, 0, rows, prefetcher);
  }

  void multiply(Unit& unit, long panel, long count, long m, long m_end, Bytes next) const {
    const long whole = m + (m_end - m) / PAIR * PAIR, tiles = (m_end - m + PAIR - 1) / PAIR * ((count + 1) / 2);
    Prefetcher prefetcher(next, tiles * steps(), MAX_PREFETCH_BYTES);
    for (const auto [from, to] : {std::pair(m, whole), std::pair(whole, m_end)})  // sets the tile unit once for each
      for (long j = 0; j < count; j += 2)
        count - j >= 2 ? pairs<2>(unit, panel + j, from, to, prefetcher)
                       : pairs<1>(unit, panel + j, from, to, prefetcher);
  }
};

}  // namespace panels
#endif
