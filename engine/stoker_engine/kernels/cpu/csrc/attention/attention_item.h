// Attention of some queries of one sequence to the keys of one KV head: the work item of a thread in attention.cpp.
//
// Elements are multiplied in one of two ways:
//
//   Singles<K>   queries, weights and values are floats; keys K are in words of one float or two bf16
//   Pairs        everything is bf16, two products are added at a time; weights are rounded to bf16, sums stay float.
//                A word holds the values of two keys; if a row sees only one of them, the other value becomes 0
//
// With AMX, pairs are the words of tiles: 32 rows at a time are multiplied with the same rearranged keys and values as by
// vectors. With few rows, bfloat16 keys are multiplied in place, without rearranging.
#pragma once

#include "attention/attention.h"
#include "attention/attention_tile.h"
#include "attention/amx_attention.h"
#include "common/memory.h"
#include "attention/softmax_state.h"
#include "attention/kv_dtypes.h"
#include "gemm/amx_tiles.h"

namespace {

// Number of keys in a part. Early parts are smaller so that short sequences are also parallelised.
constexpr long PART = 512, SMALL_PART = 128, SMALL_PARTS = PART / SMALL_PART;

inline long part_at(long position) {
  return position < PART ? position / SMALL_PART : SMALL_PARTS - 1 + position / PART;
}
inline long begin_of(long part) { return part < SMALL_PARTS ? part * SMALL_PART : (part - SMALL_PARTS + 1) * PART; }

constexpr int VECTORS = LANES == 16 ? 4 : 2;  // vectors in registers for each of ROWS rows

inline long rounded_up(long n, long to) { return (n + to - 1) / to * to; }

template <class K>
struct Singles {
  typedef K Key;
  static constexpr bool PAIRS = false;
  // exp(score - largest); for pairs exp(scale × score - largest).
  static Vec weight_of(Vec score, float largest, float) { return ::exp_of(score - largest); }
  static void put(float* weights, long key, Vec p) { store(weights + key, p); }
};

struct Pairs {
  typedef bf16 Key;
  static constexpr bool PAIRS = true;
#if defined(__AVX512BF16__)
  // Error: that of `power_of_2`, plus 2⁻²³ of the score.
  static Vec weight_of(Vec score, float largest, float scale) {
    constexpr float LOG2_E = 1.44269504f;
    return power_of_2(score * (scale * LOG2_E) - largest * LOG2_E);
  }
  static void put(float* weights, long key, Vec p) { store((bf16*)weights + key, p); }
#endif
};

// A thread's buffers: an item's queries, and a tile of keys and values rearranged for the multiplication.
struct Workspace {
#if defined(STOKER_AMX)
  mutable TileUnit unit;
#endif
  float* queries;           // [rows][depth], padded with 0; for pairs words [rows][depth / 2]
  uint32_t* columns;        // [depth / 2][16]: words of up to 16 rows, transposed
  uint32_t* keys;           // [depth / elements in a word][TILE]: a vector holds one word of LANES keys
  float* values;            // [TILE][width]; for pairs words [TILE / 2][width]
  const float* rows[TILE];  // values of each key, in `values` or in a cache of floats; unused for pairs
  float key_scales[TILE], value_scales[TILE];

  static long size(long rows, long depth, long width) { return (LANES / 2 + rows) * depth + TILE * (depth + width); }
  Workspace(float* memory, long rows, long depth)
      : queries(memory + LANES / 2 * depth),
        columns((uint32_t*)memory),
        keys((uint32_t*)(queries + rows * depth)),
        values(queries + (rows + TILE) * depth) {}
};

// Adds the products of LANES keys' words (one or two elements) with a query's elements to the scores.
inline Vec multiply_add_words(Vec scores, WordVec keys, const float* query, float) {
  return scores + (Vec)keys * query[0];
}
inline Vec multiply_add_words(Vec scores, WordVec keys, const float* query, bf16) {
  scores += (Vec)(keys << 16) * query[0];
  return scores + (Vec)(keys & 0xffff0000u) * query[1];
}

// The same for a query in words of two elements.
inline Vec multiply_add_pairs(Vec sums, WordVec keys, uint32_t query) {
#if defined(__AVX512BF16__)
  return (Vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(query), (__m512bh)keys);
#else
  return sums;  // unreachable: Pairs are used only with AVX512-BF16
#endif
}

// Some queries, for all heads that share a KV head: rows are (query, head of the group). Queries are consecutive tokens of
// one sequence; with `query_rows` each is of a different sequence, and all of them see every key of the item.
template <class A>
struct Item {
  typedef typename A::Key K;
  static constexpr bool PAIRS = A::PAIRS;
  static constexpr long WORD = 4 / sizeof(K);  // elements in a word
  static constexpr long UNIT = PAIRS ? 2 : 1;  // keys whose values are added at once
#if defined(STOKER_AMX)
  static constexpr bool TILED = PAIRS;  // whether AMX is used
#else
  static constexpr bool TILED = false;
#endif
  static constexpr long KEYS = TILED ? 32 : LANES;  // keys that are scored together

  const AttentionCall& call;
  long sequence, kv_head;
  long first, count;                 // row of the first query in the flat batch, and number of queries
  long position;                     // position of the first query
  const long* query_rows = nullptr;  // rows of the queries in the flat batch, if they are of different sequences
  long group = call.heads / call.kv_heads;
  long rows = count * group;
  long depth = depth_of(call), width = width_of(call);

  static long depth_of(const AttentionCall& call) { return rounded_up(call.head_dim, LANES * WORD); }
  static long width_of(const AttentionCall& call) { return rounded_up(call.value_dim, LANES * UNIT); }

  long query_of(long row) const { return query_rows ? query_rows[row / group] : first + row / group; }
  long position_of(long row) const { return query_rows ? position : position + row / group; }
  long head_of(long row) const { return kv_head * group + row % group; }
  long oldest_of(long row) const {
    return call.window && !query_rows ? std::max(0l, position_of(row) + 1 - call.window) : 0;
  }

  void read_queries(const Workspace& work) const {
    if constexpr (PAIRS)
      read_pairs((uint32_t*)work.queries);
    else
      call.is_bf16 ? read_queries_of<bf16>(work.queries) : read_queries_of<float>(work.queries);
#if defined(STOKER_AMX)
    if (are_keys_in_place()) transpose_queries((const uint32_t*)work.queries, rows, depth / WORD, work.columns);
#endif
  }

  void read_pairs(uint32_t* to) const {
    for (long r = 0; r < rows; r++, to += depth / 2) {
      const bf16* from = (const bf16*)call.query + query_of(r) * call.query_token + head_of(r) * call.query_head;
      memcpy(to, from, call.head_dim * sizeof(bf16));
      memset((bf16*)to + call.head_dim, 0, (depth - call.head_dim) * sizeof(bf16));
    }
  }

  template <class T>
  void read_queries_of(float* to) const {
    for (long r = 0; r < rows; r++) {
      const T* from = (const T*)call.query + query_of(r) * call.query_token + head_of(r) * call.query_head;
      for (long d = 0; d < depth; d += LANES) {
        const long remaining = std::max(0l, call.head_dim - d);
        store(to + r * depth + d, remaining >= LANES ? load(from + d) : load_part(from + d, remaining));
      }
    }
  }

  // Finds the keys `start` … `end` - 1; the rest of the tile repeats the last key. The start of tiles is the same for every
  // row, even below the window: keys outside the window repeat its oldest, since their blocks may belong to others.
  void locate(long start, long end, Tile& tile) const {
    const int32_t* table = call.tables + sequence * call.table_stride;
    const long oldest = oldest_of(0), size = size_of(call.stored);
    const char* keys = (const char*)call.keys + kv_head * call.key_head * size;
    const char* values = (const char*)call.values + kv_head * call.value_head * size;
    const float* key_scales = call.key_scales + kv_head * call.key_scale_head;
    const float* value_scales = call.value_scales + kv_head * call.value_scale_head;
    const long begin = std::max(start, oldest), last = end - 1;
    tile.count = std::min(TILE, end - start);
    for (long j = 0, count; j < TILE; j += count) {  // keys of one block, or repetitions of one key
      const long at = std::clamp(start + j, begin, last), slot = at % call.block_size;
      const long block = table[at / call.block_size];
      const bool repeats = start + j < begin || at == last;
      count = at == last ? TILE - j : repeats ? begin - start - j : std::min(call.block_size - slot, last - at);
      count = std::min(count, TILE - j);
      const auto put = [&](auto* to, auto* from, long stride) {
        for (long i = 0; i < count; i++) to[j + i] = from + (repeats ? 0 : i * stride);
      };
      put(tile.keys, keys + (block * call.key_block + slot * call.key_slot) * size, call.key_slot * size);
      put(tile.values, values + (block * call.value_block + slot * call.value_slot) * size, call.value_slot * size);
      if (!call.key_scales) continue;
      put(tile.key_scales, key_scales + block * call.key_scale_block + slot * call.key_scale_slot, call.key_scale_slot);
      put(tile.value_scales, value_scales + block * call.value_scale_block + slot * call.value_scale_slot,
          call.value_scale_slot);
    }
  }

  // Rearranges `keys` keys of the tile into the workspace, and prefetches the next tile.
  void rearrange(const Tile& tile, const Tile* next, long keys, Workspace& work) const {
    if constexpr (sizeof(K) == sizeof(float)) return rearrange_stored<float>(tile, next, keys, work);
    switch (call.stored) {
      case BF16: return rearrange_stored<bf16>(tile, next, keys, work);
      case E4M3: return rearrange_stored<e4m3>(tile, next, keys, work);
      case E5M2: return rearrange_stored<e5m2>(tile, next, keys, work);
      case INT8: return rearrange_stored<int8>(tile, next, keys, work);
    }
  }

  template <class S>
  FLATTEN void rearrange_stored(const Tile& tile, const Tile* next, long keys, Workspace& work) const {
    for (long j = 0; j < keys; j += LANES) {
      if (next)
        for (long k = j; k < j + LANES; k++) fetch(next->keys[k], call.head_dim * sizeof(S));
      for (long d = 0; d < depth; d += LANES * WORD) {
        WordVec taken[LANES];
        const long remaining = call.head_dim - d;
        for (int k = 0; k < LANES; k++) {
          const S* from = (const S*)tile.keys[j + k] + d;
          taken[k] = remaining >= LANES * WORD ? words(from) : words_part(from, remaining);
        }
        transpose(taken);
        for (int i = 0; i < LANES; i++) memcpy(work.keys + (d / WORD + i) * TILE + j, &taken[i], sizeof(WordVec));
      }
    }
    if constexpr (PAIRS) {
      for (long j = 0; j < keys; j += 2) {
        if (next)
          fetch(next->values[j], call.value_dim * sizeof(S)), fetch(next->values[j + 1], call.value_dim * sizeof(S));
        pair_values((const S*)tile.values[j], (const S*)tile.values[j + 1], (uint32_t*)work.values + j / 2 * width);
      }
    }
    for (long j = 0; !PAIRS && j < keys; j++) {
      const S* from = (const S*)tile.values[j];
      if (next) fetch(next->values[j], call.value_dim * sizeof(S));
      work.rows[j] = (const float*)from;
      if (sizeof(S) == sizeof(float) && call.value_dim % LANES == 0) continue;
      work.rows[j] = work.values + j * width;
      to_floats(work.values + j * width, from, call.value_dim);
    }
    if (!call.key_scales) return;
    for (long j = 0; j < TILE; j++) {
      if (next) fetch((const char*)next->key_scales[j], 4), fetch((const char*)next->value_scales[j], 4);
      work.key_scales[j] = *tile.key_scales[j];
      work.value_scales[j] = *tile.value_scales[j];
    }
  }

  // Interleaves two keys' values into words. Of each 2 × LANES elements, those at even indices come first, then the odd ones.
  template <class S>
  void pair_values(const S* first, const S* second, uint32_t* to) const {
    for (long d = 0; d < width; d += 2 * LANES) {
      const long remaining = call.value_dim - d;
      const bool whole = remaining >= 2 * LANES;
      const WordVec a = whole ? words(first + d) : words_part(first + d, remaining);
      const WordVec b = whole ? words(second + d) : words_part(second + d, remaining);
      const WordVec even = (a & 0xffffu) | (b << 16), odd = (a >> 16) | (b & 0xffff0000u);
      memcpy(to + d, &even, sizeof even);
      memcpy(to + d + LANES, &odd, sizeof odd);
    }
  }

  template <int R>
  void score(const Workspace& work, long r, float (*scores)[TILE], long keys) const {
    for (long j = 0; j < keys; j += VECTORS * LANES) {
      Vec sums[R][VECTORS] = {};
      const float* query = work.queries + r * depth;
      for (long d = 0; d < depth / WORD; d++)
        for (int v = 0; v < VECTORS; v++) {
          WordVec words;
          memcpy(&words, work.keys + d * TILE + j + v * LANES, sizeof words);
          for (int i = 0; i < R; i++)
            if constexpr (PAIRS)
              sums[i][v] =
                  multiply_add_pairs(sums[i][v], words, ((const uint32_t*)work.queries)[(r + i) * (depth / 2) + d]);
            else
              sums[i][v] = multiply_add_words(sums[i][v], words, query + i * depth + d * WORD, K());
        }
      for (int i = 0; i < R; i++)
        for (int v = 0; v < VECTORS; v++) store(scores[i] + j + v * LANES, sums[i][v]);
    }
  }

  // Whether the softmax's inputs are the scores times a constant, so that `weight_of` can apply the scale.
  bool is_scale_deferred() const {
    return PAIRS && !call.key_scales && !call.alibi_slopes && call.soft_cap == 0 && call.scale > 0;
  }

  // Converts the scores of row `r` for `keys` keys from `start` to inputs of the softmax (unless `is_scale_deferred`, with the
  // scale); NEG_INF for keys that the row does not see. Returns the largest score of each lane.
  Vec adjust(const Workspace& work, long r, float* scores, long start, long keys) const {
    const bool all_seen = start + keys - 1 <= position_of(r) && start >= oldest_of(r);
    Vec maxima = broadcast(NEG_INF);
    if (is_scale_deferred() && all_seen) {
      for (long j = 0; j < keys; j += LANES) maxima = larger(maxima, load(scores + j));
      return maxima;
    }
    const float at = (float)position_of(r), oldest = (float)oldest_of(r);
    const float slope = call.alibi_slopes ? call.alibi_slopes[head_of(r)] : 0.0f;
    const float scale = is_scale_deferred() ? 1.0f : call.scale;
    Vec steps;
    for (int i = 0; i < LANES; i++) steps[i] = (float)i;
    for (long j = 0; j < keys; j += LANES) {
      Vec s = load(scores + j) * scale;
      if (call.key_scales) s *= load(work.key_scales + j);
      if (call.soft_cap != 0) s = tanh_of(s / call.soft_cap) * call.soft_cap;
      if (!all_seen || slope != 0) {
        // Positions are below 2²⁴, so floats hold them exactly.
        const Vec positions = steps + (float)(start + j);
        if (slope != 0) s += slope * (positions - at);
        s = positions <= at ? s : broadcast(NEG_INF);
        s = positions >= oldest ? s : broadcast(NEG_INF);
      }
      store(scores + j, s);
      maxima = larger(maxima, s);
    }
    return maxima;
  }

  // A row's softmax weights, 4 bytes for each unit of keys (one key, or a pair).
  struct Weights {
    alignas(64) float of[TILE / UNIT];
  };

  // Computes the weights exp(scores - largest) of `keys` keys, times the values' scales; returns the sum of each lane.
  Vec exponentials(const Workspace& work, const float* scores, float largest, Weights& weights, long keys) const {
    const float scale = is_scale_deferred() ? call.scale : 1.0f;
    Vec sum = {};
    if (!call.key_scales) {
      for (long j = 0; j < keys; j += LANES) {
        const Vec p = A::weight_of(load(scores + j), largest, scale);
        sum += p;
        A::put(weights.of, j, p);
      }
      return sum;
    }
    for (long j = 0; j < keys; j += LANES) {
      const Vec s = load(scores + j), p = A::weight_of(s, largest, scale);
      sum += p;
      // The scale of a key that the row does not see may be NaN.
      A::put(weights.of, j, s == NEG_INF ? Vec{} : p * load(work.value_scales + j));
    }
    return sum;
  }

  // Scores of R rows for `keys` keys from `start`, a multiple of LANES → weights (0 for keys that a row does not see), and
  // factors that correct earlier sums. Values that exist once for each row are in the lanes of a vector.
  template <int R>
  void softmax_weights(const Workspace& work, long r, float (*scores)[TILE], long start, long keys, const State& state,
                       Weights* weights, float* factors) const {
    Vec maxima[ROWS], sums[ROWS];
    for (int i = 0; i < R; i++) maxima[i] = adjust(work, r + i, scores[i], start, keys);
    for (int i = R; i < ROWS; i++) maxima[i] = maxima[0];
    Vec current = reduce_each<ROWS>(maxima, [](Vec a, Vec b) { return larger(a, b); });
    if (is_scale_deferred()) current *= call.scale;
    const Vec previous = row_values<R>(state.largest + r), largest = larger(previous, current);
    // A row that has seen no key yet has a largest score of NEG_INF; its weights are 0. A NaN score makes its row NaN.
    float shifts[LANES], corrections[LANES];
    store(shifts, largest == NEG_INF ? Vec{} : largest);
    for (int i = 0; i < R; i++) sums[i] = exponentials(work, scores[i], shifts[i], weights[i], keys);
    for (int i = R; i < ROWS; i++) sums[i] = sums[0];
    const Vec factor = previous == largest ? broadcast(1) : ::exp_of(previous - largest);
    const Vec sum = reduce_each<ROWS>(sums, [](Vec a, Vec b) { return a + b; });
    put_row_values<R>(state.largest + r, largest);
    put_row_values<R>(state.weight + r, row_values<R>(state.weight + r) * factor + sum);
    store(corrections, factor);
    std::copy(corrections, corrections + R, factors);
  }

  // Multiplies the sums of R rows by `factors`, and adds weights × values for the units begin … end - 1 of the tile.
  template <int R, int V>
  void add_values(const Workspace& work, float* to, const Weights* weights, const float* factors, long d, long begin,
                  long end, uint32_t seen = ~0u) const {
    Vec sums[R][V];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) sums[r][v] = load(to + r * width + d + v * LANES) * factors[r];
    for (long k = begin; k < end; k++)
      for (int v = 0; v < V; v++) {
        if constexpr (PAIRS) {
          WordVec value;
          memcpy(&value, (const uint32_t*)work.values + k * width + d + v * LANES, sizeof value);
          if constexpr (R == 1) value &= seen;
          for (int r = 0; r < R; r++) {
            uint32_t pair;
            memcpy(&pair, weights[r].of + k, sizeof pair);
            sums[r][v] = multiply_add_pairs(sums[r][v], value, pair);
          }
        } else {
          const Vec value = load(work.rows[k] + d + v * LANES);
          for (int r = 0; r < R; r++) sums[r][v] += value * weights[r].of[k];
        }
      }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store(to + r * width + d + v * LANES, sums[r][v]);
  }

  template <int R>
  void add_values(const Workspace& work, float* to, const Weights* weights, const float* factors, long begin, long end,
                  uint32_t seen = ~0u) const {
    long d = 0;
    for (; d + VECTORS * LANES <= width; d += VECTORS * LANES)
      add_values<R, VECTORS>(work, to, weights, factors, d, begin, end, seen);
    for (; d < width; d += LANES) add_values<R, 1>(work, to, weights, factors, d, begin, end, seen);
  }

  // The same for one row that sees only the keys first … last, which the units begin … end - 1 contain.
  void add_own(const Workspace& work, float* to, const Weights& weights, float factor, long first, long last,
               long begin, long end) const {
    if constexpr (PAIRS) {
      for (long k = begin; k < end; k++, factor = 1.0f) {
        const uint32_t seen = (2 * k < first ? 0xffff0000u : ~0u) & (2 * k + 1 > last ? 0x0000ffffu : ~0u);
        add_values<1>(work, to, &weights, &factor, k, k + 1, seen);
      }
      if (begin >= end && factor != 1.0f) add_values<1>(work, to, &weights, &factor, 0, 0);
    } else {
      add_values<1>(work, to, &weights, &factor, begin, end);
    }
  }

  template <int R>
  FLATTEN void run_rows(const Workspace& work, long r, long start, const State& state) const {
    long first[R], last[R];  // keys of the tile that a row sees, none if first > last; both are ascending
    for (int i = 0; i < R; i++) {
      first[i] = std::max(0l, oldest_of(r + i) - start);
      last[i] = std::min(TILE - 1, position_of(r + i) - start);
    }
    if (first[0] > last[R - 1]) return;
    float scores[R][TILE], factors[R];
    Weights weights[R];
    const long keys = rounded_up(last[R - 1] + 1, LANES);
    score<R>(work, r, scores, keys);
    softmax_weights<R>(work, r, scores, start, keys, state, weights, factors);
    float* to = state.values + r * width;
    // Values that a row does not see must be skipped, not multiplied by 0, since they may be NaN. Therefore units that not
    // all rows see completely, at either end, are added row by row.
    const long begin = (first[R - 1] + UNIT - 1) / UNIT, end = (last[0] + 1) / UNIT;
    const auto first_of = [&](int i) { return first[i] / UNIT; };
    const auto end_of = [&](int i) { return last[i] < first[i] ? first_of(i) : last[i] / UNIT + 1; };
    const bool have_same_keys = first[0] == first[R - 1] && last[0] == last[R - 1];
    if (have_same_keys && first_of(0) == begin && end_of(0) == end) {
      add_values<R>(work, to, weights, factors, begin, end);
      return;
    }
    for (int i = 0; i < R; i++)
      add_own(work, to + i * width, weights[i], factors[i], first[i], last[i], first_of(i), std::min(end_of(i), begin));
    std::fill(factors, factors + R, 1.0f);
    if (begin < end) add_values<R>(work, to, weights, factors, begin, end);
    for (int i = 0; i < R; i++)
      add_own(work, to + i * width, weights[i], 1.0f, first[i], last[i], std::max(std::max(begin, end), first_of(i)),
              end_of(i));
  }

#if defined(STOKER_AMX)
  // Scores and weights of up to 32 rows for a tile.
  struct Scored {
    alignas(64) float scores[2 * TILE_ROWS][TILE];
    Weights weights[2 * TILE_ROWS];
    float factors[2 * TILE_ROWS];
  };

  // The rows [first, end) that see keys of the tile. Excluding others makes a row's steps independent of the item.
  std::pair<long, long> rows_that_see(long start) const {
    long r = 0, end = rows;
    while (position_of(r) < start) r++;
    while (end > r && oldest_of(end - 1) >= start + TILE) end--;
    return {r, end};
  }

  // Number of the tile's first keys that are computed for `count` rows from `r` on: up to the last that one of them sees.
  long keys_seen(long r, long count, long start) const {
    return rounded_up(std::min(TILE - 1, position_of(r + count - 1) - start) + 1, KEYS);
  }

  // Processes a tile for all rows.
  void run_tile(const Workspace& work, long start, const State& state) const {
    auto [r, end] = rows_that_see(start);
    for (long count; r < end; r += count) {
      count = std::min(2 * TILE_ROWS, end - r);
      count > TILE_ROWS ? run_tiled<2>(work, r, count, start, state) : run_tiled<1>(work, r, count, start, state);
    }
  }

  // The same for up to M × 16 rows.
  template <int M>
  void run_tiled(const Workspace& work, long r, long count, long start, const State& state) const {
    const long keys = keys_seen(r, count, start);
    Scored scored;
    TilePrefetcher no_prefetcher;
    work.unit.set_for(std::min(count, TILE_ROWS), std::max(count - TILE_ROWS, 0l));
    score_tiled<M>(work, r, scored.scores, keys);
    add_scored<M>(work, r, count, start, keys, scored, state, no_prefetcher);
  }

  // Whether keys are multiplied in place: there are few rows, and each aligned group of 16 keys is in one block.
  bool are_keys_in_place() const {
    return PAIRS && rows <= TILE_ROWS && call.stored == BF16 && call.head_dim % (TILE_WORDS * WORD) == 0 &&
           call.block_size % TILE_ROWS == 0;
  }

  // Processes a tile of `keys` keys for all rows, with keys in place. Values are rearranged.
  void run_in_place(const Tile& tile, const Tile* next, long keys, const Workspace& work, long start,
                    const State& state) const {
    const long vectors = width / (UNIT * LANES), groups = (rows + ROWS - 1) / ROWS, size = sizeof(bf16);
    const long steps = keys / KEYS * (depth + width) / (TILE_WORDS * WORD);
    const long weight = keys / UNIT * vectors + steps * STEP_WEIGHT + groups * keys / LANES * SOFTMAX_WEIGHT;
    TilePrefetcher prefetcher =
        next ? TilePrefetcher(*next, call.value_dim * size, call.head_dim * size, weight) : TilePrefetcher();
    for (long j = 0; j < keys; j += UNIT) {
      prefetcher.fetch(vectors);
      pair_values((const bf16*)tile.values[j], (const bf16*)tile.values[j + 1], (uint32_t*)work.values + j / 2 * width);
    }
    const auto [r, end] = rows_that_see(start);
    if (r == end) return;
    const long oldest = oldest_of(0), newest = position_of(rows - 1), block_size = call.block_size;
    const auto keys_from = [&](long j) -> const char* {
      const long at = start + j;
      if (at + TILE_ROWS <= oldest || at > newest) return nullptr;
      const long block = call.tables[sequence * call.table_stride + at / block_size];
      return (const char*)call.keys +
             (block * call.key_block + at % block_size * call.key_slot + kv_head * call.key_head) * size;
    };
    Scored scored;
    work.unit.set_for(end - r, TILE_ROWS);
    const long seen = keys_seen(r, end - r, start);
    score_in_place(work.columns, depth / WORD, r, end - r, keys_from, call.key_slot * size, seen, scored.scores,
                   prefetcher);
    add_scored<1>(work, r, end - r, start, seen, scored, state, prefetcher);
  }

  // Applies the softmax to the scores, and adds the weighted values to the rows' sums.
  template <int M>
  void add_scored(const Workspace& work, long r, long count, long start, long keys, Scored& scored, const State& state,
                  TilePrefetcher& prefetcher) const {
    for (long i = 0; i < count; i += ROWS) {
      prefetcher.fetch(keys / LANES * SOFTMAX_WEIGHT);
      with_rows(std::min<long>(ROWS, count - i), [&](auto some) {
        softmax_weights<some>(work, r + i, scored.scores + i, start, keys, state, scored.weights + i,
                              scored.factors + i);
      });
    }
    float* const to = state.values + r * width;
    for (long i = 0; i < count; i++) {
      if (scored.factors[i] == 1.0f) continue;
      for (long d = 0; d < width; d += LANES) store(to + i * width + d, load(to + i * width + d) * scored.factors[i]);
    }
    const uint32_t* const values = (const uint32_t*)work.values;
    const bool all_seen = oldest_of(r + count - 1) <= start && start + keys - 1 <= position_of(r);
    if (all_seen || are_finite(values, keys / UNIT))
      add_tiled<M>(work, values, to, scored.weights, keys, prefetcher);
    else
      add_seen(work, r, count, start, to, scored.weights, keys);
  }

  template <int M>
  void score_tiled(const Workspace& work, long r, float (*scores)[TILE], long keys) const {
    const long stride = depth * sizeof(bf16);
    const char* queries = (const char*)work.queries + r * stride;
    for (long j = 0; j < keys; j += KEYS) {
      clear_sums<M, 2>();
      for (long d = 0; d < depth / WORD; d += TILE_WORDS) {
        const uint32_t* columns = work.keys + d * TILE + j;
        multiply_tiles<M, 2>(queries + d * 4, stride, columns, columns + TILE_COLUMNS, TILE * 4);
      }
      store_sums<M, 2>(scores[0] + j, sizeof scores[0]);
    }
  }

  // Adds weights × values of the tile's first keys to the rows' sums.
  template <int M>
  void add_tiled(const Workspace& work, const uint32_t* values, float* to, const Weights* weights, long keys,
                 TilePrefetcher& prefetcher) const {
    const long stride = width * 4;
    TileUnit::compiler_barrier(weights);
    for (long d = 0; d < width; d += 2 * TILE_COLUMNS) {
      load_sums<M, 2>(to + d, stride);
      for (long k = 0; k < keys / UNIT; k += TILE_WORDS) {
        prefetcher.fetch(STEP_WEIGHT);
        const uint32_t* columns = values + k * width + d;
        multiply_tiles<M, 2>(weights[0].of + k, sizeof(Weights), columns, columns + TILE_COLUMNS, stride);
      }
      store_sums<M, 2>(to + d, stride);
    }
  }

  // Whether the values of `units` units are all finite.
  bool are_finite(const uint32_t* values, long units) const {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 non_finite = 0;
    for (long i = 0; i < units * width; i += LANES)
      non_finite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(values + i), exponent), exponent);
    return non_finite == 0;
  }

  // The same row by row, with 0 in place of values that the row does not see: their weight of 0 times infinity would be NaN.
  void add_seen(const Workspace& work, long r, long count, long start, float* to, const Weights* weights,
                long keys) const {
    static thread_local Memory memory;
    TilePrefetcher no_prefetcher;
    bf16* const seen = (bf16*)memory.of(TILE / UNIT * width * sizeof(uint32_t));
    work.unit.set_for(1, 0);
    for (long i = 0; i < count; i++) {
      memcpy((void*)seen, work.values, keys / UNIT * width * sizeof(uint32_t));
      for (long j = 0; j < keys; j++) {
        if (start + j <= position_of(r + i) && start + j >= oldest_of(r + i)) continue;
        for (long d = 0; d < width; d++) seen[(j / 2 * width + d) * 2 + j % 2] = bf16{};
      }
      TileUnit::compiler_barrier(seen);
      add_tiled<1>(work, (const uint32_t*)seen, to + i * width, weights + i, keys, no_prefetcher);
    }
  }
#endif

  // Calls `run` with `count` as a compile-time constant.
  template <int R = ROWS, class Run>
  static void with_rows(long count, Run run) {
    if (count == R) return run(std::integral_constant<int, R>());
    if constexpr (R > 1) with_rows<R - 1>(count, run);
  }

  // Range of keys of a part that any row sees, extended to the start of a tile.
  long begin_of_part(long part) const { return std::max(begin_of(part), oldest_of(0) / TILE * TILE); }
  long end_of_part(long part) const { return std::min(begin_of(part + 1), position_of(rows - 1) + 1); }

  // Finds the first tile of a part.
  void locate_part(long part, Tile& tile) const { locate(begin_of_part(part), end_of_part(part), tile); }

  // Processes the keys of one part, whose first tile is located, for all rows. `locate_after` finds the tile after the part's
  // last one, if there is one, so that it is prefetched; after a part of a single tile nothing else would do that.
  template <class LocateAfter>
  void run_part(long part, Tiles& tiles, Workspace& work, const State& state, LocateAfter locate_after) const {
    state.clear(rows);
    const long end = end_of_part(part);
    for (long start = begin_of_part(part); start < end; start += TILE) {
      bool more = start + TILE < end;
      if (more)
        locate(start + TILE, end, tiles.next());
      else
        more = locate_after(tiles.next());
      const Tile* next = more ? &tiles.next() : nullptr;
      run_over(tiles.current(), next, std::min(TILE, rounded_up(end - start, KEYS)), work, start, state);
      tiles.advance();
    }
  }

  // Processes `keys` keys of a tile for all rows.
  void run_over(const Tile& tile, const Tile* next, long keys, Workspace& work, long start, const State& state) const {
#if defined(STOKER_AMX)
    if (are_keys_in_place()) return run_in_place(tile, next, keys, work, start, state);
#endif
    rearrange(tile, next, keys, work);
    if constexpr (TILED)
      this->run_tile(work, start, state);  // `this->`: defined only with AMX
    else
      for (long r = 0; r < rows; r += ROWS)
        with_rows(std::min<long>(ROWS, rows - r), [&](auto count) { run_rows<count>(work, r, start, state); });
  }

  // The final factor of row `r`'s values. A sink is a key without a value, which each row of its head sees last.
  float norm_of(long r, const State& state) const {
    if (!call.sinks) return 1.0f / state.weight[r];
    const float sink = call.sinks[head_of(r)], largest = std::max(state.largest[r], sink);
    const float factor = correction(state.largest[r], largest);
    return factor / (state.weight[r] * factor + correction(sink, largest));
  }

  void put(const State& state) const { call.is_bf16 ? put_as<bf16>(state) : put_as<float>(state); }

  template <class T>
  void put_as(const State& state) const {
    for (long r = 0; r < rows; r++) {
      T* to = (T*)call.out + (query_of(r) * call.heads + head_of(r)) * call.value_dim;
      const float norm = norm_of(r, state);
      if constexpr (PAIRS) {
        for (long d = 0; d < call.value_dim; d += 2 * LANES) {  // even indices, then odd ones: see pair_values
          const auto words = [&](long i) {
            return __builtin_convertvector(nearest_bf16(load(state.values + r * width + d + i) * norm), WordVec);
          };
          const WordVec both = words(0) | words(LANES) << 16;
          const long remaining = call.value_dim - d;
          if (remaining >= 2 * LANES)
            memcpy((void*)(to + d), &both, sizeof both);  // usual; constant size, so no call
          else
            memcpy((void*)(to + d), &both, remaining * sizeof(bf16));
        }
        continue;
      }
      for (long d = 0; d < call.value_dim; d += LANES)
        store_up_to(to + d, load(state.values + r * width + d) * norm, call.value_dim - d);
    }
  }
};

}  // namespace
