// GEMM with weights in groups in panels; see group_panels.h.
#include "quant/group_panels.h"

#include "gemm/amx_quant_panels.h"
#include "gemm/amx_int_gemm.h"

#if defined(STOKER_PANELS)
namespace {

using groups::Layout;

bool has_panels(const Layout& layout) {
  const bool integers = layout.code == groups::UINT4 || layout.code == groups::UINT8 || layout.code == groups::INT8;
  const bool is_signed_with_zeros = layout.code == groups::INT8 && layout.has_zeros;  // no checkpoint has these
  const bool one_group_a_unit = layout.groups == 1 || layout.group % UNIT == 0;
  return integers && !is_signed_with_zeros && layout.scale_bytes() > 1 && !layout.has_row_scale &&
         layout.inner % UNIT == 0 && one_group_a_unit;
}

template <class Packed, class Rows>
void linear_packed(const Matrix& m, const LinearArgs& args, const Layout& layout) {
  const bf16 *x = (const bf16*)args.x, *bias = (const bf16*)m.bias;
  const Packed packed(m.w, layout);
  const Int8Group* rounded_x =
      rounded(x, args.x_stride, args.rows, m.inner, Packed::ZERO, Packed::STEP, packed.block_size);
  const panels::QuantPanels<Packed> w{{rounded_x, bias, (bf16*)args.y, args.y_stride, m.inner}, packed};
  const Gemm<bf16, groups::Groups<bf16, Rows>> by_rows{
      x,         args.x_stride, {(const uint8_t*)m.w, m.stride, layout}, bias, (bf16*)args.y, args.y_stride, args.rows,
      m.outputs, m.inner};
#if defined(STOKER_AMX)
  using AmxPanels = std::conditional_t<Packed::IN_BLOCKS, panels::AmxIntPanels<Packed>, panels::AmxQuantPanels<Packed>>;
  panels::share_out(by_rows, AmxPanels(w, args.rows), args.prefetch_ranges);
#else
  panels::share_out(by_rows, w, args.prefetch_ranges);
#endif
}

// `Rows` is the format of W's rows after the last whole panel.
template <class Rows, class Codes>
void linear_panels_of(const Matrix& m, const LinearArgs& args, const Layout& layout) {
  if (panels::block_of(layout) > Int8Group::SIZE)  // the cost of an offset for each block is negligible
    linear_packed<panels::PackedGroups<Codes, true, true>, Rows>(m, args, layout);
  else if (layout.has_zeros)
    linear_packed<panels::PackedGroups<Codes, true, false>, Rows>(m, args, layout);
  else
    linear_packed<panels::PackedGroups<Codes, false, false>, Rows>(m, args, layout);
}

// Calls `run` for each interleaved section of a row with its offset, its number of parts, and the bytes of a part.
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

void linear_group_panels(const Matrix& m, const LinearArgs& args) {
  const Layout layout(m);
  switch (layout.code) {
    case groups::UINT4: return linear_panels_of<LookupCodes<bf16, 4, false>, panels::GroupsOf4Bits>(m, args, layout);
    case groups::UINT8: return linear_panels_of<UInt8<bf16>, panels::GroupsOf8Bits>(m, args, layout);
    default: return linear_panels_of<Int8<bf16>, panels::GroupsOf8Bits>(m, args, layout);
  }
}

// Packs the whole panels of contiguous w [outputs, bytes of a row], in place.
extern "C" void stoker_pack_group_panels(int code, int scale, int has_zeros, int has_row_scale, long group, long inner,
                                         void* w, long outputs) {
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

// Copies rows of packed w by index → y [count, bytes of a row], in the unpacked layout.
extern "C" void stoker_group_panel_rows(int code, int scale, int has_zeros, int has_row_scale, long group, long inner,
                                        const void* w, const int64_t* rows, void* y, long count, long outputs) {
  const Layout layout(code, scale, has_zeros, has_row_scale, group, inner);
  const long row = layout.bytes(), whole = outputs / PANEL * PANEL;
  parallel_for(count * row > GRAIN_SIZE, count, [&](long i) {
    const long n = rows[i];
    uint8_t* const row_bytes = (uint8_t*)y + i * row;
    if (n >= whole) {
      memcpy(row_bytes, (const uint8_t*)w + n * row, row);
      return;
    }
    const uint8_t* const panel = (const uint8_t*)w + n / PANEL * PANEL * row;
    with_sections(layout, [&](long begin, long count, long size) {
      for (long part = 0; part < count; part++)
        memcpy(row_bytes + begin + part * size, panel + begin * PANEL + (part * PANEL + n % PANEL) * size, size);
    });
  });
}
#else
extern "C" int stoker_has_group_panels(int, int, int, int, long, long) { return 0; }
extern "C" void stoker_pack_group_panels(int, int, int, int, long, long, void*, long) {}
extern "C" void stoker_group_panel_rows(int, int, int, int, long, long, const void*, const int64_t*, void*, long,
                                        long) {}
void linear_group_panels(const Matrix&, const LinearArgs&) {}
#endif
