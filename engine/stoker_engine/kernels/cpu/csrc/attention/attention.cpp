// Causal attention of a flat batch against the paged cache, by the online softmax (Milakov & Gimelshein, 2018; Dao et
// al., 2022) in float32.
//
// Keys are processed in tiles of TILE keys from position 0 on, and tiles in parts (key_parts.h). A row (one query of
// one head) processes a part's tiles in order, and the parts' results are merged in order, regardless of which threads
// compute them. So a row's bits depend only on its own sequence, not on the batch, the chunk of the prompt, or the
// number of threads.
//
// 8-bit elements are multiplied without their scales: scores are multiplied by the scales of keys, and weights by those
// of values.
//
// Work is split by (sequence, KV head, group of queries). Decodes that see several parts are also split by parts; a
// part that several of them share as a common prefix is read once (cascade).
#include <algorithm>
#include <vector>

#include "attention/attention_item.h"
#include "attention/store_tokens.h"
#include "common/memory.h"
#include "common/threads.h"

namespace {

// Limit, in bytes, of softmax states that wait to be merged; decodes that need more are processed in several waves.
constexpr long MAX_STATE_BYTES = 32 << 20;

// If each sequence has one query, and there are at least this many work items for each thread, a thread takes all heads
// of an item: their keys and values are adjacent, which suits hardware prefetchers.
constexpr long MIN_ITEMS_PER_THREAD = 8;

// The pieces of a thread, `num_adjacent` neighbours at a time. The next piece is known early, so that its data can be
// prefetched; only the last pieces are left for the first free thread.
class PieceQueue {
 public:
  PieceQueue(Pieces& pieces, long num_adjacent) : pieces_(pieces), num_adjacent_(num_adjacent) { advance(); }
  bool is_done() const { return is_done_; }
  long current() const { return current_; }
  bool is_next_known() const { return is_next_known_; }
  long next() const { return next_; }

  void advance() {
    if (!is_next_known_) {
      is_done_ = !pieces_.take(next_);
      next_ *= num_adjacent_;
    }
    current_ = next_++;
    is_next_known_ = next_ % num_adjacent_ != 0;
    if (is_next_known_ || is_done_) return;
    is_next_known_ = pieces_.take_early(next_);
    next_ *= num_adjacent_;
  }

 private:
  Pieces& pieces_;
  const long num_adjacent_;
  long current_ = 0, next_ = 0;
  bool is_next_known_ = false, is_done_ = false;
};

// A work item: queries of one sequence with all of their keys, or decodes with one part of their keys.
struct Work {
  long sequence;      // sequence whose blocks are read
  long first, count;  // queries: rows of the flat batch; for a part, indices of decodes in `Decodes`
  long position;      // position of the first query
  long part;          // -1 for all parts, one after another
  long waiting;       // for a part, index of its first state among the waiting states
};

// The decodes of a step that see keys of more than one part. Parts are distributed to threads, and a complete part that
// several decodes have in the same blocks is read once for all of them.
class Decodes {
 public:
  Decodes(const AttentionCall& call, long max_queries) : call_(call), max_queries_(max_queries) {}

  // Adds a decode if it sees keys of more than one part; returns whether it does.
  bool take(long sequence, long position) {
    const long first = part_at(oldest_of(position)), parts = part_at(position) + 1 - first;
    if (parts < 2) return false;
    all_.push_back({sequence, position, first, parts, 0});
    return true;
  }

  // To be called after all decodes are added.
  void sort() {
    std::stable_sort(all_.begin(), all_.end(), [&](const Decode& a, const Decode& b) { return is_before(a, b); });
    for (const Decode& each : all_) query_rows_.push_back(call_.query_starts[each.sequence]);
  }

  // Appends the parts of decodes from `first` on to `work`: of at least one, then as many as `room` states allow.
  // Returns the index of the next decode.
  long share_out(long first, long room, std::vector<Work>& work) {
    long last = first, last_part = 0, pieces = 0;
    for (; last < size() && (last == first || pieces + all_[last].parts <= room); last++) {
      Decode& each = all_[last];
      each.piece = pieces, pieces += each.parts;
      last_part = std::max(last_part, each.first_part + each.parts);
    }
    pieces_.resize(pieces);
    waiting = 0;
    for (long part = 0; part < last_part; part++)
      for (long i = first, count; i < last; i += count) {
        count = 1;
        const Decode& decode = all_[i];
        if (part < decode.first_part || part >= decode.first_part + decode.parts) continue;
        while (count < max_queries_ && i + count < last && have_same_blocks(all_[i + count - 1], all_[i + count], part))
          count++;
        const long position = count > 1 ? begin_of(part + 1) - 1 : decode.position;
        for (long n = 0; n < count; n++) {
          const Decode& each = all_[i + n];
          pieces_[each.piece + part - each.first_part] = {(long)work.size(), n};
        }
        work.push_back({decode.sequence, i, count, position, part, waiting});
        waiting += count;
      }
    return last;
  }

  long size() const { return all_.size(); }
  const long* query_rows(const Work& work) const { return query_rows_.data() + work.first; }

  // Calls `each` for the parts of decode i, in order, with the index of the work item and of the query in it.
  template <class Each>
  void parts_of(long i, Each each) const {
    for (long n = all_[i].piece; n < all_[i].piece + all_[i].parts; n++) each(pieces_[n].work, pieces_[n].query);
  }
  Work whole(long i) const { return {all_[i].sequence, query_rows_[i], 1, all_[i].position, -1, -1}; }

  long waiting = 0;  // number of waiting states, one for each query and part

 private:
  struct Decode {
    long sequence, position, first_part, parts, piece;
  };
  struct Piece {
    long work, query;
  };

  long oldest_of(long position) const { return call_.window ? std::max(0l, position + 1 - call_.window) : 0; }
  const int32_t* table(const Decode& of) const { return call_.tables + of.sequence * call_.table_stride; }

  // Orders decodes by the first block of each part, so that decodes with common parts are neighbours.
  bool is_before(const Decode& a, const Decode& b) const {
    if (a.first_part != b.first_part) return a.first_part < b.first_part;
    for (long n = a.first_part; n < a.first_part + std::min(a.parts, b.parts); n++) {
      const long block = begin_of(n) / call_.block_size;
      const int32_t first_block = table(a)[block], second_block = table(b)[block];
      if (first_block != second_block) return first_block < second_block;
    }
    return a.parts < b.parts;
  }

  // Whether both see all keys of a part, in the same blocks. ALiBi biases depend on the position, so they prevent
  // sharing.
  bool have_same_blocks(const Decode& a, const Decode& b, long part) const {
    const long begin = begin_of(part), end = begin_of(part + 1);
    for (const Decode* each : {&a, &b})
      if (each->position + 1 < end || oldest_of(each->position) > begin) return false;
    const long from = begin / call_.block_size, until = (end + call_.block_size - 1) / call_.block_size;
    return !call_.alibi_slopes && std::equal(table(a) + from, table(a) + until, table(b) + from);
  }

  const AttentionCall& call_;
  const long max_queries_;
  std::vector<Decode> all_;
  std::vector<long> query_rows_;
  std::vector<Piece> pieces_;
};

template <class A>
void attend(const AttentionCall& call) {
  const long group = call.heads / call.kv_heads, heads = call.kv_heads;
  // Rows of an item: enough to reuse rearranged keys, but few enough to occupy all threads.
  long rows = 256;
  while (rows > 64 && call.tokens * call.heads < rows * 16 * threads()) rows /= 2;
  const long queries = std::max(1l, rows / group);
  const long width = Workspace<A>::width_of(call);
  const long state_size = State::size(queries * group, width);
  const long work_size = Workspace<A>::size(call, queries * group);
  std::vector<Work> work;
  Decodes decodes(call, queries);
  for (long s = 0; s < call.sequences; s++) {
    const long start = call.query_starts[s], count = call.query_starts[s + 1] - start;
    const long position = call.seq_lens[s] - count;
    if (count == 1 && decodes.take(s, position)) continue;
    for (long q = 0; q < count; q += queries)
      work.push_back({s, start + q, std::min(queries, count - q), position + q, -1, -1});
  }
  decodes.sort();
  const long room = std::max(1l, MAX_STATE_BYTES / (long)sizeof(float) / State::size(call.heads, width));

  // Kept between calls: the large buffers of latent attention would cost page faults.
  const auto memory = [&] {
    thread_local Memory kept;
    return (float*)kept.of((2 * state_size + work_size) * sizeof(float));
  };
  for (long decode = 0; !work.empty() || decode < decodes.size(); work.clear()) {
    const long first = decode;
    decode = decodes.share_out(first, room, work);
    const long total = (long)work.size(), waiting = decodes.waiting * call.heads;
    static thread_local Memory memory_of_parts;
    const State parts((float*)memory_of_parts.of(State::size(waiting, width) * sizeof(float)), waiting, width);
    const auto part_of = [&](const Work& w, long head) {
      return parts.from((w.waiting * heads + head * w.count) * group);
    };
    const auto work_of = [&](long piece) -> const Work& {  // last queries first: they see the most keys
      return work[total - 1 - piece / heads];
    };
    const auto item_of = [&](long piece) {
      const Work& w = work_of(piece);
      if (w.part < 0) return Item<A>{{call, w.sequence, piece % heads, w.first, w.count, w.position}};
      const long* query_rows = decodes.query_rows(w);
      return Item<A>{
          {call, w.sequence, piece % heads, *query_rows, w.count, w.position, w.count > 1 ? query_rows : nullptr}};
    };
    const auto first_part_of = [&](long piece, const Item<A>& item) {
      return work_of(piece).part < 0 ? part_at(item.oldest()) : work_of(piece).part;
    };
    const long num_adjacent = call.tokens == call.sequences && total >= MIN_ITEMS_PER_THREAD * threads() ? heads : 1;
    parallel(total * heads / num_adjacent, [&](Pieces& pieces) {
      float* states = memory();
      Workspace<A> space(call, states + 2 * state_size, queries * group);
      Tiles tiles;
      bool is_located = false;
      for (PieceQueue queue(pieces, num_adjacent); !queue.is_done(); queue.advance()) {
        const auto locate_next = [&](Tile& to) {
          if (!queue.is_next_known()) return false;
          const Item<A> next = item_of(queue.next());
          locate_part(next, first_part_of(queue.next(), next), to);
          return true;
        };
        const long piece = queue.current();
        const Work& w = work_of(piece);
        const Item<A> item = item_of(piece);
        if (!is_located) locate_part(item, first_part_of(piece, item), tiles.current());
        is_located = queue.is_next_known();
        item.prepare(space);
        if (w.part >= 0) {
          item.run_part(w.part, tiles, space, part_of(w, piece % heads), locate_next);
        } else {
          const State sum(states, item.num_rows, width), part(states + state_size, item.num_rows, width);
          item.run(tiles, space, sum, part, locate_next);
        }
      }
    });
    parallel((decode - first) * heads, [&](Pieces& pieces) {
      const State sum(memory(), group, width);
      for (long piece; pieces.take(piece);) {
        const long index = first + piece / heads, head = piece % heads;
        const Work w = decodes.whole(index);
        const QueryRows rows{call, w.sequence, head, w.first, 1, w.position};
        sum.clear(group);
        decodes.parts_of(index,
                         [&](long i, long query) { merge(sum, part_of(work[i], head).from(query * group), group); });
        write_result<A>(rows, sum);
      }
    });
  }
}

}  // namespace

void attention(const AttentionCall& call) {
  call.is_bf16 ? store_new<bf16>(call) : store_new<float>(call);
  if (call.stored == FLOAT) return attend<FloatArithmetic<float>>(call);
#if defined(__AVX512BF16__)
  if (call.is_bf16) return attend<PairArithmetic>(call);
#endif
  attend<FloatArithmetic<bf16>>(call);
}

extern "C" void stoker_attention(const AttentionCall* call) { attention(*call); }
