// Weights in groups in panels (panels.h): what 16 rows have of the same, beside each other. Of rows as groups.h says, of whole
// units of 32 numbers, each of one group.
//
//   panel of rows n … n + 15      scales [groups][16], zero points [groups][16] bytes, codes [words of a row][16], of four bytes
#pragma once

#include "coded_panels.h"
#include "groups.h"

#if defined(STOKER_PANELS)
namespace panels {

// Codes of 32 numbers: see coded_panels.h for ZERO, and for the rest, of a unit's words.
struct GroupsOf4Bits {
  static constexpr int ZERO = 8, BYTES = 16;
  static constexpr int first(int i) { return i % 2 * 16 + i / 2 * 4; }
  static __m512i codes(const uint8_t* unit, int i) {
    return four_bits(_mm512_loadu_si512(unit + i / 2 * 4 * PANEL), i % 2);
  }
};

struct GroupsOf8Bits {
  static constexpr int ZERO = 128, BYTES = 32;
  static constexpr int first(int i) { return i * 4; }
  static __m512i codes(const uint8_t* unit, int i) { return _mm512_loadu_si512(unit + i * 4 * PANEL); }
};

struct GroupsOfSigned8Bits : GroupsOf8Bits {
  static __m512i codes(const uint8_t* unit, int i) {
    return _mm512_xor_si512(GroupsOf8Bits::codes(unit, i), _mm512_set1_epi8(-128));
  }
};

// Panels of one kind of codes, as they lie in memory.
template <class Codes, bool ZERO_POINTS>
struct PackedGroups {
  static constexpr long STEP = EightBits::NUMBERS;
  static constexpr int ZERO = Codes::ZERO;
  static constexpr bool HAS_OFFSET = ZERO_POINTS;

  const uint8_t* at;
  long bytes;                    // from a panel to the next
  int scale;                     // what kind
  long scale_bytes;              // of a group's rows
  long zeros_at, codes_at;       // behind the beginning of a panel
  uint64_t groups_in_a_unit;     // a fraction of 2^32, rounded up

  PackedGroups(const void* w, const groups::Layout& layout)
      : at((const uint8_t*)w), bytes(layout.bytes() * PANEL), scale(layout.scale), scale_bytes(layout.scale_bytes() * PANEL),
        zeros_at(layout.zeros() * PANEL), codes_at(layout.codes() * PANEL),
        groups_in_a_unit(((1ull << 32) * EightBits::NUMBERS + layout.group - 1) / layout.group) {}

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
    if (!ZERO_POINTS) return {scales, _mm512_setzero_ps()};
    const __m512i zeros = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(panel + zeros_at + group * PANEL)));
    return {scales, _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(ZERO), zeros)) * scales};
  }
  __m512i codes(long j, long unit, int, int four) const {
    return Codes::codes(at + j * bytes + codes_at + unit * Codes::BYTES * PANEL, four);
  }
  static constexpr int first(int four) { return Codes::first(four); }
};

}  // namespace panels
#endif
