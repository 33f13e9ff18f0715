// All-reduce, all-gather and broadcast in shared memory; see shm_collectives.h for the protocol, and
// parallel/shm_communicator.py for the callers.
//
// Elements are added in the order of ranks in float32, and rounded once: a sum depends neither on other elements nor on
// the rank that computes it.
#include "comm/shm_collectives.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "common/rows.h"

namespace {

// Up to this size each rank computes the whole sum (of two ranks: at any size): slices would need a second barrier,
// which costs more.
constexpr long ONE_PASS_BYTES = 32768;
// Longest sleep, in nanoseconds, before the clock is checked; a sleep of more than twice this means that the process
// itself was stopped.
constexpr int64_t SLICE_NS = 500'000'000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);  // between processes: not FUTEX_PRIVATE
}

RankHeader& header(const Member& me, long rank) { return ((RankHeader*)me.region)[rank]; }

char* slot(const Member& me, long rank, int64_t round) {
  return me.region + me.size * sizeof(RankHeader) + (rank * 2 + (round & 1)) * me.slot_bytes;
}

// Rounds are counted modulo 2³²; the counts of ranks never differ by half of that.
bool has_arrived(uint32_t round, int64_t to) { return (int32_t)(round - (uint32_t)to) >= 0; }

// This rank's slot for the next round.
char* next_slot(const Member& me) { return slot(me, me.rank, me.round + 1); }

void arrive(Member& me) {
  RankHeader& header_of_rank = header(me, me.rank);
  me.round++;
  header_of_rank.collectives[me.round & 1] = me.collective;
  // Sequentially consistent with the sleeper's accesses: either this rank sees the sleeper, or the sleeper sees the new
  // round and does not sleep.
  header_of_rank.round.store((uint32_t)me.round, std::memory_order_seq_cst);
  if (header_of_rank.sleepers.load(std::memory_order_seq_cst) > 0)
    futex(header_of_rank.round, FUTEX_WAKE, INT32_MAX, nullptr);
}

bool spin(const Member& me, RankHeader& other, int64_t until) {
  for (int spins = 0;; spins++) {
    if (has_arrived(other.round.load(std::memory_order_acquire), me.round)) return true;
    pause();
    if (spins % 32 == 31 && now_ns() >= until) return false;
  }
}

// Sleeps until `other` has arrived or `time_left` has passed; reduces `time_left`, and returns whether `other` has
// arrived.
bool sleep(const Member& me, RankHeader& other, int64_t& time_left) {
  other.sleepers.fetch_add(1, std::memory_order_seq_cst);
  bool has_rank_arrived;
  for (;;) {
    const uint32_t seen = other.round.load(std::memory_order_seq_cst);
    if ((has_rank_arrived = has_arrived(seen, me.round)) || time_left <= 0) break;
    const int64_t start_ns = now_ns(), slice = std::min(SLICE_NS, time_left);
    const timespec timeout = {0, (long)slice};
    futex(other.round, FUTEX_WAIT, seen, &timeout);
    // Time in which this process itself was stopped does not count towards the timeout.
    time_left -= std::min(now_ns() - start_ns, 2 * slice);
  }
  other.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return has_rank_arrived;
}

bool is_same(const Collective& a, const Collective& b) {
  return a.operation == b.operation && a.dtype == b.dtype && a.rows == b.rows &&
         (a.row_bytes == b.row_bytes || a.operation == GATHER);
}

// Arrives at the next round and waits for all other ranks; returns false after a timeout or a mismatch.
bool barrier(Member& me) {
  arrive(me);
  const int64_t until = now_ns() + me.spin_ns;
  int64_t time_left = me.timeout_ns;
  for (long r = 0; r < me.size; r++)
    if (r != me.rank && !spin(me, header(me, r), until) && !sleep(me, header(me, r), time_left))
      me.late_ranks |= 1ull << r;
  if (me.late_ranks) {
    me.failure = TIMEOUT;
    return false;
  }
  for (long r = 0; r < me.size; r++) {
    const Collective& other_collective = header(me, r).collectives[me.round & 1];
    if (is_same(other_collective, me.collective)) continue;
    me.failure = MISMATCH, me.mismatched_rank = r, me.other_collective = other_collective;
    return false;
  }
  return true;
}

// out[i] = parts[0][i] + parts[1][i] + …; `out` may be one of them.
template <class T>
void add_up(const T* const* parts, long size, T* out, long count) {
  for (long i = 0; i < count; i += LANES) {
    Vec sum = load_up_to(parts[0] + i, count - i);
    for (long r = 1; r < size; r++) sum += load_up_to(parts[r] + i, count - i);
    store_up_to(out + i, sum, count - i);
  }
}

// All-reduce in one round: each rank computes the sum of all of x.
template <class T>
bool all_reduce_one_pass(Member& me, T* x, long count) {
  if (count > 0) memcpy(next_slot(me), x, count * sizeof(T));
  if (!barrier(me)) return false;
  const T* parts[MAX_RANKS];
  for (long r = 0; r < me.size; r++) parts[r] = r == me.rank ? x : (const T*)slot(me, r, me.round);
  add_up(parts, me.size, x, count);
  return true;
}

// All-reduce in two rounds: each rank computes the sum of a slice of x, then copies all slices.
template <class T>
bool all_reduce_slices(Member& me, T* x, long count) {
  constexpr long ALIGNED = 128 / sizeof(T);  // slices begin at cache lines
  const long slice = ((count + me.size - 1) / me.size + ALIGNED - 1) / ALIGNED * ALIGNED;
  const auto from = [&](long r) { return std::min(count, r * slice); };
  memcpy(next_slot(me), x, count * sizeof(T));
  if (!barrier(me)) return false;
  const T* parts[MAX_RANKS];
  const long begin = from(me.rank), length = from(me.rank + 1) - begin;
  for (long r = 0; r < me.size; r++) parts[r] = (r == me.rank ? x : (const T*)slot(me, r, me.round)) + begin;
  add_up(parts, me.size, (T*)next_slot(me), length);
  if (!barrier(me)) return false;
  for (long r = 0; r < me.size; r++)
    if (from(r) < count) memcpy(x + from(r), slot(me, r, me.round), (from(r + 1) - from(r)) * sizeof(T));
  return true;
}

template <class T>
void all_reduce(Member& me, T* x, long count) {
  const long max_elements = me.slot_bytes / sizeof(T);
  for (long from = 0; from == 0 || from < count; from += max_elements) {
    const long part = std::min(max_elements, count - from);
    const bool in_one_pass = me.size == 2 || part * (long)sizeof(T) <= ONE_PASS_BYTES;
    if (!(in_one_pass ? all_reduce_one_pass(me, x + from, part) : all_reduce_slices(me, x + from, part))) return;
  }
}

}  // namespace

// Replaces x [count], bf16 or float32, by the sum over all ranks.
extern "C" void stoker_shm_all_reduce(Member* me, int is_bf16, void* x, long count) {
  if (me->failure) return;
  me->collective = {SUM, is_bf16, 1, (int64_t)(count * (is_bf16 ? sizeof(bf16) : sizeof(float)))};
  is_bf16 ? all_reduce(*me, (bf16*)x, count) : all_reduce(*me, (float*)x, count);
}

// Fills row_bytes [size], the bytes of a row that each rank contributes to a GATHER; this rank's entry is an input.
extern "C" void stoker_shm_gather_widths(Member* me, int dtype, long rows, long* row_bytes) {
  if (me->failure) return;
  me->collective = {GATHER, dtype, rows, row_bytes[me->rank]};
  if (!barrier(*me)) return;
  for (long r = 0; r < me->size; r++) row_bytes[r] = header(*me, r).collectives[me->round & 1].row_bytes;
}

// Gathers x [rows, row_bytes[rank]] of all ranks into out [rows, sum of row_bytes]. `operation`: GATHER, or PARTS if
// all ranks contribute the same number of bytes.
extern "C" void stoker_shm_all_gather(Member* me, int operation, int dtype, const void* x, long rows,
                                      const long* row_bytes, void* out) {
  if (me->failure) return;
  me->collective = {(Operation)operation, dtype, rows, row_bytes[me->rank]};
  long widest = 0, whole = 0;
  for (long r = 0; r < me->size; r++) widest = std::max(widest, row_bytes[r]), whole += row_bytes[r];
  for (long from = 0; from == 0 || from < rows * widest; from += me->slot_bytes) {
    const auto sent_bytes = [&](long r) { return std::max(0L, std::min(me->slot_bytes, rows * row_bytes[r] - from)); };
    if (const long bytes = sent_bytes(me->rank)) memcpy(next_slot(*me), (const char*)x + from, bytes);
    if (!barrier(*me)) return;
    char* column = (char*)out;
    for (long r = 0; r < me->size; column += row_bytes[r++]) {
      const char* from_bytes = r == me->rank ? (const char*)x + from : slot(*me, r, me->round);
      for (long at = from, end = from + sent_bytes(r); at < end;) {
        const long row = at / row_bytes[r], in_row = at % row_bytes[r];
        const long bytes = std::min(row_bytes[r] - in_row, end - at);
        memcpy(column + row * whole + in_row, from_bytes, bytes);
        from_bytes += bytes, at += bytes;
      }
    }
  }
}

// Replaces x [bytes] by rank 0's.
extern "C" void stoker_shm_broadcast(Member* me, int dtype, void* x, long bytes) {
  if (me->failure) return;
  me->collective = {BROADCAST, dtype, 1, bytes};
  for (long from = 0; from == 0 || from < bytes; from += me->slot_bytes) {
    const long part = std::min(me->slot_bytes, bytes - from);
    if (part > 0 && me->rank == 0) memcpy(next_slot(*me), (char*)x + from, part);
    if (!barrier(*me)) return;
    if (part > 0 && me->rank != 0) memcpy((char*)x + from, slot(*me, 0, me->round), part);
  }
}
