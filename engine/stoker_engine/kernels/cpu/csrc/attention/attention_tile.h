// Where a tile of keys and values lies in the cache, and how the next one is fetched meanwhile.
#pragma once

#include "common/simd.h"

namespace {

// Keys: what a tile costs once is less with more of them.
constexpr long TILE = LANES == 16 ? 128 : 64;

// Where its keys, values and scales lie. Keys that there are not repeat one that there is.
struct Tile {
  const char *keys[TILE], *values[TILE];
  const float *key_scales[TILE], *value_scales[TILE];
  long count;  // of keys, without those that repeat the last
};

// The tile that is at hand, and the one after it, which is fetched meanwhile.
class Tiles {
 public:
  Tile& current() { return tiles_[current_]; }
  Tile& next() { return tiles_[current_ ^ 1]; }
  void advance() { current_ ^= 1; }

 private:
  Tile tiles_[2];
  int current_ = 0;
};

// Asks for `size` bytes that are needed soon. Blocks lie apart, so the processor does not foresee them.
inline void fetch(const char* from, long size) {
  for (long i = 0; i < size; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// Asks for a tile's values and keys, in this order, line by line beside all work on the tile before: where that is little,
// a core would wait for lines that are asked for together, of which it has few under way.
class TilePrefetcher {
 public:
  // Nothing.
  TilePrefetcher() = default;
  // Values and keys of so many bytes each, beside work of so much weight.
  TilePrefetcher(const Tile& tile, long value_size, long key_size, long weight)
      : rows_{tile.values, tile.keys}, sizes_{value_size, key_size}, count_(tile.count) {
    const auto lines = [](long size) { return (size + LINE - 1) / LINE; };
    step_ = (count_ * (lines(value_size) + lines(key_size)) * PARTS + weight - 1) / weight;
  }

  // What is due beside work of this weight.
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
  long due_ = 0, which_ = 0, row_ = 0, at_ = 0;  // lines in parts; of values or keys, which, and the byte in it
};

}  // namespace
