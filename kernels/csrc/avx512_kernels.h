// The set with AVX-512 BF16 and bf16 activations.
#pragma once

#include "kernels.h"

namespace blockhouse {
namespace {
typedef bf16 Act;
constexpr int64_t kRunTokens = 16;
}  // namespace
}  // namespace blockhouse

#include "attention_run_avx512.h"
#include "attention_rows.h"
#include "elementwise.h"
#include "quant_avx512.h"

namespace blockhouse {
namespace {

constexpr Kernels avx512_kernels() {
  Kernels kernels{};
  kernels.id = "avx512";
  kernels.title = "AVX-512 BF16";
  kernels.bf16_activations = true;
  kernels.embed = embed;
  kernels.add_rms_norm = add_rms_norm;
  kernels.rope_and_write = rope_and_write;
  kernels.silu_and_mul = silu_and_mul;
  kernels.attention_scratch = attention_scratch_rows;
  kernels.query_rows = query_rows_each;
  kernels.attend = attend_rows;
  kernels.combine = combine;
  kernels.tile_columns = kColumns;
  kernels.quant_row_limit = 16;
  kernels.quant_sizes = quant_sizes;
  kernels.quant_pack = quant_pack;
  kernels.quant_prepared_size = group_sums_size;
  kernels.quant_scratch_size = no_scratch;
  kernels.quant_prepare = prepare_group_sums;
  kernels.quant_linear = quant_linear;
  return kernels;
}

}  // namespace
}  // namespace blockhouse
