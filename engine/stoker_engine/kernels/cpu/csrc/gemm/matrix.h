// A weight in any of the supported layouts; `matrix.py` mirrors it.
#pragma once

#include <cstdint>

struct Matrix {
  enum Kind : long { ROWS, PANELS, GGUF, GGUF_PANELS, GROUPS, GROUP_PANELS, CONCAT, EXTENDED };
  long kind;
  // GGUF…: ggml's type number. GROUP…: code, scale, has zeros, has row scale, elements in a group. CONCAT: number of
  // matrices.
  long format[5];
  // CONCAT: matrices whose outputs are concatenated; EXTENDED: an Extension. Both have no stride and no bias.
  const void* w;
  long stride;       // distance of rows: for ROWS in elements, for others in bytes
  const void* bias;  // [outputs], or null
  long outputs, inner;
};

struct PrefetchRanges;

// x [rows, inner] → y [rows, outputs], bf16 or float; rows are `x_stride` and `y_stride` elements apart.
struct LinearArgs {
  const void* x;
  long x_stride;
  void* y;
  long y_stride, rows;
  const PrefetchRanges* prefetch_ranges = nullptr;  // to prefetch during the GEMM; see gemm.h
  const int64_t* batch_rows = nullptr;              // row of the input batch for each row of x; −1 for padding
};

// A linear operation whose result also depends on the request (LoRA): `add` adds to the result of `base`.
struct Extension {
  const Matrix* base;
  void (*add)(const void* context, int is_bf16, const LinearArgs* args);
  const void* context;
};

void linear(bool is_bf16, const Matrix& matrix, const LinearArgs& args);

// Linear operations for one kind each.
void linear_rows(bool is_bf16, const Matrix& matrix, const LinearArgs& args);
void linear_panels(const Matrix& matrix, const LinearArgs& args);
void linear_gguf(bool is_bf16, const Matrix& matrix, const LinearArgs& args);
void linear_gguf_panels(const Matrix& matrix, const LinearArgs& args);
void linear_groups(bool is_bf16, const Matrix& matrix, const LinearArgs& args);
void linear_group_panels(const Matrix& matrix, const LinearArgs& args);
