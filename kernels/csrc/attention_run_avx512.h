// One run of up to 16 tokens for one kv head with AVX-512 BF16: products of bf16 pairs into fp32.
//
// The weighted sum keeps each 32 dimensions as two vectors in the order that interleaving two rows
// of v gives: lanes of the first hold dimensions 0-3, 8-11, 16-19, 24-27, of the second the others.
#pragma once

#include <immintrin.h>

#include "attention_run.h"

namespace blockhouse {
namespace {

constexpr int64_t kChunk = 32;  // dimensions of one bf16 vector

BH_INLINE __m512bh load_pairs(const bf16* from) {
  return (__m512bh)_mm512_loadu_si512((const void*)from);
}

// Lane i becomes the sum of vector i: adds while it transposes.
BH_INLINE __m512 sum_each(__m512* v) {
  for (int i = 0; i < 8; i++)
    v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[i], v[i + 8]), _mm512_unpackhi_ps(v[i], v[i + 8]));
  for (int i = 0; i < 4; i++) {
    __m512d a = (__m512d)v[i], b = (__m512d)v[i + 4];
    v[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  }
  for (int i = 0; i < 2; i++)
    v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 2], 0x88),
                         _mm512_shuffle_f32x4(v[i], v[i + 2], 0xdd));
  __m512 mixed = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88),
                               _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
  const __m512i order =
      _mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
  return _mm512_permutexvar_ps(order, mixed);
}

// log2 scores of the run's tokens; lanes past its end are -infinity.
template <int kChunks>
BH_INLINE __m512 score_run(const Run<bf16>& run, const bf16* query, __mmask16 valid) {
  __m512 each[16];
#pragma GCC unroll 16
  for (int t = 0; t < 16; t++) {
    const bf16* key = run.keys + (t < run.tokens ? t : 0) * run.token_stride;
    each[t] = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int c = 0; c < kChunks; c++)
      each[t] = _mm512_dpbf16_ps(each[t], load_pairs(query + c * kChunk),
                                 load_pairs(key + c * kChunk));
  }
  __m512 scores = _mm512_mul_ps(sum_each(each), _mm512_set1_ps(run.scale));
  return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), valid, scores);
}

// Updates maximum and sum, leaves the weights as bf16, returns the factor for earlier sums.
BH_INLINE float weigh_run(__m512 scores, __mmask16 valid, float* maximum, float* sum,
                          uint16_t* weights) {
  float highest = _mm512_reduce_max_ps(scores);
  highest = highest > *maximum ? highest : *maximum;
  const float factor = highest == *maximum ? 1.0f : exp2_one(*maximum - highest);
  __m512 exps = (__m512)exp2_vec((Vec)_mm512_sub_ps(scores, _mm512_set1_ps(highest)));
  exps = _mm512_maskz_mov_ps(valid, exps);
  *maximum = highest;
  *sum = *sum * factor + _mm512_reduce_add_ps(exps);
  _mm256_store_si256((__m256i*)weights, (__m256i)_mm512_cvtneps_pbh(exps));
  return factor;
}

// acc = acc * factor + weights * v for kHeads heads that share the kv head.
template <int kHeads>
BH_INLINE void add_values(const Run<bf16>& run, const uint16_t (*weights)[16], const float* factors,
                          float* acc) {
  for (int64_t d = 0; d < run.head_dim; d += kChunk) {
    __m512 low[kHeads], high[kHeads];
    for (int h = 0; h < kHeads; h++) {
      float* from = acc + h * run.head_dim + d;
      low[h] = _mm512_mul_ps(_mm512_loadu_ps(from), _mm512_set1_ps(factors[h]));
      high[h] = _mm512_mul_ps(_mm512_loadu_ps(from + 16), _mm512_set1_ps(factors[h]));
    }
    for (int64_t t = 0; t < run.tokens; t += 2) {
      const bf16* value = run.values + t * run.token_stride + d;
      const __m512i a = _mm512_loadu_si512((const void*)value);
      const __m512i b = t + 1 < run.tokens
                            ? _mm512_loadu_si512((const void*)(value + run.token_stride))
                            : _mm512_setzero_si512();
      const __m512bh first = (__m512bh)_mm512_unpacklo_epi16(a, b);
      const __m512bh second = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; h++) {
        int32_t pair;
        __builtin_memcpy(&pair, weights[h] + t, sizeof(pair));
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
        low[h] = _mm512_dpbf16_ps(low[h], both, first);
        high[h] = _mm512_dpbf16_ps(high[h], both, second);
      }
    }
    for (int h = 0; h < kHeads; h++) {
      float* to = acc + h * run.head_dim + d;
      _mm512_storeu_ps(to, low[h]);
      _mm512_storeu_ps(to + 16, high[h]);
    }
  }
}

BH_INLINE void prefetch_rows(const bf16* rows, int64_t tokens, int64_t stride, int64_t dim) {
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t i = 0; i < dim; i += kChunk)
      _mm_prefetch((const char*)(rows + t * stride + i), _MM_HINT_T0);
}

template <int kHeads, int kChunks>
BH_INLINE void attend_heads(const Run<bf16>& run, int64_t head, __mmask16 valid, float* acc,
                            float* maximum, float* sum) {
  alignas(64) uint16_t weights[kHeads][16];
  float factors[kHeads];
  for (int h = 0; h < kHeads; h++) {
    const __m512 scores =
        score_run<kChunks>(run, run.query + (head + h) * run.head_dim, valid);
    factors[h] = weigh_run(scores, valid, maximum + head + h, sum + head + h, weights[h]);
  }
  add_values<kHeads>(run, weights, factors, acc + head * run.head_dim);
}

template <int kChunks>
void attend_run_pairs(const Run<bf16>& run, float* acc, float* maximum, float* sum) {
  const __mmask16 valid = (__mmask16)((1u << run.tokens) - 1);
  prefetch_rows(run.next_keys, run.tokens, run.token_stride, run.head_dim);
  int64_t head = 0;
  for (; head + 4 <= run.group; head += 4)
    attend_heads<4, kChunks>(run, head, valid, acc, maximum, sum);
  switch (run.group - head) {
    case 3: attend_heads<3, kChunks>(run, head, valid, acc, maximum, sum); break;
    case 2: attend_heads<2, kChunks>(run, head, valid, acc, maximum, sum); break;
    case 1: attend_heads<1, kChunks>(run, head, valid, acc, maximum, sum); break;
    default: break;
  }
  prefetch_rows(run.next_values, run.tokens, run.token_stride, run.head_dim);
}

BH_INLINE void attend_run(const Run<int8_t>& run, float* acc, float* maximum, float* sum) {
  attend_run_any(run, acc, maximum, sum);
}

// Head sizes that are no multiple of 32 take the general code.
void attend_run(const Run<bf16>& run, float* acc, float* maximum, float* sum) {
  switch (run.head_dim) {
    case 32: return attend_run_pairs<1>(run, acc, maximum, sum);
    case 64: return attend_run_pairs<2>(run, acc, maximum, sum);
    case 96: return attend_run_pairs<3>(run, acc, maximum, sum);
    case 128: return attend_run_pairs<4>(run, acc, maximum, sum);
    case 192: return attend_run_pairs<6>(run, acc, maximum, sum);
    case 256: return attend_run_pairs<8>(run, acc, maximum, sum);
    default: return attend_run_any(run, acc, maximum, sum);
  }
}

bool has_pair_order(int64_t head_dim) {
  return head_dim == 32 || head_dim == 64 || head_dim == 96 || head_dim == 128 ||
         head_dim == 192 || head_dim == 256;
}

template <class Kv, class Out>
void store_sum(const float* acc, int64_t head_dim, float scale, Out* out) {
  if (sizeof(Kv) == 1 || !has_pair_order(head_dim)) return store_sum_any(acc, head_dim, scale, out);
  const __m512i first =
      _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second =
      _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int64_t d = 0; d < head_dim; d += kChunk) {
    const __m512 low = _mm512_loadu_ps(acc + d), high = _mm512_loadu_ps(acc + d + 16);
    store(out + d, (Vec)_mm512_permutex2var_ps(low, first, high) * scale);
    store(out + d + 16, (Vec)_mm512_permutex2var_ps(low, second, high) * scale);
  }
}

}  // namespace
}  // namespace blockhouse
