// Linear over weights in groups of 32 with AVX-512 BF16: q becomes bf16, which holds it exactly, and
// meets bf16 activations; each group's fp32 sum is then scaled. A tile is 16 columns.
//
// A group of a tile unpacks to 16 vectors; vector r holds k = 2r and 2r + 1 of all 16 columns, the
// form that vdpbf16ps and the AMX tiles want. Packed layout of a group:
//   4 bits: 4 vectors of 64 bytes; nibble j of 16-bit lane t of vector v belongs to unpacked vector
//           4v + j, lane t. Unpacking sets q into the mantissa of 128.0, so q comes out as 128 + q
//           and the min takes -128 d.
//   8 bits: 8 vectors of sign and magnitude; vector v's 128-bit part p holds in its lower half
//           columns 4p..4p+3 of unpacked vector 2v, in its upper half of vector 2v + 1.
// Scales: 16 d, then 16 min where the weights have one.
#pragma once

#include <immintrin.h>

#include "quant_groups.h"

namespace blockhouse {
namespace {

constexpr int64_t kColumns = 16;
constexpr float kNibbleBase = 128.0f;

BH_INLINE uint8_t* group_values(const QuantWeights& weights, int64_t tile, int64_t group) {
  const int64_t bytes = kGroup * kColumns * weights.bits / 8;
  return weights.values + (tile * (weights.depth / kGroup) + group) * bytes;
}

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

bool quant_pack(const QuantSource& source, const QuantWeights& weights) {
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

template <int kRows, int kBits>
BH_INLINE void add_pairs(const __m512i* unpacked, const bf16* input, int64_t depth,
                         const float* sums, int64_t groups, const GroupScale& by, __m512* total) {
  __m512 even[kRows], odd[kRows];
  for (int r = 0; r < kRows; r++) even[r] = odd[r] = _mm512_setzero_ps();
#pragma GCC unroll 16
  for (int v = 0; v < 16; v += 2) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      int32_t pair[2];
      __builtin_memcpy(pair, input + r * depth + v * 2, sizeof(pair));
      even[r] = _mm512_dpbf16_ps(even[r], (__m512bh)unpacked[v],
                                 (__m512bh)_mm512_set1_epi32(pair[0]));
      odd[r] = _mm512_dpbf16_ps(odd[r], (__m512bh)unpacked[v + 1],
                                (__m512bh)_mm512_set1_epi32(pair[1]));
    }
  }
  for (int r = 0; r < kRows; r++) {
    total[r] = _mm512_fmadd_ps(_mm512_add_ps(even[r], odd[r]), by.scale, total[r]);
    if (kBits == 4)
      total[r] = _mm512_fmadd_ps(_mm512_set1_ps(sums[r * groups]), by.minimum, total[r]);
  }
}

BH_INLINE void store_total(const QuantLinearArgs& args, int64_t row, int64_t tile, __m512 total) {
  const int64_t place = row * args.weights.num_columns + tile * kColumns;
  if (args.out_float)
    store((float*)args.out + place, (Vec)total);
  else
    store((bf16*)args.out + place, (Vec)total);
}

constexpr int kMostRows = 16;  // rows that share one unpacking

template <int kBits>
BH_INLINE void quant_tile_rows(const QuantLinearArgs& args, const ByteTables& tables, int64_t tile,
                               int64_t row, int rows) {
  const int64_t depth = args.weights.depth, groups = depth / kGroup;
  __m512 total[kMostRows];
  for (int r = 0; r < rows; r++) total[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; g++) {
    __m512i unpacked[16];
    const uint8_t* values = group_values(args.weights, tile, g);
    if (kBits == 4)
      unpack_nibbles(values, unpacked);
    else
      unpack_bytes(values, tables, unpacked);
    const GroupScale by = group_scale<kBits>(args.weights, tile * groups + g);
    const bf16* input = (const bf16*)args.input + row * depth + g * kGroup;
    const float* sums = args.rows + row * groups + g;
    int r = 0;
    for (; r + 4 <= rows; r += 4)
      add_pairs<4, kBits>(unpacked, input + r * depth, depth, sums + r * groups, groups, by,
                          total + r);
    input += r * depth;
    sums += r * groups;
    switch (rows - r) {
      case 3: add_pairs<3, kBits>(unpacked, input, depth, sums, groups, by, total + r); break;
      case 2: add_pairs<2, kBits>(unpacked, input, depth, sums, groups, by, total + r); break;
      case 1: add_pairs<1, kBits>(unpacked, input, depth, sums, groups, by, total + r); break;
      default: break;
    }
  }
  for (int r = 0; r < rows; r++) store_total(args, row + r, tile, total[r]);
}

void quant_linear(const QuantLinearArgs& args, int64_t begin, int64_t end) {
  const ByteTables tables = byte_tables();
  for (int64_t tile = begin; tile < end; tile++)
    for (int64_t row = 0; row < args.num_rows; row += kMostRows) {
      const int rows = (int)(args.num_rows - row < kMostRows ? args.num_rows - row : kMostRows);
      if (args.weights.bits == 4)
        quant_tile_rows<4>(args, tables, tile, row, rows);
      else
        quant_tile_rows<8>(args, tables, tile, row, rows);
    }
}

}  // namespace
}  // namespace blockhouse
