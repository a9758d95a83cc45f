// Whether this process may use the registers that hold tiles: the processor has them, and the system lets it. Linux
// grants them to a whole process at once, when asked; elsewhere, and in sandboxes, the call fails.
#pragma once

#if EINSIGHT_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace einsight {

inline bool may_use_tiles() {
  constexpr unsigned bf16 = 1u << 22, tile = 1u << 24;
  constexpr unsigned long ask = 0x1023, data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (bf16 | tile)) return false;
  return syscall(SYS_arch_prctl, ask, data) == 0;
}

}  // namespace einsight
#endif
