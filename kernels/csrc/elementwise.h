// Embedding, fused add + RMSNorm (arXiv:1910.07467), rotary embedding (arXiv:2104.09864) with the
// write of k and v into the paged cache, and SiLU times up (arXiv:2002.05202). Sums are in fp32.
// Expects `Act`, the activations' type, to be defined by the file that includes it.
#pragma once

#include "simd.h"

namespace blockhouse {
namespace {

void embed(const bf16* table, const int64_t* ids, float* out, int64_t hidden, int64_t begin,
           int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const bf16* from = table + ids[row] * hidden;
    float* to = out + row * hidden;
    int64_t i = 0;
    for (; i + kLanes <= hidden; i += kLanes) store(to + i, load(from + i));
    for (; i < hidden; i++) to[i] = to_float(from[i]);
  }
}

// Adds `delta` into `residual` and returns the sum of squares.
BH_INLINE float add_and_square(float* residual, const Act* delta, int64_t hidden) {
  Vec squares = splat(0.0f);
  float tail = 0.0f;
  int64_t i = 0;
  for (; i + kLanes <= hidden; i += kLanes) {
    Vec value = load(residual + i);
    if (delta) {
      value += load(delta + i);
      store(residual + i, value);
    }
    squares += value * value;
  }
  for (; i < hidden; i++) {
    if (delta) residual[i] += to_float(delta[i]);
    tail += residual[i] * residual[i];
  }
  return reduce_add(squares) + tail;
}

void add_rms_norm(const NormArgs& args, int64_t begin, int64_t end) {
  const int64_t hidden = args.hidden;
  for (int64_t row = begin; row < end; row++) {
    const int64_t source = args.rows ? args.rows[row] : row;
    float* residual = args.residual + source * hidden;
    const Act* delta = args.delta ? (const Act*)args.delta + source * hidden : nullptr;
    Act* out = (Act*)args.out + row * hidden;
    const float mean = add_and_square(residual, delta, hidden) / (float)hidden;
    const float inverse = 1.0f / __builtin_sqrtf(mean + args.eps);
    int64_t i = 0;
    for (; i + kLanes <= hidden; i += kLanes)
      store(out + i, load(residual + i) * inverse * load(args.weight + i));
    for (; i < hidden; i++) store_one(out + i, residual[i] * inverse * args.weight[i]);
  }
}

BH_INLINE Vec silu_times(Vec gate, Vec up) {
  return gate * up / (1.0f + exp2_vec(gate * -kLog2E));
}

void silu_and_mul(const void* gate_up, void* out, int64_t width, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const Act* gate = (const Act*)gate_up + row * 2 * width;
    const Act* up = gate + width;
    Act* to = (Act*)out + row * width;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes)
      store(to + i, silu_times(load(gate + i), load(up + i)));
    for (; i < width; i++)
      store_one(to + i, silu_times(splat(to_float(gate[i])), splat(to_float(up[i])))[0]);
  }
}

// Copies a head to fp32, with bias and RMSNorm where the family has them.
BH_INLINE void load_head(const Act* from, const float* bias, const float* norm, float eps,
                         int64_t head_dim, float* to) {
  for (int64_t i = 0; i < head_dim; i++) to[i] = to_float(from[i]) + (bias ? bias[i] : 0.0f);
  if (!norm) return;
  float squares = 0.0f;
  for (int64_t i = 0; i < head_dim; i++) squares += to[i] * to[i];
  const float inverse = 1.0f / __builtin_sqrtf(squares / (float)head_dim + eps);
  for (int64_t i = 0; i < head_dim; i++) to[i] *= inverse * norm[i];
}

// The halves convention: dimension i turns together with i + head_dim / 2.
template <class Out>
BH_INLINE void rotate(const float* head, const float* cos_sin, int64_t head_dim, Out* out) {
  const int64_t half = head_dim / 2;
  const float* cosines = cos_sin;
  const float* sines = cos_sin + half;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    Vec a = load(head + i), b = load(head + half + i);
    Vec c = load(cosines + i), s = load(sines + i);
    store(out + i, a * c - b * s);
    store(out + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = head[i], b = head[half + i];
    store_one(out + i, a * cosines[i] - b * sines[i]);
    store_one(out + half + i, b * cosines[i] + a * sines[i]);
  }
}

constexpr int64_t kMaxHeadDim = 256;

// 8 bits: one scale for a token's head, so that its largest number becomes 127.
BH_INLINE void write_head(const float* head, int64_t dim, int64_t place, int8_t* cache,
                          float* scales) {
  float most = 0.0f;
  for (int64_t i = 0; i < dim; i++) most = __builtin_fmaxf(most, __builtin_fabsf(head[i]));
  const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
  scales[place] = most / 127.0f;
  for (int64_t i = 0; i < dim; i++) {
    const float number = __builtin_rintf(head[i] * inverse);
    cache[place * dim + i] = (int8_t)__builtin_fmaxf(-127.0f, __builtin_fminf(127.0f, number));
  }
}

// `place` counts heads of slots.
BH_INLINE void write_key(const RopeArgs& args, const float* head, const float* cos_sin,
                         int64_t place) {
  const int64_t dim = args.head_dim;
  if (!args.key_scales) return rotate(head, cos_sin, dim, (bf16*)args.key_cache + place * dim);
  alignas(64) float turned[kMaxHeadDim];
  rotate(head, cos_sin, dim, turned);
  write_head(turned, dim, place, (int8_t*)args.key_cache, args.key_scales);
}

BH_INLINE void write_value(const RopeArgs& args, const float* head, int64_t place) {
  const int64_t dim = args.head_dim;
  if (args.value_scales)
    return write_head(head, dim, place, (int8_t*)args.value_cache, args.value_scales);
  bf16* to = (bf16*)args.value_cache + place * dim;
  for (int64_t i = 0; i < dim; i++) store_one(to + i, head[i]);
}

void rope_and_write(const RopeArgs& args, int64_t begin, int64_t end) {
  const int64_t dim = args.head_dim, heads = args.num_heads, kv_heads = args.num_kv_heads;
  alignas(64) float head[kMaxHeadDim];
  for (int64_t row = begin; row < end; row++) {
    Act* qkv = (Act*)args.qkv + row * (heads + 2 * kv_heads) * dim;
    const float* cos_sin = args.cos_sin + args.positions[row] * dim;
    const float* bias = args.bias;
    for (int64_t h = 0; h < heads; h++) {
      load_head(qkv + h * dim, bias ? bias + h * dim : nullptr, args.query_norm, args.eps, dim,
                head);
      rotate(head, cos_sin, dim, qkv + h * dim);
    }
    const int64_t slot = args.slots[row];
    if (slot < 0 || slot >= args.num_slots) continue;
    for (int64_t h = 0; h < kv_heads; h++) {
      const int64_t key = (heads + h) * dim, value = (heads + kv_heads + h) * dim;
      const int64_t place = slot * kv_heads + h;
      load_head(qkv + key, bias ? bias + key : nullptr, args.key_norm, args.eps, dim, head);
      write_key(args, head, cos_sin, place);
      load_head(qkv + value, bias ? bias + value : nullptr, nullptr, args.eps, dim, head);
      write_value(args, head, place);
    }
  }
}

// Joins one row's splits: each holds a sum weighted relative to its own maximum (arXiv:1805.02867).
void combine(const AttentionArgs& args, const float* partial, int64_t splits, int64_t row) {
  const int64_t dim = args.head_dim, heads = args.num_heads, stride = dim + 2;
  Act* out = (Act*)args.out + row * heads * dim;
  for (int64_t h = 0; h < heads; h++) {
    float highest = -__builtin_inff();
    for (int64_t s = 0; s < splits; s++)
      highest = __builtin_fmaxf(highest, partial[(s * heads + h) * stride + dim]);
    float weight_sum = 0.0f;
    alignas(64) float sum[kMaxHeadDim] = {};
    for (int64_t s = 0; s < splits; s++) {
      const float* part = partial + (s * heads + h) * stride;
      const float factor = exp2_one(part[dim] - highest);
      weight_sum += factor * part[dim + 1];
      for (int64_t i = 0; i < dim; i++) sum[i] += factor * part[i];
    }
    for (int64_t i = 0; i < dim; i++) store_one(out + h * dim + i, sum[i] / weight_sum);
  }
}

}  // namespace
}  // namespace blockhouse
