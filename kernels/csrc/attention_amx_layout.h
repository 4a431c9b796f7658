// How the queries of an item and the context of a step lie in memory for attention_amx.h.
//
// A tile of queries is 16 columns, a column being one head of one row; heads that share a kv head
// lie side by side (arXiv:2305.13245).
#pragma once

#include "amx_tile.h"
#include "attention_tile.h"

namespace blockhouse {
namespace {

constexpr int64_t kStepTokens = 64;
constexpr int64_t kQueries = 16;
// Columns of an item at most, unless a kv head serves more heads than this.
constexpr int64_t kItemColumns = 96;

BH_INLINE int64_t group_size(const AttentionArgs& args) {
  return args.num_heads / args.num_kv_heads;
}

// Blocks hold whole tiles of bf16 tokens, and heads whole tiles of pairs.
bool has_amx_shape(const AttentionArgs& args) {
  return !args.key_scales && args.block_size % kTileRows == 0 && has_pair_order(args.head_dim);
}

int64_t amx_query_rows(const AttentionArgs& args) {
  if (!has_amx_shape(args)) return tile_query_rows(args);
  const int64_t rows = kItemColumns / group_size(args);
  return rows < 1 ? 1 : rows;
}

BH_INLINE int64_t query_tiles(const AttentionArgs& args, int64_t rows) {
  return (rows * group_size(args) + kQueries - 1) / kQueries;
}

// What one kv head's queries carry from step to step, by query tile.
struct QueryState {
  uint8_t* right;      // [tiles, head_dim / 32, tile]: queries as right matrices
  float* sums;         // [tiles, 16, head_dim]
  float* maximum;      // [tiles, 16] of log2 scores
  float* weight_sum;   // [tiles, 16]
  int32_t* positions;  // [tiles, 16]
};

BH_INLINE int64_t state_floats(const AttentionArgs& args, int64_t tiles) {
  return tiles * (args.head_dim / 32 * kTileFloats + kQueries * args.head_dim + 3 * kQueries);
}

BH_INLINE QueryState state_at(const AttentionArgs& args, int64_t tiles, float* memory) {
  QueryState state;
  state.right = (uint8_t*)memory;
  state.sums = memory + tiles * (args.head_dim / 32) * kTileFloats;
  state.maximum = state.sums + tiles * kQueries * args.head_dim;
  state.weight_sum = state.maximum + tiles * kQueries;
  state.positions = (int32_t*)(state.weight_sum + tiles * kQueries);
  return state;
}

// What all kv heads of an item use in turn.
struct StepMemory {
  float* scores;     // [64, 16]
  uint8_t* weights;  // [2, tile]: bf16, [query, 32 tokens]
  uint8_t* values;   // [2, head_dim / 16, tile]: v as right matrices
};

BH_INLINE int64_t step_floats(const AttentionArgs& args) {
  return kStepTokens * kQueries + 2 * kTileFloats + 2 * (args.head_dim / 16) * kTileFloats;
}

BH_INLINE StepMemory step_at(float* memory) {
  StepMemory step;
  step.scores = memory;
  step.weights = (uint8_t*)(memory + kStepTokens * kQueries);
  step.values = step.weights + 2 * kTileBytes;
  return step;
}

int64_t amx_attention_scratch(const AttentionArgs& args) {
  if (!has_amx_shape(args)) return avx512_attention_scratch(args);
  const int64_t several = state_floats(args, query_tiles(args, amx_query_rows(args)));
  const int64_t single = args.num_kv_heads * state_floats(args, query_tiles(args, 1));
  return step_floats(args) + (several > single ? several : single);
}

// Rows become columns: vector i gets lane i of all.
BH_INLINE void transpose(__m512i* v) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i a = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
    t[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) v[i] = t[i];
}

// Queries as right matrices, and empty sums. Columns past the last head are zeros.
void start_queries(const AttentionArgs& args, const AttentionItem& item, int64_t kv,
                   const QueryState& state) {
  const int64_t group = group_size(args), dim = args.head_dim;
  const int64_t columns = item.num_rows * group, tiles = query_tiles(args, item.num_rows);
  const Act* queries = (const Act*)args.query + item.first_row * args.query_stride +
                       kv * group * dim;
  for (int64_t tile = 0; tile < tiles; tile++) {
    for (int64_t c = 0; c < dim / 32; c++) {
      __m512i pairs[16];
      for (int64_t q = 0; q < kQueries; q++) {
        const int64_t column = tile * kQueries + q;
        pairs[q] = _mm512_setzero_si512();
        if (column < columns)
          pairs[q] = _mm512_loadu_si512((const void*)(queries + column / group * args.query_stride +
                                                      column % group * dim + c * 32));
      }
      transpose(pairs);
      uint8_t* to = state.right + (tile * (dim / 32) + c) * kTileBytes;
      for (int v = 0; v < 16; v++) _mm512_store_si512((void*)(to + v * 64), pairs[v]);
    }
    for (int64_t q = 0; q < kQueries; q++) {
      const int64_t row = (tile * kQueries + q) / group;
      const int64_t last = item.num_rows - 1;
      state.positions[tile * kQueries + q] =
          (int32_t)(item.first_position + (row < last ? row : last));
    }
  }
  for (int64_t i = 0; i < tiles * kQueries; i++) {
    state.maximum[i] = -1e30f;
    state.weight_sum[i] = 0.0f;
  }
  for (int64_t i = 0; i < tiles * kQueries * dim; i += 16)
    _mm512_store_ps(state.sums + i, _mm512_setzero_ps());
}

// One kv head's keys and values of a step.
struct Context {
  const bf16* keys[4];  // by tiles of 16 tokens
  const bf16* values[4];
  int64_t row_bytes, tokens, first;  // first: position of the first token
};

Context context_at(const AttentionArgs& args, const AttentionItem& item, int64_t kv, int64_t first,
                   int64_t end) {
  const int32_t* table = args.block_tables + item.request * args.table_stride;
  Context context;
  context.row_bytes = args.num_kv_heads * args.head_dim * 2;
  context.tokens = end - first < kStepTokens ? end - first : kStepTokens;
  context.first = first;
  for (int64_t t = 0; t < 4; t++) {
    const int64_t start = t * kTileRows < context.tokens ? first + t * kTileRows : first;
    const int64_t offset = block_offset(args, table, start) + kv * args.head_dim;
    context.keys[t] = (const bf16*)args.key_cache + offset;
    context.values[t] = (const bf16*)args.value_cache + offset;
  }
  return context;
}

}  // namespace
}  // namespace blockhouse
