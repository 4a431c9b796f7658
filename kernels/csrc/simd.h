// Vectors of float in the compiler's own vector extension, as wide as the file's target has
// registers: one source serves AVX-512, AVX2, SSE2 and NEON. Include inside one file per target.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
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
typedef int8_t VecI8 __attribute__((vector_size(kLanes)));

BH_INLINE Vec splat(float value) { return value - Vec{}; }

BH_INLINE Vec load(const float* from) {
  Vec out;
  __builtin_memcpy(&out, from, sizeof(out));
  return out;
}

// Compilers widen short vectors in several steps where one instruction does it.
BH_INLINE Vec load(const bf16* from) {
#if defined(__AVX512F__)
  const VecU words = (VecU)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  const VecU words = (VecU)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  VecU16 raw;
  __builtin_memcpy(&raw, from, sizeof(raw));
  const VecU words = __builtin_convertvector(raw, VecU);
#endif
  return (Vec)(words << 16);
}

BH_INLINE VecI load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (VecI)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (VecI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  VecU8 bytes;
  __builtin_memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, VecI);
#endif
}

BH_INLINE VecI load_signed_bytes(const void* from) {
#if defined(__AVX512F__)
  return (VecI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (VecI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  VecI8 bytes;
  __builtin_memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, VecI);
#endif
}

BH_INLINE Vec ints_to_float(VecI ints) { return __builtin_convertvector(ints, Vec); }

BH_INLINE Vec load(const int8_t* from) { return ints_to_float(load_signed_bytes(from)); }

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

BH_INLINE float to_float(int8_t value) { return (float)value; }

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

// Set one by one: a whole array's initialiser becomes a slow memory fill.
template <int kCount>
BH_INLINE void clear(Vec* vectors) {
#pragma GCC unroll 16
  for (int i = 0; i < kCount; i++) vectors[i] = Vec{};
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
