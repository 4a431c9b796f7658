// Kernels for x86 with AVX-512 BF16 and VBMI; build.py gives this file its flags.
#include "avx512_kernels.h"

namespace blockhouse {

extern const Kernels kAvx512Kernels;
constinit const Kernels kAvx512Kernels = avx512_kernels();

}  // namespace blockhouse
