// What the process that asks and the one that computes agree on.
#pragma once

#define HEAP ((char*)0x200000000000)
#define HEAP_BYTES (1ul << 40)  // of addresses; memory is taken where it is written
#define CALL_BYTES 4096ul       // the call lies at the heap's beginning

struct Call {
  char name[64];
  long integers[24];  // and pointers, in order
  float floats[8];    // in the same way
  long result;
};
