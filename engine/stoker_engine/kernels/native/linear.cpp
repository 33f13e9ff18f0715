// y = x Wᵀ + b for row-major x [rows, inner] and W [outputs, inner], as checkpoints hold it: nothing is packed.
//
// Every y[m][n] is one accumulator that runs over `inner` in order, whatever the tile it is computed in, so that a row's
// result depends on nothing but the row: a product is batch-invariant by construction.
//
// Small batches stream W at memory speed: threads share the outputs, and each row of W is read once for all of x.
#include <algorithm>
#include <vector>

#include "simd.h"
#include "threads.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace {

template <class T>
struct Product {
  const T* x;
  long x_stride;
  const T* w;
  long w_stride;
  const T* bias;
  T* y;
  long y_stride;
  long rows, outputs, inner;
};

// Rows m … m + M of x with rows n … n + LANES / M of W: one register for each sum.
template <class T, int M>
inline void tile(const Product<T>& p, long m, long n) {
  constexpr int N = LANES / M;
  using P = Pack<T>;
  const T *x[M], *w[N];
  for (int i = 0; i < M; i++) x[i] = p.x + (m + i) * p.x_stride;
  for (int j = 0; j < N; j++) w[j] = p.w + std::min(n + j, p.outputs - 1) * p.w_stride;
  Vec sums[M * N] = {};
  long k = 0;
  for (; k + P::SIZE <= p.inner; k += P::SIZE) {
    typename P::Type a[M];
    for (int i = 0; i < M; i++) a[i] = P::load(x[i] + k);
    for (int j = 0; j < N; j++) {
      typename P::Type b = P::load(w[j] + k);
      for (int i = 0; i < M; i++) sums[i * N + j] = P::multiply_add(sums[i * N + j], a[i], b);
    }
  }
  if (k < p.inner)
    for (int j = 0; j < N; j++) {
      typename P::Type b = pack_part(w[j] + k, p.inner - k);
      for (int i = 0; i < M; i++)
        sums[i * N + j] = P::multiply_add(sums[i * N + j], pack_part(x[i] + k, p.inner - k), b);
    }
  Vec result = sums_of(sums);
  const long count = std::min<long>(N, p.outputs - n);
  if (p.bias) {
    T bias[LANES];
    for (int i = 0; i < M; i++) memcpy(bias + i * N, p.bias + n, count * sizeof(T));
    result += load(bias);
  }
  T rounded[LANES];
  store(rounded, result);
  for (int i = 0; i < M; i++) memcpy(p.y + (m + i) * p.y_stride + n, rounded + i * N, count * sizeof(T));
}

template <class T, int M>
inline long tiles(const Product<T>& p, long m, long m_end, long n, long n_end) {
  for (; m + M <= m_end; m += M)
    for (long j = n; j < n_end; j += LANES / M) tile<T, M>(p, m, j);
  return m;
}

template <class T>
void with_vectors(const Product<T>& p) {
  // A block of outputs and a block of rows stay in the second-level cache while they are multiplied.
  const long n_block = 32, m_block = 64;
  const long n_blocks = (p.outputs + n_block - 1) / n_block, m_blocks = (p.rows + m_block - 1) / m_block;
  parallel(n_blocks * m_blocks, [&](Pieces& pieces) {
    for (long piece; pieces.take(piece);) {
      const long n = piece % n_blocks * n_block, n_end = std::min(n + n_block, p.outputs);
      long m = piece / n_blocks * m_block;
      const long m_end = std::min(m + m_block, p.rows);
      if constexpr (LANES >= 16) m = tiles<T, 4>(p, m, m_end, n, n_end);
      m = tiles<T, 2>(p, m, m_end, n, n_end);
      tiles<T, 1>(p, m, m_end, n, n_end);
    }
  });
}

#if defined(__AMX_BF16__)
// Intel's tile unit computes Yᵀ = W Xᵀ: tiles of W are loaded as they lie, and only x, the small one, is rearranged.
//
//   tiles 0…3  sums, 16 outputs × 16 rows each      4, 5  W, 16 outputs × 32 inner      6, 7  Xᵀ, 32 inner × 16 rows
constexpr long TILE = 16, DEPTH = 32;

struct Palette {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 16 rows of x as [inner / 2][16 rows][2], what the tile unit takes for the right-hand side; missing rows are 0.
void rearrange(const Product<bf16>& p, long m, bf16* to) {
  for (long k = 0; k < p.inner; k += DEPTH) {
    WordVec pairs[TILE] = {};
    for (long i = 0; i < TILE && m + i < p.rows; i++)
      memcpy(&pairs[i], p.x + (m + i) * p.x_stride + k, sizeof(WordVec));
    transpose(pairs);
    memcpy((void*)(to + k * TILE), pairs, sizeof pairs);
  }
}

// 16 outputs × 16 rows of sums → y, transposed.
void put_tile(const Product<bf16>& p, long m, long n, const float (*sums)[TILE]) {
  const Vec bias = p.bias ? load(p.bias + n) : Vec{};
  WordVec rows[TILE];
  memcpy(rows, sums, sizeof rows);
  transpose(rows);
  for (long i = 0; i < TILE && m + i < p.rows; i++) store(p.y + (m + i) * p.y_stride + n, (Vec)rows[i] + bias);
}

// N × M tiles of 16; `x` holds M rearranged groups of 16 rows.
template <int N, int M>
void amx_tile(const Product<bf16>& p, long m, const long* n, const bf16* x) {
  const long group = p.inner * TILE, stride = p.w_stride * 2;
  const bf16 *w0 = p.w + n[0] * p.w_stride, *w1 = p.w + n[N - 1] * p.w_stride;
  _tile_zero(0);
  if constexpr (N > 1) _tile_zero(1);
  if constexpr (M > 1) _tile_zero(2);
  if constexpr (N > 1 && M > 1) _tile_zero(3);
  for (long k = 0; k < p.inner; k += DEPTH) {
    _tile_loadd(4, w0 + k, stride);
    _tile_loadd(6, x + k * TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N > 1) {
      _tile_loadd(5, w1 + k, stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (M > 1) {
      _tile_loadd(7, x + group + k * TILE, 64);
      _tile_dpbf16ps(2, 4, 7);
      if constexpr (N > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sums[TILE][TILE];
  _tile_stored(0, sums, 64);
  put_tile(p, m, n[0], sums);
  if constexpr (N > 1) {
    _tile_stored(1, sums, 64);
    put_tile(p, m, n[1], sums);
  }
  if constexpr (M > 1) {
    _tile_stored(2, sums, 64);
    put_tile(p, m + TILE, n[0], sums);
    if constexpr (N > 1) {
      _tile_stored(3, sums, 64);
      put_tile(p, m + TILE, n[1], sums);
    }
  }
}

void with_amx(const Product<bf16>& p) {
  thread_local std::vector<bf16> buffer;
  const long groups = (p.rows + TILE - 1) / TILE, group = p.inner * TILE;
  if ((long)buffer.size() < groups * group) buffer.resize(groups * group);
  bf16* x = buffer.data();
  // Outputs and groups of rows in a piece: a block of W and of x that the second-level cache holds. Small batches only
  // wait for memory: their pieces are small, so that threads end together.
  const long n_block = p.rows > 64 ? 128 : 32, m_block = 16;
  const long n_blocks = (p.outputs + n_block - 1) / n_block, m_blocks = (groups + m_block - 1) / m_block;
  parallel_for(groups >= 4, groups, [&](long g) { rearrange(p, g * TILE, x + g * group); });
  parallel(n_blocks * m_blocks, [&](Pieces& pieces) {
    const Palette palette;
    _tile_loadconfig(&palette);
    for (long piece; pieces.take(piece);) {
      const long n_start = piece % n_blocks * n_block, n_end = std::min(n_start + n_block, p.outputs);
      const long g_start = piece / n_blocks * m_block, g_end = std::min(g_start + m_block, groups);
      for (long g = g_start; g < g_end; g += 2)
        for (long j = n_start; j < n_end; j += 2 * TILE) {
          // The last tile may overlap the one before it: the same sums are written twice.
          const long n[2] = {std::min(j, p.outputs - TILE), std::min(j + TILE, p.outputs - TILE)};
          if (g + 1 < g_end)
            amx_tile<2, 2>(p, g * TILE, n, x + g * group);
          else
            amx_tile<2, 1>(p, g * TILE, n, x + g * group);
        }
    }
    _tile_release();
  });
}
#endif

template <class T>
void linear(const Product<T>& p) {
#if defined(__AMX_BF16__)
  if constexpr (sizeof(T) == 2)
    if (p.inner % DEPTH == 0 && p.outputs >= TILE) return with_amx(p);
#endif
  with_vectors(p);
}

}  // namespace

// Strides in elements; `bias` may be null.
extern "C" void stoker_linear(int is_bf16, const void* x, long x_stride, const void* w, long w_stride,
                              const void* bias, void* y, long rows, long outputs, long inner) {
  if (is_bf16)
    linear(Product<bf16>{(const bf16*)x, x_stride, (const bf16*)w, w_stride, (const bf16*)bias, (bf16*)y, outputs,
                         rows, outputs, inner});
  else
    linear(Product<float>{(const float*)x, x_stride, (const float*)w, w_stride, (const float*)bias, (float*)y, outputs,
                          rows, outputs, inner});
}
