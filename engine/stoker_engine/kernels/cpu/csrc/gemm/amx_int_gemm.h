// GEMM of many rows with codes in panels by AMX, for scales of blocks. In x, code × factor (int8_activations.h) is a
// 16-bit integer: tiles multiply its upper and its lower byte by a panel's codes, and accumulate over a block. The
// result is the integer that quant_panels.h computes; it is scaled and added in the same order, so results are
// bit-identical to those for few rows.
#pragma once

#include "gemm/quant_panels.h"
#include "gemm/amx_tiles.h"

#if defined(STOKER_AMX)
namespace panels {

// Class W of `share_out`, for formats with scales of blocks.
template <class Packed>
struct AmxIntPanels : QuantPanels<Packed> {
  typedef QuantPanels<Packed> Vectors;
  using Vectors::bias, Vectors::inner, Vectors::w, Vectors::x, Vectors::y, Vectors::y_stride;
  using Unit = TileUnit;

  static constexpr long STEP = 64, TILE = TILE_ROWS * STEP;  // of a tile: inner elements, bytes
  static constexpr long BLOCK_BYTES = 512 * 1024;  // of rows of x in a block, which stay in the second-level cache

  // Scales and sums of one block of each of TILE_ROWS rows.
  struct Scales {
    float scales[TILE_ROWS], sums[TILE_ROWS];
  };
  const int8_t* int16_bytes = nullptr;  // [rows / TILE_ROWS][steps][2][TILE_ROWS][STEP]: upper bytes, and lower ones
  const Scales* scales = nullptr;       // [rows / TILE_ROWS][blocks]

  long groups() const { return inner / Int8Group::SIZE; }
  long tile_steps() const { return (inner + STEP - 1) / STEP; }  // steps of a row
  long blocks() const { return (inner + w.block_size - 1) / w.block_size; }
  long rows() const { return std::max(BLOCK_BYTES / (tile_steps() * 2 * TILE), 1l) * TILE_ROWS; }

  // Valid until this thread creates another object.
  AmxIntPanels(const Vectors& vectors, long rows) : Vectors(vectors) {
    if (rows <= Vectors::STREAMED) return;
    static thread_local Memory bytes_memory, scales_memory;
    const long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int8_t* const to_bytes = (int8_t*)bytes_memory.of(tiles * tile_steps() * 2 * TILE);
    Scales* const to_scales = (Scales*)scales_memory.of(tiles * blocks() * sizeof(Scales));
    int16_bytes = to_bytes, scales = to_scales;
    parallel_for(rows * inner >= GRAIN_SIZE, tiles, [&](long tile) {
      int8_t* const bytes_of_tile = to_bytes + tile * tile_steps() * 2 * TILE;
      if (inner % STEP) memset(bytes_of_tile + (tile_steps() - 1) * 2 * TILE, 0, 2 * TILE);  // padding
      for (long i = 0; i < TILE_ROWS; i++) {
        const Int8Group* const row = x + std::min(tile * TILE_ROWS + i, rows - 1) * groups();
        for (long group = 0; group < groups(); group++) {
          int8_t* const upper = bytes_of_tile + group / 2 * 2 * TILE + i * STEP + group % 2 * Int8Group::SIZE;
          split_into_bytes(row[group], upper, upper + TILE);
        }
        for (long block = 0; block < blocks(); block++) {
          const Int8Group& from = row[block * w.block_size / Int8Group::SIZE];
          Scales& to = to_scales[tile * blocks() + block];
          to.scales[i] = from.scale, to.sums[i] = from.sum;
        }
      }
    });
  }

  static void split_into_bytes(const Int8Group& from, int8_t* upper, int8_t* lower) {
    const __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from.codes));
    const __m512i words = _mm512_mullo_epi16(codes, _mm512_set1_epi16(from.factor()));
    _mm256_storeu_si256((__m256i*)upper, _mm512_cvtepi16_epi8(_mm512_srai_epi16(words, 8)));
    _mm256_storeu_si256((__m256i*)lower, _mm512_cvtepi16_epi8(words));
  }

  // A panel's signed codes, in the order of elements, and the headers of its blocks.
  struct Columns {
    const int8_t* codes;    // [steps][STEP / 4][PANEL][4]
    const Header* headers;  // [blocks]
  };

  // Valid until another panel is unpacked into the same memory.
  Columns unpacked(long panel, Memory& of_codes, Memory& of_headers) const {
    int8_t* const codes = (int8_t*)of_codes.of(tile_steps() * TILE);
    Header* const headers = (Header*)of_headers.of(blocks() * sizeof(Header));
    const Packed from = w.from(panel);
    for (long block = 0; block < blocks(); block++)
      headers[block] = from.header(0, block * w.block_size / Int8Group::SIZE, 0);
    for (long group = 0; group < groups(); group++)
      unroll<Int8Group::SIZE / 4>([&](auto four) {
        const __m512i signed_codes = _mm512_sub_epi8(from.codes(0, group, 0, four), _mm512_set1_epi8(Packed::ZERO));
        _mm512_store_si512(codes + (group * Int8Group::SIZE + Packed::first(four)) * PANEL, signed_codes);
      });
    if (inner % STEP) memset(codes + inner * PANEL, 0, TILE / 2);
    TileUnit::compiler_barrier(codes);
    return {codes, headers};
  }

  // Multiplies rows m … m + rows - 1 of x, for which the tile unit is set, with N panels. Dot products of a block are
  // computed while those of the previous one are added, since a tile can be reloaded only after it was read.
  template <int N>
  FLATTEN void tile(const Columns* columns, long panel, long m, long rows, Prefetcher& prefetcher) const {
    struct alignas(64) Accumulators {
      int32_t of[2][N][TILE_ROWS][PANEL];
    } accumulators[2];
    alignas(64) float sums[N][TILE_ROWS][PANEL] = {};
    const int8_t* const from = int16_bytes + m / TILE_ROWS * tile_steps() * 2 * TILE;
    const Scales* const tile_scales = scales + m / TILE_ROWS * blocks();
    const long count = blocks(), steps_of_block = w.block_size / STEP;
    const auto multiply = [&](long block) {
      if (block >= count) return;
      const long step = block * steps_of_block, end = std::min(step + steps_of_block, tile_steps());
      const int8_t* codes[N];
      unroll<N>([&](auto j) { codes[j] = columns[j].codes + step * TILE; });
      multiply_int16<N>(from + step * 2 * TILE, codes, end - step, accumulators[block % 2].of[0][0][0],
                        [&] { prefetcher.fetch(); });
    };
    multiply(0);
    for (long block = 0; block < count; block++) {
      multiply(block + 1);
      const Accumulators& made = accumulators[block % 2];
      unroll<N>([&](auto j) {
        const Header& header = columns[j].headers[block];
        unroll<TILE_ROWS>([&](auto i) {
          const __m512i upper = _mm512_slli_epi32(_mm512_load_si512(made.of[0][j][i]), 8);
          const __m512i accumulator = _mm512_add_epi32(upper, _mm512_load_si512(made.of[1][j][i]));
          const __m512 scale = _mm512_mul_ps(header.scale, _mm512_set1_ps(tile_scales[block].scales[i]));
          __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(accumulator), scale, _mm512_load_ps(sums[j][i]));
          if (Packed::HAS_OFFSET) sum = _mm512_fmadd_ps(header.offset, _mm512_set1_ps(tile_scales[block].sums[i]), sum);
          _mm512_store_ps(sums[j][i], sum);
        });
      });
    }
    for (long j = 0; j < N; j++) {
      const long n = (panel + j) * PANEL;
      const Vec added = bias ? load(bias + n) : Vec{};
      for (long i = 0; i < rows; i++) store(y + (m + i) * y_stride + n, load(sums[j][i]) + added);
    }
  }

  template <int N>
  void block(TileUnit& unit, long panel, long m, long m_end, Bytes next) const {
    static thread_local Memory of_codes[N], of_headers[N];
    Columns columns[N];
    for (long j = 0; j < N; j++) columns[j] = unpacked(panel + j, of_codes[j], of_headers[j]);
    Prefetcher prefetcher(next, (m_end - m + TILE_ROWS - 1) / TILE_ROWS * tile_steps(), MAX_PREFETCH_BYTES);
    for (long row = m, rows; row < m_end; row += rows) {
      rows = std::min(m_end - row, TILE_ROWS);
      unit.set_for(rows, rows);
      tile<N>(columns, panel, row, rows, prefetcher);
    }
  }

  void multiply(Unit& unit, long panel, long count, long m, long m_end, Bytes next) const {
    NoUnit no_unit;
    // Vectors are faster for so few rows.
    if (m_end - m < TILE_ROWS) return Vectors::multiply(no_unit, panel, count, m, m_end, next);
    for (long j = 0; j < count; j += 2) {
      if (count - j >= 2)
        block<2>(unit, panel + j, m, m_end, part_of(next, j, 2, count));
      else
        block<1>(unit, panel + j, m, m_end, part_of(next, j, 1, count));
    }
  }

  void stream(Unit&, long panel, long end, long rows, Prefetcher& prefetcher) const {
    NoUnit no_unit;
    Vectors::stream(no_unit, panel, end, rows, prefetcher);
  }
};

}  // namespace panels
#endif
