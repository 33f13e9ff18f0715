// Products with W as checkpoints hold it: nothing is packed.
#include "product.h"

namespace {

template <class T>
void linear(const void* x, long x_stride, const void* w, long w_stride, const void* bias, void* y, long rows,
            long outputs, long inner) {
  multiply(Product<T, Plain<T>>{
      (const T*)x, x_stride, {(const T*)w, w_stride}, (const T*)bias, (T*)y, outputs, rows, outputs, inner});
}

}  // namespace

// Strides in elements; `bias` may be null.
extern "C" void stoker_linear(int is_bf16, const void* x, long x_stride, const void* w, long w_stride,
                              const void* bias, void* y, long rows, long outputs, long inner) {
  (is_bf16 ? linear<bf16> : linear<float>)(x, x_stride, w, w_stride, bias, y, rows, outputs, inner);
}
