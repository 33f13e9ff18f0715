// GEMM with GGUF blocks in panels; see gguf_panels.h.
#include "gguf/gguf_panels.h"

#include "gguf/gguf_k.h"
#include "gguf/gguf_small.h"
#include "gemm/matrix.h"
#include "common/rows.h"
#include "gemm/amx_quant_panels.h"

#if defined(STOKER_PANELS)
namespace {

// `Format`: blocks of W's rows in panels; `Rows`: of the rows after the last whole panel.
template <class Rows, class Format>
void linear_panels_of(const BlockGemm& p, const PrefetchRanges* prefetch_ranges) {
  const bf16 *x = (const bf16*)p.x, *bias = (const bf16*)p.bias;
  const Int8Group* rounded_x = rounded(x, p.x_stride, p.rows, p.inner, Format::ZERO, Format::STEP);
  using Packed = panels::PackedBlocks<Format>;
  const panels::QuantPanels<Packed> w{{rounded_x, bias, (bf16*)p.y, p.y_stride, p.inner}, Packed::of(p.w, p.inner)};
  const Gemm<bf16, Blocks<bf16, Rows>> by_rows{
      x, p.x_stride, {p.w, p.w_stride, {}}, bias, (bf16*)p.y, p.y_stride, p.rows, p.outputs, p.inner};
#if defined(STOKER_AMX)
  // With a scale for 16 elements, AMX would use half of a tile's words and scale twice as often: vectors are faster.
  if constexpr (Format::STEP == Int8Group::SIZE)
    return panels::share_out(by_rows, panels::AmxQuantPanels<Packed>(w, p.rows), prefetch_ranges);
#endif
  panels::share_out(by_rows, w, prefetch_ranges);
}

typedef void (*LinearKernel)(const BlockGemm&, const PrefetchRanges* prefetch_ranges);

// The kernel for a type, by ggml's type number; null if the type has no panels.
LinearKernel kernel_of(int type) {
  switch (type) {
    case 2: return linear_panels_of<Q4_0, panels::Q4_0>;
    case 3: return linear_panels_of<Q4_1, panels::Q4_1>;
    case 6: return linear_panels_of<Q5_0, panels::Q5_0>;
    case 7: return linear_panels_of<Q5_1, panels::Q5_1>;
    case 8: return linear_panels_of<Q8_0, panels::Q8_0>;
    case 12: return linear_panels_of<Q4_K, panels::Q4_K>;
    case 13: return linear_panels_of<Q5_K, panels::Q5_K>;
    case 14: return linear_panels_of<Q6_K, panels::Q6_K>;
  }
  return nullptr;
}

}  // namespace

extern "C" int stoker_has_gguf_panels(int type) { return kernel_of(type) != nullptr; }

void linear_gguf_panels(const Matrix& m, const LinearArgs& args) {
  kernel_of(m.format[0])({args.x, args.x_stride, (const uint8_t*)m.w, m.stride, m.bias, args.y, args.y_stride,
                          args.rows, m.outputs, m.inner},
                         args.prefetch_ranges);
}

// Packs the whole panels of contiguous w [outputs, row], rows of two-byte words, in place.
extern "C" void stoker_pack_gguf_panels(void* w, long outputs, long row) {
  parallel(outputs / PANEL, [&](Pieces& pieces) {
    std::vector<uint16_t> copy(PANEL * row);
    for (long piece; pieces.take(piece);) {
      uint16_t* panel = (uint16_t*)w + piece * PANEL * row;
      memcpy(copy.data(), panel, copy.size() * sizeof(uint16_t));
      for (long word = 0; word < row; word++)
        for (long n = 0; n < PANEL; n++) panel[word * PANEL + n] = copy[n * row + word];
    }
  });
}

// Copies rows of packed w by index → y [count, row], rows of two-byte words in the unpacked layout.
extern "C" void stoker_gguf_panel_rows(const void* w, const int64_t* rows, void* y, long count, long outputs,
                                       long row) {
  const long whole = outputs / PANEL * PANEL;
  parallel_for(count * row > GRAIN_SIZE, count, [&](long i) {
    const long n = rows[i];
    uint16_t* to = (uint16_t*)y + i * row;
    if (n >= whole) {
      memcpy(to, (const uint16_t*)w + n * row, row * sizeof(uint16_t));
      return;
    }
    const uint16_t* from = (const uint16_t*)w + n / PANEL * PANEL * row + n % PANEL;
    for (long word = 0; word < row; word++) to[word] = from[word * PANEL];
  });
}
#else
extern "C" int stoker_has_gguf_panels(int) { return 0; }
extern "C" void stoker_pack_gguf_panels(void*, long, long) {}
extern "C" void stoker_gguf_panel_rows(const void*, const int64_t*, void*, long, long, long) {}
void linear_gguf_panels(const Matrix&, const LinearArgs&) {}
#endif
