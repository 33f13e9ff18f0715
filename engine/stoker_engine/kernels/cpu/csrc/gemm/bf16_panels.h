// GEMM with bfloat16 weights in panels (panels.h). Processors with AVX512-BF16 multiply pairs of bfloat16; on others,
// weights are widened to float in registers, and x in memory, once for all outputs.
#pragma once

#include "common/memory.h"
#include "common/rows.h"
#include "gemm/panels.h"

#if defined(STOKER_PANELS)
namespace panels {

#if defined(__AVX512BF16__)
// How elements of x and weights are multiplied.
struct Bf16Products {
  using X = bf16;
  // Rows of x in a block; rows of a tile with TILE_PANELS panels, limited by registers.
  static constexpr long ROWS = 96, MAX_TILE_ROWS = 6;
  static constexpr int TILE_PANELS = GROUP;
  static constexpr long STREAMED = 8;  // rows of x up to which a GEMM is bound by memory
  // Inner elements for which a group of panels and a block of rows fit into the cache.
  static constexpr long DEPTH = 2048;

  // Adds the products of elements k and k + 1 of M rows with the same elements of N panels, which start at `weights`
  // and are `distance` elements apart.
  template <int M, int N>
  static void add(const X* const* rows, long k, const bf16* weights, long distance, Vec* sums) {
    typedef Pack<bf16> P;
    constexpr int C = N;
    P::Type b[C];
    unroll<C>([&](auto c) { b[c] = P::load(weights + c * distance); });
    unroll<M>([&](auto i) {
      int32_t pair;
      memcpy(&pair, rows[i] + k, sizeof pair);
      const P::Type a = (P::Type)_mm512_set1_epi32(pair);
      unroll<C>([&](auto c) { sums[i * C + c] = P::multiply_add(sums[i * C + c], a, b[c]); });
    });
  }
};

// The rows of x as they are multiplied.
inline const bf16* rows_for_products(const bf16* x, long&, long, long, bool) { return x; }
#else
struct Bf16Products {
  using X = float;
#if defined(__AVX512F__)
  static constexpr int TILE_PANELS = GROUP;
#else
  static constexpr int TILE_PANELS = 1;
#endif
  static constexpr long ROWS = 96, MAX_TILE_ROWS = 6, STREAMED = 6, DEPTH = 512;

  template <int M, int N>
  static void add(const X* const* rows, long k, const bf16* weights, long distance, Vec* sums) {
    constexpr int C = N * PANEL_VECS;
    const auto add_each = [&](const bf16* from, long at, auto widened) {
      Vec b[C];
      unroll<C>([&](auto c) {
        WordVec pairs;
        memcpy(&pairs, from + c / PANEL_VECS * distance + c % PANEL_VECS * 2 * LANES, sizeof pairs);
        b[c] = (Vec)widened(pairs);
      });
      unroll<M>([&](auto i) {
        const Vec a = broadcast(rows[i][at]);
        unroll<C>([&](auto c) { sums[i * C + c] += a * b[c]; });
      });
    };
    add_each(weights, k, [](WordVec pairs) { return pairs << 16; });
    asm("" : "+r"(weights));  // so that pairs are loaded again, since there are no registers to keep them
    add_each(weights, k + 1, [](WordVec pairs) { return pairs & 0xffff0000; });
  }
};

// The rows of x as they are multiplied, and their stride; valid until this thread's next call.
inline const float* rows_for_products(const bf16* x, long& stride, long rows, long inner, bool is_parallel) {
  static thread_local Memory memory;
  float* const found = (float*)memory.of(rows * inner * sizeof(float));
  parallel_for(is_parallel && rows * inner >= GRAIN_SIZE, rows, [=](long m) {
    for (long k = 0; k < inner; k += LANES)
      store_up_to(found + m * inner + k, load_up_to(x + m * stride + k, inner - k), inner - k);
  });
  stride = inner;
  return found;
}
#endif

// Panels of bfloat16 elements.
struct Bf16Panels {
  using Products = Bf16Products;
  using X = Products::X;
  using Unit = NoUnit;
  static constexpr long STREAMED = Products::STREAMED;

  const X* x;
  long x_stride;
  const bf16* w;
  const bf16* bias;
  bf16* y;
  long y_stride, inner;

  // Sums of a block of rows and a group of panels between chunks of DEPTH inner elements.
  struct Sums {
    float at[Products::ROWS][GROUP * PANEL];
  };

  static constexpr long rows() { return Products::ROWS; }
  const char* begin(long panel) const { return (const char*)(w + panel * PANEL * inner); }

  // Multiplies rows m … m + M - 1 of x with N panels from `panel` on, for the inner elements k … k_end - 1.
  template <int M, int N>
  void tile(long panel, long m, long k, long k_end, float* kept, Prefetcher& prefetcher) const {
    constexpr int C = N * PANEL_VECS;  // vectors of outputs
    const bf16* from = w + panel * PANEL * inner;
    const X* rows[M];
    unroll<M>([&](auto i) { rows[i] = x + (m + i) * x_stride; });
    Vec sums[M * C];
    unroll<M * C>([&](auto i) { sums[i] = k ? load(kept + i / C * GROUP * PANEL + i % C * LANES) : Vec{}; });
    for (; k < k_end; k += 2) {
      prefetcher.fetch();
      Products::template add<M, N>(rows, k, from + k * PANEL, PANEL * inner, sums);
    }
    if (k_end < inner) {
      unroll<M * C>([&](auto i) { store(kept + i / C * GROUP * PANEL + i % C * LANES, sums[i]); });
      return;
    }
    unroll<C>([&](auto c) {
      const long n = panel * PANEL + c * LANES;
      const Vec added = bias ? load(bias + n) : Vec{};
      unroll<M>([&](auto i) { store(y + (m + i) * y_stride + n, sums[i * C + c] + added); });
    });
  }

  template <int N>
  void tile_of(long rows, long panel, long m, long k, long k_end, float* kept, Prefetcher& prefetcher) const {
    switch (rows) {
      case 1: return tile<1, N>(panel, m, k, k_end, kept, prefetcher);
      case 2: return tile<2, N>(panel, m, k, k_end, kept, prefetcher);
      case 3: return tile<3, N>(panel, m, k, k_end, kept, prefetcher);
      case 4: return tile<4, N>(panel, m, k, k_end, kept, prefetcher);
      case 5: return tile<5, N>(panel, m, k, k_end, kept, prefetcher);
      case 6: return tile<6, N>(panel, m, k, k_end, kept, prefetcher);
    }
    if constexpr (N == 1 && STREAMED > 6)
      rows == 7 ? tile<7, 1>(panel, m, k, k_end, kept, prefetcher) : tile<8, 1>(panel, m, k, k_end, kept, prefetcher);
  }

  long steps() const { return inner / 2; }

  // Each panel is one tile, read sequentially.
  void stream(Unit&, long panel, long end, long rows, Prefetcher& prefetcher) const {
    for (; panel < end; panel++) tile_of<1>(rows, panel, 0, 0, inner, nullptr, prefetcher);
  }

  template <int N>
  void block(long panel, long m, long m_end, Bytes next) const {
    thread_local Sums sums;
    const long tiles = (m_end - m + Products::MAX_TILE_ROWS - 1) / Products::MAX_TILE_ROWS;
    Prefetcher prefetcher(next, tiles * (inner / 2), MAX_PREFETCH_BYTES);
    for (long k = 0; k < inner; k += Products::DEPTH) {
      const long k_end = std::min(k + Products::DEPTH, inner);
      long row = m;
      // Tiles whose numbers of rows differ by at most one.
      for (long tiles_left = tiles; tiles_left > 0; tiles_left--) {
        const long rows = (m_end - row + tiles_left - 1) / tiles_left;
        tile_of<N>(rows, panel, row, k, k_end, sums.at[row - m], prefetcher);
        row += rows;
      }
    }
  }

  void multiply(Unit&, long panel, long count, long m, long m_end, Bytes next) const {
    if constexpr (Products::TILE_PANELS == GROUP)
      if (count == GROUP) return block<GROUP>(panel, m, m_end, next);
    for (long j = 0; j < count; j++) block<1>(panel + j, m, m_end, part_of(next, j, 1, count));
  }
};

}  // namespace panels
#endif
