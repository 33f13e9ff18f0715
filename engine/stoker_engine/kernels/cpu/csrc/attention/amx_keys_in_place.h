// Scores of up to 16 rows by AMX with keys in place in the cache: 16 keys are the rows of a tile, and queries its
// columns. For few rows this is less work than rearranging keys; each score is the same sum in the same order.
#pragma once

#include "attention/amx_attention.h"
#include "attention/rearrange_tile.h"

#if defined(STOKER_AMX)
namespace {

// Transposes up to 16 queries, [rows][words] of two elements each, to [words][16]; `words` is a multiple of 16.
inline void transpose_queries(const uint32_t* queries, long rows, long words, uint32_t* to) {
  for (long w = 0; w < words; w += TILE_WORDS) {
    WordVec block[TILE_COLUMNS] = {};
    for (long r = 0; r < rows; r++) memcpy(&block[r], queries + r * words + w, sizeof block[r]);
    transpose(block);
    memcpy((void*)(to + w * TILE_COLUMNS), block, sizeof block);
  }
  TileUnit::compiler_barrier(to);
}

// Transposes the scores of 16 keys × ROWS queries (rows of 16) to a vector for each query.
inline void transpose_scores(const float* from, Vec* to) {
  __m512 quads[4];  // four scores of each of the keys i, i + 4, i + 8, i + 12
  for (int i = 0; i < 4; i++) {
    const auto quad = [&](int n) { return _mm_loadu_ps(from + (i + 4 * n) * TILE_COLUMNS); };
    quads[i] = _mm512_castps128_ps512(quad(0));
    quads[i] = _mm512_insertf32x4(quads[i], quad(1), 1);
    quads[i] = _mm512_insertf32x4(quads[i], quad(2), 2);
    quads[i] = _mm512_insertf32x4(quads[i], quad(3), 3);
  }
  // interleave i and i + 1, then those with i + 2 and i + 3
  const auto low = [](__m512 a, __m512 b) { return (__m512d)_mm512_unpacklo_ps(a, b); };
  const auto high = [](__m512 a, __m512 b) { return (__m512d)_mm512_unpackhi_ps(a, b); };
  const __m512d a = low(quads[0], quads[1]), b = low(quads[2], quads[3]);
  const __m512d c = high(quads[0], quads[1]), d = high(quads[2], quads[3]);
  to[0] = (Vec)_mm512_unpacklo_pd(a, b), to[1] = (Vec)_mm512_unpackhi_pd(a, b);
  to[2] = (Vec)_mm512_unpacklo_pd(c, d), to[3] = (Vec)_mm512_unpackhi_pd(c, d);
}

// Computes scores of a tile's first `keys` keys, a multiple of 32, for rows `first` … `first` + `count` - 1 of
// transposed queries. `keys_from(j)` returns the address of 16 keys from j on, `stride` bytes apart, or null if no row
// sees any of them: their scores are undefined. The tile unit must be set for `count` and 16 rows.
template <class KeysFrom>
inline void score_in_place(const uint32_t* columns, long words, long first, long count, KeysFrom keys_from, long stride,
                           long keys, float (*scores)[TILE], TilePrefetcher& prefetcher) {
  alignas(64) float sums[TILE * TILE_COLUMNS + ROWS];  // transpose_scores may load beyond the last row
  for (long j = 0; j < keys; j += 2 * TILE_ROWS) {
    const char *first_keys = keys_from(j), *second_keys = keys_from(j + TILE_ROWS);
    if (!first_keys) first_keys = second_keys;
    if (!second_keys) second_keys = first_keys;
    _tile_zero(2);
    _tile_zero(3);
    for (long w = 0; w < words && first_keys; w += TILE_WORDS) {
      prefetcher.fetch(STEP_WEIGHT);
      _tile_loadd(4, columns + w * TILE_COLUMNS, 4 * TILE_COLUMNS);
      _tile_loadd(7, first_keys + 4 * w, stride);
      _tile_dpbf16ps(2, 7, 4);
      _tile_loadd(5, second_keys + 4 * w, stride);
      _tile_dpbf16ps(3, 5, 4);
    }
    _tile_stored(2, sums + j * TILE_COLUMNS, 4 * TILE_COLUMNS);
    _tile_stored(3, sums + (j + TILE_ROWS) * TILE_COLUMNS, 4 * TILE_COLUMNS);
  }
  for (long j = 0; j < keys; j += LANES)
    for (long i = 0; i < count; i += ROWS) {
      Vec rows[ROWS];
      transpose_scores(sums + j * TILE_COLUMNS + first + i, rows);
      for (long n = 0; n < std::min<long>(ROWS, count - i); n++) store(scores[i + n] + j, rows[n]);
    }
}

// Whether keys are multiplied in place: there are few rows, and each aligned group of 16 keys is in one block.
inline bool are_keys_in_place(const QueryRows& rows) {
  const AttentionCall& call = rows.call;
  return rows.num_rows <= TILE_ROWS && call.stored == BF16 &&
         call.head_dim % (TILE_WORDS * PairArithmetic::WORD) == 0 && call.block_size % TILE_ROWS == 0;
}

// Processes a tile of `keys` keys for all rows, with keys in place. Values are rearranged.
inline void attend_in_place(const QueryRows& rows, const Tile& tile, const Tile* next, long keys, AmxWorkspace& work,
                            long start, const State& state) {
  const AttentionCall& call = rows.call;
  const long width = work.width, words = work.query_words();
  const long vectors = width / (UNIT * LANES), groups = (rows.num_rows + ROWS - 1) / ROWS, size = sizeof(bf16);
  const long steps = keys / SCORED_KEYS * (work.depth + width) / (TILE_WORDS * PairArithmetic::WORD);
  const long weight = keys / UNIT * vectors + steps * STEP_WEIGHT + groups * keys / LANES * SOFTMAX_WEIGHT;
  TilePrefetcher prefetcher =
      next ? TilePrefetcher(*next, call.value_dim * size, call.head_dim * size, weight) : TilePrefetcher();
  for (long j = 0; j < keys; j += UNIT) {
    prefetcher.fetch(vectors);
    pair_values((const bf16*)tile.values[j], (const bf16*)tile.values[j + 1], call.value_dim,
                work.values + j / 2 * width, width);
  }
  const auto [r, end] = rows_that_see(rows, start);
  if (r == end) return;
  const long oldest = rows.oldest(), newest = rows.newest(), block_size = call.block_size;
  const auto keys_from = [&](long j) -> const char* {
    const long at = start + j;
    if (at + TILE_ROWS <= oldest || at > newest) return nullptr;
    const long block = call.tables[rows.sequence * call.table_stride + at / block_size];
    return (const char*)call.keys +
           (block * call.key_block + at % block_size * call.key_slot + rows.kv_head * call.key_head) * size;
  };
  Scored scored;
  work.unit.set_for(end - r, TILE_ROWS);
  const long seen = keys_seen(rows, r, end - r, start);
  score_in_place(work.columns, words, r, end - r, keys_from, call.key_slot * size, seen, scored.scores, prefetcher);
  add_scored<1>(rows, work, r, end - r, start, seen, scored, state, prefetcher);
}

}  // namespace
#endif
