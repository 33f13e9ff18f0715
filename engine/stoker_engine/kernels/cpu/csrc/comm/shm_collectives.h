// Collectives in shared memory, for ranks that are processes of one machine or threads of one process.
//
//     [header of rank 0] [header of rank 1] …   [slots of rank 0] [slots of rank 1] …
//
// Every operation consists of rounds. In a round each rank writes its collective into its header and its data into its
// slot, marks itself as arrived, waits until all others have arrived, and then reads their data. Rounds alternate
// between two slots: a rank that writes in round n + 2 has seen all others arrive at n + 1, so no rank reads the data
// of round n any more. So a round needs a single barrier.
#pragma once

#include <atomic>
#include <cstdint>

constexpr long MAX_RANKS = 64;

enum Operation : int32_t { SUM, GATHER, PARTS, BROADCAST };

// A rank's operation in a round; must be the same on all ranks, except the `row_bytes` of GATHER.
struct Collective {
  int32_t operation, dtype;
  int64_t rows, row_bytes;
};

struct RankHeader {
  // The last round at which the rank has arrived; the futex on which others sleep.
  alignas(128) std::atomic<uint32_t> round;
  std::atomic<uint32_t> sleepers;  // number of ranks that sleep on `round`
  Collective collectives[2];
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "it must work between processes");
static_assert(sizeof(RankHeader) == 128, "parallel/shm_communicator.py assumes this size");

// Reason of a failure, after which no further collective is allowed.
enum Failure : int64_t { NONE, TIMEOUT, MISMATCH };

// State of a rank, in its own memory; used by one thread at a time.
struct Member {
  char* region;
  int64_t rank, size;
  int64_t slot_bytes;  // a multiple of 128
  int64_t spin_ns, timeout_ns;
  int64_t round;
  int64_t failure;
  uint64_t late_ranks;      // TIMEOUT: bit mask of the ranks that did not arrive
  int64_t mismatched_rank;  // MISMATCH: first rank with a different operation
  Collective collective, other_collective;
};
