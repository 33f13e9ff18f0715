// A work item of attention: some queries, for all heads that share a KV head, attend to the keys that they see. The
// keys of a part are processed in tiles:
//
//   read_queries       queries → workspace                                          read_queries.h
//   locate_tile        block table → addresses of a tile's keys and values          locate_tile.h
//   rearrange_tile     keys and values → workspace, as words to be multiplied       rearrange_tile.h, arithmetic.h
//   score              queries × keys → scores                                      vector_attention.h, amx_attention.h
//   softmax_weights    scores → weights, by the online softmax                      softmax.h
//   add_values         sums + weights × values → sums                               vector_attention.h, amx_attention.h
//   merge              sums of several parts → their sum                            softmax_state.h
//   write_result       sums / sum of the weights → result                           write_result.h
#pragma once

#include "attention/amx_attention.h"
#include "attention/amx_keys_in_place.h"
#include "attention/locate_tile.h"
#include "attention/read_queries.h"
#include "attention/rearrange_tile.h"
#include "attention/vector_attention.h"
#include "attention/write_result.h"

namespace {

// A work item, computed by arithmetic A.
template <class A>
struct Item : QueryRows {
  // Copies the queries into the workspace, before parts are processed.
  void prepare(Workspace<A>& work) const {
    read_queries(*this, work);
    if constexpr (A::USES_AMX)
      if (are_keys_in_place(*this)) transpose_queries(work.queries, num_rows, work.query_words(), work.columns);
  }

  // Processes all keys, and writes the result. The first tile is located in `tiles`. `locate_next` locates the tile to
  // be prefetched after the last one, or returns false; `sum` and `part` are memory for states.
  template <class LocateNext>
  void run(Tiles& tiles, Workspace<A>& work, const State& sum, const State& part, LocateNext locate_next) const {
    const long first_part = part_at(oldest()), last_part = part_at(newest());
    for (long p = first_part; p <= last_part; p++) {
      run_part(p, tiles, work, p == first_part ? sum : part, [&](Tile& to) {
        if (p == last_part) return locate_next(to);
        locate_part(*this, p + 1, to);
        return true;
      });
      if (p != first_part) merge(sum, part, num_rows);
    }
    write_result<A>(*this, sum);
  }

  // Processes the keys of one part, whose first tile is located. `locate_after` locates the tile to be prefetched after
  // the part's last one, or returns false.
  template <class LocateAfter>
  void run_part(long part, Tiles& tiles, Workspace<A>& work, const State& state, LocateAfter locate_after) const {
    state.clear(num_rows);
    const auto [begin, end] = keys_of_part(*this, part);
    for (long start = begin; start < end; start += TILE) {
      bool more = start + TILE < end;
      if (more)
        locate_tile(*this, start + TILE, end, tiles.next());
      else
        more = locate_after(tiles.next());
      const Tile* next = more ? &tiles.next() : nullptr;
      run_tile(tiles.current(), next, std::min(TILE, rounded_up(end - start, A::SCORED_KEYS)), work, start, state);
      tiles.advance();
    }
  }

 private:
  // Processes `keys` keys of a tile, from key `start` on, for all rows.
  void run_tile(const Tile& tile, const Tile* next, long keys, Workspace<A>& work, long start,
                const State& state) const {
    if constexpr (A::USES_AMX)
      if (are_keys_in_place(*this)) return attend_in_place(*this, tile, next, keys, work, start, state);
    rearrange_tile(call, tile, next, keys, work);
    if constexpr (A::USES_AMX)
      attend_by_amx(*this, work, start, state);
    else
      for (long r = 0; r < num_rows; r += ROWS)
        with_rows(std::min<long>(ROWS, num_rows - r),
                  [&](auto count) { attend_by_vectors<count>(*this, work, r, start, state); });
  }
};

}  // namespace
