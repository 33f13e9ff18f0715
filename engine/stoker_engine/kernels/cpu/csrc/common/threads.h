// Work sharing between threads.
//
// Threads that are awake join a job and take pieces until none is left; the caller waits only for threads that have
// joined. On a busy machine, or in a container whose CPU quota is used up, the caller can do all the work. A fork-join
// team (OpenMP) would wait at its barrier for a thread that the system does not schedule.
#pragma once

#include <algorithm>
#include <atomic>

// Largest number of threads that take part.
long threads();

// Distributes 0 … count - 1 to threads.
class Pieces {
 public:
  explicit Pieces(long count) : count_(count) {}
  bool take(long& piece) { return (piece = next_.fetch_add(1, std::memory_order_relaxed)) < count_; }
  // Takes a piece in advance, so that its data can be prefetched; returns false if fewer pieces than threads are left.
  bool take_early(long& piece) {
    piece = next_.load(std::memory_order_relaxed);
    while (piece + threads() <= count_)
      if (next_.compare_exchange_weak(piece, piece + 1, std::memory_order_relaxed)) return true;
    return false;
  }

 private:
  std::atomic<long> next_{0};
  const long count_;
};

// Calls work(context, pieces) in the caller, and in each worker thread that joins before the caller's own call returns.
void share(long count, void (*work)(void* context, Pieces& pieces), void* context);

// Calls body(pieces) in each thread that takes part, so that it can set up its state once before it takes pieces.
template <class Body>
void parallel(long count, Body body) {
  share(count, [](void* context, Pieces& pieces) { (*(Body*)context)(pieces); }, &body);
}

// Calls body(i) for i = 0 … count - 1; in the caller alone if not `is_parallel`.
template <class Body>
void parallel_for(bool is_parallel, long count, Body body) {
  if (!is_parallel) {
    for (long i = 0; i < count; i++) body(i);
    return;
  }
  // A few pieces for each thread: fewer would finish unevenly, more would be too small for the cost of taking them.
  const long size = count / std::max(32L, 4 * threads()) + 1;
  parallel((count + size - 1) / size, [&](Pieces& pieces) {
    for (long piece; pieces.take(piece);)
      for (long i = piece * size; i < count && i < (piece + 1) * size; i++) body(i);
  });
}
