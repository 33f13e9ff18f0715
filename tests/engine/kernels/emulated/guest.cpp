// The other end of `on_arm.py`: maps the heap that heap.c made, loads a library of kernels, and calls the function that
// the heap's first page names whenever a byte arrives. A byte goes back when it has returned.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <utility>

#include "shared.h"

namespace {

// Integers and floats have registers of their own, and what finds none lies on the stack in order: a function takes what
// it has parameters for, and leaves the rest.
template <size_t... I>
long call(void* function, const long* a, const float* f, std::index_sequence<I...>) {
  return ((long (*)(std::decay_t<decltype(a[I])>..., float, float, float, float))function)(a[I]..., f[0], f[1], f[2],
                                                                                           f[3]);
}

}  // namespace

int main(int, char** arguments) {  // guest LIBRARY HEAP_FILE
  void* heap =
      mmap(HEAP, HEAP_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, atoi(arguments[2]), 0);
  if (heap != HEAP) return perror("the heap"), 1;
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
  Call& call_of = *(Call*)heap;
  for (char byte; read(0, &byte, 1) == 1;) {
    void* function = dlsym(library, call_of.name);
    if (!function) return fprintf(stderr, "there is no function %s\n", call_of.name), 1;
    call_of.result = call(function, call_of.integers, call_of.floats, std::make_index_sequence<24>());
    if (write(1, &byte, 1) != 1) return 1;
  }
}
