// Ranks that are processes of one machine, or threads of one process, meet in memory that all of them see.
//
//     [header of rank 0] [header of rank 1] …   [slots of rank 0] [slots of rank 1] …
//
// Every operation consists of rounds. In a round each rank writes its collective into its header and its data into its slot,
// marks itself as arrived, waits until all others have arrived, and then reads their data. Rounds alternate between two
// slots: a rank that writes in round n + 2 has seen all others arrive at n + 1, so no rank reads the data of round n any
// more. So a round takes one wait.
#pragma once

#include <atomic>
#include <cstdint>

constexpr long MAX_RANKS = 64;

enum Operation : int32_t { SUM, GATHER, PARTS, BROADCAST };

// What a rank does in a round; all must do the same, but for the bytes of GATHER.
struct Collective {
  int32_t operation, dtype;
  int64_t rows, row_bytes;
};

struct RankHeader {
  alignas(128) std::atomic<uint32_t> round;  // the last one that the rank has arrived at; others sleep on it
  std::atomic<uint32_t> sleepers;            // how many do
  Collective collectives[2];
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "it must work between processes");
static_assert(sizeof(RankHeader) == 128, "the size of the region is counted in Python too");

// What went wrong; no collective may follow.
enum Failure : int64_t { NONE, TIMEOUT, MISMATCH };

// One of the ranks. It lies in memory of its own, and is only used by one thread at a time.
struct Member {
  char* region;
  int64_t rank, size;
  int64_t slot_bytes;  // a multiple of 128
  int64_t spin_ns, timeout_ns;
  int64_t round;
  int64_t failure;
  uint64_t late_ranks;    // TIMEOUT: a bit for each rank that did not arrive
  int64_t mismatched_rank;  // MISMATCH: the first rank that does something else
  Collective collective, other_collective;
};
