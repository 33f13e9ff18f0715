// GEMM with weights in panels; see panels.h and kernels/panels.py.
#include "gemm/bf16_panels.h"

#include "gemm/matrix.h"
#include "common/rows.h"
#include "gemm/amx_panels.h"

extern "C" int stoker_has_panels() {
#if defined(STOKER_PANELS)
  return 1;
#else
  return 0;
#endif
}

#if defined(STOKER_PANELS)

// Packs contiguous w [outputs, inner] in place; inner is even. Rows after the last whole panel stay unpacked.
extern "C" void stoker_pack_panels(void* w, long outputs, long inner) {
  parallel(outputs / PANEL, [&](Pieces& pieces) {
    std::vector<uint32_t> copy(PANEL * inner / 2);
    for (long piece; pieces.take(piece);) {
      uint32_t* panel = (uint32_t*)w + piece * PANEL * inner / 2;
      memcpy(copy.data(), panel, copy.size() * sizeof(uint32_t));
      long k = 0;
      for (; k + LANES <= inner / 2; k += LANES)
        for (long first = 0; first < PANEL; first += LANES) {
          WordVec words[LANES];
          for (long n = 0; n < LANES; n++)
            memcpy(&words[n], copy.data() + (first + n) * inner / 2 + k, sizeof(WordVec));
          transpose(words);
          for (long n = 0; n < LANES; n++) memcpy(panel + (k + n) * PANEL + first, &words[n], sizeof(WordVec));
        }
      for (; k < inner / 2; k++)
        for (long n = 0; n < PANEL; n++) panel[k * PANEL + n] = copy[n * inner / 2 + k];
    }
  });
}

// Copies rows of w by index → y [count, inner].
extern "C" void stoker_panel_rows(const void* w, const int64_t* rows, void* y, long count, long outputs, long inner) {
  parallel_for(count * inner > GRAIN_SIZE, count, [&](long i) {
    const long row = rows[i], whole = outputs / PANEL * PANEL;
    uint32_t* to = (uint32_t*)y + i * inner / 2;
    if (row >= whole) {
      memcpy(to, (const bf16*)w + row * inner, inner * sizeof(bf16));
      return;
    }
    const uint32_t* from = (const uint32_t*)w + row / PANEL * PANEL * inner / 2 + row % PANEL;
    for (long k = 0; k < inner / 2; k++) to[k] = from[k * PANEL];
  });
}

void linear_panels(const Matrix& m, const LinearArgs& args) {
  const Gemm<bf16, Plain<bf16>> p{(const bf16*)args.x, args.x_stride, {(const bf16*)m.w, m.inner},
                                  (const bf16*)m.bias, (bf16*)args.y, args.y_stride,
                                  args.rows,           m.outputs,     m.inner};
  long x_stride = p.x_stride;
  const auto* const x = panels::rows_for_products(p.x, x_stride, p.rows, p.inner, true);
  const panels::Bf16Panels w{x, x_stride, p.w.at, p.bias, p.y, p.y_stride, p.inner};
#if defined(STOKER_AMX)
  if (p.inner % panels::AmxBf16Panels::STEP == 0)
    return panels::share_out(p, panels::AmxBf16Panels{w}, args.prefetch_ranges);
#endif
  panels::share_out(p, w, args.prefetch_ranges);
}
#else
extern "C" void stoker_pack_panels(void*, long, long) {}
extern "C" void stoker_panel_rows(const void*, const int64_t*, void*, long, long, long) {}
void linear_panels(const Matrix&, const LinearArgs&) {}
#endif
