// Cuts a step's attention into items and shares them out to threads.
#pragma once

#include "kernels.h"

namespace blockhouse {

// seq_lens: [requests]; query_start_loc: [requests + 1]; the cache already holds the new tokens.
void run_attention(const Kernels& kernels, const AttentionArgs& args, const int32_t* seq_lens,
                   const int32_t* query_start_loc, int64_t requests);

}  // namespace blockhouse
