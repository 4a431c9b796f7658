// Linear over weights in groups of 32 with AVX-512 BF16: unpacked q meets bf16 activations, and each
// group's fp32 sum is then scaled.
#pragma once

#include "quant_unpack_avx512.h"

namespace blockhouse {
namespace {

int64_t group_sums_size(const QuantLinearArgs& args) {
  return args.num_rows * (args.weights.depth / kGroup);
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
    prefetch_group(args.weights, tile, g);
    if (kBits == 4)
      unpack_nibbles(values, unpacked);
    else
      unpack_bytes(values, tables, unpacked);
    const GroupScale by = group_scale<kBits>(args.weights, tile * groups + g);
    const bf16* input = (const bf16*)args.input + row * depth + g * kGroup;
    const float* sums = args.prepared + row * groups + g;
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

void quant_linear(const QuantLinearArgs& args, float*, int64_t begin, int64_t end) {
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
