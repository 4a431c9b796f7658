// Paged attention of a tile of queries (arXiv:2309.06180) in FlashAttention-2's loop order
// (arXiv:2307.08691) with AVX-512 BF16: products of bf16 pairs into fp32, keys read where they lie.
//
// Scores have a query a lane, so that the softmax (arXiv:1805.02867) needs no sums across lanes; the
// weighted sum has a dimension a lane, in the pair order of attention_piece_avx512.h. Pairs run along
// dimensions in the first product and along tokens in the second.
#pragma once

#include "attention_piece_avx512.h"
#include "attention_tile.h"

namespace blockhouse {
namespace {

constexpr int kScoreRows = 8;      // tokens of a block of scores
constexpr int kScoreVectors = 3;   // vectors of queries of one: 24 sums
constexpr int kValueQueries = 6;   // queries of a block of the weighted sum
constexpr int kValueVectors = 4;   // vectors of dimensions of one: 24 sums

// Memory of one item. Columns are queries in whole vectors.
struct PairTile {
  int64_t queries, columns, dim;
  uint32_t* query_pairs;   // [dim / 2, columns]
  uint32_t* value_pairs;   // [32, dim]
  uint32_t* weight_pairs;  // [32, columns]
  float* scores;           // [64, columns]
  float* sums;             // [queries, dim] in pair order
  float* maximum;          // [columns]
  float* weight_sum;       // [columns]
  float* factors;          // [columns]
  int32_t* positions;      // [columns]
  bf16* widened;           // [2, 64, dim], keys and values of caches in 8 bits
};

int64_t pair_tile_floats(const AttentionArgs& args, int64_t rows) {
  const int64_t queries = rows * heads_per_kv(args), columns = whole_vectors(queries);
  const int64_t dim = args.head_dim, pairs = kTileTokens / 2;
  return dim / 2 * columns + pairs * dim + pairs * columns + kTileTokens * columns +
         queries * dim + 4 * columns + kTileTokens * dim;
}

BH_INLINE PairTile pair_tile_at(const AttentionArgs& args, int64_t rows, float* memory) {
  PairTile tile{};
  tile.queries = rows * heads_per_kv(args);
  tile.columns = whole_vectors(tile.queries);
  tile.dim = args.head_dim;
  tile.query_pairs = (uint32_t*)memory;
  tile.value_pairs = tile.query_pairs + tile.dim / 2 * tile.columns;
  tile.weight_pairs = tile.value_pairs + kTileTokens / 2 * tile.dim;
  tile.scores = (float*)(tile.weight_pairs + kTileTokens / 2 * tile.columns);
  tile.sums = tile.scores + kTileTokens * tile.columns;
  tile.maximum = tile.sums + tile.queries * tile.dim;
  tile.weight_sum = tile.maximum + tile.columns;
  tile.factors = tile.weight_sum + tile.columns;
  tile.positions = (int32_t*)(tile.factors + tile.columns);
  tile.widened = (bf16*)(tile.positions + tile.columns);
  return tile;
}

void start_pairs(const AttentionArgs& args, const AttentionItem& item, int64_t kv,
                 const PairTile& tile) {
  const int64_t group = heads_per_kv(args), dim = tile.dim;
  const bf16* query =
      (const bf16*)args.query + item.first_row * args.query_stride + kv * group * dim;
  for (int64_t column = 0; column < tile.columns; column++) {
    const bool is_query = column < tile.queries;
    const int64_t row = is_query ? column / group : item.num_rows - 1;
    const bf16* from = query + row * args.query_stride + column % group * dim;
    for (int64_t p = 0; p < dim / 2; p++) {
      uint32_t pair = 0;
      if (is_query) __builtin_memcpy(&pair, from + 2 * p, sizeof(pair));
      tile.query_pairs[p * tile.columns + column] = pair;
    }
    tile.positions[column] = (int32_t)(item.first_position + row);
    tile.maximum[column] = -1e30f;
    tile.weight_sum[column] = 0.0f;
  }
  for (int64_t i = 0; i < tile.queries * dim; i++) tile.sums[i] = 0.0f;
}

// Where a step's keys lie, and its values as pairs of tokens; zeros past an odd end.
struct Tokens {
  int64_t first, count;
  const bf16* keys[kTileTokens];
  // Of caches in 8 bits: what their numbers are multiples of, keys' with the scale of all scores.
  float key_scales[kTileTokens], value_scales[kTileTokens];
};

BH_INLINE const bf16* row_at(const int8_t* cache, int64_t place, int64_t dim, bf16* widened) {
  widen_row(cache + place, dim, widened);
  return widened;
}

BH_INLINE const bf16* row_at(const bf16* cache, int64_t place, int64_t, bf16*) {
  return cache + place;
}

template <class Kv>
void load_pairs_of_tokens(const AttentionArgs& args, const AttentionItem& item, int64_t kv,
                          const PairTile& tile, Tokens& tokens) {
  const int32_t* table = args.block_tables + item.request * args.table_stride;
  const bf16* values[kTileTokens];
  for (int64_t t = 0; t < tokens.count; t++) {
    const int64_t place = block_offset(args, table, tokens.first + t) + kv * tile.dim;
    bf16* widened = tile.widened + t * tile.dim;
    tokens.keys[t] = row_at((const Kv*)args.key_cache, place, tile.dim, widened);
    values[t] = row_at((const Kv*)args.value_cache, place, tile.dim,
                       widened + kTileTokens * tile.dim);
    if (sizeof(Kv) == 1) {
      tokens.key_scales[t] = args.key_scales[place / tile.dim] * args.scale * kLog2E;
      tokens.value_scales[t] = args.value_scales[place / tile.dim];
    }
  }
  for (int64_t t = 0; t < tokens.count; t += 2) {
    uint32_t* to = tile.value_pairs + t / 2 * tile.dim;
    for (int64_t d = 0; d < tile.dim; d += kChunk) {
      const __m512i a = _mm512_loadu_si512((const void*)(values[t] + d));
      const __m512i b = t + 1 < tokens.count ? _mm512_loadu_si512((const void*)(values[t + 1] + d))
                                             : _mm512_setzero_si512();
      _mm512_storeu_si512((void*)(to + d), _mm512_unpacklo_epi16(a, b));
      _mm512_storeu_si512((void*)(to + d + 16), _mm512_unpackhi_epi16(a, b));
    }
  }
}

// Dot products of some tokens, from `t` on, with some vectors of queries.
template <int kVectors>
BH_INLINE void score_block(const PairTile& tile, const Tokens& tokens, int64_t t, int64_t column) {
  const bf16* keys[kScoreRows];
  for (int i = 0; i < kScoreRows; i++)
    keys[i] = tokens.keys[t + i < tokens.count ? t + i : tokens.count - 1];
  __m512 sums[kScoreRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kScoreRows; i++)
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; v++) sums[i][v] = _mm512_setzero_ps();
  const uint32_t* queries = tile.query_pairs + column;
  for (int64_t p = 0; p < tile.dim / 2; p++, queries += tile.columns) {
    __m512bh query[kVectors];
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; v++)
      query[v] = (__m512bh)_mm512_loadu_si512((const void*)(queries + v * 16));
#pragma GCC unroll 8
    for (int i = 0; i < kScoreRows; i++) {
      int32_t pair;
      __builtin_memcpy(&pair, keys[i] + 2 * p, sizeof(pair));
      const __m512bh key = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; v++) sums[i][v] = _mm512_dpbf16_ps(sums[i][v], key, query[v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kScoreRows; i++)
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; v++)
      _mm512_storeu_ps(tile.scores + (t + i) * tile.columns + column + v * 16, sums[i][v]);
}

void score_pairs(const PairTile& tile, const Tokens& tokens) {
  for (int64_t column = 0; column < tile.columns; column += kScoreVectors * 16) {
    const int64_t vectors = (tile.columns - column) / 16;
    for (int64_t t = 0; t < tokens.count; t += kScoreRows) switch (vectors) {
        case 1: score_block<1>(tile, tokens, t, column); break;
        case 2: score_block<2>(tile, tokens, t, column); break;
        default: score_block<kScoreVectors>(tile, tokens, t, column); break;
      }
  }
}

BH_INLINE __m512i pair_up(__m512 first, __m512 second) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// Scores -> pairs of weights, with maxima, sums and factors brought up to date. kScaled: keys and
// values have scales of their own.
template <bool kMasked, bool kScaled>
void weigh_pairs(const PairTile& tile, const Tokens& tokens, float scale) {
  for (int64_t column = 0; column < tile.columns; column += 16) {
    const __m512i positions = _mm512_loadu_si512((const void*)(tile.positions + column));
    float* scores = tile.scores + column;
    const auto sees = [&](int64_t t) {
      const __m512i position = _mm512_set1_epi32((int32_t)(tokens.first + t));
      return kMasked ? _mm512_cmpge_epi32_mask(positions, position) : (__mmask16)0xFFFF;
    };
    const auto scale_of = [&](int64_t t) {
      return _mm512_set1_ps(kScaled ? tokens.key_scales[t] : scale);
    };
    const __m512 before = _mm512_loadu_ps(tile.maximum + column);
    __m512 after = before;
    for (int64_t t = 0; t < tokens.count; t++) {
      const __m512 score = _mm512_mul_ps(_mm512_loadu_ps(scores + t * tile.columns), scale_of(t));
      after = _mm512_mask_max_ps(after, sees(t), after, score);
    }
    const __m512 factor = (__m512)exp2_vec((Vec)_mm512_sub_ps(before, after));
    __m512 total = _mm512_mul_ps(_mm512_loadu_ps(tile.weight_sum + column), factor);
    const auto weight_of = [&](int64_t t) {
      const __m512 score =
          _mm512_fmsub_ps(_mm512_loadu_ps(scores + t * tile.columns), scale_of(t), after);
      const __m512 weight = _mm512_maskz_mov_ps(sees(t), (__m512)exp2_vec((Vec)score));
      total = _mm512_add_ps(total, weight);
      return kScaled ? _mm512_mul_ps(weight, _mm512_set1_ps(tokens.value_scales[t])) : weight;
    };
    for (int64_t t = 0; t < tokens.count; t += 2) {
      const __m512 first = weight_of(t);
      const __m512 second = t + 1 < tokens.count ? weight_of(t + 1) : _mm512_setzero_ps();
      _mm512_storeu_si512((void*)(tile.weight_pairs + t / 2 * tile.columns + column),
                          pair_up(first, second));
    }
    _mm512_storeu_ps(tile.maximum + column, after);
    _mm512_storeu_ps(tile.weight_sum + column, total);
    _mm512_storeu_ps(tile.factors + column, factor);
  }
}

// sums = sums * factor + weights * values for some queries and some vectors of dimensions.
template <int kQueries, int kVectors>
BH_INLINE void value_block(const PairTile& tile, int64_t pairs, int64_t query, int64_t d) {
  __m512 sums[kQueries][kVectors];
  float* at = tile.sums + query * tile.dim + d;
#pragma GCC unroll 6
  for (int q = 0; q < kQueries; q++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++)
      sums[q][v] = _mm512_mul_ps(_mm512_loadu_ps(at + q * tile.dim + v * 16),
                                 _mm512_set1_ps(tile.factors[query + q]));
  const uint32_t* values = tile.value_pairs + d;
  const uint32_t* weights = tile.weight_pairs + query;
  for (int64_t p = 0; p < pairs; p++, values += tile.dim, weights += tile.columns) {
    __m512bh value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++)
      value[v] = (__m512bh)_mm512_loadu_si512((const void*)(values + v * 16));
#pragma GCC unroll 6
    for (int q = 0; q < kQueries; q++) {
      const __m512bh weight = (__m512bh)_mm512_set1_epi32((int32_t)weights[q]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++)
        sums[q][v] = _mm512_dpbf16_ps(sums[q][v], weight, value[v]);
    }
  }
#pragma GCC unroll 6
  for (int q = 0; q < kQueries; q++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++)
      _mm512_storeu_ps(at + q * tile.dim + v * 16, sums[q][v]);
}

template <int kQueries>
BH_INLINE void value_rows(const PairTile& tile, int64_t pairs, int64_t query) {
  int64_t d = 0;
  for (; d + kValueVectors * 16 <= tile.dim; d += kValueVectors * 16)
    value_block<kQueries, kValueVectors>(tile, pairs, query, d);
  // Dimensions come in chunks of two vectors.
  if (d < tile.dim) value_block<kQueries, 2>(tile, pairs, query, d);
}

void add_value_pairs(const PairTile& tile, const Tokens& tokens) {
  const int64_t pairs = (tokens.count + 1) / 2;
  int64_t query = 0;
  for (; query + kValueQueries <= tile.queries; query += kValueQueries)
    value_rows<kValueQueries>(tile, pairs, query);
  switch (tile.queries - query) {
    case 5: return value_rows<5>(tile, pairs, query);
    case 4: return value_rows<4>(tile, pairs, query);
    case 3: return value_rows<3>(tile, pairs, query);
    case 2: return value_rows<2>(tile, pairs, query);
    case 1: return value_rows<1>(tile, pairs, query);
    default: return;
  }
}

template <class Kv>
void attend_pair_tile(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  const PairTile tile = pair_tile_at(args, item.num_rows, scratch);
  const int64_t group = heads_per_kv(args), dim = tile.dim;
  const float scale = args.scale * kLog2E;
  for (int64_t kv = item.kv_head_begin; kv < item.kv_head_end; kv++) {
    start_pairs(args, item, kv, tile);
    for (int64_t first = 0; first < item.context_end; first += kTileTokens) {
      Tokens tokens;
      const int64_t left = item.context_end - first;
      tokens.first = first;
      tokens.count = left < kTileTokens ? left : kTileTokens;
      load_pairs_of_tokens<Kv>(args, item, kv, tile, tokens);
      score_pairs(tile, tokens);
      if (first + tokens.count - 1 > item.first_position)
        weigh_pairs<true, sizeof(Kv) == 1>(tile, tokens, scale);
      else
        weigh_pairs<false, sizeof(Kv) == 1>(tile, tokens, scale);
      add_value_pairs(tile, tokens);
    }
    for (int64_t q = 0; q < tile.queries; q++) {
      const int64_t row = item.first_row + q / group, head = kv * group + q % group;
      bf16* out = (bf16*)args.out + (row * args.num_heads + head) * dim;
      store_pair_sum(tile.sums + q * dim, dim, 1.0f / tile.weight_sum[q], out);
    }
  }
}

int64_t avx512_attention_scratch(const AttentionArgs& args) {
  const int64_t generic = tile_attention_scratch(args), row = pair_scratch(args);
  const int64_t tile = pair_tile_floats(args, tile_query_rows(args));
  const int64_t most = row > tile ? row : tile;
  return generic > most ? generic : most;
}

// Odd head sizes take the general code.
void avx512_attend(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  const bool is_piece = item.num_rows == 1 &&
                        item.context_end - item.context_begin <= kSplitTokens;
  if (is_piece || !has_pair_order(args.head_dim))
    attend_tile_or_row(args, item, scratch);
  else if (args.key_scales)
    attend_pair_tile<int8_t>(args, item, scratch);
  else
    attend_pair_tile<bf16>(args, item, scratch);
}

}  // namespace
}  // namespace blockhouse
