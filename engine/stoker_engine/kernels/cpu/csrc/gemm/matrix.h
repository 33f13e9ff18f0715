// A weight, in any of the ways in which kernels multiply by one; `matrix.py` mirrors it.
#pragma once

#include <cstdint>

struct Matrix {
  enum Kind : long { ROWS, PANELS, GGUF, GGUF_PANELS, GROUPS, GROUP_PANELS, CONCAT, EXTENDED };
  long kind;
  // GGUF…: ggml's number of the type. GROUP…: code, scale, has zeros, has a row scale, elements in a group. CONCAT: how many.
  long format[5];
  const void* w;  // CONCAT: matrices, whose outputs lie side by side; EXTENDED: an Extension. These have no stride and bias.
  long stride;  // of rows: of ROWS in elements, of others in bytes
  const void* bias;  // [outputs], or null
  long outputs, inner;
};

struct PrefetchRanges;

// x [rows, inner] → y [rows, outputs], rows `x_stride` and `y_stride` elements apart, of bf16 or floats.
struct LinearArgs {
  const void* x;
  long x_stride;
  void* y;
  long y_stride, rows;
  const PrefetchRanges* prefetch_ranges = nullptr;  // may be fetched meanwhile; see gemm.h
  const int64_t* batch_rows = nullptr;  // the row of the input batch that each row of x belongs to; −1: padding
};

// A linear operation whose result also depends on the request, such as one with adapters: `add` adds to what `base` gives.
struct Extension {
  const Matrix* base;
  void (*add)(const void* context, int is_bf16, const LinearArgs* args);
  const void* context;
};

void linear(bool is_bf16, const Matrix& matrix, const LinearArgs& args);

// Of one kind each.
void linear_rows(bool is_bf16, const Matrix& matrix, const LinearArgs& args);
void linear_panels(const Matrix& matrix, const LinearArgs& args);
void linear_gguf(bool is_bf16, const Matrix& matrix, const LinearArgs& args);
void linear_gguf_panels(const Matrix& matrix, const LinearArgs& args);
void linear_groups(bool is_bf16, const Matrix& matrix, const LinearArgs& args);
void linear_group_panels(const Matrix& matrix, const LinearArgs& args);
