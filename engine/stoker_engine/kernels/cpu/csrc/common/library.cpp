// Initialization when the library is loaded.
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Requests AMX from the operating system if this library uses it; returns 0 if the request fails.
extern "C" int stoker_prepare() {
#if defined(__AMX_BF16__)
  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return 1;
#endif
}
