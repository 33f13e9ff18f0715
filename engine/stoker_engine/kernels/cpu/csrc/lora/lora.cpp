// LoRA adapters of a linear operation: y += (x Aᵀ) Bᵀ, with a separate adapter for each row of x (kernels/cpu/lora.py).
//
//   rows of x by adapter   3: 0 1   0: 2 5 7        rows without an adapter are left out
//   shrink                 t [rows][ranks] = x Aᵀ   pieces of all adapters' rows and ranks, in one parallel loop
//   expand                 y += t Bᵀ                pieces of all adapters' rows and outputs, in one parallel loop
//
// A row's result depends only on the row and its adapter.
#include <algorithm>
#include <memory>
#include <vector>

#include "common/memory.h"
#include "common/rows.h"
#include "common/threads.h"
#include "gemm/amx_panels.h"
#include "gemm/gemm.h"
#include "gemm/matrix.h"
#include "gemm/bf16_panels.h"

namespace {

// Contiguous [outputs][inner]; in panels (gemm/panels.h) `outputs` is a multiple of 16 and `inner` is even.
struct LoraMatrix {
  const void* w;
  long outputs, inner, is_panels;
};

// An adapter's part for one of the matrices that an operation merges: B is multiplied with the ranks from `first_rank`
// on, and `outputs` results (without B's padding) are added to y from `first_output` on.
struct LoraPart {
  LoraMatrix b;
  long first_rank, first_output, outputs;
};

struct LoraFactors {
  LoraMatrix a;  // A of all parts, stacked along the rows
  long num_parts;
  const LoraPart* parts;
};

// Rows of an adapter's files, and their destination: the rows from `first` on of a zeroed matrix.
struct LoraSource {
  const void* rows;  // contiguous [outputs][inner]
  long outputs, inner;
  long to;  // offset of the matrix in the adapter's memory, in bytes
  long first, to_inner, is_panels;
};

struct LoraTable {
  const int64_t* slots;  // [rows + 1], slot of each row of the input batch, −1 for none; the last entry is for padding
  long num_rows, num_slots;
};

struct LoraSite {
  const LoraTable* table;
  const LoraFactors* const* factors;  // by slot; null if the adapter does not change this operation
};

constexpr long ROWS = 96, WIDTH = 64;  // rows and outputs of a piece that is multiplied at once
// If a group has few rows, reading B is the bottleneck: its outputs are divided among threads. With many rows, y is the
// bottleneck: it is read and written in long runs along its rows.
constexpr long FEW_ROWS = 8, RUN = 4 * WIDTH, LONG_RUN = 32 * WIDTH;
#if defined(STOKER_AMX)
constexpr long RUN_ROWS = panels::AmxBf16Panels::PAIR;
#else
constexpr long RUN_ROWS = 24;
#endif

#if defined(STOKER_PANELS)
static_assert(ROWS <= panels::Bf16Panels::rows());
#endif

// Rows of x with one adapter.
struct Group {
  const LoraFactors* factors;
  const long* rows;
  long count, first_t;  // number of rows, and offset of the group's part of t
  bool follow;          // whether the rows are consecutive
};

// Rows of a group from m on × outputs n … n_end - 1 of a matrix.
struct Piece {
  const Group* group;
  const LoraPart* part;
  const LoraMatrix* matrix;
  long m, n, n_end, rows;

  template <class T>
  Bytes bytes() const {
    const T* w = (const T*)matrix->w;
    return {(const char*)(w + n * matrix->inner), (const char*)(w + n_end * matrix->inner)};
  }
};

// Calls body() in each thread, and its result with (piece, next) for each piece; `next` is the memory that the thread
// reads afterwards. Runs in parallel unless the work is too small.
template <class T, class Body>
void each_piece(const std::vector<Piece>& pieces, Body body) {
  const Piece* const all = pieces.data();
  const auto run = [&](Pieces& taken) {
    auto work = body();
    long i, next;
    for (bool more = taken.take(i); more; i = next) {
      more = taken.take(next);
      work(all[i], more ? all[next].bytes<T>() : Bytes{});
    }
  };
  const long count = pieces.size();
  long size = 0;
  for (const Piece& piece : pieces) size += piece.rows * (piece.n_end - piece.n) * piece.matrix->inner;
  if (size >= GRAIN_SIZE) return parallel(count, run);
  Pieces own(count);
  run(own);
}

struct Unit {
#if defined(STOKER_AMX)
  TileUnit tiles;
#endif
};

// Returns the groups of a batch, valid until this thread's next call.
std::vector<Group>& grouped(const LoraSite& site, const LinearArgs& args) {
  static thread_local std::vector<Group> groups;
  static thread_local std::vector<long> row_slots, rows, starts;
  groups.clear();
  const LoraTable& table = *site.table;
  row_slots.resize(args.rows);
  starts.assign(table.num_slots + 1, 0);
  bool any = false;
  for (long m = 0; m < args.rows; m++) {
    const long row = args.batch_rows[m], slot = table.slots[row < 0 ? table.num_rows : row];
    row_slots[m] = slot >= 0 && site.factors[slot] ? slot : -1;
    if (row_slots[m] >= 0) any = true, starts[row_slots[m] + 1]++;
  }
  if (!any) return groups;
  for (long slot = 0; slot < table.num_slots; slot++) starts[slot + 1] += starts[slot];
  rows.resize(args.rows);
  static thread_local std::vector<long> next;
  next.assign(starts.begin(), starts.end() - 1);
  for (long m = 0; m < args.rows; m++)
    if (row_slots[m] >= 0) rows[next[row_slots[m]]++] = m;
  long first_t = 0;
  for (long slot = 0; slot < table.num_slots; slot++) {
    const long count = starts[slot + 1] - starts[slot];
    if (!count) continue;
    const long* of = rows.data() + starts[slot];
    groups.push_back({site.factors[slot], of, count, first_t, of[count - 1] - of[0] == count - 1});
    first_t += count * site.factors[slot]->a.outputs;
  }
  return groups;
}

// Multiplies `rows` rows of x with outputs `first` … `first + count - 1` of a matrix, and prefetches `next`.
template <class T>
void multiply(Unit& unit, const LoraMatrix& matrix, const T* x, long x_stride, long rows, long first, long count, T* y,
              long y_stride, Bytes next) {
  const T* w = (const T*)matrix.w + first * matrix.inner;
#if defined(STOKER_PANELS)
  if constexpr (sizeof(T) == sizeof(bf16))
    if (matrix.is_panels) {
      const auto* const multiplied = panels::rows_for_products(x, x_stride, rows, matrix.inner, false);
      const panels::Bf16Panels by_panels{multiplied, x_stride, w, nullptr, y, y_stride, matrix.inner};
#if defined(STOKER_AMX)
      if (const long step = panels::AmxBf16Panels::step_for(matrix.inner))
        return panels::AmxBf16Panels{by_panels, step}.multiply(unit.tiles, 0, count / PANEL, 0, rows, next);
#endif
      panels::NoUnit none;
      return by_panels.multiply(none, 0, count / PANEL, 0, rows, next);
    }
#endif
  block(Gemm<T, Plain<T>>{x, x_stride, {w, matrix.inner}, nullptr, y, y_stride, rows, count, matrix.inner}, 0, rows, 0,
        count, next);
}

template <class T>
void shrink(const std::vector<Group>& groups, const LinearArgs& args, T* t) {
  static thread_local std::vector<Piece> pieces;
  // With few rows memory is the bottleneck, so all threads should read.
  const long width = args.rows <= ROWS ? 16 : WIDTH;
  pieces.clear();
  for (const Group& group : groups) {
    const LoraMatrix& a = group.factors->a;
    for (long m = 0; m < group.count; m += ROWS)
      for (long n = 0; n < a.outputs; n += width)
        pieces.push_back({&group, nullptr, &a, m, n, std::min(n + width, a.outputs), std::min(ROWS, group.count - m)});
  }
  each_piece<T>(pieces, [&] {
    return [&, unit = std::make_unique<Unit>()](const Piece& piece, Bytes next) {
      static thread_local Memory memory;
      const Group& group = *piece.group;
      const LoraMatrix& a = *piece.matrix;
      const long count = piece.rows;
      const T* x = (const T*)args.x + group.rows[piece.m] * args.x_stride;
      long stride = args.x_stride;
      if (!group.follow && count > 1) {
        T* const gathered = (T*)memory.of(count * a.inner * sizeof(T));
        for (long j = 0; j < count; j++) {
          const T* from = (const T*)args.x + group.rows[piece.m + j] * args.x_stride;
          memcpy((void*)(gathered + j * a.inner), from, a.inner * sizeof(T));
        }
        x = gathered, stride = a.inner;
      }
      T* const to = t + group.first_t + piece.m * a.outputs + piece.n;
      multiply(*unit, a, x, stride, count, piece.n, piece.n_end - piece.n, to, a.outputs, next);
    };
  });
}

template <class T>
void expand(const std::vector<Group>& groups, const LinearArgs& args, const T* t) {
  static thread_local std::vector<Piece> pieces;
  pieces.clear();
  for (const Group& group : groups) {
    const long run = group.count > FEW_ROWS ? LONG_RUN : RUN;
    for (long m = 0; m < group.count; m += RUN_ROWS)
      for (long p = 0; p < group.factors->num_parts; p++) {
        const LoraPart& part = group.factors->parts[p];
        for (long n = 0; n < part.b.outputs; n += run)
          pieces.push_back(
              {&group, &part, &part.b, m, n, std::min(n + run, part.b.outputs), std::min(RUN_ROWS, group.count - m)});
      }
  }
  each_piece<T>(pieces, [&] {
    return [&, unit = std::make_unique<Unit>()](const Piece& piece, Bytes next) {
      alignas(64) T added[RUN_ROWS * WIDTH];
      const Group& group = *piece.group;
      const LoraPart& part = *piece.part;
      const long count = piece.rows, ranks = group.factors->a.outputs;
      const T* from = t + group.first_t + piece.m * ranks + part.first_rank;
      for (long n = piece.n; n < piece.n_end; n += WIDTH) {
        const long end = std::min(n + WIDTH, piece.n_end), width = std::min(end, part.outputs) - n;
        const Piece after{&group, &part, &part.b, piece.m, end, std::min(end + WIDTH, piece.n_end), count};
        multiply(*unit, part.b, from, ranks, count, n, end - n, added, WIDTH,
                 end < piece.n_end ? after.bytes<T>() : next);
        for (long j = 0; j < count; j++) {
          T* to = (T*)args.y + group.rows[piece.m + j] * args.y_stride + part.first_output + n;
          for (long d = 0; d < width; d += LANES)
            store_up_to(to + d, load_up_to(to + d, width - d) + load_up_to(added + j * WIDTH + d, width - d),
                        width - d);
        }
      }
    };
  });
}

template <class T>
void add(const LoraSite& site, const LinearArgs& args) {
  const std::vector<Group>& groups = grouped(site, args);
  if (groups.empty()) return;
  static thread_local Memory memory;
  const Group& last = groups.back();
  T* const t = (T*)memory.of((last.first_t + last.count * last.factors->a.outputs) * sizeof(T));
  shrink(groups, args, t);
  expand(groups, args, t);
}

// See Extension in matrix.h.
void add_lora(const void* site, int is_bf16, const LinearArgs* args) {
  is_bf16 ? add<bf16>(*(const LoraSite*)site, *args) : add<float>(*(const LoraSite*)site, *args);
}

#if defined(STOKER_PANELS)
template <class T>
void pack_panels(const LoraSource& source, T* to) {
  for (long begin = 0; begin < source.outputs;) {
    const long row = source.first + begin, count = std::min(source.outputs - begin, PANEL - row % PANEL);
    const T* from = (const T*)source.rows + begin * source.inner;
    T* panel = to + row / PANEL * PANEL * source.to_inner + row % PANEL * 2;
    for (long k = 0; k + 1 < source.inner; k += 2, panel += 2 * PANEL) {  // lines of the panel one after the other
      for (long j = 0; j < count; j++) memcpy((void*)(panel + 2 * j), from + j * source.inner + k, 2 * sizeof(T));
    }
    if (source.inner % 2) {
      for (long j = 0; j < count; j++) panel[2 * j] = from[(j + 1) * source.inner - 1];
    }
    begin += count;
  }
}
#endif

template <class T>
void pack(const LoraSource& source, T* to) {
#if defined(STOKER_PANELS)
  if (source.is_panels) return pack_panels(source, to);
#endif
  for (long j = 0; j < source.outputs; j++) {
    const T* from = (const T*)source.rows + j * source.inner;
    memcpy((void*)(to + (source.first + j) * source.to_inner), from, source.inner * sizeof(T));
  }
}

}  // namespace

extern "C" void stoker_pack_lora(const void* sources, long count, int is_bf16, void* memory) {
  for (long i = 0; i < count; i++) {
    const LoraSource& source = ((const LoraSource*)sources)[i];
    char* to = (char*)memory + source.to;
    is_bf16 ? pack(source, (bf16*)to) : pack(source, (float*)to);
  }
}

extern "C" const void* stoker_address_of_add_lora() { return (const void*)add_lora; }
