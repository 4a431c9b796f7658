// The packed form of weights in groups of 32 for AVX-512 and AMX, and its unpacking. A tile is 16
// columns. q becomes bf16, which holds it exactly.
//
// A group of a tile unpacks to 16 vectors; vector r holds k = 2r and 2r + 1 of all 16 columns, the
// form that vdpbf16ps and the AMX tiles want. Packed layout of a group:
//   4 bits: 4 vectors of 64 bytes; nibble j of 16-bit lane t of vector v belongs to unpacked vector
//           4v + j, lane t. Unpacking sets q into the mantissa of 128.0, so q comes out as 128 + q
//           and the min takes -128 d.
//   8 bits: 8 vectors of sign and magnitude; vector v's 128-bit part p holds in its lower half
//           columns 4p..4p+3 of unpacked vector 2v, in its upper half of vector 2v + 1.
//   16 bits: the 16 vectors themselves.
// Scales: 16 d, then 16 min where the weights have one.
#pragma once

#include <immintrin.h>

#include "quant_groups.h"

namespace blockhouse {
namespace {

constexpr int64_t kColumns = 16;
constexpr float kNibbleBase = 128.0f;

void quant_sizes(const QuantWeights& weights, int64_t* value_bytes, int64_t* num_scales) {
  const int64_t groups = weights.num_columns * weights.depth / kGroup;
  *value_bytes = groups * kGroup * weights.bits / 8;
  *num_scales = weights.bits == 16 ? 0 : groups * scale_vectors(weights);
}

BH_INLINE uint8_t* group_values(const QuantWeights& weights, int64_t tile, int64_t group) {
  const int64_t bytes = kGroup * kColumns * weights.bits / 8;
  return weights.values + (tile * (weights.depth / kGroup) + group) * bytes;
}

// `group` starts as zeros.
BH_INLINE bool pack_value(uint8_t* group, int bits, int64_t column, int64_t k, uint8_t value) {
  const int64_t vector = k / 2, lane = column * 2 + k % 2;
  if (bits == 4) {
    const int64_t nibble = vector % 4;
    group[vector / 4 * 64 + lane * 2 + nibble / 2] |= value << (nibble % 2 * 4);
    return true;
  }
  const int64_t place = vector / 2 * 64 + column / 4 * 16 + vector % 2 * 8 + lane % 8;
  const int centred = (int)value - 128;
  group[place] = (uint8_t)(centred < 0 ? 0x80 | -centred : centred);
  return centred != -128;
}

void pack_dense(const QuantSource& source, const QuantWeights& weights) {
  const int64_t depth = weights.depth;
  const auto* from = (const uint16_t*)source.quants;
  for (int64_t tile = 0; tile < weights.num_columns / kColumns; tile++)
    for (int64_t k = 0; k < depth; k++) {
      auto* group = (uint16_t*)group_values(weights, tile, k / kGroup);
      for (int64_t column = 0; column < kColumns; column++)
        group[k % kGroup / 2 * 32 + column * 2 + k % 2] =
            from[(tile * kColumns + column) * depth + k];
    }
}

bool quant_pack(const QuantSource& source, const QuantWeights& weights) {
  if (weights.bits == 16) {
    pack_dense(source, weights);
    return true;
  }
  bool fits = true;
  for (int64_t tile = 0; tile < weights.num_columns / kColumns; tile++)
    for (int64_t group = 0; group < weights.depth / kGroup; group++) {
      pack_scales(source, weights, kColumns, tile, group);
      uint8_t* to = group_values(weights, tile, group);
      __builtin_memset(to, 0, (size_t)(kGroup * kColumns * weights.bits / 8));
      for (int64_t column = 0; column < kColumns; column++)
        for (int64_t k = 0; k < kGroup; k++)
          fits &= pack_value(to, weights.bits, column, k,
                             source_value(source, weights.bits, weights.depth,
                                          tile * kColumns + column, group * kGroup + k));
    }
  return fits;
}

// Memory is asked for this many groups ahead of its use: one core's own prefetching stops at pages.
constexpr int64_t kPrefetchGroups = 16;

// Asks for the group at `place`, counted through all tiles; past the end this touches nothing.
BH_INLINE void prefetch_place(const QuantWeights& weights, int64_t place) {
  const int64_t bytes = kGroup * kColumns * weights.bits / 8;
  const auto* values = (const char*)weights.values + place * bytes;
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(values + i, _MM_HINT_T0);
  const auto* scales = (const char*)(weights.scales + place * scale_vectors(weights) * kColumns);
  _mm_prefetch(scales, _MM_HINT_T0);
}

// For a reader that goes through a tile and then through the next.
BH_INLINE void prefetch_group(const QuantWeights& weights, int64_t tile, int64_t group) {
  prefetch_place(weights, tile * (weights.depth / kGroup) + group + kPrefetchGroups);
}

BH_INLINE void unpack_nibbles(const uint8_t* from, __m512i* out) {
  const __m512i mask = _mm512_set1_epi16(0x000F), base = _mm512_set1_epi16(0x4300);
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++) {
    const __m512i raw = _mm512_loadu_si512(from + v * 64);
    // 0xEA: (a & b) | c
    out[v * 4] = _mm512_ternarylogic_epi32(raw, mask, base, 0xEA);
    out[v * 4 + 1] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(raw, 4), mask, base, 0xEA);
    out[v * 4 + 2] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(raw, 8), mask, base, 0xEA);
    out[v * 4 + 3] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(raw, 12), mask, base, 0xEA);
  }
}

// The low and the high byte of the bf16 of 0..127, as four 64-byte tables.
struct ByteTables {
  __m512i low[2], high[2];
};

BH_INLINE ByteTables byte_tables() {
  alignas(64) uint8_t low[128], high[128];
  for (int i = 0; i < 128; i++) {
    const float value = (float)i;
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    low[i] = (uint8_t)(bits >> 16);
    high[i] = (uint8_t)(bits >> 24);
  }
  ByteTables tables;
  for (int i = 0; i < 2; i++) {
    tables.low[i] = _mm512_load_si512(low + i * 64);
    tables.high[i] = _mm512_load_si512(high + i * 64);
  }
  return tables;
}

BH_INLINE void unpack_bytes(const uint8_t* from, const ByteTables& tables, __m512i* out) {
  const __m512i sign = _mm512_set1_epi8((char)0x80);
#pragma GCC unroll 8
  for (int v = 0; v < 8; v++) {
    const __m512i raw = _mm512_loadu_si512(from + v * 64);
    const __m512i low = _mm512_permutex2var_epi8(tables.low[0], raw, tables.low[1]);
    __m512i high = _mm512_permutex2var_epi8(tables.high[0], raw, tables.high[1]);
    high = _mm512_ternarylogic_epi32(raw, sign, high, 0xEA);
    out[v * 2] = _mm512_unpacklo_epi8(low, high);
    out[v * 2 + 1] = _mm512_unpackhi_epi8(low, high);
  }
}

// What a group's sum of a row turns into: sum * scale + sum of the row's inputs * minimum.
struct GroupScale {
  __m512 scale, minimum;
};

template <int kBits>
BH_INLINE GroupScale group_scale(const QuantWeights& weights, int64_t place) {
  const uint16_t* from = weights.scales + place * scale_vectors(weights) * kColumns;
  GroupScale out;
  out.scale = (__m512)load_halves(from);
  if (kBits == 8)
    out.minimum = _mm512_setzero_ps();
  else if (weights.has_min)
    out.minimum = _mm512_fnmadd_ps(_mm512_set1_ps(kNibbleBase), out.scale,
                                   (__m512)load_halves(from + kColumns));
  else
    out.minimum = _mm512_mul_ps(_mm512_set1_ps(-kNibbleBase - 8.0f), out.scale);
  return out;
}

BH_INLINE void store_total(const QuantLinearArgs& args, int64_t row, int64_t tile, __m512 total) {
  const int64_t place = row * args.out_stride + tile * kColumns;
  if (args.out_float)
    store((float*)args.out + place, (Vec)total);
  else
    store((bf16*)args.out + place, (Vec)total);
}

}  // namespace
}  // namespace blockhouse
