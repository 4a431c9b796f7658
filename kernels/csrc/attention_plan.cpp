#include "attention_plan.h"

#include <algorithm>
#include <vector>

#include "parallel.h"
#include "scratch.h"

namespace blockhouse {
namespace {

// A single row's context is read in pieces of this many tokens, whatever the batch is, so that its
// result does not depend on its neighbours (split-KV, as Flash-Decoding does).
constexpr int64_t kSplitTokens = 256;

struct SplitRow {
  int64_t row, splits;
  const float* partials;
};

struct Plan {
  std::vector<AttentionItem> items;
  std::vector<SplitRow> split_rows;
  std::vector<float> partials;
  int64_t partials_used = 0;
};

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t floats_per_split(const AttentionArgs& args) { return args.num_heads * (args.head_dim + 2); }

void add_tiles(Plan& plan, const Kernels& kernels, const AttentionArgs& args, AttentionItem item,
               int64_t rows) {
  const int64_t most_rows = kernels.query_rows(args), tiles = divide_up(rows, most_rows);
  // The last rows read most: they go first, so that no thread is left with one at the end.
  for (int64_t tile = tiles - 1; tile >= 0; tile--)
    for (int64_t kv = 0; kv < args.num_kv_heads; kv++) {
      AttentionItem part = item;
      part.first_row += tile * most_rows;
      part.first_position += tile * most_rows;
      part.num_rows = std::min(most_rows, rows - tile * most_rows);
      part.context_end = part.first_position + part.num_rows;
      part.kv_head_begin = kv;
      part.kv_head_end = kv + 1;
      plan.items.push_back(part);
    }
}

void add_row(Plan& plan, const AttentionArgs& args, AttentionItem item, int64_t heads_per_item) {
  const int64_t context = item.first_position + 1, splits = divide_up(context, kSplitTokens);
  float* partials = plan.partials.data() + plan.partials_used;
  if (splits > 1) {
    plan.split_rows.push_back({item.first_row, splits, partials});
    plan.partials_used += splits * floats_per_split(args);
  }
  item.num_rows = 1;
  for (int64_t split = 0; split < splits; split++)
    for (int64_t kv = 0; kv < args.num_kv_heads; kv += heads_per_item) {
      item.kv_head_begin = kv;
      item.kv_head_end = std::min(kv + heads_per_item, args.num_kv_heads);
      item.context_begin = split * kSplitTokens;
      item.context_end = std::min(context, item.context_begin + kSplitTokens);
      item.partial = splits > 1 ? partials + split * floats_per_split(args) : nullptr;
      plan.items.push_back(item);
    }
}

void make_plan(Plan& plan, const Kernels& kernels, const AttentionArgs& args,
               const int32_t* seq_lens, const int32_t* starts, int64_t requests) {
  int64_t pieces = 0;
  for (int64_t r = 0; r < requests; r++)
    if (starts[r + 1] - starts[r] == 1) pieces += divide_up(seq_lens[r], kSplitTokens);
  plan.partials.resize((size_t)(pieces * floats_per_split(args)));
  // All kv heads in one item read whole blocks in order; with few items threads would idle.
  const int64_t heads_per_item = pieces >= 4 * num_threads() ? args.num_kv_heads : 1;
  for (const bool tiles : {true, false})
    for (int64_t r = 0; r < requests; r++) {
      const int64_t rows = starts[r + 1] - starts[r];
      AttentionItem item{};
      item.request = r;
      item.first_row = starts[r];
      item.first_position = seq_lens[r] - rows;
      if (tiles && rows > 1) add_tiles(plan, kernels, args, item, rows);
      if (!tiles && rows == 1) add_row(plan, args, item, heads_per_item);
    }
}

}  // namespace

void run_attention(const Kernels& kernels, const AttentionArgs& args, const int32_t* seq_lens,
                   const int32_t* query_start_loc, int64_t requests) {
  Plan plan;
  make_plan(plan, kernels, args, seq_lens, query_start_loc, requests);
  const int64_t scratch = kernels.attention_scratch(args);
  // One by one, because their costs differ widely.
  share_pieces((int64_t)plan.items.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      kernels.attend(args, plan.items[(size_t)i], thread_scratch<ScratchUse::kKernel>(scratch));
  });
  for (const SplitRow& row : plan.split_rows)
    kernels.combine(args, row.partials, row.splits, row.row);
}

}  // namespace blockhouse
