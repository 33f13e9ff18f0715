#include "common/threads.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// The worker threads; they live as long as the process.
//
// A job is open while its caller works. A thread joins by incrementing a counter, which succeeds only while the job is
// open; the caller closes it and waits until all joined threads have left. Afterwards no thread reads the job.
class Pool {
 public:
  // Sets the number of threads, including the caller.
  void resize(int count) {
    std::lock_guard<std::mutex> one_at_a_time(caller_);
    helpers_ = count - 1;
    for (; started_ < helpers_; started_++) std::thread(&Pool::help, this, started_).detach();
  }

  long size() const { return helpers_ + 1; }

  void share(long count, void (*work)(void*, Pieces&), void* context) {
    Pieces pieces(count);
    // If another engine in this process uses the pool, the caller works alone.
    std::unique_lock<std::mutex> collective(caller_, std::try_to_lock);
    if (!collective || helpers_ == 0 || count < 2) return work(context, pieces);
    work_ = work, context_ = context, pieces_ = &pieces;
    state_.store(OPEN, std::memory_order_release);
    jobs_.fetch_add(1);
    if (asleep_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    work(context, pieces);
    state_.fetch_and(~OPEN, std::memory_order_acq_rel);
    for (int spins = 0; state_.load(std::memory_order_acquire) != 0; spins++)
      spins < 4096 ? pause() : std::this_thread::yield();
  }

 private:
  static constexpr unsigned OPEN = 1u << 31;  // lower bits: number of joined threads

  void help(int index) {
    for (unsigned long seen = 0;;) {
      seen = wait_for_job_after(seen);
      unsigned state = state_.load(std::memory_order_acquire);
      while (index < helpers_ && (state & OPEN))
        if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
          work_(context_, *pieces_);
          state_.fetch_sub(1, std::memory_order_acq_rel);
          break;
        }
    }
  }

  // Operations follow each other within microseconds, steps within a millisecond: threads spin for 2 ms before they
  // sleep.
  unsigned long wait_for_job_after(unsigned long seen) {
    const auto start = std::chrono::steady_clock::now();
    for (int spins = 0;; spins++) {
      const unsigned long jobs = jobs_.load(std::memory_order_acquire);
      if (jobs != seen) return jobs;
      if (spins < 2048)
        pause();
      else
        std::this_thread::yield();  // lets other runnable threads go first
      if (spins % 64 == 63 && std::chrono::steady_clock::now() - start > std::chrono::milliseconds(2)) break;
    }
    std::unique_lock<std::mutex> lock(sleep_);
    asleep_++;
    wake_.wait(lock, [&] { return jobs_.load() != seen; });
    asleep_--;
    return jobs_.load();
  }

  std::mutex caller_;
  std::atomic<int> helpers_{0};
  int started_ = 0;

  void (*work_)(void*, Pieces&) = nullptr;
  void* context_ = nullptr;
  Pieces* pieces_ = nullptr;
  std::atomic<unsigned> state_{0};
  std::atomic<unsigned long> jobs_{0};

  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> asleep_{0};
};

Pool& pool() {
  static Pool* pool = new Pool;  // never destroyed: its threads run until the process ends
  return *pool;
}

}  // namespace

void share(long count, void (*work)(void*, Pieces&), void* context) { pool().share(count, work, context); }

long threads() { return pool().size(); }

extern "C" void stoker_use_threads(int count) { pool().resize(count); }
