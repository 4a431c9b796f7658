// The packed forms of quantised weights as the AVX-512 kernels see them: groups of 32 with one scale
// (quant_unpack_avx512.h), and GGUF's super-blocks of 256, whose groups have scales in 6 or 8 bits.
//
// A form unpacks a group of a tile to 16 vectors of bf16 pairs and gives what their sums turn into.
//
// Super-blocks, for each group of a tile of 16 columns: nibbles as in groups of 4 bits; for each
// further bit 16 masks of 32 bits, one for each unpacked vector; 32 bytes: a scale and a min for each
// column, or for six bits the scales of the group's two halves. fp16 scales: 16 d for each
// super-block, then 16 min where it has them.
#pragma once

#include "quant_tiles.h"
#include "quant_unpack_avx512.h"

namespace blockhouse {
namespace {

constexpr int64_t kMaskBytes = 64;

template <int kBits>
BH_INLINE void unpack_group(const uint8_t* values, const ByteTables& tables, __m512i* out) {
  if (kBits == 4)
    unpack_nibbles(values, out);
  else
    unpack_bytes(values, tables, out);
}

// kParts: how many scales a group has; kHasMinimum: whether sums of inputs count.
template <int kBits>
struct Groups {
  static constexpr int kParts = 1;
  static constexpr bool kHasMinimum = kBits == 4;

  static BH_INLINE void unpack(const QuantWeights& weights, int64_t place,
                               const ByteTables& tables, __m512i* out) {
    unpack_group<kBits>(weights.values + place * (kGroup * kColumns * kBits / 8), tables, out);
  }

  static BH_INLINE void scales(const QuantWeights& weights, int64_t place, GroupScale* out) {
    *out = group_scale<kBits>(weights, place);
  }

  static BH_INLINE void prefetch(const QuantWeights& weights, int64_t place) {
    prefetch_place(weights, place);
  }
};

BH_INLINE int64_t super_group_bytes(int bits) {
  return kGroup * kColumns / 2 + (bits - 4) * kMaskBytes + 2 * kColumns;
}

BH_INLINE __m512 bytes_to_floats(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
}

BH_INLINE __m512 signed_bytes_to_floats(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}

template <int kBits>
struct SuperBlocks {
  static constexpr int kParts = kBits == 6 ? 2 : 1;
  static constexpr bool kHasMinimum = true;

  static BH_INLINE const uint8_t* group_at(const QuantWeights& weights, int64_t place) {
    return weights.values + place * super_group_bytes(kBits);
  }

  static BH_INLINE void unpack(const QuantWeights& weights, int64_t place, const ByteTables&,
                               __m512i* out) {
    const uint8_t* group = group_at(weights, place);
    unpack_nibbles(group, out);
    for (int bit = 4; bit < kBits; bit++) {
      const uint8_t* masks = group + kGroup * kColumns / 2 + (bit - 4) * kMaskBytes;
      const __m512i value = _mm512_set1_epi16((short)(1 << bit));
#pragma GCC unroll 16
      for (int v = 0; v < 16; v++) {
        uint32_t mask;
        __builtin_memcpy(&mask, masks + v * 4, sizeof(mask));
        out[v] = _mm512_mask_add_epi16(out[v], mask, out[v], value);
      }
    }
  }

  // q comes out as 128 + q, and six bits stand for q - 32; the min takes both back.
  static BH_INLINE void scales(const QuantWeights& weights, int64_t place, GroupScale* out) {
    const uint16_t* halves =
        weights.scales + place / kSuperGroups * kColumns * scale_vectors(weights);
    const uint8_t* extra = group_at(weights, place + 1) - 2 * kColumns;
    const __m512 d = (__m512)load_halves(halves);
    if (kBits == 6) {
      for (int half = 0; half < 2; half++) {
        out[half].scale = _mm512_mul_ps(d, signed_bytes_to_floats(extra + half * kColumns));
        out[half].minimum = _mm512_mul_ps(_mm512_set1_ps(-kNibbleBase - 32.0f), out[half].scale);
      }
      return;
    }
    const __m512 min = (__m512)load_halves(halves + kColumns);
    out->scale = _mm512_mul_ps(d, bytes_to_floats(extra));
    out->minimum = _mm512_fnmsub_ps(min, bytes_to_floats(extra + kColumns),
                                    _mm512_mul_ps(_mm512_set1_ps(kNibbleBase), out->scale));
  }

  static BH_INLINE void prefetch(const QuantWeights& weights, int64_t place) {
    const auto* group = (const char*)group_at(weights, place);
    for (int64_t i = 0; i < super_group_bytes(kBits); i += 64) _mm_prefetch(group + i, _MM_HINT_T0);
  }
};

// Calls function(form) with the form of these weights.
template <class Function>
BH_INLINE void with_form(const QuantWeights& weights, const Function& function) {
  if (!weights.super_blocks) return weights.bits == 4 ? function(Groups<4>{}) : function(Groups<8>{});
  switch (weights.bits) {
    case 4: return function(SuperBlocks<4>{});
    case 5: return function(SuperBlocks<5>{});
    default: return function(SuperBlocks<6>{});
  }
}

void super_sizes(const QuantWeights& weights, int64_t* value_bytes, int64_t* num_scales) {
  const int64_t groups = weights.num_columns / kColumns * (weights.depth / kGroup);
  *value_bytes = groups * super_group_bytes(weights.bits);
  *num_scales = groups / kSuperGroups * kColumns * scale_vectors(weights);
}

BH_INLINE void pack_super_column(const ColumnGroup& from, const QuantWeights& weights,
                                 int64_t column, uint8_t* to) {
  for (int64_t k = 0; k < kGroup; k++) {
    pack_value(to, 4, column, k, from.values[k] & 15);
    const int64_t lane = column * 2 + k % 2;
    for (int bit = 4; bit < weights.bits; bit++)
      to[kGroup * kColumns / 2 + (bit - 4) * kMaskBytes + k / 2 * 4 + lane / 8] |=
          (uint8_t)((from.values[k] >> bit & 1) << (lane % 8));
  }
  uint8_t* extra = to + super_group_bytes(weights.bits) - 2 * kColumns;
  extra[column] = from.extra[0];
  extra[kColumns + column] = from.extra[1];
}

bool super_pack(const QuantSource& source, const QuantWeights& weights) {
  const int64_t groups = weights.depth / kGroup;
  for (int64_t tile = 0; tile < weights.num_columns / kColumns; tile++)
    for (int64_t g = 0; g < groups; g++) {
      const int64_t place = tile * groups + g;
      uint8_t* to = weights.values + place * super_group_bytes(weights.bits);
      __builtin_memset(to, 0, (size_t)super_group_bytes(weights.bits));
      uint16_t* scales = weights.scales + place / kSuperGroups * kColumns * scale_vectors(weights);
      for (int64_t column = 0; column < kColumns; column++) {
        ColumnGroup values{};
        read_column(source, weights, tile * kColumns + column, g, values);
        pack_super_column(values, weights, column, to);
        const uint8_t* block = super_block(source, weights, tile * kColumns + column, g);
        __builtin_memcpy(scales + column, block + (weights.bits == 6 ? 208 : 0), 2);
        if (weights.has_min) __builtin_memcpy(scales + kColumns + column, block + 2, 2);
      }
    }
  return true;
}

}  // namespace
}  // namespace blockhouse
