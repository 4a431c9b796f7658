// Vectors of float in the compiler's own vector extension, as wide as the file's target has
// registers: one source serves AVX-512, AVX2, SSE2 and NEON. Include inside one file per target.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace blockhouse {
namespace {

#define BH_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t VecI __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecU __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VecU16 __attribute__((vector_size(2 * kLanes)));
typedef uint8_t VecU8 __attribute__((vector_size(kLanes)));

BH_INLINE Vec splat(float value) { return value - Vec{}; }

BH_INLINE Vec load(const float* from) {
  Vec out;
  __builtin_memcpy(&out, from, sizeof(out));
  return out;
}

BH_INLINE Vec load(const bf16* from) {
  VecU16 raw;
  __builtin_memcpy(&raw, from, sizeof(raw));
  return (Vec)(__builtin_convertvector(raw, VecU) << 16);
}

BH_INLINE void store(float* to, Vec value) { __builtin_memcpy(to, &value, sizeof(value)); }

// Rounds to nearest, ties to even.
BH_INLINE void store(bf16* to, Vec value) {
#if defined(__AVX512BF16__)
  __m256i raw = (__m256i)_mm512_cvtneps_pbh((__m512)value);
#else
  VecU bits = (VecU)value;
  bits += 0x7FFFu + ((bits >> 16) & 1u);
  VecU16 raw = __builtin_convertvector(bits >> 16, VecU16);
#endif
  __builtin_memcpy(to, &raw, sizeof(raw));
}

BH_INLINE float to_float(float value) { return value; }

BH_INLINE float to_float(bf16 value) {
  uint32_t bits = (uint32_t)value.bits << 16;
  float out;
  __builtin_memcpy(&out, &bits, sizeof(out));
  return out;
}

BH_INLINE void store_one(float* to, float value) { *to = value; }

BH_INLINE void store_one(bf16* to, float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  to->bits = (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

BH_INLINE float half_to_float(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
  uint32_t bits = (uint32_t)(half & 0x7FFFu) << 13;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  value *= 0x1p112f;  // moves the exponent's bias; right for subnormal halves too
  __builtin_memcpy(&bits, &value, sizeof(bits));
  bits |= sign;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

BH_INLINE Vec vmax(Vec a, Vec b) { return a > b ? a : b; }
BH_INLINE Vec vmin(Vec a, Vec b) { return a < b ? a : b; }

BH_INLINE float reduce_add(Vec value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#else
  float lanes[kLanes];
  store(lanes, value);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
#endif
}

// 2 ** x, relative error below 3e-6; inputs are taken to lie within the range of normal floats.
BH_INLINE Vec exp2_vec(Vec x) {
  x = vmin(vmax(x, splat(-126.0f)), splat(127.0f));
  const Vec magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to a whole number
  Vec whole = (x + magic) - magic;
  Vec r = x - whole;
  Vec p = splat(1.3333558e-3f);
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  VecI exponent = __builtin_convertvector(whole, VecI);
  return (Vec)((VecI)p + (exponent << 23));
}

BH_INLINE float exp2_one(float x) {
  Vec value = exp2_vec(splat(x));
  return value[0];
}

constexpr float kLog2E = 1.44269504f;

}  // namespace
}  // namespace blockhouse
