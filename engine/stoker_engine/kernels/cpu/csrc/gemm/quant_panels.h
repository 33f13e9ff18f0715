// GEMM with codes in panels (panels.h) by integer arithmetic, 4 inner elements at a time; x is rounded to 8 bits
// (int8_activations.h). The sum of elements that share a scale is exact; it is scaled and added to a float.
//
// The memory layout is described by a class `Packed` with
//   STEP                 number of elements that share a scale, 32 or 16
//   ZERO                 code that means 0, before an offset; 0 if codes are signed
//   HAS_OFFSET           whether elements are code × scale + offset
//   IN_BLOCKS            whether x is in blocks (int8_activations.h) of `block_size` elements, which share W's scale
//   BITS                 bits of a code
//   first(i)             first element of the i-th group of four among those that share a scale
//   begin(panel)         address of a panel; panels are contiguous
//   from(panel)          the same object for the panels from this one on, which becomes panel 0
//   header(j, group, part)       scales and offsets of panel j's STEP elements from 32 × group + STEP × part on, a lane
//                                for each row
//   codes(j, group, part, i)     codes of the i-th group of four of each row, as unsigned bytes; codes of eight bits as
//                                signed bytes if SIGNED_CODES
#pragma once

#include "gemm/int8_activations.h"
#include "gemm/panel_vecs.h"

#if defined(STOKER_PANELS)
namespace panels {

struct Header {
  Floats16 scale, offset;
};

// The properties of a format that determine how it is multiplied.
template <long ELEMENTS_PER_SCALE, bool OFFSET, int BITS_OF_CODE, bool BLOCKS = false>
struct KindOf {
  static constexpr long STEP = ELEMENTS_PER_SCALE;
  static constexpr int BITS = BITS_OF_CODE;
  static constexpr bool HAS_OFFSET = OFFSET, IN_BLOCKS = BLOCKS;
};

// Exact sums of the products of STEP codes of a panel's rows with elements of x, four of each row at a time.
#if defined(STOKER_VNNI)
template <int BITS>
struct CodeSums {
  Bytes64 sums;

  CodeSums() = default;
  explicit CodeSums(int32_t initial_sum) : sums(all_words(initial_sum)) {}
  // What is computed from codes once for all rows of x.
  static Bytes64 prepared(Bytes64 codes) { return codes; }
  // Adds the products of the STEP's group of four codes with index `four`.
  void add(int four, Bytes64 codes, Bytes64, Bytes64 x) { sums = add_products(sums, codes, x); }
  Bytes64 words() const { return sums; }
  // total + the sums × a factor, from 1 to 255.
  Bytes64 added_to(Bytes64 total, int32_t factor) const {
    // Blocks of 4-bit codes have a ZERO of 8, so the sum fits into 16 bits: 32 × 8 × 127.
    if constexpr (BITS <= 4) return add_products_of_halves(total, sums, all_words(factor));
    return sum_of_words(total, product_of_words(sums, all_words(factor)));
  }
};
#else
// Codes of 5 or 6 bits: as many products as fit are added in 16 bits.
template <int BITS>
struct CodeSums {
  static constexpr int PRODUCTS = 32767 / (2 * 127 * ((1 << BITS) - 1));
  static_assert(PRODUCTS == 2 || PRODUCTS == 4);  // divides the number of products of a STEP
  Bytes64 sums, pairs = {};

  CodeSums() = default;
  explicit CodeSums(int32_t initial_sum) : sums(all_words(initial_sum)) {}
  static Bytes64 prepared(Bytes64 codes) { return codes; }
  void add(int four, Bytes64 codes, Bytes64, Bytes64 x) {
    const Bytes64 products = pairs_of_products(codes, x);
    pairs = four % PRODUCTS ? sum_of_halves(pairs, products) : products;
    if (four % PRODUCTS == PRODUCTS - 1) sums = add_products_of_halves(sums, pairs, all_words(0x10001));
  }
  Bytes64 words() const { return sums; }
  Bytes64 added_to(Bytes64 total, int32_t factor) const {
    return sum_of_words(total, product_of_words(sums, all_words(factor)));
  }
};

// Codes of four bits: the sums of a STEP's products and the initial sum fit into 16 bits, one for the first two
// elements of each four and one for the last two.
template <>
struct CodeSums<4> {
  Bytes64 pairs;

  CodeSums() = default;
  explicit CodeSums(int32_t initial_sum) : pairs(all_words(initial_sum & 0xffff)) {}
  static Bytes64 prepared(Bytes64 codes) { return codes; }
  void add(int four, Bytes64 codes, Bytes64, Bytes64 x) { pairs = sum_of_halves(pairs, pairs_of_products(codes, x)); }
  Bytes64 words() const { return added_to(all_words(0), 1); }
  Bytes64 added_to(Bytes64 total, int32_t factor) const {
    return add_products_of_halves(total, pairs, all_words(factor * 0x10001));
  }
};

// Two products of eight bits fit into 16 bits if both are signed: |code| × ±x.
template <>
struct CodeSums<8> {
  Bytes64 sums;

  CodeSums() = default;
  explicit CodeSums(int32_t initial_sum) : sums(all_words(initial_sum)) {}
  static Bytes64 prepared(Bytes64 codes) { return magnitudes_of(codes); }
  void add(int four, Bytes64 codes, Bytes64 magnitudes, Bytes64 x) {
    sums = add_products_of_halves(sums, pairs_of_signed_products(codes, magnitudes, x), all_words(0x10001));
  }
  Bytes64 words() const { return sums; }
  Bytes64 added_to(Bytes64 total, int32_t factor) const {
    return sum_of_words(total, product_of_words(sums, all_words(factor)));
  }
};
#endif

// N unpacked panels of any format of a kind, with codes in the order of elements. Worthwhile for many rows.
template <class Kind, int N>
struct Unpacked : Kind {
  static constexpr long PARTS = Int8Group::SIZE / Kind::STEP, FOURS = Kind::STEP / 4;
  struct Part {
    Bytes64 codes[FOURS];
    Header header;
  };
  const Part* at;  // [groups][N][PARTS]
  long block_size;

  // Valid until this thread unpacks other panels of this shape.
  template <class Packed>
  Unpacked(const Packed& from, long groups) : block_size(from.block_size) {
    thread_local Memory memory;
    Part* to = (Part*)memory.of(groups * N * PARTS * sizeof(Part));
    at = to;
    for (long group = 0; group < groups; group++)
      for (long j = 0; j < N; j++)
        unroll<PARTS>([&](auto part) {
          to->header = from.header(j, group, part);
          unroll<FOURS>([&](auto four) { to->codes[Packed::first(four) / 4] = from.codes(j, group, part, four); });
          to++;
        });
  }
  const Part& of(long j, long group, int part) const { return at[(group * N + j) * PARTS + part]; }
  Header header(long j, long group, int part) const { return of(j, group, part).header; }
  Bytes64 codes(long j, long group, int part, int four) const { return of(j, group, part).codes[four]; }
  static constexpr int first(int four) { return four * 4; }
};

// Multiplies rows of x with panels of any format, packed or unpacked.
struct QuantRows {
  const Int8Group* x;
  const bf16* bias;
  bf16* y;
  long y_stride, inner;

  // Multiplies STEP elements of rows of x and panels of `source`, and prefetches meanwhile.
  template <int M, int N, class Source>
  static FLATTEN void multiply(const Source& source, const Int8Group* const* rows, long group, int part,
                               Prefetcher& prefetcher, CodeSums<Source::BITS>* sums) {
    constexpr long STEP = Source::STEP;
    unroll<M * N>([&](auto i) { sums[i] = CodeSums<Source::BITS>(rows[i / N]->initial_sums[part]); });
    unroll<STEP / 4>([&](auto four) {
      if (N == 1 || four == 0) prefetcher.fetch();  // few rows are bound by memory, so prefetch evenly
      Bytes64 codes[N], prepared[N];
      unroll<N>([&](auto j) {
        codes[j] = source.codes(j, group, part, four);
        prepared[j] = CodeSums<Source::BITS>::prepared(codes[j]);
      });
      unroll<M>([&](auto i) {
        int32_t bytes;
        memcpy(&bytes, rows[i]->codes + part * STEP + Source::first(four), sizeof bytes);
        const Bytes64 each = all_words(bytes);
        unroll<N>([&](auto j) { sums[i * N + j].add(four, codes[j], prepared[j], each); });
      });
    });
  }

  // Scales integer dot products by the scales of `activations` and `header`, and adds them to `sum`.
  template <bool HAS_OFFSET>
  static FLATTEN Floats16 added(Floats16 sum, Bytes64 dot_products, const Header& header,
                                const Int8Group& activations) {
    const Floats16 scale = multiplied(header.scale, all_floats(activations.scale));
    sum = multiply_add(floats_of_words(dot_products), scale, sum);
    return HAS_OFFSET ? multiply_add(header.offset, all_floats(activations.sum), sum) : sum;
  }

  // Multiplies rows m … m + M - 1 of x by N panels, the first of which is `panel`; `source` reads their weights.
  template <int M, int N, class Source>
  FLATTEN void tile(const Source& source, long panel, long m, Prefetcher& prefetcher) const {
    constexpr long STEP = Source::STEP;
    const long groups = inner / Int8Group::SIZE;
    const Int8Group* rows[M];
    unroll<M>([&](auto i) { rows[i] = x + (m + i) * groups; });
    Floats16 sums[M * N] = {};
    const auto add = [&](auto dot_products, long group, int part) {
      unroll<N>([&](auto j) {
        const Header header = source.header(j, group, part);
        unroll<M>([&](auto i) {
          Floats16& sum = sums[i * N + j];
          sum = added<Source::HAS_OFFSET>(sum, dot_products(i * N + j), header, *rows[i]);
        });
      });
    };
    if constexpr (Source::IN_BLOCKS) {
      for (long group = 0; group < groups;) {
        Bytes64 totals[M * N] = {};
        const long first = group, end = std::min(group + source.block_size / Int8Group::SIZE, groups);
        for (; group < end; group++) {
          CodeSums<Source::BITS> code_sums[M * N];
          multiply<M, N>(source, rows, group, 0, prefetcher, code_sums);
          unroll<M>([&](auto i) {
            const int32_t factor = rows[i]->factor();
            unroll<N>([&](auto j) { totals[i * N + j] = code_sums[i * N + j].added_to(totals[i * N + j], factor); });
          });
          if (group + 1 < end) unroll<M>([&](auto i) { rows[i]++; });
        }
        add([&](auto i) { return totals[i]; }, first, 0);
        unroll<M>([&](auto i) { rows[i]++; });
      }
    } else {
      for (long group = 0; group < groups; group++) {
        unroll<Int8Group::SIZE / STEP>([&](auto part) {
          CodeSums<Source::BITS> code_sums[M * N];
          multiply<M, N>(source, rows, group, part, prefetcher, code_sums);
          add([&](auto i) { return code_sums[i].words(); }, group, part);
        });
        unroll<M>([&](auto i) { rows[i]++; });
      }
    }
    unroll<M * N>([&](auto i) {
      const long n = (panel + i % N) * PANEL;
      Vec vecs[PANEL_VECS];
      memcpy(vecs, &sums[i], sizeof vecs);
      unroll<PANEL_VECS>([&](auto v) {
        const Vec added = bias ? load(bias + n + v * LANES) : Vec{};
        store(y + (m + i / N) * y_stride + n + v * LANES, vecs[v] + added);
      });
    });
  }

  // Multiplies rows m … m_end - 1 in tiles whose numbers of rows differ by at most one.
  template <int N, long MAX_ROWS, class Source>
  void in_tiles(const Source& source, long panel, long m, long m_end, long tiles, Prefetcher& prefetcher) const {
    for (; tiles > 0; tiles--) {
      const long rows = (m_end - m + tiles - 1) / tiles;
      switch (rows) {
        case 1: tile<1, N>(source, panel, m, prefetcher); break;
        case 2: tile<2, N>(source, panel, m, prefetcher); break;
        case 3: tile<3, N>(source, panel, m, prefetcher); break;
        case 4: tile<4, N>(source, panel, m, prefetcher); break;
      }
      if constexpr (MAX_ROWS > 4) {
        if (rows == 5) tile<5, N>(source, panel, m, prefetcher);
        if (rows == 6) tile<6, N>(source, panel, m, prefetcher);
      }
      if constexpr (MAX_ROWS > 6) {
        if (rows == 7) tile<7, N>(source, panel, m, prefetcher);
        if (rows == 8) tile<8, N>(source, panel, m, prefetcher);
      }
      m += rows;
    }
  }
};

// Class W of `share_out`.
template <class Packed>
struct QuantPanels : QuantRows {
  // Rows of a block; panels and rows of a tile, limited by registers.
  static constexpr long ROWS = 192;
#if defined(__AVX512VNNI__)
  static constexpr long STREAMED = 8, TILE_PANELS = 2, MAX_TILE_ROWS = 6;
  static constexpr long DIRECT_TILES = 4;  // up to this number of tiles, panels are not unpacked
#else
  static constexpr long STREAMED = 4, TILE_PANELS = 1, MAX_TILE_ROWS = 4, DIRECT_TILES = 2;
#endif
#if defined(__AMX_BF16__)
  static constexpr bool HAS_AMX_PATH = Packed::STEP == Int8Group::SIZE;  // whether AMX multiplies many rows
#else
  static constexpr bool HAS_AMX_PATH = false;
#endif
  using Unit = NoUnit;

  Packed w;

  static constexpr long rows() { return ROWS; }
  const char* begin(long panel) const { return w.begin(panel); }

  template <int N>
  void block(long panel, long m, long m_end, Bytes next) const {
    const long tiles = (m_end - m + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    Prefetcher prefetcher(next, tiles * (inner / (N == 1 ? 4 : Packed::STEP)), MAX_PREFETCH_BYTES);  // see QuantRows
    // 8-bit codes with scales of blocks gain nothing from unpacking.
    if constexpr (!HAS_AMX_PATH && (!Packed::IN_BLOCKS || Packed::BITS <= 4))
      if (tiles > DIRECT_TILES) return unpacked<N>(panel, m, m_end, tiles, prefetcher);
    in_tiles<N, MAX_TILE_ROWS>(w.from(panel), panel, m, m_end, tiles, prefetcher);
  }

  template <int N>
  void unpacked(long panel, long m, long m_end, long tiles, Prefetcher& prefetcher) const {
    const Unpacked<typename Packed::Kind, N> unpacked(w.from(panel), inner / Int8Group::SIZE);
    in_tiles<N, MAX_TILE_ROWS>(unpacked, panel, m, m_end, tiles, prefetcher);
  }

  long steps() const { return inner / 4; }

  // Each panel is one tile, read sequentially.
  void stream(Unit&, long panel, long end, long rows, Prefetcher& prefetcher) const {
    for (; panel < end; panel++) in_tiles<1, STREAMED>(w.from(panel), panel, 0, rows, 1, prefetcher);
  }

  void multiply(Unit&, long panel, long count, long m, long m_end, Bytes next) const {
    for (long j = 0; j < count; j += TILE_PANELS) {
      if (TILE_PANELS == 1 || count - j == 1)
        block<1>(panel + j, m, m_end, part_of(next, j, 1, count));
      else
        block<TILE_PANELS>(panel + j, m, m_end, part_of(next, j, TILE_PANELS, count));
    }
  }
};

}  // namespace panels
#endif
