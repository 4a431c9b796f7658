// Paged attention (arXiv:2309.06180) with AMX tiles, FlashAttention-2's loop order
// (arXiv:2307.08691): 64 tokens of context at a time pass over all queries of an item.
//
// Keys are the left matrix as they lie in the cache, 16 tokens a tile, so scores come out as
// [token, query] and the softmax needs no sums across lanes. Weights are transposed to be the left
// matrix of the second product, whose right one is v with two tokens' rows interleaved; its
// dimensions keep the order of attention_run_avx512.h.
#pragma once

#include "attention_amx_layout.h"

namespace blockhouse {
namespace {

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
