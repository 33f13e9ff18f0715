// GEMM with unpacked rows by AMX, as Yᵀ = W Xᵀ: tiles of W are loaded in place, and only x, the smaller operand, is
// rearranged. `gemm` uses AMX where it can, else vectors.
#pragma once

#include "gemm/gemm.h"
#include "gemm/amx_tiles.h"

#if defined(STOKER_AMX)
constexpr long TILE_DEPTH = 2 * TILE_WORDS;  // inner elements of a step

// Rearranges 16 rows of x to [inner / 2][16 rows][2], the layout of a tile's columns; missing rows are 0.
template <class W>
inline void rearrange(const Gemm<bf16, W>& p, long m, bf16* to) {
  for (long k = 0; k < p.inner; k += TILE_DEPTH) {
    WordVec pairs[TILE_COLUMNS] = {};
    for (long i = 0; i < TILE_COLUMNS && m + i < p.rows; i++)
      memcpy(&pairs[i], p.x + (m + i) * p.x_stride + k, sizeof(WordVec));
    transpose(pairs);
    memcpy((void*)(to + k * TILE_COLUMNS), pairs, sizeof pairs);
  }
}

// Writes the sums of 16 outputs × 16 rows to y, transposed.
inline void put_tile(const Gemm<bf16, Plain<bf16>>& p, long m, long n, const float* sums, long stride) {
  const Vec bias = p.bias ? load(p.bias + n) : Vec{};
  WordVec rows[TILE_ROWS];
  for (long i = 0; i < TILE_ROWS; i++) memcpy(&rows[i], sums + i * stride, sizeof rows[i]);
  transpose(rows);
  for (long i = 0; i < TILE_COLUMNS && m + i < p.rows; i++) store(p.y + (m + i) * p.y_stride + n, (Vec)rows[i] + bias);
}

// Multiplies N groups of 16 outputs from n on with M groups of 16 rows from m on; `x` holds the rearranged rows.
template <int N, int M>
void multiply_groups(const Gemm<bf16, Plain<bf16>>& p, long m, long n, const bf16* x) {
  const bf16* w = p.w.at + n * p.w.stride;
  clear_sums<N, M>();
  for (long k = 0; k < p.inner; k += TILE_DEPTH) {
    const bf16* columns = x + k * TILE_COLUMNS;
    multiply_tiles<N, M>(w + k, p.w.stride * 2, columns, columns + p.inner * TILE_COLUMNS, 4 * TILE_COLUMNS);
  }
  constexpr long WIDTH = M * TILE_COLUMNS;
  alignas(64) float sums[N * TILE_ROWS][WIDTH];
  store_sums<N, M>(sums[0], sizeof sums[0]);
  for (long i = 0; i < N; i++)
    for (long j = 0; j < M; j++)
      put_tile(p, m + j * TILE_COLUMNS, n + i * TILE_ROWS, &sums[i * TILE_ROWS][j * TILE_COLUMNS], WIDTH);
}

// Multiplies all outputs, at least 16, with M groups of rows. The last group of outputs may overlap the previous one,
// which writes the same sums twice.
template <int M>
void multiply_outputs(const Gemm<bf16, Plain<bf16>>& p, long m, const bf16* x) {
  long n = 0;
  for (; n + 2 * TILE_ROWS <= p.outputs; n += 2 * TILE_ROWS) multiply_groups<2, M>(p, m, n, x);
  for (; n < p.outputs; n += TILE_ROWS) multiply_groups<1, M>(p, m, std::min(n, p.outputs - TILE_ROWS), x);
}

template <class W>
void gemm_amx(const Gemm<bf16, W>& p) {
  thread_local std::vector<bf16> buffer;
  const long groups = (p.rows + TILE_COLUMNS - 1) / TILE_COLUMNS, group = p.inner * TILE_COLUMNS;
  if ((long)buffer.size() < groups * group) buffer.resize(groups * group);
  bf16* x = buffer.data();
  // Outputs and groups of rows in a piece, chosen so that a block of W and of x fits into the second-level cache. Small
  // batches are bound by memory: their pieces are small, so that threads finish together.
  const long n_block = p.rows > 64 ? 128 : 32, m_block = W::TILED_BLOCK / TILE_COLUMNS;
  const long n_blocks = (p.outputs + n_block - 1) / n_block, m_blocks = (groups + m_block - 1) / m_block;
  parallel_for(groups >= 4, groups, [&](long g) { rearrange(p, g * TILE_COLUMNS, x + g * group); });
  parallel(n_blocks * m_blocks, [&](Pieces& pieces) {
    TileUnit unit;
    unit.set_for(TILE_ROWS, TILE_ROWS);
    for (long piece; pieces.take(piece);) {
      const long n_start = std::min(piece % n_blocks * n_block, p.outputs - TILE_ROWS);
      const long n_end = std::min((piece % n_blocks + 1) * n_block, p.outputs);
      const auto part = p.part(p.w.elements(n_start, n_end, p.inner), n_start, n_end);
      TileUnit::compiler_barrier(part.w.at);
      const long g_end = std::min((piece / n_blocks + 1) * m_block, groups);
      for (long g = piece / n_blocks * m_block; g < g_end; g += 2)
        g + 1 < g_end ? multiply_outputs<2>(part, g * TILE_COLUMNS, x + g * group)
                      : multiply_outputs<1>(part, g * TILE_COLUMNS, x + g * group);
    }
  });
}
#endif

template <class T, class W>
void gemm(const Gemm<T, W>& p) {
#if defined(STOKER_AMX)
  if constexpr (sizeof(T) == 2)
    if (p.inner % TILE_DEPTH == 0 && p.outputs >= TILE_ROWS) return gemm_amx(p);
#endif
  gemm_vectors(p);
}
