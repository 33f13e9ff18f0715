// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: 32 elements share a scale; in Q4_1 and Q5_1 also an offset.
#pragma once

#include "gguf/gguf_blocks.h"

constexpr Table AROUND_ZERO = {{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}};
constexpr Table FROM_ZERO = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};

struct Q4_0 : SmallBlocks<18> {
  void decode(const uint8_t* row, const Location& location, const Header&, Vec* out) const {
    const uint8_t* block = row + location.at;
    AROUND_ZERO.decode(block + 2, half_of(block), out);
  }
};

struct Q4_1 : SmallBlocks<20> {
  void decode(const uint8_t* row, const Location& location, const Header&, Vec* out) const {
    const uint8_t* block = row + location.at;
    FROM_ZERO.decode(block + 4, half_of(block), half_of(block + 2), out);
  }
};

struct Q5_0 : SmallBlocks<22> {
  void decode(const uint8_t* row, const Location& location, const Header&, Vec* out) const {
    const uint8_t* block = row + location.at;
    scaled((halves(block + 6) | spread(block + 2, 16)) - 16, half_of(block), out);
  }
};

struct Q5_1 : SmallBlocks<24> {
  void decode(const uint8_t* row, const Location& location, const Header&, Vec* out) const {
    const uint8_t* block = row + location.at;
    scaled(halves(block + 8) | spread(block + 4, 16), half_of(block), half_of(block + 2), out);
  }
};

struct Q8_0 : SmallBlocks<34> {
  void decode(const uint8_t* row, const Location& location, const Header&, Vec* out) const {
    const uint8_t* block = row + location.at;
    scaled(load_codes(block + 2), half_of(block), out);
  }
};
