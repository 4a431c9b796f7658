// One run of tokens for one kv head, in the compiler's vectors: any head size, heads that share the
// kv head together. A head gets the same sums whichever heads stand beside it.
#pragma once

#include "simd.h"

namespace blockhouse {
namespace {

template <class Kv>
struct Run {
  const Act* query;   // [group, head_dim]
  const Kv* keys;     // token t at t * token_stride
  const Kv* values;
  const Kv* next_keys;  // the run to come, for prefetching; readable memory always
  const Kv* next_values;
  const float* key_scales;  // token t at t * scale_stride; 8 bits only
  const float* value_scales;
  int64_t token_stride, scale_stride, tokens, group, head_dim;
  float scale;  // to log2 scores
};

constexpr int64_t kMaxRunTokens = 32;
constexpr int kScoreTokens = 4;

// Lane mask of a step that adds neighbours `kStep` apart: the lower of each pair, or the upper.
template <int kStep>
BH_INLINE VecI pair_lanes(bool upper) {
  VecI lanes;
  for (int lane = 0; lane < kLanes; lane++)
    lanes[lane] = (lane & kStep ? kLanes : 0) + (upper ? lane | kStep : lane & ~kStep);
  return lanes;
}

template <int kStep>
BH_INLINE Vec add_pairs_of(Vec a, Vec b) {
  return __builtin_shuffle(a, b, pair_lanes<kStep>(false)) +
         __builtin_shuffle(a, b, pair_lanes<kStep>(true));
}

// out[t] = the sum of v[t], for four vectors.
BH_INLINE void sum_four(const Vec* v, float* out) {
  const Vec quads = add_pairs_of<2>(add_pairs_of<1>(v[0], v[1]), add_pairs_of<1>(v[2], v[3]));
  float lanes[kLanes];
  store(lanes, quads);
  for (int t = 0; t < 4; t++) {
    float sum = lanes[t];
    for (int lane = 4; lane < kLanes; lane += 4) sum += lanes[lane + t];
    out[t] = sum;
  }
}

// scores: [kHeads, kMaxRunTokens]; past the run's end -infinity up to whole vectors.
template <int kHeads, class Kv>
BH_INLINE void score_heads(const Run<Kv>& run, const Act* query, float* scores) {
  for (int64_t first = 0; first < run.tokens; first += kScoreTokens) {
    const Kv* keys[kScoreTokens];
    for (int t = 0; t < kScoreTokens; t++)
      keys[t] = run.keys + (first + t < run.tokens ? first + t : 0) * run.token_stride;
    Vec sums[kHeads][kScoreTokens];
    clear<kHeads * kScoreTokens>(&sums[0][0]);
    int64_t i = 0;
    for (; i + kLanes <= run.head_dim; i += kLanes) {
      Vec part[kHeads];
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; h++) part[h] = load(query + h * run.head_dim + i);
#pragma GCC unroll 4
      for (int t = 0; t < kScoreTokens; t++) {
        const Vec key = load(keys[t] + i);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; h++) sums[h][t] += part[h] * key;
      }
    }
    for (int h = 0; h < kHeads; h++) {
      float* to = scores + h * kMaxRunTokens + first;
      sum_four(sums[h], to);
      for (int t = 0; t < kScoreTokens; t++) {
        for (int64_t d = i; d < run.head_dim; d++)
          to[t] += to_float(query[h * run.head_dim + d]) * to_float(keys[t][d]);
        to[t] *= run.scale;
        if (first + t >= run.tokens)
          to[t] = -__builtin_inff();
        else if (sizeof(Kv) == 1)
          to[t] *= run.key_scales[(first + t) * run.scale_stride];
      }
    }
  }
  for (int64_t t = (run.tokens + kScoreTokens - 1) / kScoreTokens * kScoreTokens; t % kLanes; t++)
    for (int h = 0; h < kHeads; h++) scores[h * kMaxRunTokens + t] = -__builtin_inff();
}

BH_INLINE float reduce_max(Vec value) {
  float lanes[kLanes];
  store(lanes, value);
  for (int width = kLanes / 2; width; width /= 2)
    for (int lane = 0; lane < width; lane++)
      lanes[lane] = lanes[lane] > lanes[lane + width] ? lanes[lane] : lanes[lane + width];
  return lanes[0];
}

// Turns scores into weights relative to the new maximum, which it updates with the sum; returns the
// factor for what was summed before.
BH_INLINE float softmax_run(float* scores, int64_t tokens, float* maximum, float* sum) {
  Vec most = load(scores);
  for (int64_t t = kLanes; t < tokens; t += kLanes) most = vmax(most, load(scores + t));
  const float found = reduce_max(most), before = *maximum;
  const float highest = found > before ? found : before;
  const float factor = before == highest ? 1.0f : exp2_one(before - highest);
  Vec total = splat(0.0f);
  for (int64_t t = 0; t < tokens; t += kLanes) {
    const Vec score = load(scores + t);
    // What lies past the end is -infinity; exp2_vec stops short of zero.
    const Vec weight = score < splat(-1e30f) ? splat(0.0f) : exp2_vec(score - splat(highest));
    store(scores + t, weight);
    total += weight;
  }
  *maximum = highest;
  *sum = *sum * factor + reduce_add(total);
  return factor;
}

// acc = acc * factor + weights * v for kHeads heads, kVectors of dimensions from `i` on.
template <int kHeads, int kVectors, class Kv>
BH_INLINE void add_dimensions(const Run<Kv>& run, const float* weights, const float* factors,
                              int64_t i, float* acc) {
  Vec total[kHeads][kVectors];
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; h++)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++)
      total[h][v] = load(acc + h * run.head_dim + i + v * kLanes) * factors[h];
  for (int64_t t = 0; t < run.tokens; t++) {
    const Kv* row = run.values + t * run.token_stride + i;
    Vec value[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) value[v] = load(row + v * kLanes);
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; h++)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) total[h][v] += value[v] * weights[h * kMaxRunTokens + t];
  }
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; h++)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++)
      store(acc + h * run.head_dim + i + v * kLanes, total[h][v]);
}

template <int kHeads, class Kv>
BH_INLINE void add_weighted(const Run<Kv>& run, const float* weights, const float* factors,
                            float* acc) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= run.head_dim; i += 2 * kLanes)
    add_dimensions<kHeads, 2>(run, weights, factors, i, acc);
  for (; i + kLanes <= run.head_dim; i += kLanes)
    add_dimensions<kHeads, 1>(run, weights, factors, i, acc);
  for (; i < run.head_dim; i++)
    for (int h = 0; h < kHeads; h++) {
      float* at = acc + h * run.head_dim + i;
      *at *= factors[h];
      for (int64_t t = 0; t < run.tokens; t++)
        *at += weights[h * kMaxRunTokens + t] * to_float(run.values[t * run.token_stride + i]);
    }
}

template <int kHeads, class Kv>
void attend_heads_any(const Run<Kv>& run, int64_t head, float* acc, float* maximum, float* sum) {
  alignas(64) float scores[kHeads * kMaxRunTokens];
  float factors[kHeads];
  score_heads<kHeads>(run, run.query + head * run.head_dim, scores);
  for (int h = 0; h < kHeads; h++) {
    float* weights = scores + h * kMaxRunTokens;
    factors[h] = softmax_run(weights, run.tokens, maximum + head + h, sum + head + h);
    if (sizeof(Kv) == 1)
      for (int64_t t = 0; t < run.tokens; t++) weights[t] *= run.value_scales[t * run.scale_stride];
  }
  add_weighted<kHeads>(run, scores, factors, acc + head * run.head_dim);
}

template <class Kv>
BH_INLINE void prefetch_run(const Kv* rows, const Run<Kv>& run) {
  for (int64_t t = 0; t < run.tokens; t++)
    for (int64_t i = 0; i < run.head_dim; i += 64 / (int64_t)sizeof(Kv))
      __builtin_prefetch(rows + t * run.token_stride + i);
}

template <class Kv>
void attend_run_any(const Run<Kv>& run, float* acc, float* maximum, float* sum) {
  prefetch_run(run.next_keys, run);
  int64_t head = 0;
  for (; run.group - head == 3 || run.group - head > 4; head += 3)
    attend_heads_any<3>(run, head, acc, maximum, sum);
  for (; head + 2 <= run.group; head += 2) attend_heads_any<2>(run, head, acc, maximum, sum);
  if (head < run.group) attend_heads_any<1>(run, head, acc, maximum, sum);
  prefetch_run(run.next_values, run);
}

template <class Out>
BH_INLINE void store_sum_any(const float* acc, int64_t head_dim, float scale, Out* out) {
  int64_t i = 0;
  for (; i + kLanes <= head_dim; i += kLanes) store(out + i, load(acc + i) * scale);
  for (; i < head_dim; i++) store_one(out + i, acc[i] * scale);
}

}  // namespace
}  // namespace blockhouse
