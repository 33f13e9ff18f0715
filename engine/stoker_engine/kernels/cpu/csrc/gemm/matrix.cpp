// GEMM with weights in any layout; see matrix.h.
#include "gemm/matrix.h"

static void linear_concat(bool is_bf16, const Matrix& matrix, LinearArgs args) {
  const Matrix* each = (const Matrix*)matrix.w;
  for (long i = 0; i < matrix.format[0]; i++) {
    linear(is_bf16, each[i], args);
    args.y = (char*)args.y + each[i].outputs * (is_bf16 ? 2 : 4);
    args.prefetch_ranges = nullptr;
  }
}

static void linear_extended(bool is_bf16, const Matrix& matrix, const LinearArgs& args) {
  const Extension& extension = *(const Extension*)matrix.w;
  linear(is_bf16, *extension.base, args);
  extension.add(extension.context, is_bf16, &args);
}

void linear(bool is_bf16, const Matrix& matrix, const LinearArgs& args) {
  if (args.rows == 0) return;
  switch (matrix.kind) {
    case Matrix::ROWS: return linear_rows(is_bf16, matrix, args);
    case Matrix::PANELS: return linear_panels(matrix, args);
    case Matrix::GGUF: return linear_gguf(is_bf16, matrix, args);
    case Matrix::GGUF_PANELS: return linear_gguf_panels(matrix, args);
    case Matrix::GROUPS: return linear_groups(is_bf16, matrix, args);
    case Matrix::GROUP_PANELS: return linear_group_panels(matrix, args);
    case Matrix::CONCAT: return linear_concat(is_bf16, matrix, args);
    case Matrix::EXTENDED: return linear_extended(is_bf16, matrix, args);
  }
}

extern "C" void stoker_linear(int is_bf16, const Matrix* matrix, const void* x, long x_stride, void* y, long rows,
                              const int64_t* batch_rows) {
  linear(is_bf16, *matrix, {x, x_stride, y, matrix->outputs, rows, nullptr, batch_rows});
}
