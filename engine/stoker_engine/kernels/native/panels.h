// y = x Wᵀ + b for W in panels (kernels/panels.py): 16 of its rows beside each other, two of each one's numbers at a time,
// so that a register holds what 16 outputs need of two inner numbers, and x's two are broadcast to it.
//
//   panel of rows n … n + 15      [inner / 2][16][2]      rows beyond the last whole panel lie as they did
//
// Beside rows as they are (product.h), no sums lie across a register's lanes at the end of a tile, a tile needs fewer
// loads, and what threads read of W has no gaps. Every y[m][n] is one lane that runs over `inner` in order: a row's result
// depends on nothing but the row. It is not the order of product.h, so bits differ from those with W's rows.
#pragma once

#include "product.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define STOKER_PANELS 1

constexpr long PANEL = 16;

namespace panels {

// A tile is as large as registers hold sums: 6 rows of x with 4 panels, or 8 rows with 2, which a batch of 7 or 8 takes
// so that its weights are read once.
constexpr int GROUP = 4;
constexpr long most_rows(int panels) { return panels == 2 ? 8 : 6; }

constexpr long MOST_AHEAD = 256 * 1024;  // bytes of the next piece that are fetched beforehand

// What panels lie in memory as is a class of
//   STEP            inner numbers that share a header
//   DIRECT_ROWS     up to so many rows of x, panels are multiplied as they are; beyond, they are unpacked first
//   DEPTH           inner numbers for which a group of panels and a block of rows stay in the cache
//   ROWS            of x in a block
//   width(rows)     panels that a tile of a block of so many rows takes
//   Header, header(j, k)   what numbers k … k + STEP of the rows of panel j share
//   load(j, k, header)     numbers k and k + 1 of each of its rows
//   from(j)         those that begin with panel j
//   begin(j)        where panel j does

// bfloat16 numbers, as they are multiplied.
struct Numbers {
  static constexpr long STEP = 2, DIRECT_ROWS = 1L << 62, DEPTH = 2048, ROWS = 96;
  static constexpr int width(long rows) { return rows == 7 || rows == 8 ? 2 : GROUP; }
  struct Header {};
  const bf16* at;
  long panel;  // numbers from one to the next

  Header header(long, long) const { return {}; }
  Pack<bf16>::Type load(long j, long k, Header) const { return Pack<bf16>::load(at + j * panel + k * PANEL); }
  Numbers from(long j) const { return {at + j * panel, panel}; }
  const char* begin(long j) const { return (const char*)(at + j * panel); }
};

// A block of rows of x with a group of panels, DEPTH inner numbers at a time: sums wait here in between.
template <long ROWS>
struct Sums {
  float at[ROWS][GROUP * PANEL];
};

// A group of panels, and what is multiplied by them.
template <class W>
struct Panels {
  const bf16* x;
  long x_stride;
  W w;
  const bf16* bias;  // of the first output, as y
  bf16* y;
  long y_stride;
  long inner;

  Panels from(long panel) const { return with(w.from(panel), panel); }

  // The outputs from this panel on, by other weights.
  template <class Other>
  Panels<Other> with(const Other& other, long panel = 0) const {
    return {x, x_stride, other, bias ? bias + panel * PANEL : nullptr, y + panel * PANEL, y_stride, inner};
  }
};

// Rows m … m + M of x with N panels, from inner number k to k_end.
template <int M, int N, class W>
inline void tile(const Panels<W>& p, long m, long k, long k_end, float* kept, Ahead& ahead) {
  typedef Pack<bf16> P;
  const W w = p.w;
  const bf16* x[M];
  with_each<M>([&](auto i) { x[i] = p.x + (m + i) * p.x_stride; });
  Vec sums[M * N];
  with_each<M * N>([&](auto i) { sums[i] = k ? load(kept + i / N * GROUP * PANEL + i % N * PANEL) : Vec{}; });
  for (; k < k_end; k += W::STEP) {
    typename W::Header headers[N];
    with_each<N>([&](auto j) { headers[j] = w.header(j, k); });
    for (long pair = k; pair < k + W::STEP; pair += 2) {
      ahead.fetch();
      P::Type b[N];
      with_each<N>([&](auto j) { b[j] = w.load(j, pair, headers[j]); });
      with_each<M>([&](auto i) {
        int32_t two;
        memcpy(&two, x[i] + pair, sizeof two);
        const P::Type a = (P::Type)_mm512_set1_epi32(two);
        with_each<N>([&](auto j) { sums[i * N + j] = P::multiply_add(sums[i * N + j], a, b[j]); });
      });
    }
  }
  if (k_end < p.inner) {
    with_each<M * N>([&](auto i) { store(kept + i / N * GROUP * PANEL + i % N * PANEL, sums[i]); });
    return;
  }
  with_each<N>([&](auto j) {
    const Vec bias = p.bias ? load(p.bias + j * PANEL) : Vec{};
    with_each<M>([&](auto i) { store(p.y + (m + i) * p.y_stride + j * PANEL, sums[i * N + j] + bias); });
  });
}

template <int N, class W>
inline void tile_of(long rows, const Panels<W>& p, long m, long k, long k_end, float* kept, Ahead& ahead) {
  switch (rows) {
    case 1: return tile<1, N>(p, m, k, k_end, kept, ahead);
    case 2: return tile<2, N>(p, m, k, k_end, kept, ahead);
    case 3: return tile<3, N>(p, m, k, k_end, kept, ahead);
    case 4: return tile<4, N>(p, m, k, k_end, kept, ahead);
    case 5: return tile<5, N>(p, m, k, k_end, kept, ahead);
    case 6: return tile<6, N>(p, m, k, k_end, kept, ahead);
  }
  if constexpr (most_rows(N) == 8)
    rows == 7 ? tile<7, N>(p, m, k, k_end, kept, ahead) : tile<8, N>(p, m, k, k_end, kept, ahead);
}

// N panels' inner numbers k … k_end, unpacked for as long as this thread asks for no others.
template <int N, class W>
Numbers unpacked(const W& w, long k, long k_end) {
  thread_local std::vector<bf16> buffer(N * W::DEPTH * PANEL);
  constexpr long panel = W::DEPTH * PANEL;
  for (long j = 0; j < N; j++)
    for (long unit = k; unit < k_end; unit += W::STEP) {
      const auto header = w.header(j, unit);
      for (long pair = unit; pair < unit + W::STEP; pair += 2) {
        const Pack<bf16>::Type numbers = w.load(j, pair, header);
        memcpy((void*)(buffer.data() + j * panel + (pair - k) * PANEL), &numbers, sizeof numbers);
      }
    }
  return {buffer.data() - k * PANEL, panel};
}

// Rows m … m_end of x, at most ROWS, with N panels.
template <int N, class W>
void block(const Panels<W>& p, long m, long m_end, Bytes next) {
  thread_local Sums<W::ROWS> sums;
  const long tiles = (m_end - m + most_rows(N) - 1) / most_rows(N);
  Ahead ahead(next, tiles * (p.inner / 2), MOST_AHEAD);
  for (long k = 0; k < p.inner; k += W::DEPTH) {
    const long k_end = std::min(k + W::DEPTH, p.inner);
    const auto multiply = [&](const auto& panels) {
      long row = m;
      for (long left = tiles; left > 0; left--) {  // tiles of as many rows as each other, within one
        const long rows = (m_end - row + left - 1) / left;
        tile_of<N>(rows, panels, row, k, k_end, sums.at[row - m], ahead);
        row += rows;
      }
    };
    if (m_end - m <= W::DIRECT_ROWS)
      multiply(p);
    else if constexpr (W::DIRECT_ROWS < W::ROWS)
      multiply(p.with(unpacked<N>(p.w, k, k_end)));
  }
}

// Likewise with any number of panels, up to a group.
template <class W>
inline void blocks(const Panels<W>& p, long count, long m, long m_end, Bytes next) {
  const long width = W::width(m_end - m), bytes = next.end - next.begin;
  for (long j = 0, taken; j < count; j += taken) {
    taken = count - j >= width ? width : 1;
    const Bytes part{next.begin + bytes * j / count, next.begin + bytes * (j + taken) / count};
    if (taken == GROUP)
      block<GROUP>(p.from(j), m, m_end, part);
    else if (taken == 2)
      block<2>(p.from(j), m, m_end, part);
    else
      block<1>(p.from(j), m, m_end, part);
  }
}

// W's whole panels are `w`; its rows beyond the last are multiplied as in product.h.
template <class Rows, class W>
inline void multiply(const Product<bf16, Rows>& p, const W& w) {
  const long whole = p.outputs / PANEL, rest = whole * PANEL;
  const long groups = (whole + GROUP - 1) / GROUP, row_blocks = (p.rows + W::ROWS - 1) / W::ROWS;
  const long pieces_of = groups + (rest < p.outputs);  // the last rows of W are a piece, too
  const auto begin = [&](long group) { return w.begin(std::min(group * GROUP, whole)); };
  parallel(pieces_of * row_blocks, [&](Pieces& pieces) {
    long piece, next;
    for (bool more = pieces.take(piece); more; piece = next) {
      more = pieces.take(next);
      const long group = piece % pieces_of, m = piece / pieces_of * W::ROWS, m_end = std::min(m + W::ROWS, p.rows);
      if (group == groups) {
        row_piece(p, m, m_end, rest, p.outputs, Bytes{});
        continue;
      }
      const long n = group * GROUP, count = std::min<long>(GROUP, whole - n), after = more ? next % pieces_of : groups;
      const Panels<W> all{p.x, p.x_stride, w, p.bias, p.y, p.y_stride, p.inner};
      blocks(all.from(n), count, m, m_end, Bytes{begin(after), begin(after + 1)});
    }
  });
}

}  // namespace panels
#endif
