// y = x Wᵀ + b for W in panels (kernels/panels.py): 16 of its rows beside each other, two of each one's elements at a time,
// so that a register holds what 16 outputs need of two inner elements, and x's two are broadcast to it.
//
//   panel of rows n … n + 15      [inner / 2][16][2]      rows beyond the last whole panel lie as they did
//
// Beside rows as they are (gemm.h), no sums lie across a register's lanes at the end of a tile, a tile needs fewer
// loads, and what threads read of W has no gaps. Every y[m][n] is one lane that runs over `inner` in order: a row's result
// depends on nothing but the row. It is not the order of gemm.h, so bits differ from those with W's rows.
#pragma once

#include "gemm/gemm.h"

#if defined(__AVX512BF16__)
#define STOKER_PANELS 1

constexpr long PANEL = 16;

namespace panels {

constexpr int GROUP = 4;  // panels

struct NoUnit {};

// Where GEMMs wait for memory, panels are multiplied one after the other, in long runs, as memory is read fastest, and in
// shorter ones at the end, so that threads end together.
constexpr long RUNS = 2;                                     // for each thread, of what is left
constexpr long MAX_RUN_BYTES = 1 << 20, MIN_RUN_BYTES = 128 << 10;  // bytes

constexpr long DEPTH = 2048;  // inner elements for which a group of panels and a block of rows stay in the cache
constexpr long MAX_PREFETCH_BYTES = 256 * 1024;  // bytes of the next piece that are fetched beforehand

// Where runs of `count` panels begin, and at last `count`.
inline const std::vector<long>& runs_of(long count, long panel_bytes) {
  static thread_local std::vector<long> starts;
  const long max_panels = std::max(MAX_RUN_BYTES / panel_bytes, 1l), min_panels = std::max(MIN_RUN_BYTES / panel_bytes, 1l);
  starts.clear();
  for (long at = 0; at < count; at += std::clamp((count - at) / (RUNS * threads()), min_panels, max_panels)) starts.push_back(at);
  starts.push_back(count);
  return starts;
}

// Shares a GEMM of up to STREAMED rows out among threads, and fetches `prefetch_ranges`, if any.
template <class Rows, class W>
inline void stream_out(const Gemm<bf16, Rows>& p, const W& w, const PrefetchRanges* prefetch_ranges) {
  const long whole = p.outputs / PANEL, tail = whole * PANEL;
  const std::vector<long>& starts = runs_of(whole, w.begin(1) - w.begin(0));
  const long runs = (long)starts.size() - 1;
  const auto run_of = [&](long run) {
    return run < runs ? Bytes{w.begin(starts[run]), w.begin(starts[run + 1])} : Bytes{};
  };
  parallel(runs + (tail < p.outputs), [&](Pieces& pieces) {
    typename W::Unit unit;
    long run, next;
    for (bool more = pieces.take(run); more; run = next) {
      more = pieces.take(next);
      if (run == runs) {
        row_piece(p, 0, p.rows, tail, p.outputs, Bytes{});
        continue;
      }
      const long panel = starts[run], end = starts[run + 1], steps = (end - panel) * w.steps();
      Prefetcher prefetcher = Prefetcher::along(run_of(run), run_of(next), steps);
      if (prefetch_ranges) {
        const long lines = prefetch_ranges->lines;
        prefetcher.add_ranges(*prefetch_ranges, lines * panel / whole, lines * end / whole, steps);
      }
      w.stream(unit, panel, end, p.rows, prefetcher);
    }
  });
}

// Shares a GEMM out among threads: blocks of rows with groups of panels. W's rows beyond the last whole panel are
// multiplied as in gemm.h. `W` is a class of
//   STREAMED                    rows of x up to which a GEMM waits for memory
//   rows()                      of x in a block, for more of them
//   Unit                        what a thread needs for them
//   begin(panel)                where a panel begins
//   steps()                     of a panel: at each of them something may be fetched
//   stream(unit, panel, end, rows, prefetcher)         the first rows of x with the panels from this one on
//   multiply(unit, panel, count, m, m_end, next)  rows m … m_end, in the same way, with up to GROUP panels; and fetches `next`
template <class Rows, class W>
inline void share_out(const Gemm<bf16, Rows>& p, const W& w, const PrefetchRanges* prefetch_ranges = nullptr) {
  if (p.rows <= W::STREAMED) return stream_out(p, w, prefetch_ranges);
  const long whole = p.outputs / PANEL, tail = whole * PANEL;
  const long groups = (whole + GROUP - 1) / GROUP, block = w.rows(), row_blocks = (p.rows + block - 1) / block;
  const long pieces_of = groups + (tail < p.outputs);  // the last rows of W are a piece, too
  const auto begin = [&](long group) { return w.begin(std::min(group * GROUP, whole)); };
  parallel(pieces_of * row_blocks, [&](Pieces& pieces) {
    typename W::Unit unit;
    long piece, next;
    for (bool more = pieces.take(piece); more; piece = next) {
      more = pieces.take(next);
      const long group = piece % pieces_of, m = piece / pieces_of * block, m_end = std::min(m + block, p.rows);
      if (group == groups) {
        row_piece(p, m, m_end, tail, p.outputs, Bytes{});
        continue;
      }
      const long n = group * GROUP, after = more ? next % pieces_of : groups;
      w.multiply(unit, n, std::min<long>(GROUP, whole - n), m, m_end, {begin(after), begin(after + 1)});
    }
  });
}

// Of `bytes` the part that is fetched while `taken` of `count` panels are multiplied, from the j-th on.
inline Bytes part_of(Bytes bytes, long j, long taken, long count) {
  const long size = bytes.end - bytes.begin;
  return {bytes.begin + size * j / count, bytes.begin + size * (j + taken) / count};
}

// bfloat16 elements.
struct Bf16Panels {
  static constexpr long STREAMED = 8;
  static constexpr long ROWS = 96, MAX_TILE_ROWS = 6;  // of a block; of a tile with GROUP panels, as registers hold sums
  using Unit = NoUnit;

  const bf16* x;
  long x_stride;
  const bf16* w;
  const bf16* bias;
  bf16* y;
  long y_stride, inner;

  // A block of rows with a group of panels, DEPTH inner elements at a time: sums wait here in between.
  struct Sums {
    float at[ROWS][GROUP * PANEL];
  };

  static constexpr long rows() { return ROWS; }
  const char* begin(long panel) const { return (const char*)(w + panel * PANEL * inner); }

  // Rows m … m + M of x with N panels from `panel` on, from inner number k to k_end.
  template <int M, int N>
  void tile(long panel, long m, long k, long k_end, float* kept, Prefetcher& prefetcher) const {
    typedef Pack<bf16> P;
    const bf16* from = w + panel * PANEL * inner;
    const bf16* rows[M];
    unroll<M>([&](auto i) { rows[i] = x + (m + i) * x_stride; });
    Vec sums[M * N];
    unroll<M * N>([&](auto i) { sums[i] = k ? load(kept + i / N * GROUP * PANEL + i % N * PANEL) : Vec{}; });
    for (; k < k_end; k += 2) {
      prefetcher.fetch();
      P::Type b[N];
      unroll<N>([&](auto j) { b[j] = P::load(from + (j * inner + k) * PANEL); });
      unroll<M>([&](auto i) {
        int32_t pair;
        memcpy(&pair, rows[i] + k, sizeof pair);
        const P::Type a = (P::Type)_mm512_set1_epi32(pair);
        unroll<N>([&](auto j) { sums[i * N + j] = P::multiply_add(sums[i * N + j], a, b[j]); });
      });
    }
    if (k_end < inner) {
      unroll<M * N>([&](auto i) { store(kept + i / N * GROUP * PANEL + i % N * PANEL, sums[i]); });
      return;
    }
    unroll<N>([&](auto j) {
      const long n = (panel + j) * PANEL;
      const Vec added = bias ? load(bias + n) : Vec{};
      unroll<M>([&](auto i) { store(y + (m + i) * y_stride + n, sums[i * N + j] + added); });
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
    if constexpr (N == 1)
      rows == 7 ? tile<7, 1>(panel, m, k, k_end, kept, prefetcher) : tile<8, 1>(panel, m, k, k_end, kept, prefetcher);
  }

  long steps() const { return inner / 2; }

  // Each panel is one tile, read from front to back.
  void stream(Unit&, long panel, long end, long rows, Prefetcher& prefetcher) const {
    for (; panel < end; panel++) tile_of<1>(rows, panel, 0, 0, inner, nullptr, prefetcher);
  }

  template <int N>
  void block(long panel, long m, long m_end, Bytes next) const {
    thread_local Sums sums;
    const long tiles = (m_end - m + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    Prefetcher prefetcher(next, tiles * (inner / 2), MAX_PREFETCH_BYTES);
    for (long k = 0; k < inner; k += DEPTH) {
      const long k_end = std::min(k + DEPTH, inner);
      long row = m;
      for (long tiles_left = tiles; tiles_left > 0; tiles_left--) {  // tiles of as many rows as each other, within one
        const long rows = (m_end - row + tiles_left - 1) / tiles_left;
        tile_of<N>(rows, panel, row, k, k_end, sums.at[row - m], prefetcher);
        row += rows;
      }
    }
  }

  void multiply(Unit&, long panel, long count, long m, long m_end, Bytes next) const {
    if (count == GROUP) return block<GROUP>(panel, m, m_end, next);
    for (long j = 0; j < count; j++) block<1>(panel + j, m, m_end, part_of(next, j, 1, count));
  }
};

}  // namespace panels
#endif
