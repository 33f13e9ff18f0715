// Drives ranks that are threads through memory they share, for ThreadSanitizer: sums, joins and copies of all lengths
// one after another, some ranks late enough for others to sleep. Each result must be right in every rank.
#include "comm/shm_collectives.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

extern "C" {
void stoker_shm_all_reduce(Member*, int, void*, long);
void stoker_shm_gather_widths(Member*, int, long, long*);
void stoker_shm_all_gather(Member*, int, int, const void*, long, const long*, void*);
void stoker_shm_broadcast(Member*, int, void*, long);
}

static constexpr long SIZE = 3, SLOT = 65536;

static bool sums(Member& me, long count) {
  std::vector<float> x(count, 1.0f + me.rank);
  stoker_shm_all_reduce(&me, 0, x.data(), count);
#ifdef RACE
  ((char*)me.region)[SIZE * sizeof(RankHeader)]++;  // what rank 0 brought, while others may read it
#endif
  for (float element : x)
    if (element != 6.0f) return false;
  return true;
}

static bool joins(Member& me, long rows, long width) {
  long widths[SIZE] = {};
  widths[me.rank] = width + me.rank;
  stoker_shm_gather_widths(&me, 8, rows, widths);
  std::vector<char> x(rows * (width + me.rank), (char)me.rank), all(rows * (3 * width + 3), 9);
  stoker_shm_all_gather(&me, GATHER, 8, x.data(), rows, widths, all.data());
  for (long row = 0, at = 0; row < rows; row++)
    for (long r = 0; r < SIZE; r++)
      for (long i = 0; i < width + r; i++)
        if (all[at++] != r) return false;
  return true;
}

static bool copies(Member& me, long bytes) {
  std::vector<char> x(bytes, me.rank == 0 ? 5 : 0);
  stoker_shm_broadcast(&me, 8, x.data(), bytes);
  for (char byte : x)
    if (byte != 5) return false;
  return true;
}

int main() {
  const size_t bytes = SIZE * (sizeof(RankHeader) + 2 * SLOT);
  char* region = (char*)std::aligned_alloc(128, bytes);
  std::memset(region, 0, bytes);
  std::vector<std::thread> ranks;
  std::vector<long> wrong(SIZE);
  for (long rank = 0; rank < SIZE; rank++)
    ranks.emplace_back([=, &wrong] {
      Member me = {};
      me.region = region, me.rank = rank, me.size = SIZE, me.slot_bytes = SLOT;
      me.spin_ns = 50'000, me.timeout_ns = 120'000'000'000;
      for (long round = 0; round < 60; round++) {
        if (round % SIZE == rank) std::this_thread::sleep_for(std::chrono::microseconds(round * 20));
        wrong[rank] += !sums(me, round * 397) + !joins(me, round % 5, round * 431) + !copies(me, round * 2903);
      }
      wrong[rank] += me.failure;
    });
  for (std::thread& rank : ranks) rank.join();
  std::puts(wrong[0] + wrong[1] + wrong[2] == 0 ? "every result was right" : "results were wrong");
  return wrong[0] + wrong[1] + wrong[2] != 0;
}
