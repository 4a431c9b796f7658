// The whole set in the compiler's vectors, with fp32 activations.
#pragma once

namespace blockhouse {
namespace {
typedef float Act;
}
}  // namespace blockhouse

#include "attention_run.h"
#include "elementwise.h"
#include "quant_generic.h"

namespace blockhouse {
namespace {

constexpr int64_t kRunTokens = kMaxRunTokens;

BH_INLINE void attend_run(const Run& run, float* acc, float* maximum, float* sum) {
  attend_run_any(run, acc, maximum, sum);
}

template <class Out>
BH_INLINE void store_sum(const float* acc, int64_t head_dim, float scale, Out* out) {
  store_sum_any(acc, head_dim, scale, out);
}

}  // namespace
}  // namespace blockhouse

#include "attention_rows.h"

namespace blockhouse {
namespace {

constexpr Kernels generic_kernels(const char* id, const char* title) {
  Kernels kernels{};
  kernels.id = id;
  kernels.title = title;
  kernels.bf16_activations = false;
  kernels.embed = embed;
  kernels.add_rms_norm = add_rms_norm;
  kernels.rope_and_write = rope_and_write;
  kernels.silu_and_mul = silu_and_mul;
  kernels.attention_scratch = attention_scratch_rows;
  kernels.query_rows = query_rows_each;
  kernels.attend = attend_rows;
  kernels.combine = combine;
  kernels.tile_columns = kLanes;
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
