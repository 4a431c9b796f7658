// Which kernels this build has and this processor can run.
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace blockhouse {

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAmxKernels;
#endif

namespace {

#if defined(__x86_64__) && defined(__linux__)
// AMX tiles in bf16 are there and the system lets this process use them.
bool has_amx() {
  constexpr unsigned kTileBit = 1u << 24, kBf16Bit = 1u << 22;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d & kTileBit) || !(d & kBf16Bit)) return false;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}
#else
bool has_amx() { return false; }
#endif

bool runs_here(const char* id) {
  if (!std::strcmp(id, "portable")) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!std::strcmp(id, "avx2")) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
                      __builtin_cpu_supports("avx512bf16");
  if (!std::strcmp(id, "avx512")) return avx512;
  if (!std::strcmp(id, "amx")) return avx512 && has_amx();
#endif
  return false;
}

const Kernels* const kAll[] = {
#if defined(__x86_64__)
    &kAmxKernels,
    &kAvx512Kernels,
    &kAvx2Kernels,
#endif
    &kPortableKernels,
};

}  // namespace

const Kernels* find_kernels(const char* id) {
  for (const Kernels* kernels : kAll)
    if (!std::strcmp(kernels->id, id) && runs_here(id)) return kernels;
  return nullptr;
}

const char* const* kernel_ids() {
  static const char* ids[sizeof(kAll) / sizeof(kAll[0]) + 1] = {};
  for (size_t i = 0; i < sizeof(kAll) / sizeof(kAll[0]); i++) ids[i] = kAll[i]->id;
  return ids;
}

}  // namespace blockhouse
