// AMX tiles: 16 rows of 64 bytes. The instructions name their tiles, so these are macros; operands
// tell the compiler which memory a load or store touches.
//
// Tile roles everywhere here: 0-3 sums, 4-5 rows of the left matrix, 6-7 pairs of the right one.
#pragma once

#include <cstdint>

namespace blockhouse {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileFloats = 256;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Sums and left tiles of the first 16 rows have `first` rows, of the next 16 `second`.
inline void configure_tiles(int64_t first, int64_t second) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    config.column_bytes[tile] = 64;
    config.rows[tile] = 16;
  }
  config.rows[0] = config.rows[1] = config.rows[4] = (uint8_t)first;
  config.rows[2] = config.rows[3] = config.rows[5] = (uint8_t)(second > 0 ? second : 1);
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

inline void release_tiles() { __asm__ volatile("tilerelease" ::: "memory"); }

// NOTE: not ordered after the caller's own stores; put a compiler barrier between.
#define BH_TILE_LOAD(tile, base, stride)                                       \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), \
                   "r"((int64_t)(stride)))
#define BH_TILE_STORE(tile, base, stride)                                    \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"((void*)(base)), \
                   "r"((int64_t)(stride))                                    \
                   : "memory")
// A whole tile of 16 rows without gaps that this call writes or reads itself.
#define BH_TILE_LOAD_WRITTEN(tile, base)                                          \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), \
                   "r"((int64_t)64), "m"(*(const char(*)[kTileBytes])(base)))
#define BH_TILE_STORE_WHOLE(tile, base)                            \
  __asm__ volatile("tilestored %%tmm" #tile ", (%1,%2,1)"          \
                   : "+m"(*(char(*)[kTileBytes])(base))            \
                   : "r"((void*)(base)), "r"((int64_t)64))
#define BH_TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
// sums += left (bf16 pairs) * right (bf16 pairs)
#define BH_TILE_MULTIPLY(sums, left, right) \
  __asm__ volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sums ::)

}  // namespace
}  // namespace blockhouse
