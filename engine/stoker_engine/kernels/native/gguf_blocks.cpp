// Products with matrices in GGUF's types, and what they stand for.
#include "gguf_blocks.h"

namespace {

const GGUFOperations& operations(int type) {
  for (auto find : {gguf_small, gguf_k, gguf_tables, gguf_numbers})
    if (const GGUFOperations* found = find(type)) return *found;
  __builtin_trap();
}

}  // namespace

// `type` is ggml's number of it. x's stride in elements, w's in bytes; `bias` may be null.
extern "C" void stoker_gguf_product(int type, int is_bf16, const void* x, long x_stride, const uint8_t* w,
                                    long w_stride, const void* bias, void* y, long rows, long outputs, long inner) {
  operations(type).product[is_bf16 != 0]({x, x_stride, w, w_stride, bias, y, rows, outputs, inner});
}

// Rows of w, their stride in bytes → y [rows, inner].
extern "C" void stoker_gguf_dequantize(int type, int is_bf16, const uint8_t* w, long w_stride, void* y, long rows,
                                       long inner) {
  operations(type).dequantize[is_bf16 != 0](w, w_stride, y, rows, inner);
}
