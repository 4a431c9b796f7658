#include "attention_plan.h"

#include <algorithm>
#include <unordered_map>

#include "parallel.h"
#include "scratch.h"

namespace blockhouse {
namespace {

struct SplitRow {
  int64_t row, splits;
  const float* partials;
};

// Items [begin, end) are for one thread, one after another.
struct Unit {
  size_t begin, end;
};

struct Plan {
  std::vector<AttentionItem> items;
  std::vector<Unit> units;
  std::vector<SplitRow> split_rows;
  std::vector<float> partials;
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
      plan.units.push_back({plan.items.size(), plan.items.size() + 1});
      plan.items.push_back(part);
    }
}

// What units of single rows are cut to.
struct RowCut {
  int64_t heads_per_item;
  size_t readers_per_unit;
};

// The readers of a shared piece follow one another, so that all but the first find it in cache.
void add_piece(Plan& plan, const AttentionArgs& args, const ContextPiece& piece,
               const int32_t* seq_lens, const int32_t* starts, float* const* partials,
               const RowCut& cut) {
  const int64_t heads_per_item = cut.heads_per_item;
  for (int64_t kv = 0; kv < args.num_kv_heads; kv += heads_per_item) {
    size_t begin = plan.items.size();
    for (const int64_t request : piece.requests) {
      if (plan.items.size() - begin == cut.readers_per_unit) {
        plan.units.push_back({begin, plan.items.size()});
        begin = plan.items.size();
      }
      const int64_t context = seq_lens[request];
      AttentionItem item{};
      item.request = request;
      item.first_row = starts[request];
      item.num_rows = 1;
      item.first_position = context - 1;
      item.kv_head_begin = kv;
      item.kv_head_end = std::min(kv + heads_per_item, args.num_kv_heads);
      item.context_begin = piece.split * kSplitTokens;
      item.context_end = std::min(context, item.context_begin + kSplitTokens);
      if (partials[request])
        item.partial = partials[request] + piece.split * floats_per_split(args);
      plan.items.push_back(item);
    }
    plan.units.push_back({begin, plan.items.size()});
  }
}

// Where each request's partial results go; null for those that are read in one piece.
std::vector<float*> place_partials(Plan& plan, const AttentionArgs& args, const int32_t* seq_lens,
                                   const int32_t* starts, int64_t requests) {
  int64_t pieces = 0;
  for (int64_t r = 0; r < requests; r++)
    if (starts[r + 1] - starts[r] == 1) pieces += divide_up(seq_lens[r], kSplitTokens);
  plan.partials.resize((size_t)(pieces * floats_per_split(args)));
  std::vector<float*> places((size_t)requests, nullptr);
  float* next = plan.partials.data();
  for (int64_t r = 0; r < requests; r++) {
    const int64_t splits = divide_up(seq_lens[r], kSplitTokens);
    if (starts[r + 1] - starts[r] != 1 || splits == 1) continue;
    places[(size_t)r] = next;
    plan.split_rows.push_back({starts[r], splits, next});
    next += splits * floats_per_split(args);
  }
  return places;
}

void make_plan(Plan& plan, const Kernels& kernels, const AttentionArgs& args,
               const int32_t* seq_lens, const int32_t* starts, int64_t requests) {
  for (int64_t r = 0; r < requests; r++) {
    const int64_t rows = starts[r + 1] - starts[r];
    if (rows < 2) continue;
    AttentionItem item{};
    item.request = r;
    item.first_row = starts[r];
    item.first_position = seq_lens[r] - rows;
    add_tiles(plan, kernels, args, item, rows);
  }
  const std::vector<float*> partials = place_partials(plan, args, seq_lens, starts, requests);
  const std::vector<ContextPiece> pieces = context_pieces(
      args.block_tables, args.table_stride, args.block_size, seq_lens, starts, requests);
  size_t readers = 0;
  for (const ContextPiece& piece : pieces) readers += piece.requests.size();
  // All kv heads in one item read whole blocks in order; with few items threads would idle. So
  // they would beside one that has all readers of a piece: no unit is more than half a share.
  const auto threads = (size_t)num_threads();
  const RowCut cut{readers >= 4 * threads ? args.num_kv_heads : 1,
                   std::max<size_t>(1, readers / (2 * threads))};
  for (const ContextPiece& piece : pieces)
    add_piece(plan, args, piece, seq_lens, starts, partials.data(), cut);
}

}  // namespace

void check_cache(const at::Tensor& cache, const at::Tensor& scales) {
  TORCH_CHECK(cache.is_contiguous() &&
                  cache.scalar_type() == (scales.defined() ? at::kChar : at::kBFloat16),
              "a cache is contiguous and bfloat16, or int8 with scales");
  TORCH_CHECK(!scales.defined() ||
                  (scales.is_contiguous() && scales.scalar_type() == at::kFloat &&
                   scales.sizes() == cache.sizes().slice(0, (size_t)cache.dim() - 1)),
              "scales are contiguous float32, one for each head of each token of the cache");
}

std::vector<ContextPiece> context_pieces(const int32_t* block_tables, int64_t table_stride,
                                         int64_t block_size, const int32_t* seq_lens,
                                         const int32_t* query_start_loc, int64_t requests) {
  const int64_t split_blocks = kSplitTokens / block_size;
  std::vector<ContextPiece> pieces;
  // By a piece's last block: where the prefix cache gave the same one, all before it are the same.
  std::unordered_map<int32_t, size_t> by_last_block;
  for (int64_t r = 0; r < requests; r++) {
    if (query_start_loc[r + 1] - query_start_loc[r] != 1) continue;
    const int32_t* table = block_tables + r * table_stride;
    for (int64_t split = 0; split * kSplitTokens < seq_lens[r]; split++) {
      const int32_t* blocks = table + split * split_blocks;
      const bool is_whole = (split + 1) * kSplitTokens <= seq_lens[r];
      if (is_whole && split_blocks * block_size == kSplitTokens) {
        const int32_t last = blocks[split_blocks - 1];
        const auto found = by_last_block.find(last);
        if (found != by_last_block.end() && pieces[found->second].split == split) {
          ContextPiece& piece = pieces[found->second];
          const int32_t* other =
              block_tables + piece.requests[0] * table_stride + split * split_blocks;
          if (std::equal(blocks, blocks + split_blocks, other)) {
            piece.requests.push_back(r);
            continue;
          }
        }
        by_last_block.emplace(last, pieces.size());
      }
      pieces.push_back({split, {r}});
    }
  }
  return pieces;
}

void run_attention(const Kernels& kernels, const AttentionArgs& args, const int32_t* seq_lens,
                   const int32_t* query_start_loc, int64_t requests) {
  Plan plan;
  make_plan(plan, kernels, args, seq_lens, query_start_loc, requests);
  const int64_t scratch = kernels.attention_scratch(args);
  // One by one, because their costs differ widely.
  share_pieces((int64_t)plan.units.size(), 1, [&](int64_t begin, int64_t end) {
    for (size_t i = plan.units[(size_t)begin].begin; i < plan.units[(size_t)end - 1].end; i++)
      kernels.attend(args, plan.items[i], thread_scratch<ScratchUse::kKernel>(scratch));
  });
  for (const SplitRow& row : plan.split_rows)
    kernels.combine(args, row.partials, row.splits, row.row);
}

}  // namespace blockhouse
