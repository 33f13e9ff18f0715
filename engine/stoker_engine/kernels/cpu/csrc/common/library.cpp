// Initialization when the library is loaded.
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Returns whether the operating system permits this process to use the library's instructions.
extern "C" int stoker_prepare() {
#if defined(__AMX_BF16__)
  // Linux requires a request for AMX tile registers: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return 1;
#endif
}
