// y = x Wᵀ + b for row-major x [rows, inner] and W [outputs, inner] in any storage format.
//
// Every y[m][n] is one accumulator that iterates over `inner` in order, in any tile, so a row's result depends only on
// the row: the GEMM is batch-invariant by construction. The format of W only determines where elements come from: a
// GEMM with stored elements is bit-identical to a GEMM with the same elements unpacked.
//
// Small batches stream W at memory speed: threads share the outputs, and each row of W is read once for all of x.
//
// A format of W is a class with
//   STEP           number of elements that are loaded at a time; if HAS_TAIL, a row's last elements may be fewer
//   DIRECT_ROWS    number of rows of x up to which W is decoded on the fly; for more, its pieces are unpacked first
//   BLOCK          rows of x that share the cost of unpacking a piece of W; TILED_BLOCK: the same with AMX
//   location(k)    position of elements k … k + STEP - 1 in any row, computed once for all rows of a tile
//   row(n)         an object for row n with
//     begin(location)   called with each location before `load`
//     load(location)    loads the elements there into registers
//     tail(location, count)   if HAS_TAIL: loads the last `count` < STEP elements, padded with zeros; needs no `begin`
//   elements(n, n_end, inner)   unpacked rows n … n_end - 1, valid until this thread's next call
//   bytes(n, n_end)            memory of rows n … n_end - 1, for prefetching; empty if `load` prefetches
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "common/simd.h"
#include "common/threads.h"

struct Bytes {
  const char *begin = nullptr, *end = nullptr;
};

// Scattered ranges of memory that some thread needs soon; `lines` cache lines in total.
struct PrefetchRanges {
  std::vector<Bytes> ranges;
  long lines = 0;
  static constexpr long LINE = 64;

  void add(Bytes range) {
    ranges.push_back(range);
    lines += (range.end - range.begin + LINE - 1) / LINE;
  }
  void clear() { ranges.clear(), lines = 0; }
};

// Unpacked elements; the stride is in elements.
template <class T>
struct Plain {
  static constexpr long STEP = Pack<T>::SIZE, DIRECT_ROWS = 1L << 62, BLOCK = 64, TILED_BLOCK = 256;
  static constexpr bool HAS_TAIL = true;
  const T* at;
  long stride;

  struct Row {
    const T* at;
    void begin(long) {}
    void load(long k, typename Pack<T>::Type* to) { to[0] = Pack<T>::load(at + k); }
    void tail(long k, long count, typename Pack<T>::Type* to) { to[0] = pack_part(at + k, count); }
  };
  long location(long k) const { return k; }
  Row row(long n) const { return {at + n * stride}; }
  Plain elements(long n, long, long) const { return {at + n * stride, stride}; }
  Bytes bytes(long n, long n_end) const { return {(const char*)(at + n * stride), (const char*)(at + n_end * stride)}; }
};

template <class T, class W>
struct Gemm {
  const T* x;
  long x_stride;
  W w;
  const T* bias;
  T* y;
  long y_stride;
  long rows, outputs, inner;

  // The same GEMM for outputs n … n_end - 1 only.
  template <class Elements>
  Gemm<T, Elements> part(const Elements& elements, long n, long n_end) const {
    return {x, x_stride, elements, bias ? bias + n : nullptr, y + n, y_stride, rows, n_end - n, inner};
  }
};

// Prefetches this thread's next data into the second-level cache, a few lines at each step of the current
// multiplication: rows are short and pieces scattered, so hardware prefetchers do not predict them.
class Prefetcher {
 public:
  Prefetcher(Bytes bytes, long steps, long max_bytes = 128 * 1024)  // more would evict the current data
      : Prefetcher({bytes.begin, bytes.begin + std::min<long>(bytes.end - bytes.begin, max_bytes)}, Bytes{}, steps) {}

  // For data that is read sequentially in `steps` steps: prefetches at a fixed distance, at the end from `next`.
  static Prefetcher along(Bytes run, Bytes next, long steps) {
    const long distance = std::min<long>(run.end - run.begin, DISTANCE);
    next.end = next.begin + std::min<long>(next.end - next.begin, distance);
    return Prefetcher({run.begin + distance, run.end}, next, steps);
  }

  // Also prefetches lines `first` … `last` - 1 of the ranges in `steps` steps. A core supports few outstanding lines,
  // so scattered lines are best requested one by one, beside sequential reads.
  void add_ranges(const PrefetchRanges& prefetch_ranges, long first, long last, long steps) {
    if (first >= last) return;
    steps_per_line_ = steps_left_ = std::max(1l, steps / (last - first));
    for (const Bytes* range = prefetch_ranges.ranges.data();; range++) {
      const long lines = (range->end - range->begin + LINE - 1) / LINE;
      if (first >= lines) {
        first -= lines;
        continue;
      }
      range_ = range, line_ = range->begin + first * LINE,
      last_ = prefetch_ranges.ranges.data() + prefetch_ranges.ranges.size();
      return;
    }
  }

  void fetch() {  // spreads lines evenly, so that memory never idles
    if (--steps_left_ == 0) fetch_range_line();
    for (due_ += step_; due_ >= LINE * PARTS; due_ -= LINE * PARTS, at_ += LINE) {
      if (at_ >= end_ && then_.begin) at_ = then_.begin, end_ = then_.end, then_ = Bytes{};
      if (at_ < end_) __builtin_prefetch(at_, 0, 2);
    }
  }

 private:
  static constexpr long LINE = 64, PARTS = 64, DISTANCE = 8192;

  Prefetcher(Bytes bytes, Bytes then, long steps)
      : at_(bytes.begin),
        end_(bytes.end),
        then_(then),
        step_(((bytes.end - bytes.begin + then.end - then.begin) * PARTS + steps - 1) / steps) {}

  void fetch_range_line() {
    __builtin_prefetch(line_, 0, 2);
    steps_left_ = steps_per_line_, line_ += LINE;
    if (line_ < range_->end) return;
    if (++range_ == last_)
      steps_left_ = 0;
    else
      line_ = range_->begin;
  }

  const char *at_, *end_;
  Bytes then_;
  const long step_;  // bytes of a step, in units of 1 / PARTS
  long due_ = 0;
  long steps_left_ = 0, steps_per_line_ = 0;  // of `add_ranges`
  const char* line_ = nullptr;
  const Bytes *range_ = nullptr, *last_ = nullptr;
};

// Calls `f` with the compile-time constants 0 … N - 1, so that indexed arrays stay in registers.
template <class F, int... I>
inline void unroll(std::integer_sequence<int, I...>, F f) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
inline void unroll(F f) {
#if defined(__SANITIZE_ADDRESS__)  // with sanitizers a loop compiles in seconds, its unrolled form in minutes
  for (int i = 0; i < N; i++) f(i);
#else
  unroll(std::make_integer_sequence<int, N>{}, f);
#endif
}

// Adds the products of the tail of a tile's rows, from k on, to its sums.
template <int M, class T, class W>
__attribute__((noinline)) void add_tail(const Gemm<T, W>& p, long m, long n, long k, Vec* sums) {
  constexpr int N = LANES / M, PACKS = W::STEP / Pack<T>::SIZE;
  using P = Pack<T>;
  const long count = p.inner - k;
  const auto location = p.w.location(k);
  for (int j = 0; j < N; j++) {
    typename P::Type b[PACKS];
    p.w.row(std::min(n + j, p.outputs - 1)).tail(location, count, b);
    for (int s = 0; s * P::SIZE < count; s++)
      for (int i = 0; i < M; i++) {
        const T* x = p.x + (m + i) * p.x_stride + k + s * P::SIZE;
        const auto a = pack_part(x, std::min<long>(count - s * P::SIZE, P::SIZE));
        sums[i * N + j] = P::multiply_add(sums[i * N + j], a, b[s]);
      }
  }
}

// Multiplies rows m … m + M - 1 of x with rows n … n + LANES / M - 1 of W, with one register for each sum.
template <int M, class T, class W>
inline void tile(const Gemm<T, W>& p, long m, long n, Prefetcher& prefetcher) {
  constexpr int N = LANES / M, PACKS = W::STEP / Pack<T>::SIZE;
  using P = Pack<T>;
  const T* x[M];
  typename W::Row w[N];
  for (int i = 0; i < M; i++) x[i] = p.x + (m + i) * p.x_stride;
  unroll<N>([&](auto j) { w[j] = p.w.row(std::min(n + j, p.outputs - 1)); });
  Vec sums[M * N] = {};
  long k = 0;
  for (; k + W::STEP <= p.inner; k += W::STEP) {
    prefetcher.fetch();
    const auto location = p.w.location(k);
    unroll<N>([&](auto j) { w[j].begin(location); });
    typename P::Type a[M * PACKS];
    unroll<M * PACKS>([&](auto i) { a[i] = P::load(x[i / PACKS] + k + i % PACKS * P::SIZE); });
    unroll<N>([&](auto j) {
      typename P::Type b[PACKS];
      w[j].load(location, b);
      unroll<PACKS>([&](auto s) {
        unroll<M>([&](auto i) { sums[i * N + j] = P::multiply_add(sums[i * N + j], a[i * PACKS + s], b[s]); });
      });
    });
  }
  Vec all[M * N];
  unroll<M * N>([&](auto i) { all[i] = sums[i]; });
  if constexpr (W::HAS_TAIL)
    if (k < p.inner) add_tail<M>(p, m, n, k, all);
  Vec result = sums_of(all);
  const long count = std::min<long>(N, p.outputs - n);
  if (p.bias) {
    T bias[LANES];
    for (int i = 0; i < M; i++) memcpy(bias + i * N, p.bias + n, count * sizeof(T));
    result += load(bias);
  }
  T rounded[LANES];
  store(rounded, result);
  unroll<M>([&](auto i) {
    T* y = p.y + (m + i) * p.y_stride + n;
    if (count == N)
      memcpy((void*)y, rounded + i * N, N * sizeof(T));  // usual; constant size, so no call
    else
      memcpy((void*)y, rounded + i * N, count * sizeof(T));
  });
}

template <int M, class T, class W>
inline long tiles(const Gemm<T, W>& p, long m, long m_end, long n, long n_end, Prefetcher& prefetcher) {
  for (; m + M <= m_end; m += M)
    for (long j = n; j < n_end; j += LANES / M) tile<M>(p, m, j, prefetcher);
  return m;
}

constexpr long MAX_TILE_ROWS = LANES >= 16 ? 4 : 2;  // rows of x in a tile

template <class T, class W>
void block(const Gemm<T, W>& p, long m, long m_end, long n, long n_end, Bytes next) {
  const auto tiles_of = [&](long rows) { return ((n_end - n) * rows + LANES - 1) / LANES; };
  const long rows = m_end - m, tail = rows % MAX_TILE_ROWS;
  const long count = rows / MAX_TILE_ROWS * tiles_of(MAX_TILE_ROWS) + tail / 2 * tiles_of(2) + tail % 2 * tiles_of(1);
  Prefetcher prefetcher(next, std::max(1l, count * (p.inner / W::STEP)));
  m = tiles<MAX_TILE_ROWS>(p, m, m_end, n, n_end, prefetcher);
  m = tiles<2>(p, m, m_end, n, n_end, prefetcher);
  tiles<1>(p, m, m_end, n, n_end, prefetcher);
}

// Computes outputs n … n_end - 1 of rows m … m_end - 1.
template <class T, class W>
void row_piece(const Gemm<T, W>& p, long m, long m_end, long n, long n_end, Bytes next) {
  if constexpr (W::DIRECT_ROWS > 0)
    if (p.rows <= W::DIRECT_ROWS) return block(p, m, m_end, n, n_end, next);
  block(p.part(p.w.elements(n, n_end, p.inner), n, n_end), m, m_end, 0, n_end - n, next);
}

template <class T, class W>
void gemm_vectors(const Gemm<T, W>& p) {
  // A block of outputs and a block of rows fit into the second-level cache together. Small batches are bound by memory:
  // their pieces are small, so that threads finish together.
  const long n_block = p.rows <= 64 && p.inner * (long)sizeof(T) >= 2048 ? 16 : 32, m_block = W::BLOCK;
  const long n_blocks = (p.outputs + n_block - 1) / n_block, m_blocks = (p.rows + m_block - 1) / m_block;
  const auto first_of = [&](long piece) { return piece % n_blocks * n_block; };
  const auto end_of = [&](long piece) { return std::min(first_of(piece) + n_block, p.outputs); };
  parallel(n_blocks * m_blocks, [&](Pieces& pieces) {
    long piece, next;
    for (bool more = pieces.take(piece); more; piece = next) {
      more = pieces.take(next);
      const Bytes prefetcher = more ? p.w.bytes(first_of(next), end_of(next)) : Bytes{};
      const long m = piece / n_blocks * m_block;
      row_piece(p, m, std::min(m + m_block, p.rows), first_of(piece), end_of(piece), prefetcher);
    }
  });
}
