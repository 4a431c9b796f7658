// One row's attention over a piece of its context with AVX-512 BF16: products of bf16 pairs into
// fp32. All scores of the piece come first, then one softmax, then the weighted sum: nothing is
// rescaled on the way.
//
// The weighted sum keeps each 32 dimensions as two vectors in the order that interleaving two rows
// of v gives: lanes of the first hold dimensions 0-3, 8-11, 16-19, 24-27, of the second the others.
#pragma once

#include <immintrin.h>

#include "attention_rows.h"

namespace blockhouse {
namespace {

constexpr int64_t kChunk = 32;  // dimensions of one bf16 vector
constexpr int64_t kPairRun = 16;  // tokens whose scores are one vector
constexpr int64_t kRunsAhead = 2;  // how far ahead memory is asked for

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


// Whole numbers in 8 bits are exact in bf16; what they are multiples of comes in later.
BH_INLINE void widen_row(const int8_t* from, int64_t dim, bf16* to) {
  for (int64_t d = 0; d < dim; d += kChunk) {
    const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + d)));
    const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + d + 16)));
    _mm512_storeu_si512((void*)(to + d), (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high),
                                                                      _mm512_cvtepi32_ps(low)));
  }
}

// Memory of one item; [heads, kSplitTokens] where nothing else is said.
struct Piece {
  int64_t heads, group, dim, tokens;
  const bf16* query;  // [heads, dim]
  float* scores;
  uint16_t* weights;
  float* sums;     // [heads, dim] in pair order
  float* maximum;  // [heads]
  float* total;    // [heads]
  // Of caches in 8 bits:
  float* value_scales;  // [kv heads, kSplitTokens]
  bf16* widened;        // [kPairRun, dim], one kv head's rows of a run
};

int64_t pair_scratch(const AttentionArgs& args) {
  const int64_t per_head = kSplitTokens + kSplitTokens / 2 + args.head_dim + 2;
  return args.num_heads * per_head + args.num_kv_heads * kSplitTokens +
         kPairRun * args.head_dim / 2;
}

BH_INLINE Piece piece_at(const AttentionArgs& args, const AttentionItem& item, float* memory) {
  Piece piece{};
  piece.group = args.num_heads / args.num_kv_heads;
  piece.heads = (item.kv_head_end - item.kv_head_begin) * piece.group;
  piece.dim = args.head_dim;
  piece.tokens = item.context_end - item.context_begin;
  piece.query = (const bf16*)args.query + item.first_row * args.query_stride +
                item.kv_head_begin * piece.group * piece.dim;
  piece.scores = memory;
  piece.weights = (uint16_t*)(piece.scores + piece.heads * kSplitTokens);
  piece.sums = (float*)(piece.weights + piece.heads * kSplitTokens);
  piece.maximum = piece.sums + piece.heads * piece.dim;
  piece.total = piece.maximum + piece.heads;
  piece.value_scales = piece.total + piece.heads;
  piece.widened = (bf16*)(piece.value_scales + args.num_kv_heads * kSplitTokens);
  return piece;
}

// Rows of a block for some kv heads; row t at t * stride.
struct PairRun {
  int64_t first, tokens;  // within the piece
  int64_t offset, stride;
};

BH_INLINE PairRun pair_run_at(const AttentionArgs& args, const AttentionItem& item, int64_t first) {
  const int32_t* table = args.block_tables + item.request * args.table_stride;
  const int64_t position = item.context_begin + first;
  const int64_t in_block = args.block_size - position % args.block_size;
  const int64_t left = item.context_end - position;
  PairRun run{};
  run.first = first;
  run.tokens = in_block < kPairRun ? in_block : kPairRun;
  run.tokens = run.tokens < left ? run.tokens : left;
  run.stride = args.num_kv_heads * args.head_dim;
  run.offset = block_offset(args, table, position) + item.kv_head_begin * args.head_dim;
  return run;
}

// Memory to ask for while something else is computed: the rows of a run, a share at a time. A burst
// would wait for the lines in flight, of which a core has a few dozen.
struct Ahead {
  const char* rows = nullptr;
  int64_t tokens = 0, stride_bytes = 0, line_bytes = 0;  // of a row: what this item reads
  int64_t shares = 1;

  BH_INLINE void ask(int64_t share) const {
    const int64_t end = tokens * (share + 1) / shares;
    for (int64_t t = tokens * share / shares; t < end; t++)
      for (int64_t i = 0; i < line_bytes; i += 64)
        _mm_prefetch(rows + t * stride_bytes + i, _MM_HINT_T0);
  }
};

// The run that begins `first` tokens into the piece; past its end there is nothing to ask for.
template <class Kv>
BH_INLINE Ahead ahead_at(const AttentionArgs& args, const AttentionItem& item, const void* cache,
                         int64_t first, int64_t shares) {
  Ahead ahead;
  if (first >= item.context_end - item.context_begin) return ahead;
  const PairRun run = pair_run_at(args, item, first);
  ahead.rows = (const char*)((const Kv*)cache + run.offset);
  ahead.tokens = run.tokens;
  ahead.stride_bytes = run.stride * (int64_t)sizeof(Kv);
  ahead.line_bytes =
      (item.kv_head_end - item.kv_head_begin) * args.head_dim * (int64_t)sizeof(Kv);
  ahead.shares = shares;
  return ahead;
}

template <class Kv>
BH_INLINE void ask_for_first_runs(const AttentionArgs& args, const AttentionItem& item,
                                  const void* cache) {
  for (int64_t first = 0; first < kRunsAhead * kPairRun; first += kPairRun)
    ahead_at<Kv>(args, item, cache, first, 1).ask(0);
}

// One kv head's rows of a run in bf16.
struct RunRows {
  const bf16* rows;
  int64_t tokens, stride;
};

template <class Kv>
BH_INLINE RunRows rows_of(const void* cache, const PairRun& run, int64_t kv, const Piece& piece) {
  const Kv* from = (const Kv*)cache + run.offset + kv * piece.dim;
  if (sizeof(Kv) == 2) return {(const bf16*)from, run.tokens, run.stride};
  for (int64_t t = 0; t < run.tokens; t++)
    widen_row((const int8_t*)(from + t * run.stride), piece.dim, piece.widened + t * piece.dim);
  return {piece.widened, run.tokens, piece.dim};
}

BH_INLINE __mmask16 lanes_of(const PairRun& run) { return (__mmask16)((1u << run.tokens) - 1); }

// The scales of a run's rows, zeros past its end.
BH_INLINE __m512 scales_of(const float* scales, const AttentionArgs& args, const PairRun& run,
                           int64_t kv) {
  const __m512i tokens = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i places = _mm512_mullo_epi32(tokens, _mm512_set1_epi32((int)args.num_kv_heads));
  return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), lanes_of(run), places,
                                  scales + run.offset / args.head_dim + kv, 4);
}

// Scores of a run for one head; lanes past its end are anything.
template <int kChunks>
BH_INLINE __m512 score_run(const RunRows& keys, const bf16* query) {
  __m512 each[kPairRun];
#pragma GCC unroll 16
  for (int t = 0; t < kPairRun; t++) {
    const bf16* key = keys.rows + (t < keys.tokens ? t : 0) * keys.stride;
    each[t] = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int c = 0; c < kChunks; c++)
      each[t] = _mm512_dpbf16_ps(each[t], load_pairs(query + c * kChunk),
                                 load_pairs(key + c * kChunk));
  }
  return sum_each(each);
}

template <int kChunks, class Kv>
void score_piece(const AttentionArgs& args, const AttentionItem& item, const Piece& piece) {
  const int64_t kv_heads = piece.heads / piece.group;
  ask_for_first_runs<Kv>(args, item, args.key_cache);
  for (int64_t first = 0; first < piece.tokens;) {
    const PairRun run = pair_run_at(args, item, first);
    const Ahead ahead =
        ahead_at<Kv>(args, item, args.key_cache, first + kRunsAhead * kPairRun, piece.heads);
    for (int64_t kv = 0; kv < kv_heads; kv++) {
      const RunRows keys = rows_of<Kv>(args.key_cache, run, kv, piece);
      __m512 scale = _mm512_set1_ps(args.scale * kLog2E);
      if (sizeof(Kv) == 1) {
        scale = _mm512_mul_ps(scale, scales_of(args.key_scales, args, run, kv));
        _mm512_mask_storeu_ps(piece.value_scales + kv * kSplitTokens + first, lanes_of(run),
                              scales_of(args.value_scales, args, run, kv));
      }
      for (int64_t h = kv * piece.group; h < (kv + 1) * piece.group; h++) {
        ahead.ask(h);
        const __m512 scores = score_run<kChunks>(keys, piece.query + h * piece.dim);
        _mm512_mask_storeu_ps(piece.scores + h * kSplitTokens + first, lanes_of(run),
                              _mm512_mul_ps(scores, scale));
      }
    }
    first += run.tokens;
  }
}

// Scores of one head -> weights in bf16, zeros up to whole vectors; their maximum and sum.
template <class Kv>
BH_INLINE void weigh_piece(const Piece& piece, int64_t head) {
  float* scores = piece.scores + head * kSplitTokens;
  uint16_t* weights = piece.weights + head * kSplitTokens;
  const int64_t rest = piece.tokens % kPairRun, whole = piece.tokens - rest;
  const __m512 least = _mm512_set1_ps(-__builtin_inff());
  const __mmask16 tail = (__mmask16)((1u << rest) - 1);
  __m512 most = least;
  for (int64_t t = 0; t < whole; t += kPairRun)
    most = _mm512_max_ps(most, _mm512_loadu_ps(scores + t));
  if (rest) {
    const __m512 last = _mm512_mask_loadu_ps(least, tail, scores + whole);
    most = _mm512_max_ps(most, last);
  }
  const float highest = _mm512_reduce_max_ps(most);
  const __m512 base = _mm512_set1_ps(highest);
  __m512 total = _mm512_setzero_ps();
  for (int64_t t = 0; t < piece.tokens; t += kPairRun) {
    const __mmask16 valid = t < whole ? (__mmask16)0xFFFF : tail;
    const __m512 score = _mm512_sub_ps(_mm512_loadu_ps(scores + t), base);
    __m512 weight = _mm512_maskz_mov_ps(valid, (__m512)exp2_vec((Vec)score));
    total = _mm512_add_ps(total, weight);
    if (sizeof(Kv) == 1) {
      const float* scales = piece.value_scales + head / piece.group * kSplitTokens + t;
      weight = _mm512_mul_ps(weight, _mm512_maskz_loadu_ps(valid, scales));
    }
    _mm256_storeu_si256((__m256i*)(weights + t), (__m256i)_mm512_cvtneps_pbh(weight));
  }
  piece.maximum[head] = highest;
  piece.total[head] = _mm512_reduce_add_ps(total);
}

// sums += weights * v of a run, for kHeads heads of one kv head and kWide chunks of dimensions.
template <int kHeads, int kWide>
BH_INLINE void add_values(const RunRows& values, int64_t d, const uint16_t* weights, int64_t dim,
                          float* sums) {
  __m512 acc[kHeads][2 * kWide];
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; h++)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * kWide; i++) acc[h][i] = _mm512_loadu_ps(sums + h * dim + d + i * 16);
  for (int64_t t = 0; t < values.tokens; t += 2) {
    const bf16* value = values.rows + t * values.stride + d;
    __m512bh part[2 * kWide];
#pragma GCC unroll 2
    for (int c = 0; c < kWide; c++) {
      const __m512i a = _mm512_loadu_si512((const void*)(value + c * kChunk));
      const __m512i b = t + 1 < values.tokens
                            ? _mm512_loadu_si512((const void*)(value + values.stride + c * kChunk))
                            : _mm512_setzero_si512();
      part[2 * c] = (__m512bh)_mm512_unpacklo_epi16(a, b);
      part[2 * c + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; h++) {
      int32_t pair;
      __builtin_memcpy(&pair, weights + h * kSplitTokens + t, sizeof(pair));
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int i = 0; i < 2 * kWide; i++) acc[h][i] = _mm512_dpbf16_ps(acc[h][i], both, part[i]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; h++)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * kWide; i++) _mm512_storeu_ps(sums + h * dim + d + i * 16, acc[h][i]);
}

template <int kHeads, int kChunks>
BH_INLINE void add_values_of(const RunRows& values, const uint16_t* weights, float* sums) {
  constexpr int64_t kDim = kChunks * kChunk;
  int64_t d = 0;
#pragma GCC unroll 4
  for (; d + 2 * kChunk <= kDim; d += 2 * kChunk)
    add_values<kHeads, 2>(values, d, weights, kDim, sums);
  if (d < kDim) add_values<kHeads, 1>(values, d, weights, kDim, sums);
}

template <int kChunks, class Kv>
void sum_piece(const AttentionArgs& args, const AttentionItem& item, const Piece& piece) {
  const int64_t kv_heads = piece.heads / piece.group;
  for (int64_t i = 0; i < piece.heads * piece.dim; i += 16)
    _mm512_storeu_ps(piece.sums + i, _mm512_setzero_ps());
  for (int64_t first = 0; first < piece.tokens;) {
    const PairRun run = pair_run_at(args, item, first);
    const Ahead ahead =
        ahead_at<Kv>(args, item, args.value_cache, first + kRunsAhead * kPairRun, kv_heads);
    for (int64_t kv = 0; kv < kv_heads; kv++) {
      ahead.ask(kv);
      const RunRows values = rows_of<Kv>(args.value_cache, run, kv, piece);
      for (int64_t h = 0; h < piece.group; h += 4) {
        const int64_t head = kv * piece.group + h;
        const uint16_t* weights = piece.weights + head * kSplitTokens + first;
        float* sums = piece.sums + head * piece.dim;
        switch (piece.group - h) {
          case 1: add_values_of<1, kChunks>(values, weights, sums); break;
          case 2: add_values_of<2, kChunks>(values, weights, sums); break;
          case 3: add_values_of<3, kChunks>(values, weights, sums); break;
          default: add_values_of<4, kChunks>(values, weights, sums); break;
        }
      }
    }
    first += run.tokens;
  }
}

template <int kChunks, class Kv>
void attend_pairs(const AttentionArgs& args, const AttentionItem& item, const Piece& piece) {
  score_piece<kChunks, Kv>(args, item, piece);
  ask_for_first_runs<Kv>(args, item, args.value_cache);
  for (int64_t h = 0; h < piece.heads; h++) weigh_piece<Kv>(piece, h);
  sum_piece<kChunks, Kv>(args, item, piece);
}

bool has_pair_order(int64_t head_dim) {
  return head_dim == 32 || head_dim == 64 || head_dim == 96 || head_dim == 128 ||
         head_dim == 192 || head_dim == 256;
}

// One head's sum in plain order.
template <class Out>
void store_pair_sum(const float* acc, int64_t head_dim, float scale, Out* out) {
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

void store_piece(const AttentionArgs& args, const AttentionItem& item, const Piece& piece) {
  const int64_t dim = piece.dim, first_head = item.kv_head_begin * piece.group;
  for (int64_t h = 0; h < piece.heads; h++) {
    const float* sums = piece.sums + h * dim;
    if (item.partial) {
      float* part = item.partial + (first_head + h) * (dim + 2);
      store_pair_sum(sums, dim, 1.0f, part);
      part[dim] = piece.maximum[h];
      part[dim + 1] = piece.total[h];
    } else {
      bf16* out = (bf16*)args.out + (item.first_row * args.num_heads + first_head + h) * dim;
      store_pair_sum(sums, dim, 1.0f / piece.total[h], out);
    }
  }
}

// Other head sizes take the general code, and so would a row with a longer context than one piece.
template <class Kv>
void attend_piece(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  if (item.context_end - item.context_begin > kSplitTokens)
    return attend_row<Kv>(args, item, scratch);
  const Piece piece = piece_at(args, item, scratch);
  switch (args.head_dim) {
    case 32: attend_pairs<1, Kv>(args, item, piece); break;
    case 64: attend_pairs<2, Kv>(args, item, piece); break;
    case 96: attend_pairs<3, Kv>(args, item, piece); break;
    case 128: attend_pairs<4, Kv>(args, item, piece); break;
    case 192: attend_pairs<6, Kv>(args, item, piece); break;
    case 256: attend_pairs<8, Kv>(args, item, piece); break;
    default: return attend_row<Kv>(args, item, scratch);
  }
  store_piece(args, item, piece);
}

void attend_one_row(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  if (args.key_scales)
    attend_piece<int8_t>(args, item, scratch);
  else
    attend_piece<bf16>(args, item, scratch);
}

}  // namespace
}  // namespace blockhouse
