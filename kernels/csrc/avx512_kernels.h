// The set with AVX-512 BF16 and bf16 activations.
#pragma once

#include "kernels.h"

namespace blockhouse {
namespace {
typedef bf16 Act;
}  // namespace
}  // namespace blockhouse

#include "attention_pairs_avx512.h"
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
  kernels.attention_scratch = avx512_attention_scratch;
  kernels.query_rows = tile_query_rows;
  kernels.attend = avx512_attend;
  kernels.combine = combine;
  kernels.groups.tile_columns = kColumns;
  kernels.groups.row_limit = INT64_MAX;
  kernels.groups.sizes = quant_sizes;
  kernels.groups.pack = quant_pack;
  kernels.groups.prepared_size = avx512_prepared_size;
  kernels.groups.scratch_size = avx512_scratch_size;
  kernels.groups.prepare = avx512_prepare;
  kernels.groups.linear = avx512_linear;
  kernels.super_blocks = kernels.groups;
  kernels.super_blocks.sizes = super_sizes;
  kernels.super_blocks.pack = super_pack;
  kernels.packs_dense = true;
  return kernels;
}

}  // namespace
}  // namespace blockhouse
