// Linear over weights in groups of 32, in the compiler's vectors: fp32 activations, a tile of
// kLanes columns at a time.
//
// Packed layout, for each tile and group: 4 bits: 16 vectors of bytes, vector i with q of k = i in
// the low nibbles and of k = i + 16 in the high ones; 8 bits: 32 vectors of bytes. Scales: kLanes of
// d, then kLanes of min where the weights have one.
#pragma once

#include "quant_groups.h"

namespace blockhouse {
namespace {

bool quant_pack(const QuantSource& source, const QuantWeights& weights) {
  const int64_t depth = weights.depth, groups = depth / kGroup;
  const int64_t vectors = weights.bits == 4 ? 16 : 32;
  for (int64_t tile = 0; tile < weights.num_columns / kLanes; tile++)
    for (int64_t group = 0; group < groups; group++) {
      pack_scales(source, weights, kLanes, tile, group);
      uint8_t* to = weights.values + (tile * groups + group) * vectors * kLanes;
      for (int64_t i = 0; i < vectors; i++)
        for (int64_t lane = 0; lane < kLanes; lane++) {
          const int64_t column = tile * kLanes + lane, k = group * kGroup + i;
          uint8_t value = source_value(source, weights.bits, depth, column, k);
          if (weights.bits == 4)
            value |= source_value(source, weights.bits, depth, column, k + 16) << 4;
          to[i * kLanes + lane] = value;
        }
    }
  return true;
}

BH_INLINE Vec bytes_to_float(VecU8 bytes) {
  return __builtin_convertvector(__builtin_convertvector(bytes, VecI), Vec);
}

template <int kRows, int kBits>
BH_INLINE void add_group(const uint8_t* values, const float* input, int64_t depth, Vec* out) {
  for (int r = 0; r < kRows; r++) out[r] = splat(0.0f);
  for (int i = 0; i < (kBits == 4 ? 16 : 32); i++) {
    VecU8 bytes;
    __builtin_memcpy(&bytes, values + i * kLanes, sizeof(bytes));
    if (kBits == 8) {
      const Vec weight = bytes_to_float(bytes) - 128.0f;
      for (int r = 0; r < kRows; r++) out[r] += weight * input[r * depth + i];
    } else {
      const Vec low = bytes_to_float(bytes & 15), high = bytes_to_float(bytes >> 4);
      for (int r = 0; r < kRows; r++) {
        out[r] += low * input[r * depth + i];
        out[r] += high * input[r * depth + i + 16];
      }
    }
  }
}

template <int kRows, int kBits>
void quant_tile(const QuantLinearArgs& args, int64_t tile, int64_t row) {
  const int64_t depth = args.weights.depth, groups = depth / kGroup;
  const int64_t value_bytes = kGroup * kLanes * kBits / 8;
  const int64_t num_scales = scale_vectors(args.weights);
  const float* input = (const float*)args.input + row * depth;
  const float* sums = args.prepared + row * groups;
  Vec total[kRows], part[kRows];
  for (int r = 0; r < kRows; r++) total[r] = splat(0.0f);
  for (int64_t g = 0; g < groups; g++) {
    const int64_t place = tile * groups + g;
    const uint16_t* scales = args.weights.scales + place * num_scales * kLanes;
    add_group<kRows, kBits>(args.weights.values + place * value_bytes, input + g * kGroup, depth,
                            part);
    const Vec scale = load_halves(scales);
    for (int r = 0; r < kRows; r++) total[r] += part[r] * scale;
    if (kBits == 4) {
      const Vec minimum = args.weights.has_min ? load_halves(scales + kLanes) : scale * -8.0f;
      for (int r = 0; r < kRows; r++) total[r] += minimum * sums[r * groups + g];
    }
  }
  float* out = (float*)args.out + row * args.weights.num_columns + tile * kLanes;
  for (int r = 0; r < kRows; r++) store(out + r * args.weights.num_columns, total[r]);
}

template <int kBits>
void quant_tiles(const QuantLinearArgs& args, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; tile++) {
    int64_t row = 0;
    for (; row + 4 <= args.num_rows; row += 4) quant_tile<4, kBits>(args, tile, row);
    for (; row + 2 <= args.num_rows; row += 2) quant_tile<2, kBits>(args, tile, row);
    for (; row < args.num_rows; row++) quant_tile<1, kBits>(args, tile, row);
  }
}

void quant_linear(const QuantLinearArgs& args, float*, int64_t begin, int64_t end) {
  if (args.weights.bits == 4)
    quant_tiles<4>(args, begin, end);
  else
    quant_tiles<8>(args, begin, end);
}

}  // namespace
}  // namespace blockhouse
