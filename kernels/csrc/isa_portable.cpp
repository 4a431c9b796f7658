// Kernels for any processor: what the compiler vectorises for the base instruction set.
#include "generic_kernels.h"

namespace blockhouse {

extern const Kernels kPortableKernels;
constinit const Kernels kPortableKernels = generic_kernels("portable", "portable");

}  // namespace blockhouse
