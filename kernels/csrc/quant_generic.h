// Linear over weights in groups of 32, in the compiler's vectors, over the tiles of quant_tiles.h.
//
// Few rows multiply with q itself; the sums of half a group (16 numbers) are then scaled, so scales
// are exact and a row gets the same sums however many others stand beside it. Many rows multiply
// with w = scale * q + min in fp32, unpacked once for all of them.
#pragma once

#include "block_product.h"
#include "quant_tiles.h"

namespace blockhouse {
namespace {

// Numbers of depth unpacked at a time for many rows: a tile of them stays in the first cache.
constexpr int64_t kPanelDepth = 128;
constexpr int64_t kPrefetchBytes = 4096;

BH_INLINE bool unpacks_panels(const QuantLinearArgs& args) {
  return sizeof(Act) == 4 && (args.as_many || args.num_rows > kFewRows);
}

// Exact: sums of groups, then the rows in fp32 where activations are not. Panels: the rows again.
int64_t tile_prepared_size(const QuantLinearArgs& args) {
  const int64_t numbers = args.num_rows * args.weights.depth;
  if (unpacks_panels(args)) return numbers;
  return numbers / kGroup + (sizeof(Act) == 4 ? 0 : numbers);
}

// Panels: [panel, row, kPanelDepth], so that rows of a panel lie side by side.
BH_INLINE void prepare_panels(const QuantLinearArgs& args, int64_t first, int64_t last) {
  const int64_t depth = args.weights.depth;
  for (int64_t row = first; row < last; row++)
    for (int64_t k = 0; k < depth; k += kPanelDepth) {
      const int64_t size = depth - k < kPanelDepth ? depth - k : kPanelDepth;
      const Act* from = (const Act*)args.input + row * depth + k;
      float* to = args.prepared + k * args.num_rows + row * size;
      for (int64_t i = 0; i < size; i += kLanes) store(to + i, load(from + i));
    }
}

void tile_prepare(const QuantLinearArgs& args, int64_t begin, int64_t end) {
  const int64_t first = begin * kRowBlock;
  const int64_t last = end * kRowBlock < args.num_rows ? end * kRowBlock : args.num_rows;
  if (unpacks_panels(args)) return prepare_panels(args, first, last);
  if (has_minimum(args.weights.bits)) prepare_group_sums(args, begin, end);
  if (sizeof(Act) == 4) return;
  const int64_t depth = args.weights.depth;
  float* to = args.prepared + args.num_rows * (depth / kGroup);
  for (int64_t i = first * depth; i < last * depth; i += kLanes)
    store(to + i, load((const Act*)args.input + i));
}

BH_INLINE const float* exact_input(const QuantLinearArgs& args) {
  if (sizeof(Act) == 4) return (const float*)args.input;
  return args.prepared + args.num_rows * (args.weights.depth / kGroup);
}

template <int kBits>
BH_INLINE Vec add_scaled_half(Vec total, Vec part, const TileScales& by, int half, int vector) {
  return kBits == 16 ? total + part : total + part * by.scale[half][vector];
}

BH_INLINE void store_tile_row(const QuantLinearArgs& args, int64_t row, int64_t tile, int vector,
                              Vec value) {
  const int64_t place = row * args.out_stride + tile * kTileColumns + vector * kLanes;
  if (args.out_float)
    store((float*)args.out + place, value);
  else
    store((Act*)args.out + place, value);
}

BH_INLINE void prefetch_ahead(const uint8_t* group, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(group + kPrefetchBytes + i);
}

// Unpacks and multiplies at once: for one or two rows.
template <int kBits, int kRows>
void multiply_few(const QuantLinearArgs& args, int64_t tile, int64_t row) {
  constexpr int kVectors = kTileVectors < 4 / kRows ? kTileVectors : 4 / kRows;
  const int64_t depth = args.weights.depth, groups = depth / kGroup;
  const float* input = exact_input(args) + row * depth;
  const float* sums = args.prepared + row * groups;
  constexpr bool kHasMinimum = has_minimum(kBits);
  const int64_t bytes = tile_group_bytes(args.weights);
  Vec total[kRows][kTileVectors];
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kTileVectors; v++) total[r][v] = splat(0.0f);
  for (int64_t g = 0; g < groups; g++, input += kGroup) {
    const uint8_t* group = tile_group(args.weights, tile, g);
    prefetch_ahead(group, bytes);
    TileScales by;
    load_tile_scales(args.weights, tile, g, by);
#pragma GCC unroll 4
    for (int first = 0; first < kTileVectors; first += kVectors) {
      Vec part[2][kRows][kVectors];
      clear<2 * kRows * kVectors>(&part[0][0][0]);
#pragma GCC unroll 16
      for (int i = 0; i < kHalf; i++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
          Vec low, high;
          unpack_pair<kBits>(group, i, first + v, &low, &high);
#pragma GCC unroll 2
          for (int r = 0; r < kRows; r++) {
            part[0][r][v] += low * input[r * depth + i];
            part[1][r][v] += high * input[r * depth + i + kHalf];
          }
        }
      for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kVectors; v++) {
          Vec& sum = total[r][first + v];
          sum = add_scaled_half<kBits>(sum, part[0][r][v], by, 0, first + v);
          sum = add_scaled_half<kBits>(sum, part[1][r][v], by, 1, first + v);
          if (kHasMinimum) sum += by.minimum[first + v] * sums[r * groups + g];
        }
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kTileVectors; v++) store_tile_row(args, row + r, tile, v, total[r][v]);
}

template <int kBits>
BH_INLINE void unpack_group(const uint8_t* group, float* to) {
  for (int i = 0; i < kHalf; i++)
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; v++) {
      Vec low, high;
      unpack_pair<kBits>(group, i, v, &low, &high);
      store(to + i * kTileColumns + v * kLanes, low);
      store(to + (i + kHalf) * kTileColumns + v * kLanes, high);
    }
}

// One group of some rows: their sums into `totals`, [rows, 32].
template <int kBits, int kRows>
void add_group_rows(const float* unpacked, const float* input, int64_t depth, const float* sums,
                    int64_t groups, const TileScales& by, float* totals) {
  for (int first = 0; first < kTileVectors; first += kProductVectors)
    for (int half = 0; half < 2; half++) {
      Vec part[kRows][kProductVectors];
      clear<kRows * kProductVectors>(&part[0][0]);
      add_products<kRows, kProductVectors>(
          input + half * kHalf, depth, 1, unpacked + half * kHalf * kTileColumns + first * kLanes,
          kTileColumns, kHalf, part);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kProductVectors; v++) {
          float* at = totals + r * kTileColumns + (first + v) * kLanes;
          Vec sum = add_scaled_half<kBits>(load(at), part[r][v], by, half, first + v);
          if (half == 1 && has_minimum(kBits)) sum += by.minimum[first + v] * sums[r * groups];
          store(at, sum);
        }
    }
}

template <int kBits>
BH_INLINE void add_group_block(int64_t rows, const float* unpacked, const float* input,
                               int64_t depth, const float* sums, int64_t groups,
                               const TileScales& by, float* totals) {
  switch (rows) {
#define BH_ROWS(n)                                                                            \
  case n:                                                                                     \
    return add_group_rows<kBits, n>(unpacked, input, depth, sums, groups, by, totals)
    BH_ROWS(1);
    BH_ROWS(2);
    BH_ROWS(3);
    BH_ROWS(4);
    BH_ROWS(5);
    default: BH_ROWS(6);
#undef BH_ROWS
  }
}

// Up to 32 rows over a tile, unpacked group by group.
template <int kBits>
void multiply_exact(const QuantLinearArgs& args, int64_t tile, int64_t row, int64_t rows) {
  const int64_t depth = args.weights.depth, groups = depth / kGroup;
  alignas(64) float unpacked[kGroup * kTileColumns], totals[kFewRows * kTileColumns];
  for (int64_t i = 0; i < rows * kTileColumns; i++) totals[i] = 0.0f;
  const int64_t bytes = tile_group_bytes(args.weights);
  for (int64_t g = 0; g < groups; g++) {
    const uint8_t* group = tile_group(args.weights, tile, g);
    prefetch_ahead(group, bytes);
    TileScales by;
    load_tile_scales(args.weights, tile, g, by);
    unpack_group<kBits>(group, unpacked);
    const float* input = exact_input(args) + row * depth + g * kGroup;
    const float* sums = args.prepared + row * groups + g;
    for (int64_t r = 0; r < rows; r += kProductRows)
      add_group_block<kBits>(rows - r < kProductRows ? rows - r : kProductRows, unpacked,
                             input + r * depth, depth, sums + r * groups, groups, by,
                             totals + r * kTileColumns);
  }
  for (int64_t r = 0; r < rows; r++)
    for (int v = 0; v < kTileVectors; v++)
      store_tile_row(args, row + r, tile, v, load(totals + r * kTileColumns + v * kLanes));
}

// The group's weights as they are meant: scale * q + min.
template <int kBits>
BH_INLINE void unpack_weights(const QuantWeights& weights, int64_t tile, int64_t g, float* to) {
  TileScales by;
  load_tile_scales(weights, tile, g, by);
  const uint8_t* group = tile_group(weights, tile, g);
  constexpr bool kHasMinimum = has_minimum(kBits);
  for (int v = 0; v < kTileVectors; v++) {
    const Vec minimum = kHasMinimum ? by.minimum[v] : splat(0.0f);
    for (int i = 0; i < kHalf; i++) {
      Vec low, high;
      unpack_pair<kBits>(group, i, v, &low, &high);
      if (kBits != 16) {
        low = low * by.scale[0][v] + minimum;
        high = high * by.scale[1][v] + minimum;
      }
      store(to + i * kTileColumns + v * kLanes, low);
      store(to + (i + kHalf) * kTileColumns + v * kLanes, high);
    }
  }
}

template <int kBits>
void multiply_panels(const QuantLinearArgs& args, int64_t tile) {
  const int64_t depth = args.weights.depth;
  alignas(64) float panel[kPanelDepth * kTileColumns];
  for (int64_t k = 0; k < depth; k += kPanelDepth) {
    const int64_t size = depth - k < kPanelDepth ? depth - k : kPanelDepth;
    for (int64_t g = 0; g < size / kGroup; g++)
      unpack_weights<kBits>(args.weights, tile, k / kGroup + g, panel + g * kGroup * kTileColumns);
    Product product{};
    product.left = args.prepared + k * args.num_rows;
    product.row_stride = size;
    product.depth_stride = 1;
    product.right = panel;
    product.right_stride = kTileColumns;
    product.out = (float*)args.out + tile * kTileColumns;
    product.out_stride = args.out_stride;
    product.rows = args.num_rows;
    product.columns = kTileColumns;
    product.depth = size;
    product.adds = k > 0;
    multiply(product);
  }
}

template <int kBits>
void multiply_tiles(const QuantLinearArgs& args, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; tile++) {
    if (unpacks_panels(args)) {
      multiply_panels<kBits>(args, tile);
    } else if (args.num_rows == 1) {
      multiply_few<kBits, 1>(args, tile, 0);
    } else if (args.num_rows == 2) {
      multiply_few<kBits, 2>(args, tile, 0);
    } else {
      for (int64_t row = 0; row < args.num_rows; row += kFewRows) {
        const int64_t left = args.num_rows - row;
        multiply_exact<kBits>(args, tile, row, left < kFewRows ? left : kFewRows);
      }
    }
  }
}

void tile_linear(const QuantLinearArgs& args, float*, int64_t begin, int64_t end) {
  switch (args.weights.bits) {
    case 4: return multiply_tiles<4>(args, begin, end);
    case 5: return multiply_tiles<5>(args, begin, end);
    case 6: return multiply_tiles<6>(args, begin, end);
    case 8: return multiply_tiles<8>(args, begin, end);
    default: return multiply_tiles<16>(args, begin, end);
  }
}

constexpr QuantKernels tile_kernels(int64_t row_limit) {
  QuantKernels kernels{};
  kernels.tile_columns = kTileColumns;
  kernels.row_limit = row_limit;
  kernels.sizes = tile_sizes;
  kernels.pack = tile_pack;
  kernels.prepared_size = tile_prepared_size;
  kernels.scratch_size = no_scratch;
  kernels.prepare = tile_prepare;
  kernels.linear = tile_linear;
  return kernels;
}

}  // namespace
}  // namespace blockhouse
