// The tile instructions, or, with STERNA_EMULATED_TILES, the same on plain memory: so that the products written with them can be tested on a
// processor without. Tile numbers are literals.
#pragma once

#include <immintrin.h>

#include <cstdint>

// What `_tile_loadconfig` reads.
struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64, "palette 1");

#if defined(STERNA_EMULATED_TILES)

namespace sterna {
namespace {

struct EmulatedTile {
  int rows, row_bytes;
  alignas(64) uint8_t data[16][64];
};
thread_local EmulatedTile emulated_tiles[8];

// Processors fault here.
inline void tile_fault_unless(bool holds) {
  if (!holds) __builtin_trap();
}

inline void emulated_loadconfig(const void* p) {
  TileConfig config;
  __builtin_memcpy(&config, p, sizeof config);
  tile_fault_unless(config.palette == 1 && config.start_row == 0);
  for (uint8_t each : config.reserved) tile_fault_unless(each == 0);
  for (int i = 8; i < 16; i++) tile_fault_unless(config.rows[i] == 0 && config.row_bytes[i] == 0);
  for (int i = 0; i < 8; i++) {
    tile_fault_unless(config.rows[i] <= 16 && config.row_bytes[i] <= 64 && (config.rows[i] == 0) == (config.row_bytes[i] == 0));
    __builtin_memset(&emulated_tiles[i], 0, sizeof(EmulatedTile));
    emulated_tiles[i].rows = config.rows[i];
    emulated_tiles[i].row_bytes = config.row_bytes[i];
  }
}

inline void emulated_release() { __builtin_memset(emulated_tiles, 0, sizeof emulated_tiles); }

inline EmulatedTile& emulated_tile(int t) {
  EmulatedTile& tile = emulated_tiles[t];
  tile_fault_unless(tile.rows > 0 && tile.row_bytes > 0);
  return tile;
}

inline void emulated_zero(int t) { __builtin_memset(emulated_tile(t).data, 0, sizeof(EmulatedTile::data)); }

inline void emulated_loadd(int t, const void* base, long stride) {
  EmulatedTile& tile = emulated_tile(t);
  for (int r = 0; r < tile.rows; r++) __builtin_memcpy(tile.data[r], static_cast<const uint8_t*>(base) + r * stride, size_t(tile.row_bytes));
}

inline void emulated_stored(int t, void* base, long stride) {
  const EmulatedTile& tile = emulated_tile(t);
  for (int r = 0; r < tile.rows; r++) __builtin_memcpy(static_cast<uint8_t*>(base) + r * stride, tile.data[r], size_t(tile.row_bytes));
}

inline void check_shapes(const EmulatedTile& c, const EmulatedTile& a, const EmulatedTile& b) {
  tile_fault_unless(&c != &a && &c != &b && &a != &b);
  tile_fault_unless(c.rows == a.rows && c.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows && a.row_bytes % 4 == 0 && b.row_bytes % 4 == 0);
}

// c += a b over bytes: A is int8, B of type TypeB.
template <class TypeB>
void emulated_dpb(int to, int left, int right) {
  EmulatedTile& c = emulated_tile(to);
  const EmulatedTile &a = emulated_tile(left), &b = emulated_tile(right);
  check_shapes(c, a, b);
  for (int m = 0; m < c.rows; m++) {
    for (int n = 0; n < c.row_bytes / 4; n++) {
      int32_t sum;
      __builtin_memcpy(&sum, &c.data[m][4 * n], 4);
      for (int k = 0; k < a.row_bytes; k++) sum += int8_t(a.data[m][k]) * TypeB(b.data[k / 4][4 * n + k % 4]);
      __builtin_memcpy(&c.data[m][4 * n], &sum, 4);
    }
  }
}

inline float emulated_bf16(const uint8_t* p) {
  uint16_t half;
  __builtin_memcpy(&half, p, 2);
  const uint32_t u = uint32_t(half) << 16;
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

// Even and odd products are summed apart over the tile and then added: the order of Intel's description of TDPBF16PS.
inline void emulated_dpbf16ps(int to, int left, int right) {
  EmulatedTile& c = emulated_tile(to);
  const EmulatedTile &a = emulated_tile(left), &b = emulated_tile(right);
  check_shapes(c, a, b);
  for (int m = 0; m < c.rows; m++) {
    for (int n = 0; n < c.row_bytes / 4; n++) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < a.row_bytes / 4; k++) {
        even = __builtin_fmaf(emulated_bf16(&a.data[m][4 * k]), emulated_bf16(&b.data[k][4 * n]), even);
        odd = __builtin_fmaf(emulated_bf16(&a.data[m][4 * k + 2]), emulated_bf16(&b.data[k][4 * n + 2]), odd);
      }
      __builtin_memcpy(&sum, &c.data[m][4 * n], 4);
      sum += even + odd;
      __builtin_memcpy(&c.data[m][4 * n], &sum, 4);
    }
  }
}

}  // namespace
}  // namespace sterna

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_zero emulated_zero
#define _tile_dpbssd emulated_dpb<int8_t>
#define _tile_dpbsud emulated_dpb<uint8_t>
#define _tile_dpbf16ps emulated_dpbf16ps

#endif

namespace sterna {
namespace {

// Compilers take the tile instructions for ones that read no memory: what they read must be written before.
STERNA_INLINE void written() { asm volatile("" ::: "memory"); }

struct TileShape {
  int rows, row_bytes;
};
struct TileShapes {
  TileShape each[8];
};

// The eight tiles in these shapes, until the end of the scope.
class Tiles {
 public:
  STERNA_INLINE explicit Tiles(const TileShapes& shapes) {
    TileConfig config;
    __builtin_memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int t = 0; t < 8; t++) {
      config.rows[t] = uint8_t(shapes.each[t].rows);
      config.row_bytes[t] = uint16_t(shapes.each[t].row_bytes);
    }
    written();
    _tile_loadconfig(&config);
  }
  STERNA_INLINE ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace
}  // namespace sterna
