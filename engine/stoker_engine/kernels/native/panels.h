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

constexpr long DEPTH = 2048;  // inner numbers for which a group of panels and a block of rows stay in the cache
constexpr long ROWS = 96;     // of x in a block
constexpr long MOST_AHEAD = 256 * 1024;  // bytes of the next piece that are fetched beforehand

// A block of rows of x with a group of panels, DEPTH inner numbers at a time: sums wait here in between.
struct Sums {
  float at[ROWS][GROUP * PANEL];
};

// A group of panels, and what is multiplied by them.
struct Panels {
  const bf16* x;
  long x_stride;
  const bf16* w;
  const bf16* bias;  // of the first output, as y
  bf16* y;
  long y_stride;
  long inner;

  Panels from(long panel) const {
    return {x, x_stride, w + panel * inner * PANEL, bias ? bias + panel * PANEL : nullptr, y + panel * PANEL, y_stride,
            inner};
  }
};

// Rows m … m + M of x with N panels, from inner number k to k_end.
template <int M, int N>
inline void tile(const Panels& p, long m, long k, long k_end, float* kept, Ahead& ahead) {
  typedef Pack<bf16> P;
  const long panel = p.inner * PANEL;
  const bf16* x[M];
  with_each<M>([&](auto i) { x[i] = p.x + (m + i) * p.x_stride; });
  Vec sums[M * N];
  with_each<M * N>([&](auto i) { sums[i] = k ? load(kept + i / N * GROUP * PANEL + i % N * PANEL) : Vec{}; });
  for (; k < k_end; k += 2) {
    ahead.fetch();
    P::Type b[N];
    with_each<N>([&](auto j) { b[j] = P::load(p.w + j * panel + k * PANEL); });
    with_each<M>([&](auto i) {
      int32_t pair;
      memcpy(&pair, x[i] + k, sizeof pair);
      const P::Type a = (P::Type)_mm512_set1_epi32(pair);
      with_each<N>([&](auto j) { sums[i * N + j] = P::multiply_add(sums[i * N + j], a, b[j]); });
    });
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

template <int N>
inline void tile_of(long rows, const Panels& p, long m, long k, long k_end, float* kept, Ahead& ahead) {
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

// Rows m … m_end of x, at most ROWS, with N panels.
template <int N>
void block(const Panels& p, long m, long m_end, Bytes next) {
  thread_local Sums sums;
  const long tiles = (m_end - m + most_rows(N) - 1) / most_rows(N);
  Ahead ahead(next, tiles * (p.inner / 2), MOST_AHEAD);
  for (long k = 0; k < p.inner; k += DEPTH) {
    const long k_end = std::min(k + DEPTH, p.inner);
    long row = m;
    for (long left = tiles; left > 0; left--) {  // tiles of as many rows as each other, within one
      const long rows = (m_end - row + left - 1) / left;
      tile_of<N>(rows, p, row, k, k_end, sums.at[row - m], ahead);
      row += rows;
    }
  }
}

// Likewise with any number of panels, up to a group.
inline void blocks(const Panels& p, long count, long m, long m_end, Bytes next) {
  const long rows = m_end - m, width = rows == 7 || rows == 8 ? 2 : GROUP, bytes = next.end - next.begin;
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

// W's rows beyond the last whole panel are multiplied as in product.h.
inline void multiply(const Product<bf16, Plain<bf16>>& p) {
  const long whole = p.outputs / PANEL, rest = whole * PANEL, panel = p.inner * PANEL;
  const long groups = (whole + GROUP - 1) / GROUP, row_blocks = (p.rows + ROWS - 1) / ROWS;
  const long pieces_of = groups + (rest < p.outputs);  // the last rows of W are a piece, too
  const auto at = [&](long group) { return p.w.at + std::min(group * GROUP, whole) * panel; };
  parallel(pieces_of * row_blocks, [&](Pieces& pieces) {
    long piece, next;
    for (bool more = pieces.take(piece); more; piece = next) {
      more = pieces.take(next);
      const long group = piece % pieces_of, m = piece / pieces_of * ROWS, m_end = std::min(m + ROWS, p.rows);
      if (group == groups) {
        row_piece(p, m, m_end, rest, p.outputs, Bytes{});
        continue;
      }
      const long n = group * GROUP * PANEL, count = std::min<long>(GROUP, whole - group * GROUP);
      const long after = more ? next % pieces_of : groups;
      const Bytes ahead{(const char*)at(after), (const char*)at(after + 1)};
      blocks({p.x, p.x_stride, at(group), p.bias ? p.bias + n : nullptr, p.y + n, p.y_stride, p.inner}, count, m, m_end,
             ahead);
    }
  });
}

}  // namespace panels
#endif
