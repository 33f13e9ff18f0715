// Finds the addresses of keys and values in the paged cache, by the block table of their sequence.
#pragma once

#include "attention/attention_tile.h"
#include "attention/key_parts.h"
#include "attention/kv_dtypes.h"
#include "attention/query_rows.h"

namespace {

// The keys of a part that any row sees, extended down to the start of a tile.
struct KeyRange {
  long begin, end;
};
inline KeyRange keys_of_part(const QueryRows& rows, long part) {
  return {std::max(begin_of(part), rows.oldest() / TILE * TILE), std::min(begin_of(part + 1), rows.newest() + 1)};
}

// Finds the keys `start` … `end` - 1; the rest of the tile repeats the last key. Tiles start at multiples of TILE, even
// below the window: their entries below it repeat its oldest key, since older blocks may belong to other sequences.
inline void locate_tile(const QueryRows& rows, long start, long end, Tile& tile) {
  const AttentionCall& call = rows.call;
  const int32_t* table = call.tables + rows.sequence * call.table_stride;
  const long size = size_of(call.stored), kv_head = rows.kv_head;
  const char* keys = (const char*)call.keys + kv_head * call.key_head * size;
  const char* values = (const char*)call.values + kv_head * call.value_head * size;
  const float* key_scales = call.key_scales + kv_head * call.key_scale_head;
  const float* value_scales = call.value_scales + kv_head * call.value_scale_head;
  const long begin = std::max(start, rows.oldest()), last = end - 1;
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

// Finds the first tile of a part.
inline void locate_part(const QueryRows& rows, long part, Tile& tile) {
  const auto [begin, end] = keys_of_part(rows, part);
  locate_tile(rows, begin, end, tile);
}

}  // namespace
