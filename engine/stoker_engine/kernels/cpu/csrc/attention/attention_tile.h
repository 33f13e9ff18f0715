// Addresses of a tile of keys and values in the cache, and prefetching of the next tile.
#pragma once

#include "common/simd.h"

namespace {

// Number of keys in a tile; more keys amortise the fixed cost of a tile.
constexpr long TILE = LANES == 16 ? 128 : 64;

// Addresses of a tile's keys, values and scales. Entries without a key repeat an existing one.
struct Tile {
  const char *keys[TILE], *values[TILE];
  const float *key_scales[TILE], *value_scales[TILE];
  long count;  // number of keys, without repetitions of the last
};

// The current tile, and the next one, which is prefetched.
class Tiles {
 public:
  Tile& current() { return tiles_[current_]; }
  Tile& next() { return tiles_[current_ ^ 1]; }
  void advance() { current_ ^= 1; }

 private:
  Tile tiles_[2];
  int current_ = 0;
};

// Prefetches `size` bytes. Hardware prefetchers do not predict them, since blocks are scattered.
inline void fetch(const char* from, long size) {
  for (long i = 0; i < size; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// Prefetches a tile's values, then its keys, line by line during the work on the previous tile: a core supports few
// outstanding lines, so prefetching them all at once would stall it.
class TilePrefetcher {
 public:
  // Prefetches nothing.
  TilePrefetcher() = default;
  // Prefetches values and keys of the given sizes in bytes, during work of total cost `weight`.
  TilePrefetcher(const Tile& tile, long value_size, long key_size, long weight)
      : rows_{tile.values, tile.keys}, sizes_{value_size, key_size}, count_(tile.count) {
    const auto lines = [](long size) { return (size + LINE - 1) / LINE; };
    step_ = (count_ * (lines(value_size) + lines(key_size)) * PARTS + weight - 1) / weight;
  }

  // Prefetches the lines that are due during work of this cost.
  void fetch(long weight) {
    for (due_ += step_ * weight; due_ >= PARTS; due_ -= PARTS) {
      if (row_ == count_) row_ = 0, which_++;
      if (which_ > 1) return;
      __builtin_prefetch(rows_[which_][row_] + at_, 0, 2);
      if ((at_ += LINE) >= sizes_[which_]) at_ = 0, row_++;
    }
  }

 private:
  static constexpr long LINE = 64, PARTS = 64;
  const char* const* rows_[2] = {};
  long sizes_[2] = {}, count_ = 0, step_ = 0;
  // Lines due, in units of 1 / PARTS; the next line: 0 for values or 1 for keys, index of the key, and byte.
  long due_ = 0, which_ = 0, row_ = 0, at_ = 0;
};

}  // namespace
