// Groups as the weights that they stand for, w = scale * q + min rounded to bf16, as a dense bf16
// model has them: for steps of many rows, which share the unpacking.
#pragma once

#include "quant_forms_avx512.h"

namespace blockhouse {
namespace {

// Bytes of one tile's group once it is unpacked: 16 vectors of bf16 pairs.
constexpr int64_t kUnpackedBytes = 1024;

// Both numbers of each pair as fp32, scaled and rounded back to bf16.
BH_INLINE __m512i scale_pairs(__m512i pairs, const GroupScale& by) {
  const __m512i high = _mm512_set1_epi32((int)0xFFFF0000), half = _mm512_set1_epi32(0x8000);
  const __m512 even = (__m512)_mm512_slli_epi32(pairs, 16);
  const __m512 odd = (__m512)_mm512_and_si512(pairs, high);
  const __m512i first =
      _mm512_add_epi32((__m512i)_mm512_fmadd_ps(even, by.scale, by.minimum), half);
  const __m512i second =
      _mm512_add_epi32((__m512i)_mm512_fmadd_ps(odd, by.scale, by.minimum), half);
  // 0xEA: (a & b) | c
  return _mm512_ternarylogic_epi32(second, high, _mm512_srli_epi32(first, 16), 0xEA);
}

// Groups [begin, end) of a tile, one after another.
template <class Form>
void unpack_scaled(const QuantWeights& weights, const ByteTables& tables, int64_t tile,
                   int64_t begin, int64_t end, uint8_t* to) {
  const int64_t first = tile * (weights.depth / kGroup);
  for (int64_t g = begin; g < end; g++, to += kUnpackedBytes) {
    __m512i unpacked[16];
    GroupScale by[Form::kParts];
    Form::prefetch(weights, first + g + kPrefetchGroups);
    Form::unpack(weights, first + g, tables, unpacked);
    Form::scales(weights, first + g, by);
#pragma GCC unroll 16
    for (int v = 0; v < 16; v++)
      _mm512_store_si512(to + v * 64, scale_pairs(unpacked[v], by[v * Form::kParts / 16]));
  }
}

}  // namespace
}  // namespace blockhouse
