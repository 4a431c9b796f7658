// Linear over quantised weights with AVX-512 BF16, in any form of quant_forms_avx512.h.
//
// Few rows (a step of decodes): unpacked q meets bf16 activations, and each group's fp32 sum is then
// scaled, so scales are exact. Many rows: w = scale * q + min rounded to bf16, unpacked for a panel
// of columns at a time; 16-bit weights are panels as they lie. A row's products are added up in one
// order whatever stands beside it.
#pragma once

#include "quant_scaled_avx512.h"

namespace blockhouse {
namespace {

// A block of products: 6 rows by 4 tiles are 24 sums, which with 4 weights and an activation fill
// the registers.
constexpr int kBlockRows = 6;
constexpr int kSideTiles = 4;
// Up to so many rows weights are unpacked into registers, tile by tile.
constexpr int kRegisterRows = 8;
// Groups of depth that a panel holds at a time, to stay in L2 while all rows pass over it.
constexpr int64_t kPanelGroups = 96;

BH_INLINE bool uses_panels(const QuantLinearArgs& args) {
  return args.weights.bits == 16 || args.as_many || args.num_rows > kFewRows;
}

// How many sums of inputs a group of a row has.
BH_INLINE int64_t parts_of(const QuantWeights& weights) {
  return weights.super_blocks && weights.bits == 6 ? 2 : 1;
}

// Few rows: sums of groups, or of their halves. Panels read the activations as they are.
int64_t avx512_prepared_size(const QuantLinearArgs& args) {
  if (uses_panels(args)) return 0;
  return args.num_rows * (args.weights.depth / kGroup) * parts_of(args.weights);
}

void avx512_prepare(const QuantLinearArgs& args, int64_t begin, int64_t end) {
  if (uses_panels(args) || args.weights.bits == 8) return;
  if (parts_of(args.weights) == 1) return prepare_group_sums(args, begin, end);
  const int64_t halves = args.weights.depth / kHalf;
  const int64_t last = end * kRowBlock < args.num_rows ? end * kRowBlock : args.num_rows;
  for (int64_t i = begin * kRowBlock * halves; i < last * halves; i++)
    args.prepared[i] = reduce_add(load((const Act*)args.input + i * kHalf));
}

// Of a panel: its weights, and the sums of its rows where it takes several turns over the depth.
int64_t avx512_scratch_size(const QuantLinearArgs& args) {
  if (!uses_panels(args)) return 0;
  const int64_t groups = args.weights.depth / kGroup;
  const int64_t weights = groups < kPanelGroups ? groups : kPanelGroups;
  const int64_t sums = groups <= kPanelGroups ? 0 : args.num_rows * kSideTiles * kColumns;
  return weights * kSideTiles * kUnpackedBytes / 4 + sums;
}

BH_INLINE __m512bh broadcast_pair(const bf16* from) {
  int32_t pair;
  __builtin_memcpy(&pair, from, sizeof(pair));
  return (__m512bh)_mm512_set1_epi32(pair);
}

// Rows in blocks of about the same size: 16 as 5, 5 and 6.
BH_INLINE int64_t num_blocks(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }
BH_INLINE int64_t block_begin(int64_t rows, int64_t block) {
  return rows * block / num_blocks(rows);
}

// ---- few rows

// The sums of a group turn into part of the totals: sum * scale + sum of inputs * minimum.
template <class Form>
BH_INLINE __m512 add_scaled(__m512 total, __m512 sum, const GroupScale& by, const float* inputs) {
  total = _mm512_fmadd_ps(sum, by.scale, total);
  if (Form::kHasMinimum) total = _mm512_fmadd_ps(_mm512_set1_ps(*inputs), by.minimum, total);
  return total;
}

// The vectors of a group that one scale belongs to.
template <class Form>
BH_INLINE constexpr int part_begin(int part) {
  return part * 16 / Form::kParts;
}

// Unpacks into registers: for so few rows that unpacking and memory are most of the work.
template <int kRows, class Form>
void one_tile(const QuantLinearArgs& args, const ByteTables& tables, int64_t tile) {
  const int64_t depth = args.weights.depth, groups = depth / kGroup;
  const bf16* input = (const bf16*)args.input;
  const float* inputs = args.prepared;
  __m512 total[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) total[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; g++, input += kGroup) {
    __m512i unpacked[16];
    GroupScale by[Form::kParts];
    Form::prefetch(args.weights, tile * groups + g + kPrefetchGroups);
    Form::unpack(args.weights, tile * groups + g, tables, unpacked);
    Form::scales(args.weights, tile * groups + g, by);
#pragma GCC unroll 2
    for (int part = 0; part < Form::kParts; part++, inputs++) {
      __m512 sums[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) sums[r] = _mm512_setzero_ps();
#pragma GCC unroll 16
      for (int v = part_begin<Form>(part); v < part_begin<Form>(part + 1); v++)
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++)
          sums[r] = _mm512_dpbf16_ps(sums[r], (__m512bh)unpacked[v],
                                     broadcast_pair(input + r * depth + v * 2));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++)
        total[r] =
            add_scaled<Form>(total[r], sums[r], by[part], inputs + r * groups * Form::kParts);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) store_total(args, r, tile, total[r]);
}

// A group of some tiles, unpacked for several blocks of rows.
template <int kTiles, class Form>
struct UnpackedTiles {
  alignas(64) __m512i values[kTiles][16];
  GroupScale by[kTiles][Form::kParts];
};

template <int kTiles, class Form>
BH_INLINE void unpack_tiles(const QuantWeights& weights, const ByteTables& tables, int64_t tile,
                            int64_t group, UnpackedTiles<kTiles, Form>& out) {
  constexpr int64_t kAhead = kPrefetchGroups / kTiles * 2;
  const int64_t groups = weights.depth / kGroup;
  // The tiles that come after these begin where these end.
  const int64_t next = group + kAhead < groups ? 0 : (kTiles - 1) * groups;
  for (int t = 0; t < kTiles; t++) {
    const int64_t place = (tile + t) * groups + group;
    Form::prefetch(weights, place + kAhead + next);
    Form::unpack(weights, place, tables, out.values[t]);
    Form::scales(weights, place, out.by[t]);
  }
}

// One group of a block of rows; `totals` is [rows, kTiles] vectors.
template <int kRows, int kTiles, class Form>
BH_INLINE void add_group(const UnpackedTiles<kTiles, Form>& unpacked, const bf16* input,
                         int64_t depth, const float* inputs, int64_t groups, __m512* totals) {
  for (int part = 0; part < Form::kParts; part++, inputs++) {
    __m512 sums[kRows][kTiles];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) sums[r][t] = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (int v = part_begin<Form>(part); v < part_begin<Form>(part + 1); v++)
#pragma GCC unroll 6
      for (int r = 0; r < kRows; r++) {
        const __m512bh left = broadcast_pair(input + r * depth + v * 2);
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; t++)
          sums[r][t] = _mm512_dpbf16_ps(sums[r][t], (__m512bh)unpacked.values[t][v], left);
      }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++)
        totals[r * kTiles + t] =
            add_scaled<Form>(totals[r * kTiles + t], sums[r][t], unpacked.by[t][part],
                             inputs + r * groups * Form::kParts);
  }
}

template <int kTiles, class Form>
BH_INLINE void add_group_of(int64_t rows, const UnpackedTiles<kTiles, Form>& unpacked, const bf16* input,
                            int64_t depth, const float* inputs, int64_t groups, __m512* totals) {
  switch (rows) {
#define BH_ROWS(n) \
  case n: return add_group<n, kTiles, Form>(unpacked, input, depth, inputs, groups, totals)
    BH_ROWS(1);
    BH_ROWS(2);
    BH_ROWS(3);
    BH_ROWS(4);
    BH_ROWS(5);
    default: BH_ROWS(6);
#undef BH_ROWS
  }
}

template <int kTiles, class Form>
void some_tiles(const QuantLinearArgs& args, const ByteTables& tables, int64_t tile) {
  const int64_t depth = args.weights.depth, groups = depth / kGroup, rows = args.num_rows;
  const bf16* input = (const bf16*)args.input;
  __m512 totals[kFewRows * kTiles];
  for (int64_t i = 0; i < rows * kTiles; i++) totals[i] = _mm512_setzero_ps();
  const int64_t blocks = num_blocks(rows);
  for (int64_t g = 0; g < groups; g++) {
    UnpackedTiles<kTiles, Form> unpacked;
    unpack_tiles<kTiles, Form>(args.weights, tables, tile, g, unpacked);
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t row = block_begin(rows, block), end = block_begin(rows, block + 1);
      add_group_of<kTiles, Form>(end - row, unpacked, input + row * depth + g * kGroup, depth,
                                  args.prepared + (row * groups + g) * Form::kParts, groups,
                                  totals + row * kTiles);
    }
  }
  for (int64_t r = 0; r < rows; r++)
    for (int t = 0; t < kTiles; t++) store_total(args, r, tile + t, totals[r * kTiles + t]);
}

template <class Form>
BH_INLINE void one_tile_of(const QuantLinearArgs& args, const ByteTables& tables, int64_t tile) {
  switch (args.num_rows) {
#define BH_ROWS(n) \
  case n: return one_tile<n, Form>(args, tables, tile)
    BH_ROWS(1);
    BH_ROWS(2);
    BH_ROWS(3);
    BH_ROWS(4);
    BH_ROWS(5);
    BH_ROWS(6);
    BH_ROWS(7);
    default: BH_ROWS(kRegisterRows);
#undef BH_ROWS
  }
}

template <class Form>
void few_rows(const QuantLinearArgs& args, int64_t begin, int64_t end) {
  const ByteTables tables = byte_tables();
  int64_t tile = begin;
  if (args.num_rows <= kRegisterRows) {
    for (; tile < end; tile++) one_tile_of<Form>(args, tables, tile);
    return;
  }
  for (; tile + kSideTiles <= end; tile += kSideTiles)
    some_tiles<kSideTiles, Form>(args, tables, tile);
  for (; tile < end; tile++) some_tiles<1, Form>(args, tables, tile);
}

// ---- many rows

// Some tiles side by side over some of the depth.
struct Panel {
  const uint8_t* weights;
  int64_t tile_bytes;     // from one tile to the next
  int64_t tile, tiles;    // which columns
  int64_t begin, groups;  // which groups of the depth
  bool is_first, is_last;
  bool is_cold;  // the weights lie in memory, not in a cache that they were just written to
};

// Of a cold panel memory is asked for this many pairs ahead.
constexpr int64_t kPrefetchPairs = 48;

template <int kTiles>
BH_INLINE void prefetch_pair(const Panel& panel, int64_t pair) {
  const int64_t ahead = pair + kPrefetchPairs;
  // The tiles that come after these begin where these end.
  const int64_t next = ahead < panel.groups * 16 ? 0 : (kTiles - 1) * panel.tile_bytes;
#pragma GCC unroll 4
  for (int t = 0; t < kTiles; t++)
    _mm_prefetch((const char*)panel.weights + ahead * 64 + t * panel.tile_bytes + next,
                 _MM_HINT_T0);
}

template <int kRows, int kTiles>
BH_INLINE void multiply_block(const QuantLinearArgs& args, const Panel& panel, int64_t row,
                              float* kept) {
  __m512 sums[kRows][kTiles];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++)
      sums[r][t] = panel.is_first
                       ? _mm512_setzero_ps()
                       : _mm512_load_ps(kept + ((row + r) * kSideTiles + t) * kColumns);
  const int64_t depth = args.weights.depth;
  const bf16* input = (const bf16*)args.input + row * depth + panel.begin * kGroup;
  const uint8_t* weights = panel.weights;
  const bool asks = panel.is_cold && row == 0;
  for (int64_t pair = 0; pair < panel.groups * 16; pair++, weights += 64, input += 2) {
    if (asks) prefetch_pair<kTiles>(panel, pair);
    __m512bh right[kTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++)
      right[t] = (__m512bh)_mm512_loadu_si512(weights + t * panel.tile_bytes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++) {
      const __m512bh left = broadcast_pair(input + r * depth);
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) sums[r][t] = _mm512_dpbf16_ps(sums[r][t], left, right[t]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      if (panel.is_last)
        store_total(args, row + r, panel.tile + t, sums[r][t]);
      else
        _mm512_store_ps(kept + ((row + r) * kSideTiles + t) * kColumns, sums[r][t]);
    }
}

template <int kTiles>
void multiply_panel_tiles(const QuantLinearArgs& args, const Panel& panel, float* kept) {
  const int64_t rows = args.num_rows;
  for (int64_t block = 0; block < num_blocks(rows); block++) {
    const int64_t row = block_begin(rows, block);
    switch (block_begin(rows, block + 1) - row) {
      case 1: multiply_block<1, kTiles>(args, panel, row, kept); break;
      case 2: multiply_block<2, kTiles>(args, panel, row, kept); break;
      case 3: multiply_block<3, kTiles>(args, panel, row, kept); break;
      case 4: multiply_block<4, kTiles>(args, panel, row, kept); break;
      case 5: multiply_block<5, kTiles>(args, panel, row, kept); break;
      default: multiply_block<kBlockRows, kTiles>(args, panel, row, kept); break;
    }
  }
}

void multiply_panel_rows(const QuantLinearArgs& args, const Panel& panel, float* kept) {
  switch (panel.tiles) {
    case 4: return multiply_panel_tiles<4>(args, panel, kept);
    case 3: return multiply_panel_tiles<3>(args, panel, kept);
    case 2: return multiply_panel_tiles<2>(args, panel, kept);
    default: return multiply_panel_tiles<1>(args, panel, kept);
  }
}

void many_rows_panels(const QuantLinearArgs& args, float* scratch, int64_t begin, int64_t end) {
  const ByteTables tables = byte_tables();
  const QuantWeights& weights = args.weights;
  const int64_t groups = weights.depth / kGroup;
  const int64_t most = groups < kPanelGroups ? groups : kPanelGroups;
  auto* unpacked = (uint8_t*)scratch;
  float* kept = scratch + most * kSideTiles * kUnpackedBytes / 4;
  for (int64_t tile = begin; tile < end; tile += kSideTiles)
    for (int64_t first = 0; first < groups; first += most) {
      Panel panel{};
      panel.tile = tile;
      panel.tiles = end - tile < kSideTiles ? end - tile : kSideTiles;
      panel.begin = first;
      panel.groups = groups - first < most ? groups - first : most;
      panel.is_first = first == 0;
      panel.is_last = first + panel.groups == groups;
      panel.is_cold = weights.bits == 16;
      if (panel.is_cold) {
        panel.weights = group_values(weights, tile, first);
        panel.tile_bytes = groups * kUnpackedBytes;
      } else {
        panel.weights = unpacked;
        panel.tile_bytes = panel.groups * kUnpackedBytes;
        with_form(weights, [&](auto form) {
          for (int64_t t = 0; t < panel.tiles; t++)
            unpack_scaled<decltype(form)>(weights, tables, tile + t, first, first + panel.groups,
                                          unpacked + t * panel.tile_bytes);
        });
      }
      multiply_panel_rows(args, panel, kept);
    }
}

void avx512_linear(const QuantLinearArgs& args, float* scratch, int64_t begin, int64_t end) {
  if (uses_panels(args))
    many_rows_panels(args, scratch, begin, end);
  else
    with_form(args.weights, [&](auto form) { few_rows<decltype(form)>(args, begin, end); });
}

}  // namespace
}  // namespace blockhouse
