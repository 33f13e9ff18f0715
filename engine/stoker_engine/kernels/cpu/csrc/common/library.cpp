// What is done once, when the library is loaded.
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Returns whether the system lets this process use the instructions that the library was compiled for.
extern "C" int stoker_prepare() {
#if defined(__AMX_BF16__)
  // Linux gives tile registers to those who ask: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return 1;
#endif
}
