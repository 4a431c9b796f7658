// One run of tokens for one kv head, in the compiler's vectors: any head size.
#pragma once

#include "simd.h"

namespace blockhouse {
namespace {

struct Run {
  const Act* query;    // [group, head_dim]
  const bf16* keys;    // token t at t * token_stride
  const bf16* values;
  const bf16* next_keys;  // the run to come, for prefetching; readable memory always
  const bf16* next_values;
  int64_t token_stride, tokens, group, head_dim;
  float scale;  // to log2 scores
};

constexpr int64_t kMaxRunTokens = 32;

BH_INLINE float dot(const Act* a, const bf16* b, int64_t size) {
  Vec sum = splat(0.0f);
  float tail = 0.0f;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sum += load(a + i) * load(b + i);
  for (; i < size; i++) tail += to_float(a[i]) * to_float(b[i]);
  return reduce_add(sum) + tail;
}

// Turns scores into weights relative to the new maximum, which it updates with the sum; returns the
// factor for what was summed before.
BH_INLINE float softmax_run(float* scores, int64_t tokens, float* maximum, float* sum) {
  float highest = *maximum;
  for (int64_t t = 0; t < tokens; t++) highest = scores[t] > highest ? scores[t] : highest;
  const float factor = *maximum == highest ? 1.0f : exp2_one(*maximum - highest);
  float total = 0.0f;
  for (int64_t t = tokens; t % kLanes; t++) scores[t] = -__builtin_inff();
  for (int64_t t = 0; t < tokens; t += kLanes)
    store(scores + t, exp2_vec(load(scores + t) - splat(highest)));
  for (int64_t t = 0; t < tokens; t++) total += scores[t];
  *maximum = highest;
  *sum = *sum * factor + total;
  return factor;
}

BH_INLINE void add_weighted(const Run& run, const float* weights, float factor, float* acc) {
  int64_t i = 0;
  for (; i + kLanes <= run.head_dim; i += kLanes) {
    Vec total = load(acc + i) * factor;
    for (int64_t t = 0; t < run.tokens; t++)
      total += weights[t] * load(run.values + t * run.token_stride + i);
    store(acc + i, total);
  }
  for (; i < run.head_dim; i++) {
    acc[i] *= factor;
    for (int64_t t = 0; t < run.tokens; t++)
      acc[i] += weights[t] * to_float(run.values[t * run.token_stride + i]);
  }
}

void attend_run_any(const Run& run, float* acc, float* maximum, float* sum) {
  alignas(64) float scores[kMaxRunTokens];
  for (int64_t g = 0; g < run.group; g++) {
    const Act* query = run.query + g * run.head_dim;
    for (int64_t t = 0; t < run.tokens; t++)
      scores[t] = dot(query, run.keys + t * run.token_stride, run.head_dim) * run.scale;
    const float factor = softmax_run(scores, run.tokens, maximum + g, sum + g);
    add_weighted(run, scores, factor, acc + g * run.head_dim);
  }
}

template <class Out>
BH_INLINE void store_sum_any(const float* acc, int64_t head_dim, float scale, Out* out) {
  int64_t i = 0;
  for (; i + kLanes <= head_dim; i += kLanes) store(out + i, load(acc + i) * scale);
  for (; i < head_dim; i++) store_one(out + i, acc[i] * scale);
}

}  // namespace
}  // namespace blockhouse
