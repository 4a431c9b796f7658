// Kernels for x86 with AVX2, FMA and F16C; build.py gives this file its flags.
#include "generic_kernels.h"

namespace blockhouse {

extern const Kernels kAvx2Kernels;
constinit const Kernels kAvx2Kernels = generic_kernels("avx2", "AVX2");

}  // namespace blockhouse
