// Weights in groups that share a scale (kernels/group_blocks.py has the layout), as the W of a GEMM (gemm.h).
//
// A row's scales and zero points are converted to floats before its elements are read, so all types of scales are
// handled alike.
#pragma once

#include "quant/group_codes.h"
#include "gemm/matrix.h"

namespace groups {

// In the order of kernels/cpu/group_blocks.py.
enum Code { UINT2, UINT3, UINT4, UINT8, INT8, FP8_E4M3, FP8_E5M2, FP4, NF4 };
enum Scale { FLOAT32, FLOAT16, BFLOAT16, E8M0, SCALE_E4M3 };

// The values of up to 16 codes, repeated to fill tables.
alignas(64) inline constexpr float INTEGERS2[16] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
alignas(64) inline constexpr float INTEGERS3[16] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
alignas(64) inline constexpr float INTEGERS4[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
alignas(64) inline constexpr float FP4_VALUES[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
// clang-format off
alignas(64) inline constexpr float NF4_VALUES[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f,
    1.0f};
// clang-format on

// Layout of a row.
struct Layout {
  int code, scale;
  bool has_zeros, has_row_scale;
  long group, groups, inner;

  Layout(int code, int scale, bool has_zeros, bool has_row_scale, long group, long inner)
      : code(code), scale(scale), has_zeros(has_zeros), has_row_scale(has_row_scale), inner(inner) {
    this->group = group ? group : inner;
    groups = (inner + this->group - 1) / this->group;
  }

  // The layout of a matrix of kind GROUPS or GROUP_PANELS.
  explicit Layout(const Matrix& m) : Layout(m.format[0], m.format[1], m.format[2], m.format[3], m.format[4], m.inner) {}

  long scale_bytes() const { return scale == FLOAT32 ? 4 : scale == FLOAT16 || scale == BFLOAT16 ? 2 : 1; }
  long scales() const { return has_row_scale ? 4 : 0; }
  long zeros() const { return scales() + groups * scale_bytes(); }
  long codes() const { return zeros() + (has_zeros ? groups : 0); }
  float implied_zero() const {
    return code == UINT2 ? 2.0f : code == UINT3 ? 4.0f : code == UINT4 ? 8.0f : code == UINT8 ? 128.0f : 0.0f;
  }
  const float* values() const {
    return code == UINT2   ? INTEGERS2
           : code == UINT3 ? INTEGERS3
           : code == FP4   ? FP4_VALUES
           : code == NF4   ? NF4_VALUES
                           : INTEGERS4;
  }
  long bits() const {
    return code == UINT2 ? 2 : code == UINT3 ? 3 : code == UINT4 || code == FP4 || code == NF4 ? 4 : 8;
  }
  long bytes() const { return codes() + (inner + UNIT - 1) / UNIT * UNIT * bits() / 8; }
  // Whether a unit's halves may belong to different groups.
  bool splits() const { return groups > 1 && group % UNIT; }
};

// Converts `count` elements of BYTES bytes, LANES at a time. The last vector is read as if 0s followed; `to` must have
// room for whole vectors.
template <int BYTES, class Convert>
inline void convert(const uint8_t* from, long count, float* to, Convert of) {
  long i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, of(from + i * BYTES));
  if (i < count) {
    uint8_t padded[LANES * BYTES] = {};
    memcpy(padded, from + i * BYTES, (count - i) * BYTES);
    store(to + i, of(padded));
  }
}

// Reads a row's scales and zero points; `scales` and `zeros` must have room for whole vectors.
__attribute__((noinline)) inline void read_groups(const Layout& layout, const uint8_t* row, float* scales,
                                                  float* zeros) {
  const uint8_t* from = row + layout.scales();
  const long count = layout.groups;
  switch (layout.scale) {
    case FLOAT32: memcpy(scales, from, count * 4); break;
    case FLOAT16:
      convert<2>(from, count, scales, [](const uint8_t* at) {
        HalfVec half;
        memcpy(&half, at, sizeof half);
        return halves(half);
      });
      break;
    case BFLOAT16: convert<2>(from, count, scales, [](const uint8_t* at) { return load((const bf16*)at); }); break;
    case E8M0:
      convert<1>(from, count, scales, [](const uint8_t* at) {
        const WordVec exponent = widened(at);
        const WordVec power = exponent == 0 ? WordVec{} + 0x400000 : exponent << 23;
        return (Vec)(exponent == 255 ? WordVec{} + 0x7fc00000 : power);
      });
      break;
    case SCALE_E4M3:
      convert<1>(from, count, scales, [](const uint8_t* at) { return halves(halves_of_e4m3(at)) * E4M3_FACTOR; });
  }
  if (layout.has_row_scale) {
    float row_scale;
    memcpy(&row_scale, row, sizeof row_scale);
    for (long i = 0; i < count; i++) scales[i] *= row_scale;
  }
  if (layout.code == FP8_E4M3)
    for (long i = 0; i < count; i++) scales[i] *= E4M3_FACTOR;
  if (layout.has_zeros)
    convert<1>(row + layout.zeros(), count, zeros,
               [](const uint8_t* at) { return __builtin_convertvector((IntVec)widened(at), Vec); });
  else
    for (long i = 0; i < count; i++) zeros[i] = layout.implied_zero();
}

// W in groups; the stride is in bytes.
template <class T, class Codes>
struct Groups {
  static constexpr long STEP = UNIT, DIRECT_ROWS = Codes::DIRECT_ROWS, BLOCK = 256, TILED_BLOCK = 1024;
  static constexpr bool HAS_TAIL = true;
  using P = Pack<T>;
  const uint8_t* at;
  long stride;
  Layout layout;

  struct Row {
    const uint8_t* codes;
    const float* scales;
    Codes kind;

    __attribute__((always_inline)) void begin(const GroupLocation& location) {
      if (location.begins) kind.begin(scales, location);
    }

    __attribute__((always_inline)) void load(const GroupLocation& location, typename P::Type* to) {
      // Hardware prefetchers cannot follow many short streams.
      __builtin_prefetch(codes + location.ahead, 0, 2);
      kind.load(codes + location.at, scales, location, to);
    }

    // Loads the first `count` elements of the last unit, padded with zeros.
    void tail(const GroupLocation& location, long count, typename P::Type* to) {
      T elements[UNIT];
      kind.begin(scales, location);
      unpack(location, elements);
      memset((void*)(elements + count), 0, (UNIT - count) * sizeof(T));
      for (int s = 0; s < UNIT_PACKS<T>; s++) to[s] = P::load(elements + s * P::SIZE);
    }

    void unpack(const GroupLocation& location, T* to) {
      typename P::Type packs[UNIT_PACKS<T>];
      begin(location);
      load(location, packs);
      for (int s = 0; s < UNIT_PACKS<T>; s++) put_pack(to + s * P::SIZE, packs[s]);
    }
  };

  // Number of floats in the buffer of a row's scales; its zero points follow.
  long room() const { return (layout.groups + LANES - 1) / LANES * LANES; }

  __attribute__((always_inline)) GroupLocation location(long k) const {
    const long at = k / UNIT * Codes::BYTES;
    const long first = (unsigned)k / (unsigned)layout.group;
    const long second = std::min<long>((unsigned)(k + 16) / (unsigned)layout.group, layout.groups - 1);
    return {at,
            at + LANES * stride,
            {first, second},
            {first + room(), second + room()},
            layout.splits() || k == first * layout.group};
  }

  // Valid until this thread requests another row whose n is equal modulo LANES.
  __attribute__((noinline)) Row row(long n) const {
    thread_local std::vector<float> buffer;
    const long size = 2 * room();
    if ((long)buffer.size() < LANES * size) buffer.resize(LANES * size);
    float* scales = buffer.data() + n % LANES * size;
    const uint8_t* from = at + n * stride;
    for (long i = 0; i < layout.codes(); i += 64) __builtin_prefetch(from + LANES * stride + i, 0, 2);
    read_groups(layout, from, scales, scales + room());
    Codes kind;
    if constexpr (Codes::BYTES < UNIT) kind.values = layout.values();
    return {from + layout.codes(), scales, kind};
  }

  void unpack(long n, T* to, long inner) const {
    Row from = row(n);
    long k = 0;
    for (; k + UNIT <= inner; k += UNIT) from.unpack(location(k), to + k);
    if (k < inner) {
      T elements[UNIT];
      from.unpack(location(k), elements);
      memcpy((void*)(to + k), elements, (inner - k) * sizeof(T));
    }
  }

  Bytes bytes(long, long) const { return {}; }

  Plain<T> elements(long n, long n_end, long inner) const {
    thread_local std::vector<T> buffer;
    if ((long)buffer.size() < (n_end - n) * inner) buffer.resize((n_end - n) * inner);
    for (long i = n; i < n_end; i++) unpack(i, buffer.data() + (i - n) * inner, inner);
    return {buffer.data(), inner};
  }
};

}  // namespace groups
