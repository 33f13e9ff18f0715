// IQ4_NL, IQ4_XS, MXFP4: four-bit codes are indices into a table of integers.
#include "gguf/gguf_blocks.h"

namespace {

// Denser around 0, as weights are.
constexpr Table UNEVEN = {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};
// Twice the values of FP4 (e2m1).
constexpr Table FP4_TWICE = {{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};

struct IQ4_NL : SmallBlocks<18> {
  void decode(const uint8_t* row, const Location& location, const Header&, Vec* out) const {
    const uint8_t* block = row + location.at;
    UNEVEN.decode(block + 2, half_of(block), out);
  }
};

struct IQ4_XS : LargeBlocks<136> {
  struct Header {
    float scales[8];
  };

  void read(const uint8_t* row, const Location& location, Header& header) const {
    const uint8_t* block = row + location.block;
    const float scale = half_at(block);
    for (int u = 0; u < 8; u++) {
      const int low = block[4 + u / 2] >> u % 2 * 4 & 15, high = block[2 + u / 4] >> u % 4 * 2 & 3;
      header.scales[u] = scale * (float)((low | high << 4) - 32);
    }
  }

  void decode(const uint8_t* row, const Location& location, const Header& header, Vec* out) const {
    UNEVEN.decode(row + location.block + 8 + location.unit * 16, broadcast(header.scales[location.unit]), out);
  }
};

struct MXFP4 : SmallBlocks<17> {
  void decode(const uint8_t* row, const Location& location, const Header&, Vec* out) const {
    const uint8_t* block = row + location.at;
    // Half of 2^(exponent - 127), since the table has twice the values; the smallest two are subnormal.
    const uint32_t exponent = block[0], bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    FP4_TWICE.decode(block + 1, broadcast(scale), out);
  }
};

}  // namespace

const GGUFOperations* gguf_tables(int type) {
  switch (type) {
    case 20: return &gguf_operations<IQ4_NL>;
    case 23: return &gguf_operations<IQ4_XS>;
    case 39: return &gguf_operations<MXFP4>;
    default: return nullptr;
  }
}
