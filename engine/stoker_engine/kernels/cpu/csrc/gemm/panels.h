// y = x Wᵀ + b for W in panels (kernels/panels.py): 16 rows are interleaved, two elements of each at a time, so that a
// register holds two inner elements of 16 outputs (8 with AVX2), which are multiplied with two broadcast elements of x.
//
//   panel of rows n … n + 15      [inner / 2][16][2]      rows after the last whole panel are not packed
//
// Compared to unpacked rows (gemm.h), no sums across a register's lanes are needed at the end of a tile, a tile needs
// fewer loads, and threads read W contiguously. Every y[m][n] is one lane that iterates over `inner` in order, so a
// row's result depends only on the row. The order differs from gemm.h, so bits differ from those with unpacked rows.
#pragma once

#include "gemm/gemm.h"

#if defined(__AVX2__)
#define STOKER_PANELS 1

constexpr long PANEL = 16;
constexpr int PANEL_VECS = PANEL / LANES;  // vectors of the 16 outputs of a panel

namespace panels {

constexpr int GROUP = 4;  // panels in a group

struct NoUnit {};

// GEMMs that are bound by memory multiply panels one after the other, in long runs since sequential reads are fastest,
// and in shorter runs at the end, so that threads finish together.
constexpr long RUNS = 2;  // a run is 1 / RUNS of a thread's share of the rest
constexpr long MAX_RUN_BYTES = 1 << 20, MIN_RUN_BYTES = 128 << 10;

constexpr long MAX_PREFETCH_BYTES = 256 * 1024;  // largest part of the next piece that is prefetched

// Returns the first panels of the runs of `count` panels, followed by `count`.
inline const std::vector<long>& runs_of(long count, long panel_bytes) {
  static thread_local std::vector<long> starts;
  const long max_panels = std::max(MAX_RUN_BYTES / panel_bytes, 1l);
  const long min_panels = std::max(MIN_RUN_BYTES / panel_bytes, 1l);
  starts.clear();
  for (long at = 0; at < count; at += std::clamp((count - at) / (RUNS * threads()), min_panels, max_panels))
    starts.push_back(at);
  starts.push_back(count);
  return starts;
}

// Distributes a GEMM of up to STREAMED rows to threads, and prefetches `prefetch_ranges`, if any.
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

// Distributes a GEMM to threads, as blocks of rows × groups of panels. W's rows after the last whole panel are
// multiplied as in gemm.h. `W` is a class with
//   STREAMED                    number of rows of x up to which a GEMM is bound by memory
//   rows()                      rows of x in a block; the last block may have fewer
//   Unit                        state of a thread
//   begin(panel)                address of a panel
//   steps()                     number of steps of a panel, at each of which lines may be prefetched
//   stream(unit, panel, end, rows, prefetcher)    multiplies the first `rows` rows of x with panels `panel` … `end` - 1
//   multiply(unit, panel, count, m, m_end, next)  multiplies rows m … m_end - 1 with at most GROUP panels; prefetches
//                                               `next`
template <class Rows, class W>
inline void share_out(const Gemm<bf16, Rows>& p, const W& w, const PrefetchRanges* prefetch_ranges = nullptr) {
  if (p.rows <= W::STREAMED) return stream_out(p, w, prefetch_ranges);
  const long whole = p.outputs / PANEL, tail = whole * PANEL;
  const long groups = (whole + GROUP - 1) / GROUP, block = w.rows(), row_blocks = (p.rows + block - 1) / block;
  const long pieces_of = groups + (tail < p.outputs);  // the remaining rows of W are a piece, too
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

// The part of `bytes` to prefetch while `taken` of `count` panels are multiplied, from the j-th on.
inline Bytes part_of(Bytes bytes, long j, long taken, long count) {
  const long size = bytes.end - bytes.begin;
  return {bytes.begin + size * j / count, bytes.begin + size * (j + taken) / count};
}

}  // namespace panels
#endif
