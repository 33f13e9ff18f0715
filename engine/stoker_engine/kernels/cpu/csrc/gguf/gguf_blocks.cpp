// GEMM with matrices in GGUF's types, and their dequantization.
#include "gguf/gguf_blocks.h"
#include "gemm/matrix.h"

namespace {

const GGUFOperations& operations(int type) {
  for (auto find : {gguf_small, gguf_k, gguf_tables, gguf_float16})
    if (const GGUFOperations* found = find(type)) return *found;
  __builtin_trap();
}

}  // namespace

void linear_gguf(bool is_bf16, const Matrix& m, const LinearArgs& args) {
  operations(m.format[0])
      .linear[is_bf16]({args.x, args.x_stride, (const uint8_t*)m.w, m.stride, m.bias, args.y, args.y_stride, args.rows,
                        m.outputs, m.inner});
}

// Dequantizes rows of w, their stride in bytes → y [rows, inner].
extern "C" void stoker_gguf_dequantize(int type, int is_bf16, const uint8_t* w, long w_stride, void* y, long rows,
                                       long inner) {
  operations(type).dequantize[is_bf16 != 0](w, w_stride, y, rows, inner);
}
