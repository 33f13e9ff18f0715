// The rows of a work item, and the keys that each row sees.
#pragma once

#include <algorithm>

#include "attention/attention.h"

namespace {

// Some queries, for all heads that share a KV head: rows are (query, head of the group). Queries are consecutive tokens
// of one sequence; with `query_rows` each is of a different sequence, and all of them see every key of the item.
struct QueryRows {
  const AttentionCall& call;
  long sequence, kv_head;
  long first, num_queries;           // row of the first query in the flat batch, and number of queries
  long position;                     // position of the first query
  const long* query_rows = nullptr;  // rows of the queries in the flat batch, if they are of different sequences
  long group = call.heads / call.kv_heads;
  long num_rows = num_queries * group;

  long query_of(long row) const { return query_rows ? query_rows[row / group] : first + row / group; }
  long head_of(long row) const { return kv_head * group + row % group; }

  // A row sees the keys oldest_of(row) … position_of(row). Both are ascending.
  long position_of(long row) const { return query_rows ? position : position + row / group; }
  long oldest_of(long row) const {
    return call.window && !query_rows ? std::max(0l, position_of(row) + 1 - call.window) : 0;
  }
  long oldest() const { return oldest_of(0); }
  long newest() const { return position_of(num_rows - 1); }

  // Whether each of `count` rows from `row` on sees all of `keys` keys from `start` on.
  bool see_all(long row, long count, long start, long keys) const {
    return start + keys - 1 <= position_of(row) && start >= oldest_of(row + count - 1);
  }
};

}  // namespace
