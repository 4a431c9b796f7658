// Cuts a step's attention into items and shares them out to threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "kernels.h"

namespace blockhouse {

// cache: contiguous bf16 [..., kv_heads, head_dim]; or int8 with float scales [..., kv_heads].
void check_cache(const at::Tensor& cache, const at::Tensor& scales);

// A piece of a context and the single rows that read it: more than one where they share its blocks.
struct ContextPiece {
  int64_t split;
  std::vector<int64_t> requests;
};

// The pieces of all requests with one new token. Requests that hold the same blocks in the same
// places (a prefix that was cached, or answers to one prompt) share a piece.
std::vector<ContextPiece> context_pieces(const int32_t* block_tables, int64_t table_stride,
                                         int64_t block_size, const int32_t* seq_lens,
                                         const int32_t* query_start_loc, int64_t requests);

// seq_lens: [requests]; query_start_loc: [requests + 1]; the cache already holds the new tokens.
void run_attention(const Kernels& kernels, const AttentionArgs& args, const int32_t* seq_lens,
                   const int32_t* query_start_loc, int64_t requests);

}  // namespace blockhouse
