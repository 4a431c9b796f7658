// Weights in groups of 32 (or plain bf16) as tiles of 32 columns, in the compiler's vectors.
//
// Packed layout, for each tile and group; "vectors" are 32 columns side by side:
//   4 bits:  16 vectors of bytes, vector i with q of k = i in the low nibbles, of k = i + 16 in the
//            high ones. Five bits add a vector of words with bit k; six bits add two vectors of
//            words with bits 2i and 2i + 1 for k = i and for k = i + 16.
//   8 bits:  32 vectors of bytes, q - 128 as a signed number.
//   16 bits: 16 vectors of words, k = i in the lower half, k = i + 16 in the upper one.
//   Super-blocks of 256 (GGUF's K formats) end each group with 64 bytes: a scale and a min for each
//   column, or, for six bits, the scales of the group's two halves.
// fp16 scales: 32 d for each group (or super-block), then 32 min where the weights have them.
#pragma once

#include "quant_groups.h"

namespace blockhouse {
namespace {

constexpr int64_t kTileColumns = 32;
constexpr int kTileVectors = kTileColumns / kLanes;
constexpr int64_t kHalf = kGroup / 2;
constexpr int64_t kSuperGroups = 8;  // groups of a super-block
constexpr int64_t kNibbleBytes = kHalf * kTileColumns;
constexpr int64_t kWordBytes = 4 * kTileColumns;

BH_INLINE int64_t tile_group_bytes(const QuantWeights& weights) {
  const int64_t values = kGroup * kTileColumns * weights.bits / 8;
  return weights.super_blocks ? values + 2 * kTileColumns : values;
}

BH_INLINE int64_t groups_per_scale(const QuantWeights& weights) {
  return weights.super_blocks ? kSuperGroups : 1;
}

void tile_sizes(const QuantWeights& weights, int64_t* value_bytes, int64_t* num_scales) {
  const int64_t tile_groups = weights.num_columns / kTileColumns * (weights.depth / kGroup);
  *value_bytes = tile_groups * tile_group_bytes(weights);
  *num_scales = weights.bits == 16 ? 0
                                   : tile_groups / groups_per_scale(weights) * kTileColumns *
                                         scale_vectors(weights);
}

BH_INLINE uint8_t* tile_group(const QuantWeights& weights, int64_t tile, int64_t group) {
  return weights.values + (tile * (weights.depth / kGroup) + group) * tile_group_bytes(weights);
}

BH_INLINE uint16_t* tile_scales(const QuantWeights& weights, int64_t tile, int64_t group) {
  const int64_t each = groups_per_scale(weights), count = weights.depth / kGroup / each;
  return weights.scales + (tile * count + group / each) * kTileColumns * scale_vectors(weights);
}

// One column of one group, whatever the source's form.
struct ColumnGroup {
  uint8_t values[kGroup];
  uint8_t extra[2];  // super-blocks: scale and min, or the scales of both halves
};

// Six-bit scale and min of a group, out of a super-block's twelve bytes.
BH_INLINE void read_scale_and_min(const uint8_t* packed, int64_t group, uint8_t* to) {
  const int64_t i = group % 4;
  if (group < 4) {
    to[0] = packed[i] & 63;
    to[1] = packed[4 + i] & 63;
  } else {
    to[0] = (uint8_t)((packed[8 + i] & 15) | (packed[i] >> 6 << 4));
    to[1] = (uint8_t)((packed[8 + i] >> 4) | (packed[4 + i] >> 6 << 4));
  }
}

// GGUF's Q4_K: d, min, 12 bytes of scales, nibbles of two groups in 32 bytes; Q5_K: a plane of fifth
// bits before the nibbles.
BH_INLINE void read_k_group(const uint8_t* block, int bits, int64_t group, ColumnGroup& out) {
  const uint8_t* nibbles = block + (bits == 5 ? 48 : 16) + group / 2 * 32;
  read_scale_and_min(block + 4, group, out.extra);
  for (int64_t k = 0; k < kGroup; k++) {
    out.values[k] = (nibbles[k] >> (group % 2 * 4)) & 15;
    if (bits == 5) out.values[k] |= (uint8_t)(((block[16 + k] >> group) & 1) << 4);
  }
}

// GGUF's Q6_K: 128 bytes of nibbles, 64 of two upper bits, 16 signed scales, d.
BH_INLINE void read_q6_group(const uint8_t* block, int64_t group, ColumnGroup& out) {
  const int64_t half = group / 4, quarter = group % 4;
  const uint8_t* low = block + half * 64 + quarter % 2 * 32;
  const uint8_t* high = block + 128 + half * 32;
  for (int64_t k = 0; k < kGroup; k++)
    out.values[k] = (uint8_t)(((low[k] >> (quarter / 2 * 4)) & 15) |
                              (((high[k] >> (quarter * 2)) & 3) << 4));
  out.extra[0] = block[192 + group * 2];
  out.extra[1] = block[192 + group * 2 + 1];
}

BH_INLINE int64_t super_block_bytes(int bits) { return bits == 4 ? 144 : bits == 5 ? 176 : 210; }

BH_INLINE const uint8_t* super_block(const QuantSource& source, const QuantWeights& weights,
                                     int64_t column, int64_t group) {
  const int64_t blocks = weights.depth / (kGroup * kSuperGroups);
  return source.quants + (column * blocks + group / kSuperGroups) * super_block_bytes(weights.bits);
}

BH_INLINE void read_column(const QuantSource& source, const QuantWeights& weights, int64_t column,
                           int64_t group, ColumnGroup& out) {
  if (!weights.super_blocks) {
    for (int64_t k = 0; k < kGroup; k++)
      out.values[k] = source_value(source, weights.bits, weights.depth, column, group * kGroup + k);
    return;
  }
  const uint8_t* block = super_block(source, weights, column, group);
  if (weights.bits == 6)
    read_q6_group(block, group % kSuperGroups, out);
  else
    read_k_group(block, weights.bits, group % kSuperGroups, out);
}

BH_INLINE void write_column(const ColumnGroup& from, const QuantWeights& weights, int64_t lane,
                            uint8_t* to) {
  if (weights.bits == 8) {
    for (int64_t k = 0; k < kGroup; k++) to[k * kTileColumns + lane] = from.values[k] ^ 0x80;
    return;
  }
  uint32_t words[2] = {};
  for (int64_t i = 0; i < kHalf; i++) {
    const uint8_t low = from.values[i], high = from.values[i + kHalf];
    to[i * kTileColumns + lane] = (uint8_t)((low & 15) | (high & 15) << 4);
    if (weights.bits == 5)
      words[0] |= (uint32_t)(low >> 4) << i | (uint32_t)(high >> 4) << (i + kHalf);
    if (weights.bits == 6) {
      words[0] |= (uint32_t)(low >> 4) << (2 * i);
      words[1] |= (uint32_t)(high >> 4) << (2 * i);
    }
  }
  uint8_t* end = to + kNibbleBytes;
  for (int64_t word = 0; word < weights.bits - 4; word++, end += kWordBytes)
    __builtin_memcpy(end + lane * 4, words + word, 4);
  if (!weights.super_blocks) return;
  end[lane] = from.extra[0];
  end[kTileColumns + lane] = from.extra[1];
}

BH_INLINE void pack_tile_scales(const QuantSource& source, const QuantWeights& weights,
                                int64_t tile, int64_t group) {
  if (!weights.super_blocks) return pack_scales(source, weights, kTileColumns, tile, group);
  if (group % kSuperGroups) return;
  uint16_t* to = tile_scales(weights, tile, group);
  for (int64_t lane = 0; lane < kTileColumns; lane++) {
    const uint8_t* block = super_block(source, weights, tile * kTileColumns + lane, group);
    __builtin_memcpy(to + lane, block + (weights.bits == 6 ? 208 : 0), 2);
    if (weights.has_min) __builtin_memcpy(to + kTileColumns + lane, block + 2, 2);
  }
}

BH_INLINE void pack_plain_group(const QuantSource& source, const QuantWeights& weights,
                                int64_t tile, int64_t group, uint8_t* to) {
  const auto* from = (const uint16_t*)source.quants;
  for (int64_t lane = 0; lane < kTileColumns; lane++) {
    const uint16_t* row = from + (tile * kTileColumns + lane) * weights.depth + group * kGroup;
    for (int64_t i = 0; i < kHalf; i++) {
      const uint32_t word = row[i] | (uint32_t)row[i + kHalf] << 16;
      __builtin_memcpy(to + (i * kTileColumns + lane) * 4, &word, 4);
    }
  }
}

bool tile_pack(const QuantSource& source, const QuantWeights& weights) {
  for (int64_t tile = 0; tile < weights.num_columns / kTileColumns; tile++)
    for (int64_t group = 0; group < weights.depth / kGroup; group++) {
      uint8_t* to = tile_group(weights, tile, group);
      if (weights.bits == 16) {
        pack_plain_group(source, weights, tile, group, to);
        continue;
      }
      pack_tile_scales(source, weights, tile, group);
      for (int64_t lane = 0; lane < kTileColumns; lane++) {
        ColumnGroup column{};
        read_column(source, weights, tile * kTileColumns + lane, group, column);
        write_column(column, weights, lane, to);
      }
    }
  return true;
}

BH_INLINE VecU load_words(const uint8_t* from) {
  VecU words;
  __builtin_memcpy(&words, from, sizeof(words));
  return words;
}

// q of k = i and of k = i + 16, for one vector of a group's columns. Six bits: q - 32.
template <int kBits>
BH_INLINE void unpack_pair(const uint8_t* group, int i, int vector, Vec* low, Vec* high) {
  const int64_t lane = vector * kLanes, place = i * kTileColumns + lane;
  if (kBits == 16) {
    const VecU words = load_words(group + place * 4);
    *low = (Vec)(words << 16);
    *high = (Vec)(words & 0xFFFF0000u);
    return;
  }
  if (kBits == 8) {
    *low = ints_to_float(load_signed_bytes(group + place));
    *high = ints_to_float(load_signed_bytes(group + place + kHalf * kTileColumns));
    return;
  }
  const VecI bytes = load_bytes(group + place);
  VecI first = bytes & 15, second = bytes >> 4;
  if (kBits == 5) {
    const VecU words = load_words(group + kNibbleBytes + lane * 4);
    first |= (VecI)((words >> i & 1) << 4);
    second |= (VecI)((words >> (i + kHalf) & 1) << 4);
  }
  if (kBits == 6) {
    const uint8_t* planes = group + kNibbleBytes + lane * 4;
    first = (first | (VecI)((load_words(planes) >> (2 * i) & 3) << 4)) - 32;
    second = (second | (VecI)((load_words(planes + kWordBytes) >> (2 * i) & 3) << 4)) - 32;
  }
  *low = ints_to_float(first);
  *high = ints_to_float(second);
}

// What a group's sums turn into: sum of half h * scale[h] + sum of inputs * minimum.
struct TileScales {
  Vec scale[2][kTileVectors];
  Vec minimum[kTileVectors];
};

// Without a min of its own, a group of 4 bits has one from its centre.
BH_INLINE constexpr bool has_minimum(int bits) { return bits == 4 || bits == 5; }

BH_INLINE void load_tile_scales(const QuantWeights& weights, int64_t tile, int64_t group,
                                TileScales& out) {
  if (weights.bits == 16) return;
  const uint16_t* halves = tile_scales(weights, tile, group);
  const uint8_t* extra =
      tile_group(weights, tile, group) + tile_group_bytes(weights) - 2 * kTileColumns;
  for (int v = 0; v < kTileVectors; v++) {
    const Vec d = load_halves(halves + v * kLanes);
    out.scale[0][v] = out.scale[1][v] = d;
    if (weights.super_blocks && weights.bits == 6) {
      out.scale[0][v] = d * ints_to_float(load_signed_bytes(extra + v * kLanes));
      out.scale[1][v] = d * ints_to_float(load_signed_bytes(extra + kTileColumns + v * kLanes));
    } else if (weights.super_blocks) {
      out.scale[0][v] = out.scale[1][v] = d * ints_to_float(load_bytes(extra + v * kLanes));
      out.minimum[v] = -load_halves(halves + kTileColumns + v * kLanes) *
                       ints_to_float(load_bytes(extra + kTileColumns + v * kLanes));
    } else if (weights.bits == 4) {
      out.minimum[v] =
          weights.has_min ? load_halves(halves + kTileColumns + v * kLanes) : d * -8.0f;
    }
  }
}

}  // namespace
}  // namespace blockhouse
