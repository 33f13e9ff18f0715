// GEMM with unpacked weights of x's dtype; see kernels/linear.py.
#include "gemm/matrix.h"
#include "gemm/amx_gemm.h"

template <class T>
static void linear_rows_of(const Matrix& m, const LinearArgs& args) {
  gemm(Gemm<T, Plain<T>>{(const T*)args.x,
                         args.x_stride,
                         {(const T*)m.w, m.stride},
                         (const T*)m.bias,
                         (T*)args.y,
                         args.y_stride,
                         args.rows,
                         m.outputs,
                         m.inner});
}

void linear_rows(bool is_bf16, const Matrix& matrix, const LinearArgs& args) {
  is_bf16 ? linear_rows_of<bf16>(matrix, args) : linear_rows_of<float>(matrix, args);
}
