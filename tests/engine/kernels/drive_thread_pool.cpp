// Drives the kernels' thread pool, for ThreadSanitizer: callers side by side, a pool that grows and shrinks meanwhile,
// pauses after which threads have gone to sleep. Each piece must be computed once, and be there when `share` returns.
#include "common/threads.h"

#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

extern "C" void stoker_use_threads(int count);

static long shared_total = 0;

static bool is_right(long count) {
  std::vector<int> computed(count);  // no atomics: `share` itself must order what threads write and callers read
  parallel(count, [&](Pieces& pieces) {
    long piece;
    for (bool more = pieces.take(piece); more; more = pieces.take_early(piece) || pieces.take(piece)) {
      computed[piece]++;
#ifdef RACE
      shared_total++;
#endif
    }
  });
  for (int times : computed)
    if (times != 1) return false;
  return true;
}

int main() {
  stoker_use_threads(4);
  std::vector<std::thread> callers;
  std::vector<int> wrong(2);
  for (int caller = 0; caller < 2; caller++)
    callers.emplace_back([caller, &wrong] {
      for (long job = 0; job < 1500; job++) {
        wrong[caller] += !is_right(1 + job * 7 % 40);
        if (job % 300 == 299) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    });
  for (int round = 0; round < 40; round++) {
    stoker_use_threads(1 + round % 6);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (std::thread& caller : callers) caller.join();
  std::puts(wrong[0] + wrong[1] == 0 ? "every piece was computed once" : "pieces were lost, or computed twice");
  return wrong[0] + wrong[1] + (shared_total < 0);
}
