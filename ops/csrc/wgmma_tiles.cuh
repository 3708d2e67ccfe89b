// What the wgmma kernel's CTAs work on: their place in the problem, the layout of shared memory, the products of one
// tile, and where the accumulators go. Legend and overview: rank_wgmma.cu.
#pragma once
#include "exchange.cuh"

namespace zerolora {
namespace {

constexpr int kRows = 128, kCols = kWgmmaCols, kConsumers = 256, kCopiers = 128;
constexpr int kBox = 64 * 2;  // bytes in a row of a box of Z: one 128-byte swizzle atom
// Passes for U alone or G alone: bytes of 128 rows x 64 columns, and of a tile. Layout has those of all passes.
constexpr int kHalfBytes = kRows * kBox, kTileBytes = 2 * kHalfBytes;
constexpr int kBitsRow = 16;          // bytes of Dropout::bits in a row of a tile
constexpr int kSharedBytes = 232448;  // that a block may have

struct Problem {
  CUtensorMap z, p, v;
  int64_t T, D;
  float *u, *g;
  int first_cta, ctas_wide;  // CTAs before this problem's; CTAs side by side
};
struct Args {
  Problem problem[kMaxMerged];
  int count, cluster;
  int64_t rows_per_split, cols_per_split;
  Dropout dropout;
  bool g_by_rank;
};

// What one CTA works on.
struct Place {
  int64_t row0, col0, row_split, col_split;
};

template <int RP, int kBlocks, bool kU, bool kG> struct Layout {
  static constexpr bool kBoth = kU && kG;
  // dY is never dropped. Drawing waits for its own results: as many warps as the accumulators leave room for.
  static constexpr int kMaskers = kBoth ? 0 : kBlocks * RP <= 64 ? 512 : 256;
  static constexpr int kThreads = kConsumers + kCopiers + kMaskers;
  // setmaxnreg moves registers within what the launch gave: 168 each to 384 threads, 96 each to 640, 72 each to 896.
  // Asking for more than the others return waits for ever.
  static constexpr int kConsumerRegisters = kBoth ? 216 : kMaskers == 512 ? 88 : 176;
  static constexpr int kMaskerRegisters = kMaskers == 512 ? 72 : 48, kCopierRegisters = kBoth ? 56 : 24;
  static_assert(128 * (2 * kConsumerRegisters + kCopierRegisters) + kMaskers * kMaskerRegisters <=
                    kThreads * (65536 / kThreads / 8 * 8),
                "the warpgroups ask for more registers than there are");
  static constexpr int kTileRows = wgmma_rows(kBoth, RP);
  static constexpr int kHalf = kTileRows * kBox, kTile = 2 * kHalf;  // bytes of 64 columns, and of 128
  static constexpr int kVBytes = kG ? kTileRows * RP * 2 : 0;
  static constexpr int kPBytes = kBoth ? kBlocks * kCols * RP * 2 : 0;  // both: P of the CTA's columns stays
  static constexpr int kPTileBytes = kU && !kG ? kCols * RP * 2 : 0;    // U alone: P travels with each tile
  static constexpr int kBitsBytes = kG && !kU ? kRows * kBitsRow : 0;   // G alone: the mask may have been drawn before
  static constexpr int kStageBytes = kTile + kPTileBytes + kBitsBytes;
  static constexpr int kExchangeBytes = kBoth ? kExchanges * Slices<RP>::kBytes : 0;
  // V of a row of tiles is copied when the tile `stages` before the row's first is done; by then the row that used the
  // slot before must be.
  static constexpr int v_slots(int stages) { return kG ? (stages + 2 * kBlocks - 2) / kBlocks : 0; }
  static constexpr int bytes(int stages) {  // 1024: the atoms want that alignment
    return 1024 + kPBytes + stages * kStageBytes + v_slots(stages) * kVBytes + kExchangeBytes + (3 * stages + 8) * 8;
  }
  static constexpr int fitting(int stages) { return bytes(stages) <= kSharedBytes ? stages : fitting(stages - 1); }
  static constexpr int kStages = kBoth ? fitting(10) : RP == 64 ? 4 : 5;
  static constexpr int kVSlots = v_slots(kStages);
  static constexpr int kExchange = kPBytes + kStages * kStageBytes + kVSlots * kVBytes;
  static constexpr int kBarriers = kExchange + kExchangeBytes, kBytes = bytes(kStages);
};

// The barriers of a stage: copied (full), masked, and read by both warpgroups (empty).
template <int kStages> struct Barriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t full(int stage) const { return base + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return base + (kStages + stage) * 8; }
  __device__ __forceinline__ uint32_t masked(int stage) const { return base + (2 * kStages + stage) * 8; }
  __device__ __forceinline__ uint32_t p_full(int block) const { return base + (3 * kStages + block) * 8; }
  __device__ __forceinline__ uint32_t slices_full() const { return base + (3 * kStages + 4) * 8; }
  __device__ __forceinline__ uint32_t slices_free() const { return base + (3 * kStages + 4 + kExchanges) * 8; }
};

// U of 64 rows, which begin at z; kHalf: bytes of the tile's first 64 columns.
template <typename T, int RP, int kHalf, bool kByRank>
__device__ __forceinline__ void tile_u(float (&u)[RP / 2], uint32_t z, uint32_t p) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t a = descriptor<1024, Swizzle::b128>(z + half * kHalf + k * 32);
      if constexpr (kByRank) {
        wgmma<T, 0, 0>(u, a, descriptor<1024, Swizzle::b128>(p + half * RP * kBox + k * 32));
      } else {
        constexpr int kRow = RP * 2;
        wgmma<T, 0, 1>(u, a, descriptor<8 * kRow, swizzle_of<kRow>()>(p + (half * 64 + k * 16) * kRow));
      }
    }
}

// G of 64 columns, which begin at z.
template <typename T, int RP, int kTileRows>
__device__ __forceinline__ void tile_g(float (&g)[RP / 2], uint32_t z, uint32_t v) {
  constexpr int kRow = RP * 2;
#pragma unroll
  for (int k = 0; k < kTileRows / 16; ++k)
    wgmma<T, 1, 1>(g, descriptor<1024, Swizzle::b128>(z + k * 16 * kBox),
                   descriptor<8 * kRow, swizzle_of<kRow>()>(v + k * 16 * kRow));
}

// row0: the first row of this warpgroup.
template <int RP>
__device__ __forceinline__ void store_u(const float (&u)[RP / 2], const Problem& a, int64_t row0, int64_t split) {
  float* const base = a.u + split * a.T * RP + quad_column();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = row0 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + half * 8;
#pragma unroll
    for (int pair = 0; pair < RP / 16; ++pair) {
      const float4 value = quad(u, half, pair);
      if (row < a.T) *reinterpret_cast<float4*>(base + row * RP + pair * 16) = value;
    }
  }
}

// col0: the first column of this warpgroup.
template <int RP>
__device__ __forceinline__ void store_g(const float (&g)[RP / 2], const Problem& a, int64_t col0, int64_t split,
                                        bool by_rank) {
  float* const base = a.g + split * a.D * RP;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t col = col0 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + half * 8;
    if (by_rank) {
      if (col >= a.D) continue;
#pragma unroll
      for (int n = 0; n < RP / 8; ++n) {
        const int rank = n * 8 + threadIdx.x % 4 * 2;
        base[rank * a.D + col] = g[n * 4 + half * 2], base[(rank + 1) * a.D + col] = g[n * 4 + half * 2 + 1];
      }
      continue;
    }
#pragma unroll
    for (int pair = 0; pair < RP / 16; ++pair) {
      const float4 value = quad(g, half, pair);
      if (col < a.D) *reinterpret_cast<float4*>(base + col * RP + pair * 16 + quad_column()) = value;
    }
  }
}

}  // namespace
}  // namespace zerolora
