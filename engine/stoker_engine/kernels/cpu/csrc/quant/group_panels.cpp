// Products with weights in groups in panels; see group_panels.h.
#include "quant/group_panels.h"

#include "gemm/amx_quant_panels.h"
#include "gemm/amx_int_gemm.h"

#if defined(STOKER_PANELS)
namespace {

using groups::Layout;

bool has_panels(const Layout& layout) {
  const bool integers = layout.code == groups::UINT4 || layout.code == groups::UINT8 || layout.code == groups::INT8;
  const bool one_group_a_unit = layout.groups == 1 || layout.group % UNIT == 0;
  return integers && layout.scale_bytes() > 1 && !layout.has_row_scale && layout.inner % UNIT == 0 && one_group_a_unit;
}

template <class Packed, class Rows>
void multiply_packed(const Matrix& m, const Multiplied& by, const Layout& layout) {
  const bf16 *x = (const bf16*)by.x, *bias = (const bf16*)m.bias;
  const Packed packed(m.w, layout);
  const EightBits* rounded_x = rounded(x, by.x_stride, by.rows, m.inner, Packed::ZERO, Packed::STEP, packed.block_size);
  const panels::CodedPanels<Packed> w{{rounded_x, bias, (bf16*)by.y, by.y_stride, m.inner}, packed};
  const Product<bf16, groups::Groups<bf16, Rows>> by_rows{
      x, by.x_stride, {(const uint8_t*)m.w, m.stride, layout}, bias, (bf16*)by.y, by.y_stride, by.rows, m.outputs, m.inner};
#if defined(STOKER_AMX)
  using Tiled = std::conditional_t<Packed::IN_BLOCKS, panels::TiledDigits<Packed>, panels::TiledCodes<Packed>>;
  panels::share_out(by_rows, Tiled(w, by.rows), by.soon);
#else
  panels::share_out(by_rows, w, by.soon);
#endif
}

// W's rows beyond the last whole panel are `InputBatch`.
template <class Rows, class Codes>
void multiply_panels_of(const Matrix& m, const Multiplied& by, const Layout& layout) {
  if (panels::block_of(layout) > EightBits::NUMBERS)  // an offset of each block costs nothing to speak of
    multiply_packed<panels::PackedGroups<Codes, true, true>, Rows>(m, by, layout);
  else if (layout.has_zeros)
    multiply_packed<panels::PackedGroups<Codes, true, false>, Rows>(m, by, layout);
  else
    multiply_packed<panels::PackedGroups<Codes, false, false>, Rows>(m, by, layout);
}

// Calls `run` with what lies side by side of a row: where it begins, in how many parts, and the bytes of one.
template <class Run>
void with_sections(const Layout& layout, Run run) {
  run(0, layout.groups, layout.scale_bytes());
  if (layout.has_zeros) run(layout.zeros(), layout.groups, 1);
  run(layout.codes(), (layout.bytes() - layout.codes()) / 4, 4);
}

}  // namespace

extern "C" int stoker_has_group_panels(int code, int scale, int has_zeros, int has_row_scale, long group, long inner) {
  return has_panels(Layout(code, scale, has_zeros, has_row_scale, group, inner));
}

void multiply_group_panels(const Matrix& m, const Multiplied& by) {
  const Layout layout(m);
  switch (layout.code) {
    case groups::UINT4: return multiply_panels_of<Looked<bf16, 4, false>, panels::GroupsOf4Bits>(m, by, layout);
    case groups::UINT8: return multiply_panels_of<UInt8<bf16>, panels::GroupsOf8Bits>(m, by, layout);
    default: return multiply_panels_of<Int8<bf16>, panels::GroupsOf8Bits>(m, by, layout);
  }
}

// w [outputs, bytes of a row], without gaps: its whole panels, in place.
extern "C" void stoker_pack_group_panels(int code, int scale, int has_zeros, int has_row_scale, long group, long inner, void* w,
                                         long outputs) {
  const Layout layout(code, scale, has_zeros, has_row_scale, group, inner);
  const long row = layout.bytes();
  parallel(outputs / PANEL, [&](Pieces& pieces) {
    std::vector<uint8_t> copy(PANEL * row);
    for (long piece; pieces.take(piece);) {
      uint8_t* const panel = (uint8_t*)w + piece * PANEL * row;
      memcpy(copy.data(), panel, copy.size());
      with_sections(layout, [&](long begin, long count, long size) {
        uint8_t* to = panel + begin * PANEL;
        for (long i = 0; i < count; i++)
          for (long n = 0; n < PANEL; n++, to += size) memcpy(to, copy.data() + n * row + begin + i * size, size);
      });
    }
  });
}

// Rows of w by their numbers → y [count, bytes of a row], as they were before they were packed.
extern "C" void stoker_group_panel_rows(int code, int scale, int has_zeros, int has_row_scale, long group, long inner,
                                        const void* w, const int64_t* rows, void* y, long count, long outputs) {
  const Layout layout(code, scale, has_zeros, has_row_scale, group, inner);
  const long row = layout.bytes(), whole = outputs / PANEL * PANEL;
  parallel_for(count * row > WORTH_SHARING, count, [&](long i) {
    const long n = rows[i];
    uint8_t* const own = (uint8_t*)y + i * row;
    if (n >= whole) {
      memcpy(own, (const uint8_t*)w + n * row, row);
      return;
    }
    const uint8_t* const panel = (const uint8_t*)w + n / PANEL * PANEL * row;
    with_sections(layout, [&](long begin, long count, long size) {
      for (long part = 0; part < count; part++)
        memcpy(own + begin + part * size, panel + begin * PANEL + (part * PANEL + n % PANEL) * size, size);
    });
  });
}
#else
extern "C" int stoker_has_group_panels(int, int, int, int, long, long) { return 0; }
extern "C" void stoker_pack_group_panels(int, int, int, int, long, long, void*, long) {}
extern "C" void stoker_group_panel_rows(int, int, int, int, long, long, const void*, const int64_t*, void*, long, long) {}
void multiply_group_panels(const Matrix&, const Multiplied&) {}
#endif
