// A matrix in blocks as the W of a GEMM (gemm.h): elements are decoded in registers.
//
// Elements are computed in float32 and rounded to x's dtype, so a GEMM is bit-identical to that with the dequantized
// matrix. For few rows of x, elements are decoded on the fly, so W is read at its stored size; for more rows, a piece
// of W is unpacked once for all of them.
//
// A format decodes units of 32 elements. It is a class, whose objects may have fields, with
//   HAS_TAIL                 whether rows may end within a unit
//   Header                   data that units of a row share, kept from one to the next; `NoHeader` for none
//   location(u)              → Location: position of unit u in any row; `at`, an offset in bytes, is prefetched
//   begins(location)         with a Header: whether another one starts at this unit
//   read(row, location, header)          reads the header
//   decode(row, location, header, out)   decodes the 32 elements of a unit to Vec out[UNIT_VECS], not yet rounded
//   decode_tail(row, location, header, count, out)   if HAS_TAIL: decodes `count` < 32 elements of the last unit; other
//                            elements of out are undefined, and no byte beyond the row is read
#pragma once

#include <type_traits>

#include "common/rows.h"
#include "gemm/amx_gemm.h"

constexpr long UNIT = 32;
constexpr int UNIT_VECS = UNIT / LANES;

struct NoHeader {};

template <class T>
constexpr int UNIT_PACKS = UNIT / Pack<T>::SIZE;

// Rounds a unit's elements to the type of the last argument.
inline void pack_unit(const Vec* elements, Pack<float>::Type* to, float) {
  for (int s = 0; s < UNIT_VECS; s++) to[s] = elements[s];
}

#if defined(__AVX512BF16__)
inline void pack_unit(const Vec* elements, Pack<bf16>::Type* to, bf16) {
  to[0] = (Pack<bf16>::Type)_mm512_cvtne2ps_pbh((__m512)elements[1], (__m512)elements[0]);
}
#else
inline void pack_unit(const Vec* elements, Pack<bf16>::Type* to, bf16) {
  for (int s = 0; s < UNIT_VECS; s++) to[s] = rounded(elements[s]);
}
#endif

inline void put_pack(float* to, Vec v) { store(to, v); }
#if defined(__AVX512BF16__)
inline void put_pack(bf16* to, Pack<bf16>::Type v) { memcpy((void*)to, &v, sizeof v); }
#else
inline void put_pack(bf16* to, Vec v) {  // already rounded
  const HalfVec half = __builtin_convertvector((WordVec)v >> 16, HalfVec);
  memcpy((void*)to, &half, sizeof half);
}
#endif

// W in blocks; the stride is in bytes.
template <class T, class Format>
struct Blocks {
  static constexpr long STEP = UNIT, DIRECT_ROWS = 4, BLOCK = 256, TILED_BLOCK = 1024;
  static constexpr bool HAS_TAIL = Format::HAS_TAIL;
  using P = Pack<T>;
  using Location = decltype(Format().location(0));
  const uint8_t* at;
  long stride;
  Format format;

  struct Row {
    const uint8_t* at;
    long ahead;
    Format format;
    typename Format::Header header;

    void begin(const Location& location) {
      if constexpr (!std::is_same_v<typename Format::Header, NoHeader>)
        if (format.begins(location)) read_header(location);
    }

    // Not inlined: the tile would contain a copy for each of its rows.
    __attribute__((noinline)) void read_header(const Location& location) { format.read(at, location, header); }

    // Always inlined: a call would cost half as much as decoding.
    __attribute__((always_inline)) void load(const Location& location, typename P::Type* to) {
      // Hardware prefetchers cannot follow many short streams.
      __builtin_prefetch(at + location.at + ahead, 0, 2);
      Vec elements[UNIT_VECS];
      format.decode(at, location, header, elements);
      pack_unit(elements, to, T{});
    }

    void tail(const Location& location, long count, typename P::Type* to) {
      T elements[UNIT] = {};
      begin(location);
      copy_tail(location, count, elements);
      for (int s = 0; s < UNIT_PACKS<T>; s++) to[s] = P::load(elements + s * P::SIZE);
    }

    // Write the elements of a unit, or the first `count` of the last unit, for dequantization. Subnormals are kept,
    // which `pack_unit` may flush to 0.
    void copy(const Location& location, T* to) {
      Vec elements[UNIT_VECS];
      format.decode(at, location, header, elements);
      for (int s = 0; s < UNIT_VECS; s++) store_decoded(to + s * LANES, elements[s]);
    }

    void copy_tail(const Location& location, long count, T* to) {
      Vec elements[UNIT_VECS];
      T rounded[UNIT];
      format.decode_tail(at, location, header, count, elements);
      for (int s = 0; s < UNIT_VECS; s++) store_decoded(rounded + s * LANES, elements[s]);
      memcpy((void*)to, rounded, count * sizeof(T));
    }
  };

  Location location(long k) const { return format.location(k / UNIT); }
  Row row(long n) const { return {at + n * stride, LANES * stride, format, {}}; }

  // Dequantizes row n to `to`. Subnormals are kept.
  void copy(long n, T* to, long inner) const {
    Row from = row(n);
    long k = 0;
    for (; k + UNIT <= inner; k += UNIT) {
      from.begin(location(k));
      from.copy(location(k), to + k);
    }
    if constexpr (HAS_TAIL)
      if (k < inner) {
        from.begin(location(k));
        from.copy_tail(location(k), inner - k, to + k);
      }
  }

  // The same by `load`: subnormals may become 0.
  void unpack(long n, T* to, long inner) const {
    Row from = row(n);
    long k = 0;
    for (; k + UNIT <= inner; k += UNIT) {
      typename P::Type packs[UNIT_PACKS<T>];
      from.begin(location(k));
      from.load(location(k), packs);
      for (int s = 0; s < UNIT_PACKS<T>; s++) put_pack(to + k + s * P::SIZE, packs[s]);
    }
    if constexpr (HAS_TAIL)
      if (k < inner) {
        from.begin(location(k));
        from.copy_tail(location(k), inner - k, to + k);
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

// Arguments of a GEMM. Strides of x in elements, of w in bytes; `bias` may be null.
struct BlockGemm {
  const void* x;
  long x_stride;
  const uint8_t* w;
  long w_stride;
  const void* bias;
  void* y;
  long y_stride, rows, outputs, inner;
};

template <class T, class Format>
void block_gemm(const BlockGemm& p, const Format& format) {
  gemm(Gemm<T, Blocks<T, Format>>{(const T*)p.x,
                                  p.x_stride,
                                  {p.w, p.w_stride, format},
                                  (const T*)p.bias,
                                  (T*)p.y,
                                  p.y_stride,
                                  p.rows,
                                  p.outputs,
                                  p.inner});
}

// Dequantizes rows of w, their stride in bytes → y [rows, inner].
template <class T, class Format>
void dequantize_blocks(const uint8_t* w, long w_stride, void* y, long rows, long inner, const Format& format) {
  parallel_for(rows * inner > GRAIN_SIZE, rows,
               [&](long row) { Blocks<T, Format>{w, w_stride, format}.copy(row, (T*)y + row * inner, inner); });
}
