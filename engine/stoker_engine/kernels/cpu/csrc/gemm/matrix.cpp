// Products with weights of any kind; see matrix.h.
#include "gemm/matrix.h"

static void multiply_beside(bool is_bf16, const Matrix& matrix, Multiplied by) {
  const Matrix* each = (const Matrix*)matrix.w;
  for (long i = 0; i < matrix.format[0]; i++) {
    multiply(is_bf16, each[i], by);
    by.y = (char*)by.y + each[i].outputs * (is_bf16 ? 2 : 4);
    by.soon = nullptr;
  }
}

void multiply(bool is_bf16, const Matrix& matrix, const Multiplied& by) {
  if (by.rows == 0) return;
  switch (matrix.kind) {
    case Matrix::ROWS: return multiply_rows(is_bf16, matrix, by);
    case Matrix::PANELS: return multiply_panels(matrix, by);
    case Matrix::GGUF: return multiply_gguf(is_bf16, matrix, by);
    case Matrix::GGUF_PANELS: return multiply_gguf_panels(matrix, by);
    case Matrix::GROUPS: return multiply_groups(is_bf16, matrix, by);
    case Matrix::GROUP_PANELS: return multiply_group_panels(matrix, by);
    case Matrix::BESIDE: return multiply_beside(is_bf16, matrix, by);
  }
}

extern "C" void stoker_product(int is_bf16, const Matrix* matrix, const void* x, long x_stride, void* y, long rows) {
  multiply(is_bf16, *matrix, {x, x_stride, y, matrix->outputs, rows});
}
