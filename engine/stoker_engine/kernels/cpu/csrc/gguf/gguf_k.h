// Q2_K … Q6_K: 256 elements share a float16, the factor of the integer scales of 16 or 32 elements.
#pragma once

#include "gguf/gguf_blocks.h"

// The scales of a block, one for each sixteen elements.
struct Scales {
  float scales[16];
};

struct ScalesAndOffsets {
  float scales[16], offsets[16];
};

// Writes sixteen small integers × scale.
inline void put_scales(HalfCodes integers, Vec scale, float* to) {
  Vec scales[HALF_VECS];
  to_floats(integers, scales);
  for (Vec& each : scales) each *= scale;
  memcpy(to, scales, sizeof scales);
}

inline HalfCodes load_sixteen(const uint8_t* from) {
  HalfCodes codes;
  memcpy(&codes, from, sizeof codes);
  return codes;
}

struct Q2_K : LargeBlocks<84> {
  using Header = ScalesAndOffsets;

  void read(const uint8_t* row, const Location& location, Header& header) const {
    const uint8_t* block = row + location.block;
    const HalfCodes both = load_sixteen(block);
    put_scales(both & 15, half_of(block + 80), header.scales);
    put_scales(both >> 4, -half_of(block + 82), header.offsets);
  }

  void decode(const uint8_t* row, const Location& location, const Header& header, Vec* out) const {
    const uint8_t* codes = row + location.block + 16 + location.unit / 4 * 32;
    scaled_by_halves(bits_of(load_codes(codes), location.unit % 4 * 2, 3), header.scales + location.unit * 2,
                     header.offsets + location.unit * 2, out);
  }
};

struct Q3_K : LargeBlocks<110> {
  using Header = Scales;

  // 6-bit scales: 4 bits in the first 8 bytes, 2 bits in the next 4.
  void read(const uint8_t* row, const Location& location, Header& header) const {
    const uint8_t* block = row + location.block;
    uint64_t low;
    uint32_t high;
    memcpy(&low, block + 96, sizeof low);
    memcpy(&high, block + 104, sizeof high);
    constexpr uint64_t FOURS = 0x0f0f0f0f0f0f0f0f;
    constexpr uint32_t TWOS = 0x03030303;
    const uint64_t first = (high & TWOS) | (uint64_t)(high >> 2 & TWOS) << 32;
    const uint64_t second = (high >> 4 & TWOS) | (uint64_t)(high >> 6 & TWOS) << 32;
    typedef uint64_t Words __attribute__((vector_size(16)));
    const Words integers = {(low & FOURS) | first << 4, (low >> 4 & FOURS) | second << 4};
    put_scales((HalfCodes)integers - 32, half_of(block + 108), header.scales);
  }

  void decode(const uint8_t* row, const Location& location, const Header& header, Vec* out) const {
    const uint8_t *block = row + location.block, *codes = block + 32 + location.unit / 4 * 32;
    const Codes low = bits_of(load_codes(codes), location.unit % 4 * 2, 3);
    const Codes high = moved_up(bits_of(load_codes(block), location.unit, 1), 2);
    scaled_by_halves((low | high) - 4, header.scales + location.unit * 2, out);
  }
};

// Reads Q4_K's and Q5_K's eight scales and eight offsets, 6 bits each, from 12 bytes: the first four of both are in the
// low bits of the first 8 bytes; of the others, 4 bits are in the last 4 bytes, 2 in the high bits of the first 8.
inline void six_bits(const uint8_t* block, ScalesAndOffsets& header) {
  uint32_t words[3];
  memcpy(words, block + 4, sizeof words);
  constexpr uint32_t SIXES = 0x3f3f3f3f, FOURS = 0x0f0f0f0f, TWOS = 0x03030303;
  typedef uint32_t Words __attribute__((vector_size(16)));
  const Words integers = {words[0] & SIXES, (words[2] & FOURS) | (words[0] >> 6 & TWOS) << 4, words[1] & SIXES,
                          (words[2] >> 4 & FOURS) | (words[1] >> 6 & TWOS) << 4};
  Vec both[HALF_VECS];
  to_floats((HalfCodes)integers, both);
  float elements[16];
  memcpy(elements, both, sizeof elements);
  const float scale = half_at(block), offset = -half_at(block + 2);
  for (int i = 0; i < 8; i++) {
    header.scales[i] = elements[i] * scale;
    header.offsets[i] = elements[8 + i] * offset;
  }
}

// The low four bits of a unit's codes: two units share 32 bytes, in the low and the high halves.
inline Codes four_bits(const uint8_t* codes, long unit) {
  return bits_of(load_codes(codes + unit / 2 * 32), unit % 2 * 4, 15);
}

struct Q4_K : LargeBlocks<144> {
  using Header = ScalesAndOffsets;

  void read(const uint8_t* row, const Location& location, Header& header) const {
    six_bits(row + location.block, header);
  }

  void decode(const uint8_t* row, const Location& location, const Header& header, Vec* out) const {
    const Vec scale = broadcast(header.scales[location.unit]), offset = broadcast(header.offsets[location.unit]);
    scaled(four_bits(row + location.block + 16, location.unit), scale, offset, out);
  }
};

struct Q5_K : LargeBlocks<176> {
  using Header = ScalesAndOffsets;

  void read(const uint8_t* row, const Location& location, Header& header) const {
    six_bits(row + location.block, header);
  }

  void decode(const uint8_t* row, const Location& location, const Header& header, Vec* out) const {
    const uint8_t* block = row + location.block;
    const Vec scale = broadcast(header.scales[location.unit]), offset = broadcast(header.offsets[location.unit]);
    const Codes fifth = moved_up(bits_of(load_codes(block + 16), location.unit, 1), 4);
    scaled(four_bits(block + 48, location.unit) | fifth, scale, offset, out);
  }
};

struct Q6_K : LargeBlocks<210> {
  using Header = Scales;

  void read(const uint8_t* row, const Location& location, Header& header) const {
    const uint8_t* block = row + location.block;
    put_scales(load_sixteen(block + 192), half_of(block + 208), header.scales);
  }

  void decode(const uint8_t* row, const Location& location, const Header& header, Vec* out) const {
    const long half = location.unit / 4, quarter = location.unit % 4;
    const uint8_t* low = row + location.block + half * 64 + quarter % 2 * 32;
    const uint8_t* high = row + location.block + 128 + half * 32;
    const Codes four = bits_of(load_codes(low), quarter / 2 * 4, 15);
    const Codes two = moved_up(bits_of(load_codes(high), quarter * 2, 3), 4);
    scaled_by_halves((four | two) - 32, header.scales + location.unit * 2, out);
  }
};
