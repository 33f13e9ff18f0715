// Division of a sequence's keys into parts, whose results are merged in order.
#pragma once

namespace {

// Number of keys in a part. The first PART keys form smaller parts, so that short sequences are also parallelised.
constexpr long PART = 512, SMALL_PART = 128, SMALL_PARTS = PART / SMALL_PART;

inline long part_at(long position) {
  return position < PART ? position / SMALL_PART : SMALL_PARTS - 1 + position / PART;
}
inline long begin_of(long part) { return part < SMALL_PARTS ? part * SMALL_PART : (part - SMALL_PARTS + 1) * PART; }

}  // namespace
