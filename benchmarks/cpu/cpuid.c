// Answers for patched CPUID instructions (restrict.py): those of the processor without the bits of CLEAR.
//
// CLEAR, defined on the compiler's command line, has the bits to clear in EAX, EBX, ECX and EDX for leaf 7, subleaves 0
// and 1. PATCH is the byte that, twice, replaces the instruction.

#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdint.h>
#include <ucontext.h>

static const uint32_t clear[2][4] = CLEAR;

static void answer(int number, siginfo_t* info, void* context) {
  (void)info;
  greg_t* saved = ((ucontext_t*)context)->uc_mcontext.gregs;
  const uint8_t* code = (const uint8_t*)saved[REG_RIP];
  if (code[0] != PATCH || code[1] != PATCH) {  // another instruction: it is repeated, and ends the process
    signal(number, SIG_DFL);
    return;
  }
  const uint32_t leaf = (uint32_t)saved[REG_RAX], subleaf = (uint32_t)saved[REG_RCX];
  uint32_t a, b, c, d;
  __cpuid_count(leaf, subleaf, a, b, c, d);
  const int has_mask = leaf == 7 && subleaf < 2;
  saved[REG_RAX] = has_mask ? a & ~clear[subleaf][0] : a;
  saved[REG_RBX] = has_mask ? b & ~clear[subleaf][1] : b;
  saved[REG_RCX] = has_mask ? c & ~clear[subleaf][2] : c;
  saved[REG_RDX] = has_mask ? d & ~clear[subleaf][3] : d;
  saved[REG_RIP] += 2;  // the length of CPUID
}

__attribute__((constructor)) static void install(void) {
  struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGILL, &action, 0);
}
