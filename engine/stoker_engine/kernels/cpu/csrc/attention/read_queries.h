// Copies an item's queries into the workspace, padded with 0.
#pragma once

#include "attention/query_rows.h"
#include "attention/workspace.h"

namespace {

template <class T>
inline const T* query_at(const QueryRows& rows, long row) {
  const AttentionCall& call = rows.call;
  return (const T*)call.query + rows.query_of(row) * call.query_token + rows.head_of(row) * call.query_head;
}

template <class T, class A>
inline void read_floats(const QueryRows& rows, Workspace<A>& work) {
  for (long r = 0; r < rows.num_rows; r++) {
    const T* from = query_at<T>(rows, r);
    for (long d = 0; d < work.depth; d += LANES) {
      const long remaining = std::max(0l, rows.call.head_dim - d);
      store(work.queries + r * work.depth + d, remaining >= LANES ? load(from + d) : load_part(from + d, remaining));
    }
  }
}

template <class K>
inline void read_queries(const QueryRows& rows, Workspace<FloatArithmetic<K>>& work) {
  rows.call.is_bf16 ? read_floats<bf16>(rows, work) : read_floats<float>(rows, work);
}

inline void read_queries(const QueryRows& rows, Workspace<PairArithmetic>& work) {
  const long size = rows.call.head_dim;
  for (long r = 0; r < rows.num_rows; r++) {
    bf16* to = (bf16*)(work.queries + r * work.query_words());
    memcpy((void*)to, query_at<bf16>(rows, r), size * sizeof(bf16));
    memset((void*)(to + size), 0, (work.depth - size) * sizeof(bf16));
  }
}

}  // namespace
