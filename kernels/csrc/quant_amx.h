// Linear with AMX tiles over the packed form of quant_unpack_avx512.h.
//
// Up to 32 rows multiply with q itself and each group's sum is scaled in fp32, as exact as the
// other kernels. More rows multiply with w = scale * q + min rounded to bf16, as a dense bf16 model
// has it; unpacking is then shared by all rows. 16-bit weights are tiles as they lie.
#pragma once

#include "amx_tile.h"
#include "quant_scaled_avx512.h"

namespace blockhouse {
namespace {

// What is unpacked at a time for many rows, to stay in L2 while they pass over it.
constexpr int64_t kPanelBytes = 512 * 1024;
constexpr int64_t kPairColumns = 2 * kColumns;

BH_INLINE int64_t row_blocks(const QuantLinearArgs& args) {
  return (args.num_rows + kRowBlock - 1) / kRowBlock;
}

BH_INLINE bool is_packed(const QuantLinearArgs& args) {
  return args.as_many || args.num_rows > kFewRows;
}

int64_t amx_prepared_size(const QuantLinearArgs& args) {
  // Sums of whole row blocks: rows past the end are read, and not used.
  if (!is_packed(args)) return row_blocks(args) * kRowBlock * (args.weights.depth / kGroup);
  return row_blocks(args) * kRowBlock * args.weights.depth / 2;
}

// Tiles of columns that pass together; even.
BH_INLINE int64_t panel_tiles(const QuantWeights& weights) {
  const int64_t pairs = kPanelBytes / (2 * weights.depth / kGroup * kTileBytes);
  return pairs < 1 ? 2 : pairs * 2;
}

int64_t amx_scratch_size(const QuantLinearArgs& args) {
  if (!is_packed(args) || args.weights.bits == 16) return 0;
  return panel_tiles(args.weights) * (args.weights.depth / kGroup) * kTileFloats;
}

// Few rows: group sums. Many: the rows as tiles, [block, group, 16, 32] bf16, zeros past the end.
void amx_prepare(const QuantLinearArgs& args, int64_t begin, int64_t end) {
  if (!is_packed(args)) {
    if (args.weights.bits != 4) return;
    prepare_group_sums(args, begin, end);
    const int64_t groups = args.weights.depth / kGroup;
    for (int64_t i = args.num_rows * groups; i < end * kRowBlock * groups; i++)
      args.prepared[i] = 0.0f;
    return;
  }
  const int64_t depth = args.weights.depth, groups = depth / kGroup;
  for (int64_t block = begin; block < end; block++)
    for (int64_t r = 0; r < kRowBlock; r++) {
      const int64_t row = block * kRowBlock + r;
      const bf16* from = (const bf16*)args.input + row * depth;
      bf16* to = (bf16*)args.prepared + (block * groups * kRowBlock + r) * kGroup;
      for (int64_t g = 0; g < groups; g++) {
        const __m512i part = row < args.num_rows
                                 ? _mm512_loadu_si512((const void*)(from + g * kGroup))
                                 : _mm512_setzero_si512();
        _mm512_storeu_si512((void*)(to + g * kRowBlock * kGroup), part);
      }
    }
}

// Where the left matrix's tile of a group lies.
struct Left {
  const bf16* rows;
  int64_t row_bytes, group_step;  // bytes between rows, elements between groups
};

BH_INLINE Left left_of(const QuantLinearArgs& args, int64_t block) {
  const int64_t depth = args.weights.depth;
  if (is_packed(args))
    return {(const bf16*)args.prepared + block * kRowBlock * depth, 64, kRowBlock * kGroup};
  return {(const bf16*)args.input + block * kRowBlock * depth, depth * 2, kGroup};
}

template <int kBits>
BH_INLINE void unpack_exact(const uint8_t* values, const ByteTables& tables, uint8_t* to) {
  __m512i unpacked[16];
  unpack_group<kBits>(values, tables, unpacked);
#pragma GCC unroll 16
  for (int v = 0; v < 16; v++) _mm512_store_si512(to + v * 64, unpacked[v]);
}

// Groups on their way through unpacking, tiles and scaling. The stages are apart so that none waits
// for memory that the one before has just written.
constexpr int64_t kRing = 8, kTileLag = 2, kScaleLag = 5;

struct Ring {
  alignas(64) uint8_t unpacked[kRing][kTileBytes];
  alignas(64) float sums[kRing][kTileFloats];
};

template <int kBits, int kRows>
BH_INLINE void add_scaled(const QuantLinearArgs& args, const float* sums, const float* inputs,
                          int64_t place, __m512* total) {
  const int64_t groups = args.weights.depth / kGroup;
  const GroupScale by = group_scale<kBits>(args.weights, place);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++) {
    total[r] = _mm512_fmadd_ps(_mm512_load_ps(sums + r * kColumns), by.scale, total[r]);
    if (kBits == 4)
      total[r] = _mm512_fmadd_ps(_mm512_set1_ps(inputs[r * groups]), by.minimum, total[r]);
  }
}

// `rows` rows, at most kRows, from `row` on. What lies past them in the ring is finite.
template <int kBits, int kRows>
void exact_tile(const QuantLinearArgs& args, const ByteTables& tables, int64_t tile, int64_t row,
                int64_t rows, Ring& ring) {
  __m512 total[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++) total[r] = _mm512_setzero_ps();
  const int64_t groups = args.weights.depth / kGroup;
  const Left left = left_of(args, row / kRowBlock);
  for (int64_t step = 0; step < groups + kScaleLag; step++) {
    if (step < groups) {
      prefetch_group(args.weights, tile, step);
      unpack_exact<kBits>(group_values(args.weights, tile, step), tables,
                          ring.unpacked[step % kRing]);
    }
    const int64_t g = step - kTileLag;
    if (g >= 0 && g < groups) {
      BH_TILE_LOAD_WRITTEN(6, ring.unpacked[g % kRing]);
      BH_TILE_LOAD(4, left.rows + g * left.group_step, left.row_bytes);
      BH_TILE_ZERO(0);
      BH_TILE_MULTIPLY(0, 4, 6);
      BH_TILE_STORE_WHOLE(0, ring.sums[g % kRing]);
    }
    const int64_t done = step - kScaleLag;
    if (done >= 0)
      add_scaled<kBits, kRows>(args, ring.sums[done % kRing],
                               args.prepared + row * groups + done, tile * groups + done, total);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++)
    if (r < rows) store_total(args, row + r, tile, total[r]);
}

template <int kBits>
void exact_rows(const QuantLinearArgs& args, const ByteTables& tables, int64_t begin, int64_t end) {
  Ring ring;
  __builtin_memset(ring.sums, 0, sizeof(ring.sums));
  for (int64_t row = 0; row < args.num_rows; row += kRowBlock) {
    const int64_t left = args.num_rows - row, rows = left < kRowBlock ? left : kRowBlock;
    configure_tiles(rows, 0);
    for (int64_t tile = begin; tile < end; tile++) {
      if (rows == 1)
        exact_tile<kBits, 1>(args, tables, tile, row, rows, ring);
      else if (rows == 2)
        exact_tile<kBits, 2>(args, tables, tile, row, rows, ring);
      else if (rows <= 4)
        exact_tile<kBits, 4>(args, tables, tile, row, rows, ring);
      else if (rows <= 8)
        exact_tile<kBits, 8>(args, tables, tile, row, rows, ring);
      else
        exact_tile<kBits, 16>(args, tables, tile, row, rows, ring);
    }
  }
}

// One or two blocks of 16 rows times two tiles of columns; `sums` becomes [rows, 32].
template <int kBlocks>
void multiply_pair(const Left* left, int64_t groups, const uint8_t* first, const uint8_t* second,
                   float* sums) {
  constexpr int64_t kBytes = kPairColumns * 4;
  BH_TILE_ZERO(0);
  BH_TILE_ZERO(1);
  BH_TILE_ZERO(2);
  BH_TILE_ZERO(3);
  for (int64_t g = 0; g < groups; g++) {
    BH_TILE_LOAD(6, first + g * kTileBytes, 64);
    BH_TILE_LOAD(4, left[0].rows + g * left[0].group_step, left[0].row_bytes);
    BH_TILE_MULTIPLY(0, 4, 6);
    BH_TILE_LOAD(7, second + g * kTileBytes, 64);
    BH_TILE_MULTIPLY(1, 4, 7);
    if (kBlocks == 2) {
      BH_TILE_LOAD(5, left[1].rows + g * left[1].group_step, left[1].row_bytes);
      BH_TILE_MULTIPLY(2, 5, 6);
      BH_TILE_MULTIPLY(3, 5, 7);
    }
  }
  BH_TILE_STORE(0, sums, kBytes);
  BH_TILE_STORE(1, sums + kColumns, kBytes);
  if (kBlocks == 2) {
    float* below = sums + kTileRows * kPairColumns;
    BH_TILE_STORE(2, below, kBytes);
    BH_TILE_STORE(3, below + kColumns, kBytes);
  }
}

// Rows from `row` on, at most 32, of the tiles `tile` and, where `two`, the next.
void store_pair(const QuantLinearArgs& args, int64_t row, int64_t tile, bool two,
                const float* sums) {
  const int64_t left = args.num_rows - row, rows = left < 2 * kRowBlock ? left : 2 * kRowBlock;
  for (int64_t r = 0; r < rows; r++) {
    const __m512 first = _mm512_load_ps(sums + r * kPairColumns);
    const __m512 second = _mm512_load_ps(sums + r * kPairColumns + kColumns);
    if (two && !args.out_float) {
      bf16* to = (bf16*)args.out + (row + r) * args.out_stride + tile * kColumns;
      _mm512_storeu_si512((void*)to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    } else {
      store_total(args, row + r, tile, first);
      if (two) store_total(args, row + r, tile + 1, second);
    }
  }
}

// All rows times the tiles from `begin` to `end`, whose right matrices lie side by side.
void multiply_panel(const QuantLinearArgs& args, int64_t begin, int64_t end,
                    const uint8_t* right) {
  alignas(64) float sums[2 * kRowBlock * kPairColumns];
  const int64_t blocks = row_blocks(args), groups = args.weights.depth / kGroup;
  for (int64_t block = 0; block < blocks; block += 2) {
    const Left left[2] = {left_of(args, block), left_of(args, block + 1)};
    for (int64_t tile = begin; tile < end; tile += 2) {
      const bool two = tile + 1 < end;
      const uint8_t* first = right + (tile - begin) * groups * kTileBytes;
      const uint8_t* second = two ? first + groups * kTileBytes : first;
      if (block + 1 < blocks)
        multiply_pair<2>(left, groups, first, second, sums);
      else
        multiply_pair<1>(left, groups, first, second, sums);
      store_pair(args, block * kRowBlock, tile, two, sums);
    }
  }
}

void many_rows(const QuantLinearArgs& args, const ByteTables& tables, float* scratch,
               int64_t begin, int64_t end) {
  const int64_t step = panel_tiles(args.weights), groups = args.weights.depth / kGroup;
  for (int64_t first = begin; first < end; first += step) {
    const int64_t last = first + step < end ? first + step : end;
    if (args.weights.bits == 16) {
      multiply_panel(args, first, last, group_values(args.weights, first, 0));
      continue;
    }
    auto* panel = (uint8_t*)scratch;
    for (int64_t tile = first; tile < last; tile++) {
      uint8_t* to = panel + (tile - first) * groups * kTileBytes;
      if (args.weights.bits == 4)
        unpack_scaled<Groups<4>>(args.weights, tables, tile, 0, groups, to);
      else
        unpack_scaled<Groups<8>>(args.weights, tables, tile, 0, groups, to);
    }
    __asm__ volatile("" ::: "memory");  // the panel is written before tiles read it
    multiply_panel(args, first, last, panel);
  }
}

void amx_linear(const QuantLinearArgs& args, float* scratch, int64_t begin, int64_t end) {
  const ByteTables tables = byte_tables();
  const int64_t rows = args.num_rows;
  if (is_packed(args) || args.weights.bits == 16) {
    if (is_packed(args))
      configure_tiles(kTileRows, kTileRows);
    else
      configure_tiles(rows < kTileRows ? rows : kTileRows, rows - kTileRows);
    many_rows(args, tables, scratch, begin, end);
  } else if (args.weights.bits == 4) {
    exact_rows<4>(args, tables, begin, end);
  } else {
    exact_rows<8>(args, tables, begin, end);
  }
  release_tiles();
}

}  // namespace
}  // namespace blockhouse
