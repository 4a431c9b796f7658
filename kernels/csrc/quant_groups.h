// What every packed form of weights in groups of 32 shares. Expects `Act` to be defined.
#pragma once

#include "simd.h"

namespace blockhouse {
namespace {

constexpr int64_t kGroup = 32;

BH_INLINE int64_t scale_vectors(const QuantWeights& weights) { return weights.has_min ? 2 : 1; }

BH_INLINE uint8_t source_value(const QuantSource& source, int bits, int64_t depth, int64_t column,
                               int64_t k) {
  if (bits == 8) return source.quants[column * depth + k];
  return (source.quants[column * (depth / 2) + k / 2] >> (k % 2 * 4)) & 15;
}

// The scales of one tile and group.
BH_INLINE void pack_scales(const QuantSource& source, const QuantWeights& weights, int64_t lanes,
                           int64_t tile, int64_t group) {
  const int64_t groups = weights.depth / kGroup;
  uint16_t* to = weights.scales + (tile * groups + group) * lanes * scale_vectors(weights);
  for (int64_t lane = 0; lane < lanes; lane++) {
    const int64_t from = (tile * lanes + lane) * groups + group;
    to[lane] = source.scales[from];
    if (weights.has_min) to[lanes + lane] = source.mins[from];
  }
}

int64_t no_scratch(const QuantLinearArgs&) { return 0; }

constexpr int64_t kRowBlock = 16;

// The sum of each group of a row, which the mins multiply.
void prepare_group_sums(const QuantLinearArgs& args, int64_t begin, int64_t end) {
  const Act* from = (const Act*)args.input;
  const int64_t groups = args.weights.depth / kGroup;
  const int64_t last = end * kRowBlock < args.num_rows ? end * kRowBlock : args.num_rows;
  for (int64_t i = begin * kRowBlock * groups; i < last * groups; i++) {
    Vec sum = splat(0.0f);
    for (int64_t k = 0; k < kGroup; k += kLanes) sum += load(from + i * kGroup + k);
    args.prepared[i] = reduce_add(sum);
  }
}

BH_INLINE Vec load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  Vec out;
  for (int lane = 0; lane < kLanes; lane++) out[lane] = half_to_float(from[lane]);
  return out;
#endif
}

}  // namespace
}  // namespace blockhouse
