// A heap that another process can see: preloaded, it serves all of malloc's family from one file in memory, which lies at
// the same address in every process that maps it. So an address that Python gives to the kernels means the same to them in
// an emulator's process (see guest.cpp).
//
// Blocks have sizes of powers of two and go back to a list of their size. Memory is never returned to the system.
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shared.h"

int stoker_heap_file = -1;  // for the child that maps it, too

typedef struct Block {
  struct Block* next;  // of a free one
  size_t size;         // usable, behind this header
} Block;

static Block* unused[64];
static char* unbroken;
static atomic_flag busy = ATOMIC_FLAG_INIT;

static void fail(const char* why) {
  (void)!write(2, why, strlen(why));
  _exit(1);
}

static void map(void) {
  stoker_heap_file = memfd_create("stoker-heap", 0);
  if (stoker_heap_file < 0 || ftruncate(stoker_heap_file, HEAP_BYTES)) fail("no file in memory for the heap\n");
  void* at = mmap(HEAP, HEAP_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE,
                  stoker_heap_file, 0);
  if (at != HEAP) fail("the heap's address is taken\n");
  unbroken = HEAP + CALL_BYTES;
}

// The header lies right before what is returned, so that its address is all that free needs. Zeroed where `zero` is not 0.
static void* take(size_t size, size_t alignment, int zero) {
  if (size > HEAP_BYTES / 4) return NULL;
  if (alignment < 64) alignment = 64;
  int order = 6;
  while (((size_t)1 << order) < size) order++;
  while (atomic_flag_test_and_set(&busy)) {
  }
  if (!unbroken) map();
  Block* block = alignment == 64 ? unused[order] : NULL;
  const int fresh = !block;
  if (block) {
    unused[order] = block->next;
  } else {
    char* at = (char*)(((uintptr_t)unbroken + sizeof(Block) + alignment - 1) & ~(alignment - 1));
    block = (Block*)at - 1;
    block->size = (size_t)1 << order;
    unbroken = at + block->size;
    if (unbroken > HEAP + HEAP_BYTES) fail("the heap is full\n");
  }
  atomic_flag_clear(&busy);
  if (zero && !fresh) memset(block + 1, 0, size);
  return block + 1;
}

void* malloc(size_t size) { return take(size, 64, 0); }

void* calloc(size_t count, size_t size) {
  size_t all;
  if (__builtin_mul_overflow(count, size, &all)) return NULL;
  return take(all, 64, 1);
}

void free(void* at) {
  if (!at) return;
  const int error = errno;
  Block* block = (Block*)at - 1;
  const int order = __builtin_ctzl(block->size);
  while (atomic_flag_test_and_set(&busy)) {
  }
  block->next = unused[order];
  unused[order] = block;
  atomic_flag_clear(&busy);
  errno = error;
}

size_t malloc_usable_size(void* at) { return at ? ((Block*)at - 1)->size : 0; }

void* realloc(void* at, size_t size) {
  const size_t old = malloc_usable_size(at);
  if (at && size <= old) return at;
  void* moved = take(size, 64, 0);
  if (moved && at) {
    memcpy(moved, at, old);
    free(at);
  }
  return moved;
}

int posix_memalign(void** at, size_t alignment, size_t size) {
  *at = take(size, alignment, 0);
  return *at ? 0 : ENOMEM;
}

void* aligned_alloc(size_t alignment, size_t size) { return take(size, alignment, 0); }
void* memalign(size_t alignment, size_t size) { return take(size, alignment, 0); }
void* valloc(size_t size) { return take(size, 4096, 0); }
void* pvalloc(size_t size) { return take((size + 4095) & ~(size_t)4095, 4096, 0); }
