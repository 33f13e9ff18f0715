// A plain model of Intel's tile instructions, for processors without them: the kernels are compiled with
//
//   -D__AMX_BF16__ -include amx_model.h
//
// and compute what their tiles would. It follows the operations that Intel's Software Developer's Manual writes out for
// LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS, TDPBSSD and TDPBUSD. What a processor faults at, ends the process.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace amx_model {

struct Unit {
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config;
  float tiles[8][16][16];
};

inline thread_local Unit unit;
inline long num_products = 0;  // counted by whichever thread: it is only asked whether there were some

inline void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "amx_model: %s\n", what);
  abort();
}

inline void load_config(const void* from) {
  memcpy(&unit.config, from, sizeof unit.config);
  const Unit::Config& config = unit.config;
  require(config.palette == 1 && config.start_row == 0, "a palette that is none");
  for (uint8_t byte : config.reserved) require(byte == 0, "reserved bytes are in use");
  for (int tile = 0; tile < 16; tile++) {
    const bool is_there = tile < 8;
    require(config.bytes[tile] <= (is_there ? 64 : 0) && config.rows[tile] <= (is_there ? 16 : 0), "a tile too large");
    require((config.bytes[tile] == 0) == (config.rows[tile] == 0), "a tile of nothing");
  }
  memset(unit.tiles, 0, sizeof unit.tiles);
}

inline void release() { memset(&unit, 0, sizeof unit); }

inline void require_tile(int tile) {
  require(unit.config.palette == 1, "no configuration is loaded");
  require(unit.config.rows[tile] > 0, "a tile that is not configured");
}

inline void zero(int tile) {
  require_tile(tile);
  memset(unit.tiles[tile], 0, sizeof unit.tiles[tile]);
}

inline void load(int tile, const void* from, long stride) {
  zero(tile);
  for (int row = 0; row < unit.config.rows[tile]; row++)
    memcpy(unit.tiles[tile][row], (const char*)from + row * stride, unit.config.bytes[tile]);
}

inline void put(int tile, void* to, long stride) {
  require_tile(tile);
  for (int row = 0; row < unit.config.rows[tile]; row++)
    memcpy((char*)to + row * stride, unit.tiles[tile][row], unit.config.bytes[tile]);
}

// What is too small for a normal number is 0.
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

inline float element(const float* words, int location) {
  uint16_t half;
  memcpy(&half, (const char*)words + 2 * location, sizeof half);
  const uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return flushed(x);
}

inline void require_fit(int to, int a, int b) {
  for (int tile : {to, a, b}) require_tile(tile);
  const Unit::Config& config = unit.config;
  require(
      config.rows[a] == config.rows[to] && 4 * config.rows[b] == config.bytes[a] && config.bytes[b] == config.bytes[to],
      "tiles whose sizes do not fit");
  num_products++;
}

inline void multiply(int to, int a, int b) {
  require_fit(to, a, b);
  const Unit::Config& config = unit.config;
  const int pairs = config.bytes[a] / 4, columns = config.bytes[to] / 4;
  float right[16][32];
  for (int k = 0; k < pairs; k++)
    for (int n = 0; n < 2 * columns; n++) right[k][n] = element(unit.tiles[b][k], n);
  for (int row = 0; row < config.rows[to]; row++) {
    float sums[32] = {};
    for (int k = 0; k < pairs; k++) {
      const float left[2] = {element(unit.tiles[a][row], 2 * k), element(unit.tiles[a][row], 2 * k + 1)};
      for (int n = 0; n < 2 * columns; n++) sums[n] = flushed(std::fma(left[n % 2], right[k][n], sums[n]));
    }
    for (int n = 0; n < columns; n++) {
      float& sum = unit.tiles[to][row][n];
      sum = flushed(flushed(sum) + flushed(sums[2 * n] + sums[2 * n + 1]));
    }
  }
}

// `Left` is what bytes of the left tile are.
template <class Left>
inline void multiply_bytes(int to, int a, int b) {
  require_fit(to, a, b);
  const Unit::Config& config = unit.config;
  const auto left = [a](int row, int location) { return ((const Left*)unit.tiles[a][row])[location]; };
  const auto right = [b](int row, int location) { return ((const int8_t*)unit.tiles[b][row])[location]; };
  for (int row = 0; row < config.rows[to]; row++)
    for (int n = 0; n < config.bytes[to] / 4; n++) {
      int32_t sum;
      memcpy(&sum, &unit.tiles[to][row][n], sizeof sum);
      for (int k = 0; k < config.bytes[a]; k++) sum += left(row, k) * right(k / 4, 4 * n + k % 4);
      memcpy(&unit.tiles[to][row][n], &sum, sizeof sum);
    }
}

}  // namespace amx_model

// How many products of tiles there were.
extern "C" __attribute__((weak)) long amx_model_products() { return amx_model::num_products; }

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadconfig amx_model::load_config
#define _tile_release amx_model::release
#define _tile_zero amx_model::zero
#define _tile_loadd amx_model::load
#define _tile_stored amx_model::put
#define _tile_dpbf16ps amx_model::multiply
#define _tile_dpbssd amx_model::multiply_bytes<int8_t>
#define _tile_dpbusd amx_model::multiply_bytes<uint8_t>
#define syscall(...) 0  // the system gives leave to use tiles
