// A weight in any of the supported layouts; `matrix.py` mirrors it.
#pragma once

#include <cstdint>

struct Matrix {
  enum Kind : long { ROWS, PANELS, GGUF, GGUF_PANELS, GROUPS, GROUP_PANELS, CONCAT, EXTENDED };
  long kind;
  // GGUF…: ggml's type number. GROUP…: code, scale, has zeros, has row scale, elements in a group. CONCAT: number of matrices.
  long format[5];
  const void* w;  // CONCAT: matrices whose outputs are concatenated; EXTENDED: an Extension. Both have no stride and no bias.
  long stride;  // distance of rows: for ROWS in elements, for others in bytes
  const void* bias;  // [outputs], or null
  long outputs, inner;
};

struct PrefetchRanges;

// Called by a GEMM of many rows for each block of y that is complete: rows m … m_end - 1, outputs n … n_end - 1. The thread
// that computed the block calls it, so the block is in its cache.
struct BlockDone {
  void (*call)(const void* context, long m, long m_end, long n, long n_end);
  const void* context;
};

// x [rows, inner] → y [rows, outputs], bf16 or float; rows are `x_stride` and `y_stride` elements apart.
struct LinearArgs {
  const void* x;
  long x_stride;
  void* y;
  long y_stride, rows;
  const PrefetchRanges* prefetch_ranges = nullptr;  // to prefetch during the GEMM; see gemm.h
  const int64_t* batch_rows = nullptr;  // row of the input batch for each row of x; −1 for padding
  const BlockDone* block_done = nullptr;  // only if `reports_blocks`
  long first_output = 0;                 // added to the outputs of `block_done`
};

// A linear operation whose result also depends on the request (LoRA): `linear` computes `base` and adds to its result.
struct Extension {
  const Matrix* base;
  void (*linear)(const void* context, int is_bf16, const Matrix* base, const LinearArgs* args);
  const void* context;
};

// Number of rows from which a GEMM can call `block_done`.
constexpr long MANY_ROWS = 64;
bool reports_blocks(const Matrix& matrix, const LinearArgs& args);

void linear(bool is_bf16, const Matrix& matrix, const LinearArgs& args);

// Linear operations for one kind each.
void linear_rows(bool is_bf16, const Matrix& matrix, const LinearArgs& args);
void linear_panels(const Matrix& matrix, const LinearArgs& args);
void linear_gguf(bool is_bf16, const Matrix& matrix, const LinearArgs& args);
void linear_gguf_panels(const Matrix& matrix, const LinearArgs& args);
void linear_groups(bool is_bf16, const Matrix& matrix, const LinearArgs& args);
void linear_group_panels(const Matrix& matrix, const LinearArgs& args);
