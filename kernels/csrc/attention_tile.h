// Paged attention of a tile of queries (arXiv:2309.06180) in FlashAttention-2's loop order
// (arXiv:2307.08691): 64 tokens of context at a time become fp32 once and pass over all queries of
// an item. Heads that share a kv head lie side by side (arXiv:2305.13245).
//
// A query is a column, so scores come out as [token, query] and the softmax (arXiv:1805.02867) needs
// no sums across lanes; both products are block_product.h's.
#pragma once

#include "attention_rows.h"
#include "block_product.h"

namespace blockhouse {
namespace {

constexpr int64_t kTileTokens = 64;
// Queries of an item at most, unless a kv head serves more heads than this.
constexpr int64_t kTileQueries = 48;

BH_INLINE int64_t whole_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

BH_INLINE int64_t heads_per_kv(const AttentionArgs& args) {
  return args.num_heads / args.num_kv_heads;
}

int64_t tile_query_rows(const AttentionArgs& args) {
  const int64_t rows = kTileQueries / heads_per_kv(args);
  return rows < 1 ? 1 : rows;
}

// Memory of one item. Columns and `width` are whole vectors; what pads them is zero.
struct QueryTile {
  int64_t queries, columns, dim, width;
  float* queries_by_dim;  // [dim, columns], scaled to log2 scores
  float* sums;            // [queries, width]
  float* keys;            // [64, dim]
  float* values;          // [64, width]
  float* scores;          // [64, columns], then weights
  float* maximum;         // [columns]
  float* weight_sum;      // [columns]
  float* factors;         // [columns]
  int32_t* positions;     // [columns]
};

BH_INLINE int64_t tile_floats(const AttentionArgs& args, int64_t rows) {
  const int64_t queries = rows * heads_per_kv(args), columns = whole_vectors(queries);
  const int64_t dim = args.head_dim, width = whole_vectors(dim);
  return columns * dim + queries * width + kTileTokens * (dim + width + columns) + 4 * columns;
}

int64_t tile_attention_scratch(const AttentionArgs& args) {
  const int64_t tile = tile_floats(args, tile_query_rows(args));
  const int64_t rows = attention_scratch_rows(args);
  return tile > rows ? tile : rows;
}

BH_INLINE QueryTile query_tile_at(const AttentionArgs& args, int64_t rows, float* memory) {
  QueryTile tile;
  tile.queries = rows * heads_per_kv(args);
  tile.columns = whole_vectors(tile.queries);
  tile.dim = args.head_dim;
  tile.width = whole_vectors(tile.dim);
  tile.queries_by_dim = memory;
  tile.sums = tile.queries_by_dim + tile.dim * tile.columns;
  tile.keys = tile.sums + tile.queries * tile.width;
  tile.values = tile.keys + kTileTokens * tile.dim;
  tile.scores = tile.values + kTileTokens * tile.width;
  tile.maximum = tile.scores + kTileTokens * tile.columns;
  tile.weight_sum = tile.maximum + tile.columns;
  tile.factors = tile.weight_sum + tile.columns;
  tile.positions = (int32_t*)(tile.factors + tile.columns);
  return tile;
}

void start_tile(const AttentionArgs& args, const AttentionItem& item, int64_t kv,
                const QueryTile& tile) {
  const int64_t group = heads_per_kv(args), dim = tile.dim;
  const float scale = args.scale * kLog2E;
  const Act* query = (const Act*)args.query + item.first_row * args.query_stride + kv * group * dim;
  for (int64_t column = 0; column < tile.columns; column++) {
    const bool is_query = column < tile.queries;
    const int64_t row = is_query ? column / group : item.num_rows - 1;
    const Act* from = query + row * args.query_stride + column % group * dim;
    for (int64_t d = 0; d < dim; d++)
      tile.queries_by_dim[d * tile.columns + column] = is_query ? to_float(from[d]) * scale : 0.0f;
    tile.positions[column] = (int32_t)(item.first_position + row);
    tile.maximum[column] = -1e30f;
    tile.weight_sum[column] = 0.0f;
  }
  for (int64_t i = 0; i < tile.queries * tile.width; i++) tile.sums[i] = 0.0f;
  for (int64_t i = 0; i < kTileTokens * tile.width; i++) tile.values[i] = 0.0f;
}

template <class Kv>
BH_INLINE void widen_row(const Kv* from, float scale, int64_t dim, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes)
    store(to + i, sizeof(Kv) == 1 ? load(from + i) * scale : load(from + i));
  for (; i < dim; i++) to[i] = sizeof(Kv) == 1 ? to_float(from[i]) * scale : to_float(from[i]);
}

template <class Kv>
void load_tokens(const AttentionArgs& args, const int32_t* table, int64_t kv, int64_t first,
                 int64_t tokens, const QueryTile& tile) {
  for (int64_t t = 0; t < tokens; t++) {
    const Run<Kv> run = run_at<Kv>(args, block_offset(args, table, first + t), 0, kv);
    const float key_scale = sizeof(Kv) == 1 ? *run.key_scales : 1.0f;
    const float value_scale = sizeof(Kv) == 1 ? *run.value_scales : 1.0f;
    widen_row(run.keys, key_scale, tile.dim, tile.keys + t * tile.dim);
    widen_row(run.values, value_scale, tile.dim, tile.values + t * tile.width);
  }
}

BH_INLINE VecI load_ints(const int32_t* from) {
  VecI out;
  __builtin_memcpy(&out, from, sizeof(out));
  return out;
}

// Scores -> weights, with maxima, sums and factors brought up to date.
template <bool kMasked>
void weigh_tokens(const QueryTile& tile, int64_t first, int64_t tokens) {
  for (int64_t column = 0; column < tile.columns; column += kLanes) {
    const VecI positions = load_ints(tile.positions + column);
    float* scores = tile.scores + column;
    const Vec before = load(tile.maximum + column);
    Vec after = before;
    for (int64_t t = 0; t < tokens; t++) {
      const Vec score = load(scores + t * tile.columns);
      const VecI sees = positions >= (int32_t)(first + t);
      after = vmax(after, kMasked ? (sees ? score : before) : score);
    }
    const Vec factor = exp2_vec(before - after);
    Vec total = load(tile.weight_sum + column) * factor;
    for (int64_t t = 0; t < tokens; t++) {
      Vec weight = exp2_vec(load(scores + t * tile.columns) - after);
      const VecI sees = positions >= (int32_t)(first + t);
      if (kMasked) weight = sees ? weight : splat(0.0f);
      store(scores + t * tile.columns, weight);
      total += weight;
    }
    store(tile.maximum + column, after);
    store(tile.weight_sum + column, total);
    store(tile.factors + column, factor);
  }
}

void rescale_sums(const QueryTile& tile) {
  for (int64_t q = 0; q < tile.queries; q++) {
    const float factor = tile.factors[q];
    if (factor == 1.0f) continue;
    float* row = tile.sums + q * tile.width;
    for (int64_t i = 0; i < tile.width; i += kLanes) store(row + i, load(row + i) * factor);
  }
}

BH_INLINE void score_tokens(const QueryTile& tile, int64_t tokens) {
  Product product{};
  product.left = tile.keys;
  product.row_stride = tile.dim;
  product.depth_stride = 1;
  product.right = tile.queries_by_dim;
  product.right_stride = product.out_stride = tile.columns;
  product.out = tile.scores;
  product.rows = tokens;
  product.columns = tile.columns;
  product.depth = tile.dim;
  multiply(product);
}

BH_INLINE void add_tokens(const QueryTile& tile, int64_t tokens) {
  Product product{};
  product.left = tile.scores;
  product.row_stride = 1;
  product.depth_stride = tile.columns;
  product.right = tile.values;
  product.right_stride = product.out_stride = tile.width;
  product.out = tile.sums;
  product.rows = tile.queries;
  product.columns = tile.width;
  product.depth = tokens;
  product.adds = true;
  multiply(product);
}

template <class Kv>
void attend_tile(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  const QueryTile tile = query_tile_at(args, item.num_rows, scratch);
  const int64_t group = heads_per_kv(args), dim = tile.dim;
  const int32_t* table = args.block_tables + item.request * args.table_stride;
  for (int64_t kv = item.kv_head_begin; kv < item.kv_head_end; kv++) {
    start_tile(args, item, kv, tile);
    for (int64_t first = 0; first < item.context_end; first += kTileTokens) {
      const int64_t left = item.context_end - first;
      const int64_t tokens = left < kTileTokens ? left : kTileTokens;
      load_tokens<Kv>(args, table, kv, first, tokens, tile);
      score_tokens(tile, tokens);
      if (first + tokens - 1 > item.first_position)
        weigh_tokens<true>(tile, first, tokens);
      else
        weigh_tokens<false>(tile, first, tokens);
      rescale_sums(tile);
      add_tokens(tile, tokens);
    }
    for (int64_t q = 0; q < tile.queries; q++) {
      const int64_t row = item.first_row + q / group, head = kv * group + q % group;
      Act* out = (Act*)args.out + (row * args.num_heads + head) * dim;
      store_sum_any(tile.sums + q * tile.width, dim, 1.0f / tile.weight_sum[q], out);
    }
  }
}

void attend_tile_or_row(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  if (item.num_rows == 1) return attend_one_row(args, item, scratch);
  if (args.key_scales)
    attend_tile<int8_t>(args, item, scratch);
  else
    attend_tile<bf16>(args, item, scratch);
}

}  // namespace
}  // namespace blockhouse
