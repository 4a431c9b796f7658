// Paged attention (arXiv:2309.06180) with AMX tiles, FlashAttention-2's loop order
// (arXiv:2307.08691): 64 tokens of context at a time pass over all queries of an item.
//
// A tile of queries is 16 columns, a column being one head of one row; heads that share a kv head
// lie side by side (arXiv:2305.13245). Keys are the left matrix as they lie in the cache, 16 tokens
// a tile, so scores come out as [token, query] and the softmax needs no sums across lanes. Weights
// are transposed to be the left matrix of the second product, whose right one is v with two tokens'
// rows interleaved; its dimensions keep the order of attention_run_avx512.h.
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

// v of token pairs side by side; zeros past the end, whatever lies there.
void interleave_values(const AttentionArgs& args, const Context& context, uint8_t* to) {
  const int64_t dim = args.head_dim, tiles = dim / 16;
  const __m512i zero = _mm512_setzero_si512();
  for (int64_t t = 0; t < kStepTokens && (t / 32 * 32) < context.tokens; t += 2) {
    const auto* rows = (const uint8_t*)context.values[t / 16] + t % 16 * context.row_bytes;
    const bool first = t < context.tokens, second = t + 1 < context.tokens;
    uint8_t* pair = to + t / 32 * tiles * kTileBytes + t % 32 / 2 * 64;
    for (int64_t d = 0; d < tiles; d += 2) {
      const __m512i a = first ? _mm512_loadu_si512(rows + d * 32) : zero;
      const __m512i b = second ? _mm512_loadu_si512(rows + context.row_bytes + d * 32) : zero;
      _mm512_store_si512(pair + d * kTileBytes, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(pair + (d + 1) * kTileBytes, _mm512_unpackhi_epi16(a, b));
    }
  }
}

void score_step(const AttentionArgs& args, const Context& context, const uint8_t* right,
                float* scores) {
  BH_TILE_ZERO(0);
  BH_TILE_ZERO(1);
  BH_TILE_ZERO(2);
  BH_TILE_ZERO(3);
  const int64_t tiles = (context.tokens + kTileRows - 1) / kTileRows;
  for (int64_t c = 0; c < args.head_dim / 32; c++) {
    BH_TILE_LOAD(6, right + c * kTileBytes, 64);
    BH_TILE_LOAD(4, context.keys[0] + c * 32, context.row_bytes);
    BH_TILE_MULTIPLY(0, 4, 6);
    if (tiles > 1) {
      BH_TILE_LOAD(5, context.keys[1] + c * 32, context.row_bytes);
      BH_TILE_MULTIPLY(1, 5, 6);
    }
    if (tiles > 2) {
      BH_TILE_LOAD(4, context.keys[2] + c * 32, context.row_bytes);
      BH_TILE_MULTIPLY(2, 4, 6);
    }
    if (tiles > 3) {
      BH_TILE_LOAD(5, context.keys[3] + c * 32, context.row_bytes);
      BH_TILE_MULTIPLY(3, 5, 6);
    }
  }
  BH_TILE_STORE(0, scores, 64);
  BH_TILE_STORE(1, scores + kTileFloats, 64);
  BH_TILE_STORE(2, scores + 2 * kTileFloats, 64);
  BH_TILE_STORE(3, scores + 3 * kTileFloats, 64);
}

// 2 ** x for x <= 0, to 3e-6; far below it goes to zero.
BH_INLINE __m512 exp2_falling(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, 1);  // x - floor(x)
  __m512 p = _mm512_set1_ps(1.342669e-2f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.224247e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4128021e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9304484e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);
}

// Which queries see token `t` of the step.
BH_INLINE __mmask16 visible(const Context& context, __m512i positions, int64_t t) {
  if (t >= context.tokens) return 0;
  return _mm512_cmpge_epi32_mask(positions, _mm512_set1_epi32((int32_t)(context.first + t)));
}

BH_INLINE __m512i join_pairs(__m512 even, __m512 odd) {
  const __m512i half = _mm512_set1_epi32(0x8000), high = _mm512_set1_epi32((int)0xFFFF0000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32((__m512i)even, half), 16);
  // 0xEA: (a & b) | c
  return _mm512_ternarylogic_epi32(_mm512_add_epi32((__m512i)odd, half), high, low, 0xEA);
}

// Scores -> weights as left matrices, with maximum and sum brought up to date. Returns the factor
// for what was summed before.
template <bool kMasked>
__m512 weigh_step(const AttentionArgs& args, const Context& context, const float* scores,
                  float* maximum, float* weight_sum, const int32_t* query_positions,
                  uint8_t* weights) {
  const __m512i positions = _mm512_loadu_si512((const void*)query_positions);
  const __m512 scale = _mm512_set1_ps(args.scale * kLog2E);
  __m512 highest = _mm512_set1_ps(-1e30f);
  for (int64_t t = 0; t < context.tokens; t++) {
    const __m512 score = _mm512_load_ps(scores + t * kQueries);
    if (kMasked)
      highest = _mm512_mask_max_ps(highest, visible(context, positions, t), highest, score);
    else
      highest = _mm512_max_ps(highest, score);
  }
  const __m512 before = _mm512_loadu_ps(maximum);
  const __m512 after = _mm512_max_ps(before, _mm512_mul_ps(highest, scale));
  const __m512 factor = exp2_falling(_mm512_sub_ps(before, after));
  __m512 total = _mm512_mul_ps(_mm512_loadu_ps(weight_sum), factor);
  for (int64_t half = 0; half * 32 < context.tokens; half++) {
    __m512i pairs[16];
    for (int64_t pair = 0; pair < 16; pair++) {
      __m512 both[2];
      for (int64_t i = 0; i < 2; i++) {
        const int64_t t = half * 32 + pair * 2 + i;
        both[i] = exp2_falling(
            _mm512_fmsub_ps(_mm512_load_ps(scores + t * kQueries), scale, after));
        if (kMasked) both[i] = _mm512_maskz_mov_ps(visible(context, positions, t), both[i]);
        total = _mm512_add_ps(total, both[i]);
      }
      pairs[pair] = join_pairs(both[0], both[1]);
    }
    transpose(pairs);
    for (int v = 0; v < 16; v++)
      _mm512_store_si512((void*)(weights + half * kTileBytes + v * 64), pairs[v]);
  }
  _mm512_storeu_ps(maximum, after);
  _mm512_storeu_ps(weight_sum, total);
  return factor;
}

void rescale(float* sums, int64_t dim, __m512 factor) {
  __mmask16 changed = _mm512_cmpneq_ps_mask(factor, _mm512_set1_ps(1.0f));
  alignas(64) float factors[kQueries];
  _mm512_store_ps(factors, factor);
  for (; changed; changed &= (__mmask16)(changed - 1)) {
    const int query = __builtin_ctz(changed);
    const __m512 by = _mm512_set1_ps(factors[query]);
    for (int64_t d = 0; d < dim; d += 16) {
      float* at = sums + query * dim + d;
      _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), by));
    }
  }
}

// sums += weights * v, two tiles of 16 dimensions at a time.
void add_values_step(const AttentionArgs& args, int64_t tokens, const uint8_t* weights,
                     const uint8_t* values, float* sums) {
  const int64_t dim = args.head_dim, tiles = dim / 16, row_bytes = dim * 4;
  const bool two = tokens > 32;
  for (int64_t d = 0; d < tiles; d += 2) {
    BH_TILE_LOAD(0, sums + d * 16, row_bytes);
    BH_TILE_LOAD(1, sums + d * 16 + 16, row_bytes);
    BH_TILE_LOAD(4, weights, 64);
    BH_TILE_LOAD(6, values + d * kTileBytes, 64);
    BH_TILE_MULTIPLY(0, 4, 6);
    BH_TILE_LOAD(7, values + (d + 1) * kTileBytes, 64);
    BH_TILE_MULTIPLY(1, 4, 7);
    if (two) {
      const uint8_t* more = values + tiles * kTileBytes;
      BH_TILE_LOAD(5, weights + kTileBytes, 64);
      BH_TILE_LOAD(6, more + d * kTileBytes, 64);
      BH_TILE_MULTIPLY(0, 5, 6);
      BH_TILE_LOAD(7, more + (d + 1) * kTileBytes, 64);
      BH_TILE_MULTIPLY(1, 5, 7);
    }
    BH_TILE_STORE(0, sums + d * 16, row_bytes);
    BH_TILE_STORE(1, sums + d * 16 + 16, row_bytes);
  }
}

void attend_step(const AttentionArgs& args, const AttentionItem& item, const Context& context,
                 const StepMemory& step, const QueryState& state) {
  const int64_t dim = args.head_dim, tiles = query_tiles(args, item.num_rows);
  interleave_values(args, context, step.values);
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int32_t* positions = state.positions + tile * kQueries;
    if (positions[kQueries - 1] < context.first) continue;
    // Clears what an earlier step left in rows that this one does not fill.
    score_step(args, context, state.right + tile * (dim / 32) * kTileBytes, step.scores);
    const bool all = context.tokens == kStepTokens &&
                     positions[0] >= context.first + kStepTokens - 1;
    float* maximum = state.maximum + tile * kQueries;
    float* weight_sum = state.weight_sum + tile * kQueries;
    const __m512 factor =
        all ? weigh_step<false>(args, context, step.scores, maximum, weight_sum, positions,
                                step.weights)
            : weigh_step<true>(args, context, step.scores, maximum, weight_sum, positions,
                               step.weights);
    float* sums = state.sums + tile * kQueries * dim;
    rescale(sums, dim, factor);
    __asm__ volatile("" ::: "memory");  // weights, values and sums are written before tiles read
    add_values_step(args, context.tokens, step.weights, step.values, sums);
  }
}

void finish_queries(const AttentionArgs& args, const AttentionItem& item, int64_t kv,
                    const QueryState& state) {
  const int64_t group = group_size(args), dim = args.head_dim;
  for (int64_t column = 0; column < item.num_rows * group; column++) {
    const int64_t head = kv * group + column % group, row = item.first_row + column / group;
    const float* sums = state.sums + column * dim;
    if (item.partial) {
      float* part = item.partial + head * (dim + 2);
      store_pair_sum(sums, dim, 1.0f, part);
      part[dim] = state.maximum[column];
      part[dim + 1] = state.weight_sum[column];
    } else {
      Act* out = (Act*)args.out + (row * args.num_heads + head) * dim;
      store_pair_sum(sums, dim, 1.0f / state.weight_sum[column], out);
    }
  }
}

// Asks for this kv head's share of the next step: some tokens with all kv heads of the item, because
// that is how they lie side by side.
void prefetch_share(const AttentionArgs& args, const AttentionItem& item, int64_t kv,
                    int64_t next) {
  const int64_t kv_heads = item.kv_head_end - item.kv_head_begin;
  const int64_t share = (kStepTokens + kv_heads - 1) / kv_heads;
  const int64_t begin = next + (kv - item.kv_head_begin) * share;
  const int64_t step_end = next + kStepTokens < item.context_end ? next + kStepTokens
                                                                 : item.context_end;
  const int64_t end = begin + share < step_end ? begin + share : step_end;
  if (begin >= end) return;
  const int32_t* table = args.block_tables + item.request * args.table_stride;
  const int64_t width = kv_heads * args.head_dim, row = args.num_kv_heads * args.head_dim;
  int64_t offset = block_offset(args, table, begin) + item.kv_head_begin * args.head_dim;
  for (int64_t position = begin; position < end; position++) {
    for (int64_t d = 0; d < width; d += 32) {
      _mm_prefetch((const char*)((const bf16*)args.key_cache + offset + d), _MM_HINT_T0);
      _mm_prefetch((const char*)((const bf16*)args.value_cache + offset + d), _MM_HINT_T0);
    }
    offset += row;
    // The next token may lie in another block.
    if ((position + 1) % kTileRows == 0 && position + 1 < end)
      offset = block_offset(args, table, position + 1) + item.kv_head_begin * args.head_dim;
  }
}

void amx_attend(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  if (!has_amx_shape(args)) return avx512_attend(args, item, scratch);
  const int64_t tiles = query_tiles(args, item.num_rows);
  const StepMemory step = step_at(scratch);
  float* states = scratch + step_floats(args);
  const int64_t state_size = state_floats(args, tiles);
  configure_tiles(kTileRows, kTileRows);
  for (int64_t kv = item.kv_head_begin; kv < item.kv_head_end; kv++)
    start_queries(args, item, kv,
                  state_at(args, tiles, states + (kv - item.kv_head_begin) * state_size));
  for (int64_t first = item.context_begin; first < item.context_end; first += kStepTokens)
    for (int64_t kv = item.kv_head_begin; kv < item.kv_head_end; kv++) {
      const QueryState state =
          state_at(args, tiles, states + (kv - item.kv_head_begin) * state_size);
      prefetch_share(args, item, kv, first + kStepTokens);
      attend_step(args, item, context_at(args, item, kv, first, item.context_end), step, state);
    }
  for (int64_t kv = item.kv_head_begin; kv < item.kv_head_end; kv++)
    finish_queries(args, item, kv,
                   state_at(args, tiles, states + (kv - item.kv_head_begin) * state_size));
  release_tiles();
}

}  // namespace
}  // namespace blockhouse
