// GEMM with weights in groups, and their dequantization; see kernels/group_blocks.py for the layout.
#include "quant/groups.h"

namespace {

using namespace groups;

// Calls `run` with an object whose type determines the kind of codes.
template <class T, class Run>
void with_codes(const Layout& layout, Run run) {
  switch (layout.code) {
    case UINT2: return run(LookupCodes<T, 2, true>{});
    case UINT3: return run(LookupCodes<T, 3, true>{});
    case UINT8: return run(UInt8<T>{});
    case INT8: return run(Int8<T>{});
    case FP8_E4M3: return run(Fp8<T, true>{});
    case FP8_E5M2: return run(Fp8<T, false>{});
    default: return layout.splits() ? run(LookupCodes<T, 4, true>{}) : run(LookupCodes<T, 4, false>{});
  }
}

template <class T>
void group_linear(const BlockGemm& p, const Layout& layout) {
  with_codes<T>(layout, [&](auto codes) {
    gemm(Gemm<T, Groups<T, decltype(codes)>>{(const T*)p.x,
                                             p.x_stride,
                                             {p.w, p.w_stride, layout},
                                             (const T*)p.bias,
                                             (T*)p.y,
                                             p.outputs,
                                             p.rows,
                                             p.outputs,
                                             p.inner});
  });
}

// Converts through floats, so subnormals of bfloat16 are kept.
void dequantize(const Layout& layout, const uint8_t* w, long w_stride, void* y, bool is_bf16, long rows, long inner) {
  with_codes<float>(layout, [&](auto codes) {
    parallel_for(rows * inner > GRAIN_SIZE, rows, [&](long row) {
      const Groups<float, decltype(codes)> groups{w, w_stride, layout};
      if (!is_bf16) return groups.unpack(row, (float*)y + row * inner, inner);
      const float* elements = groups.elements(row, row + 1, inner).at;
      for (long k = 0; k < inner; k += LANES) {
        bf16 decoded[LANES];
        store_decoded(decoded, load_up_to(elements + k, inner - k));
        memcpy((bf16*)y + row * inner + k, decoded, std::min<long>(LANES, inner - k) * sizeof(bf16));
      }
    });
  });
}

}  // namespace

void linear_groups(bool is_bf16, const Matrix& m, const LinearArgs& args) {
  const Layout layout(m);
  (is_bf16 ? group_linear<bf16> : group_linear<float>)({args.x, args.x_stride, (const uint8_t*)m.w, m.stride, m.bias,
                                                        args.y, args.y_stride, args.rows, m.outputs, m.inner},
                                                       layout);
}

// Dequantizes rows of w, their stride in bytes → y [rows, inner].
extern "C" void stoker_group_dequantize(int code, int scale, int has_zeros, int has_row_scale, long group, int is_bf16,
                                        const uint8_t* w, long w_stride, void* y, long rows, long inner) {
  const Layout layout(code, scale, has_zeros, has_row_scale, group, inner);
  dequantize(layout, w, w_stride, y, is_bf16, rows, inner);
}
