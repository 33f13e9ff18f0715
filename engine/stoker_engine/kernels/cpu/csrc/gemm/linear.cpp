// Products with weights whose rows are numbers of x's dtype; see kernels/linear.py.
#include "gemm/matrix.h"
#include "gemm/amx_gemm.h"

template <class T>
static void multiply_rows_of(const Matrix& m, const Multiplied& by) {
  multiply(Product<T, Plain<T>>{(const T*)by.x, by.x_stride, {(const T*)m.w, m.stride}, (const T*)m.bias, (T*)by.y,
                                by.y_stride, by.rows, m.outputs, m.inner});
}

void multiply_rows(bool is_bf16, const Matrix& matrix, const Multiplied& by) {
  is_bf16 ? multiply_rows_of<bf16>(matrix, by) : multiply_rows_of<float>(matrix, by);
}
