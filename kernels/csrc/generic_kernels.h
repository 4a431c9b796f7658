// The whole set in the compiler's vectors, with fp32 activations.
#pragma once

namespace blockhouse {
namespace {
typedef float Act;
}
}  // namespace blockhouse

#include "attention_tile.h"
#include "elementwise.h"
#include "quant_generic.h"

namespace blockhouse {
namespace {

void attend_one_row(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  if (args.key_scales)
    attend_row<int8_t>(args, item, scratch);
  else
    attend_row<bf16>(args, item, scratch);
}

constexpr Kernels generic_kernels(const char* id, const char* title) {
  Kernels kernels{};
  kernels.id = id;
  kernels.title = title;
  kernels.bf16_activations = false;
  kernels.embed = embed;
  kernels.add_rms_norm = add_rms_norm;
  kernels.rope_and_write = rope_and_write;
  kernels.silu_and_mul = silu_and_mul;
  kernels.attention_scratch = tile_attention_scratch;
  kernels.query_rows = tile_query_rows;
  kernels.attend = attend_tile_or_row;
  kernels.combine = combine;
  kernels.groups = kernels.super_blocks = tile_kernels(INT64_MAX);
  kernels.packs_dense = true;
  return kernels;
}

}  // namespace
}  // namespace blockhouse
