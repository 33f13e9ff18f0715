// Sharing work between threads.
//
// A thread that is awake takes the next piece; no thread waits for one that has taken none. So on a busy machine, or
// in a container whose time is up, the caller does the work by itself, where a fork-join team (OpenMP's) would wait at
// its barrier for a thread that the system does not run.
#pragma once

#include <atomic>

// How many threads take part, if all come.
long threads();

// Hands out 0 … count - 1, each to one thread.
class Pieces {
 public:
  explicit Pieces(long count) : count_(count) {}
  bool take(long& piece) { return (piece = next_.fetch_add(1, std::memory_order_relaxed)) < count_; }
  // The same, before it is needed, so that what it is made of can be fetched; as long as each thread can have another.
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

// Calls work(context, pieces) here and in every thread that comes while pieces are left.
void share(long count, void (*work)(void* context, Pieces& pieces), void* context);

// Calls body(pieces) in each thread that takes part: what a thread needs is set up once, then `take` gives its pieces.
template <class Body>
void parallel(long count, Body body) {
  share(count, [](void* context, Pieces& pieces) { (*(Body*)context)(pieces); }, &body);
}

// Calls body(i) for i = 0 … count - 1; where it is not worth sharing, here.
template <class Body>
void parallel_for(bool is_parallel, long count, Body body) {
  if (!is_parallel) {
    for (long i = 0; i < count; i++) body(i);
    return;
  }
  // A few pieces a thread: fewer would end unevenly, more would be taken for too little work.
  const long size = count / 32 + 1;
  parallel((count + size - 1) / size, [&](Pieces& pieces) {
    for (long piece; pieces.take(piece);)
      for (long i = piece * size; i < count && i < (piece + 1) * size; i++) body(i);
  });
}
