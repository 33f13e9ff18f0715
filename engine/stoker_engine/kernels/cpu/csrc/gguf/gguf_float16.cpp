// F16 and BF16: unquantized 16-bit elements, so rows may have any length.
#include "gguf/gguf_blocks.h"

namespace {

template <class Element>
struct Elements {
  static constexpr bool HAS_TAIL = true;
  using Header = NoHeader;
  struct Location {
    long at;
  };
  Location location(long u) const { return {u * UNIT * 2}; }

  void decode(const uint8_t* row, const Location& location, const Header&, Vec* out) const {
    for (int s = 0; s < UNIT_VECS; s++) out[s] = Element::load(row + location.at + s * LANES * 2);
  }

  void decode_tail(const uint8_t* row, const Location& location, const Header& header, long count, Vec* out) const {
    uint8_t last[UNIT * 2] = {};
    memcpy(last, row + location.at, count * 2);
    decode(last, {0}, header, out);
  }
};

struct Bfloat16 {
  static Vec load(const uint8_t* from) { return ::load((const bf16*)from); }
};

struct Float16 {
  static Vec load(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Vec v;
    for (int i = 0; i < LANES; i++) v[i] = half_at(from + i * 2);
    return v;
#endif
  }
};

}  // namespace

const GGUFOperations* gguf_float16(int type) {
  switch (type) {
    case 1: return &gguf_operations<Elements<Float16>>;
    case 30: return &gguf_operations<Elements<Bfloat16>>;
    default: return nullptr;
  }
}
