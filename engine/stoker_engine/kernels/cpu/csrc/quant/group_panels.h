// Weights in groups in panels (panels.h): each part of 16 rows (groups.h) is interleaved. Rows must consist of whole
// units of 32 elements, each in a single group.
//
//   panel of rows n … n + 15      scales [groups][16], zero points [groups][16] bytes, codes [words][16] of four bytes
#pragma once

#include "gemm/quant_panels.h"
#include "quant/groups.h"

#if defined(STOKER_PANELS)
namespace panels {

// Codes of 32 elements; for ZERO and the functions, which take a unit's words, see quant_panels.h.
struct GroupsOf4Bits {
  static constexpr int BITS = 4, ZERO = 8, STORED_ZERO = 8, BYTES = 16;
  static constexpr int first(int i) { return i % 2 * 16 + i / 2 * 4; }
  explicit GroupsOf4Bits(const groups::Layout&) {}
  Bytes64 codes(const uint8_t* unit, int i) const { return four_bits(bytes_at(unit + i / 2 * 4 * PANEL), i % 2); }
};

struct GroupsOf8Bits {
  static constexpr int BITS = 8, ZERO = SIGNED_CODES ? 0 : 128, STORED_ZERO = 128, BYTES = 32;
  static constexpr int first(int i) { return i * 4; }
  Bytes64 sign;  // converts signed bytes to unsigned ones, or unsigned ones to signed ones, by adding 128
  explicit GroupsOf8Bits(const groups::Layout& layout)
      : sign(all_bytes((layout.code == groups::INT8) == SIGNED_CODES ? 0 : -128)) {}
  Bytes64 codes(const uint8_t* unit, int i) const { return flipped(bytes_at(unit + i * 4 * PANEL), sign); }
};

// Size of blocks of x: 256 or 128 if it divides a group, 256 if a row is one group, else 32.
inline long block_of(const groups::Layout& layout) {
  for (long block : {256, 128})  // with 64, scaling would cost as much as accumulating saves
    if (layout.groups == 1 || layout.group % block == 0) return block;
  return Int8Group::SIZE;
}

// Panels of one kind of codes in memory. OFFSET: whether there may be zero points.
template <class Codes, bool OFFSET, bool BLOCKS>
struct PackedGroups : KindOf<Int8Group::SIZE, OFFSET, Codes::BITS, BLOCKS> {
  using Kind = KindOf<Int8Group::SIZE, OFFSET, Codes::BITS, BLOCKS>;
  static constexpr int ZERO = Codes::ZERO;

  Codes kind;
  const uint8_t* at;
  long block_size;
  long bytes;  // bytes of a panel
  int scale;   // type of scales
  bool has_zeros;
  long scale_bytes;           // bytes of a group's scales in a panel
  long zeros_at, codes_at;    // offsets in a panel
  uint64_t groups_in_a_unit;  // in units of 2^-32, rounded up

  PackedGroups(const void* w, const groups::Layout& layout)
      : kind(layout),
        at((const uint8_t*)w),
        block_size(block_of(layout)),
        bytes(layout.bytes() * PANEL),
        scale(layout.scale),
        has_zeros(layout.has_zeros),
        scale_bytes(layout.scale_bytes() * PANEL),
        zeros_at(layout.zeros() * PANEL),
        codes_at(layout.codes() * PANEL),
        groups_in_a_unit(((1ull << 32) * Int8Group::SIZE + layout.group - 1) / layout.group) {}

  const char* begin(long panel) const { return (const char*)(at + panel * bytes); }
  PackedGroups from(long panel) const {
    PackedGroups found = *this;
    found.at += panel * bytes;
    return found;
  }

  Header header(long j, long unit, int) const {
    const long group = unit * groups_in_a_unit >> 32;
    const uint8_t *panel = at + j * bytes, *from = panel + group * scale_bytes;
    Floats16 scales;
    if (scale == groups::FLOAT32)
      scales = floats_at(from);
    else if (scale == groups::FLOAT16)
      scales = floats_of_halves(_mm256_loadu_si256((const __m256i*)from));
    else
      scales = floats_of_bf16(_mm256_loadu_si256((const __m256i*)from));
    if (!OFFSET || !has_zeros) return {scales, all_floats(0)};
    const __m256i zeros = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(panel + zeros_at + group * PANEL)));
    const __m256i offsets = _mm256_sub_epi16(_mm256_set1_epi16(Codes::STORED_ZERO), zeros);
    return {scales, multiplied(floats_of_integers(offsets), scales)};
  }
  Bytes64 codes(long j, long unit, int, int four) const {
    return kind.codes(at + j * bytes + codes_at + unit * Codes::BYTES * PANEL, four);
  }
  static constexpr int first(int four) { return Codes::first(four); }
};

}  // namespace panels
#endif
