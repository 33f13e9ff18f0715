// Weights in GGUF's format Q8_0 (kernels/q8_0.py draws it): products with them, and what they stand for.
#include "blocks.h"

namespace {

struct Q8_0 {
  static constexpr bool HAS_REST = false;
  using Header = NoHeader;
  struct Place {
    long at;
  };

  Place place(long u) const { return {u * 34}; }
  void begin(const uint8_t*, const Place&, Header&) const {}
  void decode(const uint8_t* row, const Place& place, const Header&, Vec* out) const {
    const uint8_t* block = row + place.at;
    const Vec scale = half_of(block);
    for (int s = 0; s < UNIT_VECS; s++) out[s] = signed_bytes((const int8_t*)block + 2 + s * LANES) * scale;
  }
};

}  // namespace

// x's stride in elements, w's in bytes; `bias` may be null.
extern "C" void stoker_q8_0_product(int is_bf16, const void* x, long x_stride, const uint8_t* w, long w_stride,
                                    const void* bias, void* y, long rows, long outputs, long inner) {
  const BlockProduct product{x, x_stride, w, w_stride, bias, y, rows, outputs, inner};
  (is_bf16 ? multiply_blocks<bf16, Q8_0> : multiply_blocks<float, Q8_0>)(product, {});
}

// Rows of w, their stride in bytes → y [rows, inner].
extern "C" void stoker_q8_0_dequantize(int is_bf16, const uint8_t* w, long w_stride, void* y, long rows, long inner) {
  (is_bf16 ? dequantize_blocks<bf16, Q8_0> : dequantize_blocks<float, Q8_0>)(w, w_stride, y, rows, inner, {});
}
