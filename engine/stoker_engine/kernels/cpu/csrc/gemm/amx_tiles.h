// Intel AMX: a core has eight tiles of up to 16 rows of 64 bytes, which GEMMs use as follows:
//
//   tiles 0…3  sums, 16 columns for each row: rows A × columns A, A × B, B × A, B × B
//   tiles 4, 5  columns A and B: words of two or four inner elements, [words of a step][16]
//   tiles 6, 7  rows A and B, of up to 16 rows each: [rows][words of a step]
#pragma once

#include "common/simd.h"

#if defined(__AMX_BF16__)
#define STOKER_AMX 1

constexpr long TILE_ROWS = 16, TILE_COLUMNS = 16, TILE_WORDS = 16;

// This thread's tile unit; released when the object is destroyed.
class TileUnit {
 public:
  TileUnit() = default;
  TileUnit(const TileUnit&) = delete;
  ~TileUnit() {
    if (first_ != 0) _tile_release();
  }

  // Configures the unit for GEMMs with the given numbers of rows A and B, each up to TILE_ROWS, and words of a step.
  // Tiles lose their contents if the configuration changes.
  void set_for(long first, long second, long words = TILE_WORDS) {
    if (first == first_ && second == second_ && words == words_) return;
    first_ = first, second_ = second, words_ = words;
    Palette palette;
    const auto set = [&](int tile, long num_rows, long bytes) {
      palette.rows[tile] = num_rows, palette.bytes[tile] = num_rows ? bytes : 0;
    };
    for (int tile : {0, 1}) set(tile, first, 4 * TILE_COLUMNS);
    for (int tile : {2, 3}) set(tile, second, 4 * TILE_COLUMNS);
    for (int tile : {4, 5}) set(tile, words, 4 * TILE_COLUMNS);
    set(6, first, 4 * words), set(7, second, 4 * words);
    compiler_barrier(&palette);
    _tile_loadconfig(&palette);
  }

  // Forces earlier writes to memory, since compilers do not know that tile loads read it.
  static void compiler_barrier(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

 private:
  struct Palette {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };
  long first_ = 0, second_ = 0, words_ = 0;
};

// Sums of M groups of rows × N groups of columns, M and N 1 or 2. In memory, group B's rows are below those of group A,
// and group B's columns are to their right; strides are in bytes.
template <int M, int N>
inline void clear_sums() {
  _tile_zero(0);
  if constexpr (N > 1) _tile_zero(1);
  if constexpr (M > 1) _tile_zero(2);
  if constexpr (M > 1 && N > 1) _tile_zero(3);
}

template <int M, int N>
inline void load_sums(const float* from, long stride) {
  const float* second = from + TILE_ROWS * stride / 4;
  TileUnit::compiler_barrier(from);
  _tile_loadd(0, from, stride);
  if constexpr (N > 1) _tile_loadd(1, from + TILE_COLUMNS, stride);
  if constexpr (M > 1) _tile_loadd(2, second, stride);
  if constexpr (M > 1 && N > 1) _tile_loadd(3, second + TILE_COLUMNS, stride);
}

template <int M, int N, class T>
inline void store_sums(T* to, long stride) {
  T* second = to + TILE_ROWS * stride / 4;
  _tile_stored(0, to, stride);
  if constexpr (N > 1) _tile_stored(1, to + TILE_COLUMNS, stride);
  if constexpr (M > 1) _tile_stored(2, second, stride);
  if constexpr (M > 1 && N > 1) _tile_stored(3, second + TILE_COLUMNS, stride);
}

// Adds the products of a step's bfloat16 rows and columns to the sums; group B's columns may be anywhere.
template <int M, int N>
inline void multiply_tiles(const void* rows, long row_stride, const void* columns, const void* second_columns,
                           long column_stride) {
  _tile_loadd(4, columns, column_stride);
  _tile_loadd(6, rows, row_stride);
  _tile_dpbf16ps(0, 6, 4);
  if constexpr (N > 1) {
    _tile_loadd(5, second_columns, column_stride);
    _tile_dpbf16ps(1, 6, 5);
  }
  if constexpr (M > 1) {
    _tile_loadd(7, (const char*)rows + TILE_ROWS * row_stride, row_stride);
    _tile_dpbf16ps(2, 7, 4);
    if constexpr (N > 1) _tile_dpbf16ps(3, 7, 5);
  }
}

// Multiplies signed bytes into `to`, [rows][16]: as rows A × columns A if WHICH is 0, else as rows B × columns B, which
// use separate tiles. The words of columns are contiguous.
template <int WHICH>
inline void multiply_codes(const void* rows, long row_stride, const void* columns, int32_t* to) {
  if constexpr (WHICH == 0) {
    _tile_loadd(4, columns, 4 * TILE_COLUMNS);
    _tile_loadd(6, rows, row_stride);
    _tile_zero(0);
    _tile_dpbssd(0, 6, 4);
    _tile_stored(0, to, 4 * TILE_COLUMNS);
  } else {
    _tile_loadd(5, columns, 4 * TILE_COLUMNS);
    _tile_loadd(7, rows, row_stride);
    _tile_zero(3);
    _tile_dpbssd(3, 7, 5);
    _tile_stored(3, to, 4 * TILE_COLUMNS);
  }
}

// Multiplies 16-bit integers with signed bytes over `steps` steps of 64 inner elements: upper (signed) and lower bytes
// of the integers [steps][2][16][64] × codes of N panels [steps][16][16][4] → to [2][N][16][16], upper bytes first.
// Calls `meanwhile` at each step.
template <int N, class Meanwhile>
inline void multiply_int16(const int8_t* int16_bytes, const int8_t* const* columns, long steps, int32_t* to,
                           Meanwhile meanwhile) {
  constexpr long TILE = TILE_ROWS * 64;
  clear_sums<2, N>();
  for (long step = 0; step < steps; step++) {
    meanwhile();
    _tile_loadd(4, columns[0] + step * TILE, 64);
    _tile_loadd(6, int16_bytes + 2 * step * TILE, 64);
    _tile_dpbssd(0, 6, 4);
    if constexpr (N > 1) {
      _tile_loadd(5, columns[1] + step * TILE, 64);
      _tile_dpbssd(1, 6, 5);
    }
    _tile_loadd(7, int16_bytes + (2 * step + 1) * TILE, 64);
    _tile_dpbusd(2, 7, 4);
    if constexpr (N > 1) _tile_dpbusd(3, 7, 5);
  }
  constexpr long TILE_ELEMENTS = TILE_ROWS * TILE_COLUMNS;
  _tile_stored(0, to, 4 * TILE_COLUMNS);
  if constexpr (N > 1) _tile_stored(1, to + TILE_ELEMENTS, 4 * TILE_COLUMNS);
  _tile_stored(2, to + N * TILE_ELEMENTS, 4 * TILE_COLUMNS);
  if constexpr (N > 1) _tile_stored(3, to + 3 * TILE_ELEMENTS, 4 * TILE_COLUMNS);
}

#endif
