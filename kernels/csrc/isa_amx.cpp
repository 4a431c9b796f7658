// Kernels for x86 with AMX bf16 tiles beside AVX-512 BF16; build.py gives this file its flags.
#include "avx512_kernels.h"
#include "attention_amx.h"
#include "quant_amx.h"

namespace blockhouse {
namespace {

constexpr Kernels amx_kernels() {
  Kernels kernels = avx512_kernels();
  kernels.id = "amx";
  kernels.title = "AMX BF16";
  kernels.query_rows = amx_query_rows;
  kernels.attention_scratch = amx_attention_scratch;
  kernels.attend = amx_attend;
  // Many rows take the tiles of dense weights.
  kernels.super_blocks.row_limit = kFewRows;
  kernels.groups.prepared_size = amx_prepared_size;
  kernels.groups.scratch_size = amx_scratch_size;
  kernels.groups.prepare = amx_prepare;
  kernels.groups.linear = amx_linear;
  return kernels;
}

}  // namespace

extern const Kernels kAmxKernels;
constinit const Kernels kAmxKernels = amx_kernels();

}  // namespace blockhouse
