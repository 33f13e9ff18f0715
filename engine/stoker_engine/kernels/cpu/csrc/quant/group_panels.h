// Weights in groups in panels (panels.h): each part of 16 rows (groups.h) is interleaved. Rows must consist of whole units of
// 32 elements, each in a single group.
//
//   panel of rows n … n + 15      scales [groups][16], zero points [groups][16] bytes, codes [words][16] of four bytes
#pragma once

#include "gemm/quant_panels.h"
#include "quant/groups.h"

#if defined(STOKER_PANELS)
namespace panels {

// Codes of 32 elements; for ZERO and the functions, which take a unit's words, see quant_panels.h.
struct GroupsOf4Bits {
  static constexpr int ZERO = 8, BYTES = 16;
  static constexpr int first(int i) { return i % 2 * 16 + i / 2 * 4; }
  explicit GroupsOf4Bits(const groups::Layout&) {}
  __m512i codes(const uint8_t* unit, int i) const {
    return four_bits(_mm512_loadu_si512(unit + i / 2 * 4 * PANEL), i % 2);
  }
};

struct GroupsOf8Bits {
  static constexpr int ZERO = 128, BYTES = 32;
  static constexpr int first(int i) { return i * 4; }
  __m512i sign;  // converts signed bytes to unsigned ones by adding ZERO
  explicit GroupsOf8Bits(const groups::Layout& layout)
      : sign(_mm512_set1_epi8(layout.code == groups::INT8 ? -128 : 0)) {}
  __m512i codes(const uint8_t* unit, int i) const {
    return _mm512_xor_si512(_mm512_loadu_si512(unit + i * 4 * PANEL), sign);
  }
};

// Size of blocks of x: the largest possible one that divides a group, else 32.
inline long block_of(const groups::Layout& layout) {
  for (long block : {256, 128})  // with 64, scaling would cost as much as accumulating saves
    if (layout.groups == 1 || layout.group % block == 0) return block;
  return Int8Group::SIZE;
}

// Panels of one kind of codes in memory. OFFSET: whether there may be zero points.
template <class Codes, bool OFFSET, bool BLOCKS>
struct PackedGroups : KindOf<Int8Group::SIZE, OFFSET, BLOCKS, (Codes::BYTES < Int8Group::SIZE)> {
  using Kind = KindOf<Int8Group::SIZE, OFFSET, BLOCKS, (Codes::BYTES < Int8Group::SIZE)>;
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
    __m512 scales;
    if (scale == groups::FLOAT32)
      scales = _mm512_loadu_ps(from);
    else if (scale == groups::FLOAT16)
      scales = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
    else
      scales = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
    if (!OFFSET || !has_zeros) return {scales, _mm512_setzero_ps()};
    const __m512i zeros = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(panel + zeros_at + group * PANEL)));
    return {scales, _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(ZERO), zeros)) * scales};
  }
  __m512i codes(long j, long unit, int, int four) const {
    return kind.codes(at + j * bytes + codes_at + unit * Codes::BYTES * PANEL, four);
  }
  static constexpr int first(int four) { return Codes::first(four); }
};

}  // namespace panels
#endif
