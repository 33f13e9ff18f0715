// Causal attention of a flat batch against the paged cache, by the online softmax (Milakov & Gimelshein, 2018; Dao et
// al., 2022) in float32.
//
// Keys are taken in tiles of TILE that start at position 0, and tiles in parts of PART keys. A row (one query of one
// head) runs through a part's tiles in order, and the parts' results are merged in order, whether one thread does all
// of it or each part is another's. So a row's result depends on its own sequence alone, bit for bit: not on the batch,
// not on the chunk it is computed in, not on the number of threads.
//
// What is stored in 8 bits stands for itself times a scale: scores are multiplied by those of keys, and weights by those
// of values, so that numbers are multiplied as they are stored.
//
// Work is shared by (sequence, key head, tile of queries); a lone query of a long sequence is shared by parts too.
#include <algorithm>
#include <limits>
#include <vector>

#include "attention.h"
#include "stored_numbers.h"
#include "threads.h"

namespace {

constexpr long TILE = 64, PART = 1024;
constexpr int ROWS = 4;                       // rows that share a key while it is in a register
constexpr int VECTORS = LANES == 16 ? 4 : 2;  // vectors of each of these rows in registers
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

inline long rounded_up(long n, long to) { return (n + to - 1) / to * to; }

// The softmax of some keys so far: the largest score, the sum of exp(score - largest), and with these weights the sum
// of the values, [rows][width].
struct State {
  float *largest, *weight, *values;
  long width;

  static long size(long rows, long width) { return rows * (width + 2); }
  State(float* memory, long rows, long width)
      : largest(memory), weight(memory + rows), values(memory + 2 * rows), width(width) {}
  void clear(long rows) const {
    std::fill(largest, largest + rows, NOTHING);
    std::fill(weight, weight + rows, 0.0f);
    std::fill(values, values + rows * width, 0.0f);
  }
};

inline float exp_of(float x) { return ::exp_of(broadcast(x))[0]; }

// What a state is multiplied by when its largest score becomes `to`.
inline float correction(float from, float to) {
  if (from == to) return 1.0f;
  return from == NOTHING ? 0.0f : exp_of(from - to);
}

void merge(const State& total, const State& part, long rows) {
  for (long r = 0; r < rows; r++) {
    const float largest = std::max(total.largest[r], part.largest[r]);
    const float a = correction(total.largest[r], largest), b = correction(part.largest[r], largest);
    total.largest[r] = largest;
    total.weight[r] = total.weight[r] * a + part.weight[r] * b;
    float *to = total.values + r * total.width, *from = part.values + r * part.width;
    for (long i = 0; i < total.width; i += LANES) store(to + i, load(to + i) * a + load(from + i) * b);
  }
}

inline long size_of(long stored) { return stored == FLOAT ? 4 : stored == BF16 ? 2 : 1; }

// Where a tile's keys, values and scales lie in the cache.
struct Tile {
  const char *keys[TILE], *values[TILE];
  const float *key_scales[TILE], *value_scales[TILE];
};

// Asks for `size` bytes that are needed soon. Blocks lie apart, so the processor does not foresee them.
inline void fetch(const char* from, long size) {
  for (long i = 0; i < size; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// What a thread works on: an item's queries, and a tile brought into the form that rows are multiplied with.
struct Workspace {
  float* queries;          // [rows][depth], padded with 0
  uint32_t* keys;          // [depth / numbers in a word][TILE]: a vector holds a word of LANES keys
  float* values;           // [TILE][width]
  const float* rows[TILE];  // of the values: here, or in the cache if that holds floats
  float key_scales[TILE], value_scales[TILE];

  static long size(long rows, long depth, long width) { return rows * depth + TILE * (depth + width); }
  Workspace(float* memory, long rows, long depth)
      : queries(memory), keys((uint32_t*)(memory + rows * depth)), values(memory + (rows + TILE) * depth) {}
};

// Words of one or two numbers of LANES keys × a query's numbers, added to the scores.
inline Vec add_products(Vec scores, WordVec keys, const float* query, float) { return scores + (Vec)keys * query[0]; }
inline Vec add_products(Vec scores, WordVec keys, const float* query, bf16) {
  scores += (Vec)(keys << 16) * query[0];
  return scores + (Vec)(keys & 0xffff0000u) * query[1];
}

// Some consecutive queries of one sequence with all heads of one key head: rows are (query, head of the group).
// K: what keys are in the workspace, float or bf16.
template <class K>
struct Item {
  static constexpr long WORD = 4 / sizeof(K);  // numbers in a word

  const AttentionCall& call;
  long sequence, kv_head, first, count;  // first query, as a row of the flat batch, and how many
  long position;                         // of the first query
  long group = call.heads / call.kv_heads;
  long rows = count * group;
  long depth = depth_of(call), width = width_of(call);

  static long depth_of(const AttentionCall& call) { return rounded_up(call.head_dim, LANES * WORD); }
  static long width_of(const AttentionCall& call) { return rounded_up(call.value_dim, LANES); }

  long position_of(long row) const { return position + row / group; }
  long head_of(long row) const { return kv_head * group + row % group; }
  long oldest_of(long row) const { return call.window ? std::max(0l, position_of(row) + 1 - call.window) : 0; }

  void read_queries(float* to) const { call.is_bf16 ? read_queries_of<bf16>(to) : read_queries_of<float>(to); }

  template <class T>
  void read_queries_of(float* to) const {
    for (long r = 0; r < rows; r++) {
      const T* from = (const T*)call.query + (first + r / group) * call.query_token + head_of(r) * call.query_head;
      for (long d = 0; d < depth; d += LANES) {
        const long left = std::max(0l, call.head_dim - d);
        store(to + r * depth + d, left >= LANES ? load(from + d) : load_part(from + d, left));
      }
    }
  }

  // The keys from `start` to before `end`; those that are missing to a whole tile repeat the last. Tiles begin where they
  // do for every row, also below the window: keys that it has left repeat its oldest, since their blocks are others'.
  void locate(long start, long end, Tile& tile) const {
    const int32_t* table = call.tables + sequence * call.table_stride;
    const long oldest = oldest_of(0), size = size_of(call.stored);
    const char *keys = (const char*)call.keys + kv_head * call.key_head * size;
    const char *values = (const char*)call.values + kv_head * call.value_head * size;
    const float *key_scales = call.key_scales + kv_head * call.key_scale_head;
    const float *value_scales = call.value_scales + kv_head * call.value_scale_head;
    for (long j = 0; j < TILE; j++) {
      const long at = std::min(std::max(start + j, oldest), end - 1);
      const long block = table[at / call.block_size], slot = at % call.block_size;
      tile.keys[j] = keys + (block * call.key_block + slot * call.key_slot) * size;
      tile.values[j] = values + (block * call.value_block + slot * call.value_slot) * size;
      if (!call.key_scales) continue;
      tile.key_scales[j] = key_scales + block * call.key_scale_block + slot * call.key_scale_slot;
      tile.value_scales[j] = value_scales + block * call.value_scale_block + slot * call.value_scale_slot;
    }
  }

  // Brings `keys` of the tile into the workspace, and meanwhile fetches the next tile.
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
  void rearrange_stored(const Tile& tile, const Tile* next, long keys, Workspace& work) const {
    for (long j = 0; j < keys; j += LANES) {
      if (next)
        for (long k = j; k < j + LANES; k++) fetch(next->keys[k], call.head_dim * sizeof(S));
      for (long d = 0; d < depth; d += LANES * WORD) {
        WordVec taken[LANES];
        const long left = call.head_dim - d;
        for (int k = 0; k < LANES; k++) {
          const S* from = (const S*)tile.keys[j + k] + d;
          taken[k] = left >= LANES * WORD ? words(from) : words_part(from, left);
        }
        transpose(taken);
        for (int i = 0; i < LANES; i++) memcpy(work.keys + (d / WORD + i) * TILE + j, &taken[i], sizeof(WordVec));
      }
    }
    for (long j = 0; j < keys; j++) {
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

  template <int R>
  void score(const Workspace& work, long r, float (*scores)[TILE], long keys) const {
    for (long j = 0; j < keys; j += VECTORS * LANES) {
      Vec sums[R][VECTORS] = {};
      const float* query = work.queries + r * depth;
      for (long d = 0; d < depth / WORD; d++)
        for (int v = 0; v < VECTORS; v++) {
          WordVec words;
          memcpy(&words, work.keys + d * TILE + j + v * LANES, sizeof words);
          for (int i = 0; i < R; i++) sums[i][v] = add_products(sums[i][v], words, query + i * depth + d * WORD, K());
        }
      for (int i = 0; i < R; i++)
        for (int v = 0; v < VECTORS; v++) store(scores[i] + j + v * LANES, sums[i][v]);
    }
  }

  // Scores of row `r` for the keys from `start` → weights, 0 where it sees none, times the values' scales; returns the
  // correction.
  float weigh(const Workspace& work, long r, float* scores, long start, const State& state) const {
    const float at = (float)position_of(r), oldest = (float)oldest_of(r);
    const float slope = call.alibi_slopes ? call.alibi_slopes[head_of(r)] : 0.0f;
    const bool all_seen = start + TILE - 1 <= position_of(r) && start >= oldest_of(r);
    Vec steps;
    for (int i = 0; i < LANES; i++) steps[i] = (float)i;
    Vec most = broadcast(NOTHING);
    for (long j = 0; j < TILE; j += LANES) {
      Vec s = load(scores + j) * call.scale;
      if (call.key_scales) s *= load(work.key_scales + j);
      if (call.soft_cap != 0) s = tanh_of(s / call.soft_cap) * call.soft_cap;
      if (!all_seen || slope != 0) {
        // Positions are small next to 2²⁴, so floats hold them exactly.
        const Vec positions = steps + (float)(start + j);
        if (slope != 0) s += slope * (positions - at);
        s = positions <= at ? s : broadcast(NOTHING);
        s = positions >= oldest ? s : broadcast(NOTHING);
      }
      store(scores + j, s);
      most = larger(most, s);
    }
    const float before = state.largest[r], largest = std::max(before, max_of(most));
    if (largest == NOTHING) {
      std::fill(scores, scores + TILE, 0.0f);
      return 1.0f;
    }
    Vec sum = {};
    for (long j = 0; j < TILE; j += LANES) {
      const Vec p = ::exp_of(load(scores + j) - largest);
      store(scores + j, call.key_scales ? p * load(work.value_scales + j) : p);
      sum += p;
    }
    const float factor = correction(before, largest);
    state.largest[r] = largest;
    state.weight[r] = state.weight[r] * factor + sum_of(sum);
    return factor;
  }

  // Multiplies R rows by their corrections and adds weights × values, for the keys first … last of the tile.
  template <int R, int V>
  void add_values(const Workspace& work, float* to, const float (*weights)[TILE], const float* factors, long d,
                  long first, long last) const {
    Vec sums[R][V];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) sums[r][v] = load(to + r * width + d + v * LANES) * factors[r];
    for (long k = first; k <= last; k++)
      for (int v = 0; v < V; v++) {
        const Vec value = load(work.rows[k] + d + v * LANES);
        for (int r = 0; r < R; r++) sums[r][v] += value * weights[r][k];
      }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store(to + r * width + d + v * LANES, sums[r][v]);
  }

  template <int R>
  void add_values(const Workspace& work, float* to, const float (*weights)[TILE], const float* factors, long first,
                  long last) const {
    long d = 0;
    for (; d + VECTORS * LANES <= width; d += VECTORS * LANES)
      add_values<R, VECTORS>(work, to, weights, factors, d, first, last);
    for (; d < width; d += LANES) add_values<R, 1>(work, to, weights, factors, d, first, last);
  }

  template <int R>
  void run_rows(const Workspace& work, long r, long start, const State& state) const {
    long first[R], last[R];  // keys of the tile that a row sees, none where first > last; both grow from row to row
    for (int i = 0; i < R; i++) {
      first[i] = std::max(0l, oldest_of(r + i) - start);
      last[i] = std::min(TILE - 1, position_of(r + i) - start);
    }
    if (first[0] > last[R - 1]) return;
    float scores[R][TILE] = {}, factors[R];
    score<R>(work, r, scores, last[R - 1] + 1);
    for (int i = 0; i < R; i++) factors[i] = weigh(work, r + i, scores[i], start, state);
    float* to = state.values + r * width;
    if (first[0] == first[R - 1] && last[0] == last[R - 1]) {
      add_values<R>(work, to, scores, factors, first[0], last[0]);
      return;
    }
    // A value that a row does not see is left out, not multiplied by 0: it may be nan. So what only some rows see, at
    // either end, goes to each of them alone.
    for (int i = 0; i < R; i++)
      add_values<1>(work, to + i * width, scores + i, factors + i, first[i], std::min(last[i], first[R - 1] - 1));
    std::fill(factors, factors + R, 1.0f);
    add_values<R>(work, to, scores, factors, first[R - 1], last[0]);
    for (int i = 0; i < R; i++)
      add_values<1>(work, to + i * width, scores + i, factors + i, std::max(first[R - 1], last[0] + 1), last[i]);
  }

  // Runs all rows over the keys of one part.
  void run_part(long part, Workspace& work, const State& state) const {
    state.clear(rows);
    const long end = std::min((part + 1) * PART, position_of(rows - 1) + 1);
    const long begin = std::max(part * PART, oldest_of(0) / TILE * TILE);
    Tile tiles[2];
    if (begin < end) locate(begin, end, tiles[0]);
    for (long start = begin, turn = 0; start < end; start += TILE, turn ^= 1) {
      Tile* next = start + TILE < end ? &tiles[turn ^ 1] : nullptr;
      if (next) locate(start + TILE, end, *next);
      rearrange(tiles[turn], next, std::min(TILE, rounded_up(end - start, LANES)), work);
      for (long r = 0; r < rows; r += ROWS) {
        const long left = rows - r;
        if (left >= 4)
          run_rows<4>(work, r, start, state);
        else if (left == 3)
          run_rows<3>(work, r, start, state);
        else if (left == 2)
          run_rows<2>(work, r, start, state);
        else
          run_rows<1>(work, r, start, state);
      }
    }
  }

  // What the values of row `r` are multiplied by at the end. A sink is a key without a value, which each row of its head
  // sees last.
  float share_of(long r, const State& state) const {
    if (!call.sinks) return 1.0f / state.weight[r];
    const float sink = call.sinks[head_of(r)], largest = std::max(state.largest[r], sink);
    const float factor = correction(state.largest[r], largest);
    return factor / (state.weight[r] * factor + correction(sink, largest));
  }

  void put(const State& state) const { call.is_bf16 ? put_as<bf16>(state) : put_as<float>(state); }

  template <class T>
  void put_as(const State& state) const {
    for (long r = 0; r < rows; r++) {
      T* to = (T*)call.out + ((first + r / group) * call.heads + head_of(r)) * call.value_dim;
      const float share = share_of(r, state);
      for (long d = 0; d < call.value_dim; d += LANES)
        store_up_to(to + d, load(state.values + r * width + d) * share, call.value_dim - d);
    }
  }
};

inline long parts_until(long position) { return position / PART + 1; }

template <class K>
void attend(const AttentionCall& call) {
  struct Work {
    long sequence, first, count, position;
    long part;     // -1: all of them, one after another
    long scratch;  // where the part's state goes
  };
  std::vector<Work> work;
  const long group = call.heads / call.kv_heads;
  const long queries = std::max(1l, 32 / group);  // enough rows that keys are read rarely, few enough to share out
  const long depth = Item<K>::depth_of(call), width = Item<K>::width_of(call);
  const long state_size = State::size(queries * group, width), part_size = State::size(group, width);
  const long work_size = Workspace::size(queries * group, depth, width);
  long scratch = 0;
  for (long s = 0; s < call.sequences; s++) {
    const long start = call.query_starts[s], count = call.query_starts[s + 1] - start;
    const long position = call.seq_lens[s] - count;
    const long oldest = call.window ? std::max(0l, position + 1 - call.window) : 0;
    if (count == 1 && oldest / PART + 1 < parts_until(position)) {
      for (long part = oldest / PART; part < parts_until(position); part++)
        work.push_back({s, start, 1, position, part, scratch++});
    } else {
      for (long q = 0; q < count; q += queries)
        work.push_back({s, start + q, std::min(queries, count - q), position + q, -1, -1});
    }
  }
  std::vector<float> states(scratch * call.kv_heads * part_size);
  const auto state_of = [&](const Work& w, long head) {
    return State(states.data() + (w.scratch * call.kv_heads + head) * part_size, group, width);
  };
  const long heads = call.kv_heads, total = (long)work.size();

  // Kept between calls: the largest, for latent attention, would cost page faults each time.
  const auto memory = [&] {
    thread_local std::vector<float> kept;
    if ((long)kept.size() < 2 * state_size + work_size) kept.resize(2 * state_size + work_size);
    return kept.data();
  };
  parallel(total * heads, [&](Pieces& pieces) {
    float* own = memory();
    Workspace space(own + 2 * state_size, queries * group, depth);
    for (long piece; pieces.take(piece);) {
      const Work& w = work[total - 1 - piece / heads];  // a sequence's last queries first: they see the most keys
      const long head = piece % heads;
      const Item<K> item{call, w.sequence, head, w.first, w.count, w.position};
      item.read_queries(space.queries);
      if (w.part >= 0) {
        item.run_part(w.part, space, state_of(w, head));
        continue;
      }
      const State sum(own, item.rows, width), part(own + state_size, item.rows, width);
      sum.clear(item.rows);
      for (long p = item.oldest_of(0) / PART; p < parts_until(item.position_of(item.rows - 1)); p++) {
        item.run_part(p, space, part);
        merge(sum, part, item.rows);
      }
      item.put(sum);
    }
  });
  if (!scratch) return;
  parallel(total * heads, [&](Pieces& pieces) {
    const State sum(memory(), group, width);
    for (long piece; pieces.take(piece);) {
      const long i = piece / heads, head = piece % heads;
      const Work& w = work[i];
      if (w.part < 0 || (i > 0 && work[i - 1].part >= 0 && work[i - 1].sequence == w.sequence)) continue;
      const Item<K> item{call, w.sequence, head, w.first, w.count, w.position};
      sum.clear(group);
      for (long j = i; j < total && work[j].part >= 0 && work[j].sequence == w.sequence; j++)
        merge(sum, state_of(work[j], head), group);
      item.put(sum);
    }
  });
}

// Where new keys or values come from, and where they go.
struct Rows {
  const void* from;
  long token, head;  // strides
  void* to;
  long block, slot, to_head;
  float* scales;
  long scale_block, scale_slot, scale_head;
  long width;
};

// The scale of a vector whose numbers are to be no larger than `largest`; not-a-number if one of them is none.
template <class T>
inline float scale_of(const T* from, long width, float largest) {
  Vec most{}, nothing{};
  for (long d = 0; d < width; d += LANES) {
    const Vec v = load_up_to(from + d, width - d);
    most = larger(most, larger(v, -v));
    nothing += v - v;  // 0, or not-a-number
  }
  const float scale = max_of(most) / largest + sum_of(nothing);
  return scale == 0 ? 1 : scale;
}

template <class S, class T>
inline void store_scaled(S* to, const T* from, float scale, long width) {
  const Vec largest = broadcast(S::LARGEST), divisor = broadcast(scale);
  for (long d = 0; d < width; d += LANES) {
    const Vec x = load_up_to(from + d, width - d);
    Vec v = x / divisor;
    v = v > largest ? largest : v;
    v = v < -largest ? -largest : v;
    store_up_to(to + d, v + (x - x), width - d);
  }
}

template <class T, class S>
void store_rows(const AttentionCall& call, const Rows& rows) {
  parallel_for(call.tokens >= 128, call.tokens, [&](long t) {
    const long block = call.slots[t] / call.block_size, slot = call.slots[t] % call.block_size;
    for (long h = 0; h < call.kv_heads; h++) {
      const T* from = (const T*)rows.from + t * rows.token + h * rows.head;
      S* to = (S*)rows.to + block * rows.block + slot * rows.slot + h * rows.to_head;
      if constexpr (sizeof(S) == 1) {
        float* scale = rows.scales + block * rows.scale_block + slot * rows.scale_slot + h * rows.scale_head;
        if (call.scales_of_tokens) *scale = scale_of(from, rows.width, S::LARGEST);
        store_scaled(to, from, *scale, rows.width);
      } else if constexpr (sizeof(S) == sizeof(T)) {
        memcpy((void*)to, from, rows.width * sizeof(T));
      } else {
        for (long d = 0; d < rows.width; d += LANES)
          store_up_to(to + d, load_up_to(from + d, rows.width - d), rows.width - d);
      }
    }
  });
}

template <class T>
void store_all(const AttentionCall& c, const Rows& rows) {
  switch (c.stored) {
    case FLOAT: return store_rows<T, float>(c, rows);
    case BF16: return store_rows<T, bf16>(c, rows);
    case E4M3: return store_rows<T, e4m3>(c, rows);
    case E5M2: return store_rows<T, e5m2>(c, rows);
    case INT8: return store_rows<T, int8>(c, rows);
  }
}

template <class T>
void store_new(const AttentionCall& c) {
  store_all<T>(c, {c.new_keys, c.new_key_token, c.new_key_head, c.keys, c.key_block, c.key_slot, c.key_head,
                   c.key_scales, c.key_scale_block, c.key_scale_slot, c.key_scale_head, c.head_dim});
  if (c.new_values)
    store_all<T>(c, {c.new_values, c.new_value_token, c.new_value_head, c.values, c.value_block, c.value_slot,
                     c.value_head, c.value_scales, c.value_scale_block, c.value_scale_slot, c.value_scale_head,
                     c.value_dim});
}

}  // namespace

extern "C" void stoker_attention(const AttentionCall* call) {
  call->is_bf16 ? store_new<bf16>(*call) : store_new<float>(*call);
  call->stored == FLOAT ? attend<float>(*call) : attend<bf16>(*call);
}
