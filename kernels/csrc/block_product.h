// A small matrix product in registers: six rows by two vectors of columns at a time, the left matrix
// read number by number. Both matrices are fp32 and lie in cache.
#pragma once

#include "simd.h"

namespace blockhouse {
namespace {

constexpr int kProductRows = 6, kProductVectors = 2;

// out[rows, columns] = (or +=) left[rows, depth] * right[depth, columns]
struct Product {
  const float* left;  // (row, k) at row * row_stride + k * depth_stride
  int64_t row_stride, depth_stride;
  const float* right;  // (k, column) at k * right_stride + column
  int64_t right_stride;
  float* out;
  int64_t out_stride;
  int64_t rows, columns, depth;  // columns: a multiple of kLanes
  bool adds;
};

// acc[kRows][kVectors] += left * right, k in order: a row's sums do not depend on kRows.
template <int kRows, int kVectors>
BH_INLINE void add_products(const float* left, int64_t row_stride, int64_t depth_stride,
                            const float* right, int64_t right_stride, int64_t depth,
                            Vec (*acc)[kVectors]) {
  for (int64_t k = 0; k < depth; k++) {
    Vec columns[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) columns[v] = load(right + k * right_stride + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++) {
      const Vec number = splat(left[r * row_stride + k * depth_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) acc[r][v] += columns[v] * number;
    }
  }
}

template <int kRows, int kVectors>
void multiply_block(const Product& p, int64_t row, int64_t column) {
  float* out = p.out + row * p.out_stride + column;
  Vec acc[kRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++)
      acc[r][v] = p.adds ? load(out + r * p.out_stride + v * kLanes) : splat(0.0f);
  add_products<kRows, kVectors>(p.left + row * p.row_stride, p.row_stride, p.depth_stride,
                                p.right + column, p.right_stride, p.depth, acc);
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) store(out + r * p.out_stride + v * kLanes, acc[r][v]);
}

template <int kVectors>
BH_INLINE void multiply_columns(const Product& p, int64_t column) {
  int64_t row = 0;
  for (; row + 6 <= p.rows; row += 6) multiply_block<6, kVectors>(p, row, column);
  switch (p.rows - row) {
    case 5: return multiply_block<5, kVectors>(p, row, column);
    case 4: return multiply_block<4, kVectors>(p, row, column);
    case 3: return multiply_block<3, kVectors>(p, row, column);
    case 2: return multiply_block<2, kVectors>(p, row, column);
    case 1: return multiply_block<1, kVectors>(p, row, column);
    default: return;
  }
}

void multiply(const Product& p) {
  int64_t column = 0;
  for (; column + 2 * kLanes <= p.columns; column += 2 * kLanes) multiply_columns<2>(p, column);
  if (column < p.columns) multiply_columns<1>(p, column);
}

}  // namespace
}  // namespace blockhouse
