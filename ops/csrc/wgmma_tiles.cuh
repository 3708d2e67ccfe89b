// What the wgmma kernel's CTAs work on: their place in the problem, the layout of shared memory, the products of one
// tile, and where the accumulators go. Legend and overview: rank_wgmma.cu.
#pragma once
#include "hopper.cuh"

namespace zerolora {
namespace {

constexpr int kRows = kWgmmaRows, kCols = kWgmmaCols, kConsumers = 256, kCopiers = 128, kMaskerRegisters = 48;
constexpr int kBox = 64 * 2;              // bytes in a row of a box of Z: one 128-byte swizzle atom
constexpr int kHalfBytes = kRows * kBox;  // 128 rows x 64 columns
constexpr int kTileBytes = 2 * kHalfBytes;
constexpr int kBitsRow = 16;  // bytes of Dropout::bits in a row of a tile

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
  static constexpr int kMaskers = kBoth ? 0 : 256;  // dY is never dropped
  static constexpr int kThreads = kConsumers + kCopiers + kMaskers;
  // setmaxnreg moves registers within what the launch gave: 168 each to 384 threads, 96 each to 640. Asking for more
  // than the others return waits for ever: 128 * (2 * 216 + 56) <= 384 * 168, 128 * (2 * 176 + 24 + 2 * 48) <= 640
  // * 96.
  static constexpr int kConsumerRegisters = kMaskers == 0 ? 216 : 176, kCopierRegisters = kMaskers == 0 ? 56 : 24;
  static_assert(128 * (2 * kConsumerRegisters + kCopierRegisters) + kMaskers * kMaskerRegisters <=
                    kThreads * (65536 / kThreads / 8 * 8),
                "the warpgroups ask for more registers than there are");
  static constexpr int kVBytes = kG ? kRows * RP * 2 : 0;
  static constexpr int kPBytes = kBoth ? kBlocks * kCols * RP * 2 : 0;  // both: P of the CTA's columns stays
  static constexpr int kPTileBytes = kU && !kG ? kCols * RP * 2 : 0;    // U alone: P travels with each tile
  static constexpr int kStages = (RP == 64 ? 4 : 5) - (kBoth && RP > 16 ? 1 : 0);
  // A slot of V is overwritten when the tile `kStages` back is done: with 4 blocks to a row that is a row later.
  static constexpr int kVSlots = kG ? (kBlocks >= kStages - 1 ? 2 : kStages) : 0;
  static constexpr int kBitsBytes = kG && !kU ? kRows * kBitsRow : 0;   // G alone: the mask may have been drawn before
  static constexpr int kStageBytes = kTileBytes + kPTileBytes + kBitsBytes;
  static constexpr int kExchange = kPBytes + kStages * kStageBytes + kVSlots * kVBytes;
  static constexpr int kBarriers = kExchange + (kBoth ? kRows * RP * 4 : 0);
  static constexpr int kBytes = 1024 + kBarriers + (3 * kStages + 3) * 8;  // 1024: the atoms want that alignment
};

struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// The barriers of a stage: copied (full), masked, and read by both warpgroups (empty).
template <int kStages> struct Barriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t full(int stage) const { return base + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return base + (kStages + stage) * 8; }
  __device__ __forceinline__ uint32_t masked(int stage) const { return base + (2 * kStages + stage) * 8; }
  __device__ __forceinline__ uint32_t p_full() const { return base + 3 * kStages * 8; }
  __device__ __forceinline__ uint32_t slices_full() const { return base + (3 * kStages + 1) * 8; }
  __device__ __forceinline__ uint32_t slices_free() const { return base + (3 * kStages + 2) * 8; }
};

template <typename T, int RP, bool kByRank>
__device__ __forceinline__ void tile_u(float (&u)[RP / 2], uint32_t z, uint32_t p, int group) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t a = descriptor<1024, Swizzle::b128>(z + half * kHalfBytes + group * 64 * kBox + k * 32);
      if constexpr (kByRank) {
        wgmma<T, 0, 0>(u, a, descriptor<1024, Swizzle::b128>(p + half * RP * kBox + k * 32));
      } else {
        constexpr int kRow = RP * 2;
        wgmma<T, 0, 1>(u, a, descriptor<8 * kRow, swizzle_of<kRow>()>(p + (half * 64 + k * 16) * kRow));
      }
    }
}

template <typename T, int RP>
__device__ __forceinline__ void tile_g(float (&g)[RP / 2], uint32_t z, uint32_t v, int group) {
  constexpr int kRow = RP * 2;
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k)
    wgmma<T, 1, 1>(g, descriptor<1024, Swizzle::b128>(z + group * kHalfBytes + k * 16 * kBox),
                   descriptor<8 * kRow, swizzle_of<kRow>()>(v + k * 16 * kRow));
}

template <int RP>
__device__ __forceinline__ void store_u(const float (&u)[RP / 2], const Problem& a, int64_t row0, int64_t split) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* base = a.u + split * a.T * RP;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = row0 + warp * 16 + lane / 4 + half * 8;
    if (row >= a.T) continue;
#pragma unroll
    for (int n = 0; n < RP / 8; ++n)
      *reinterpret_cast<float2*>(base + row * RP + n * 8 + lane % 4 * 2) =
          make_float2(u[n * 4 + half * 2], u[n * 4 + half * 2 + 1]);
  }
}

template <int RP>
__device__ __forceinline__ void store_g(const float (&g)[RP / 2], const Problem& a, int64_t col0, int64_t split,
                                        bool by_rank) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* base = a.g + split * a.D * RP;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t col = col0 + warp * 16 + lane / 4 + half * 8;
    if (col >= a.D) continue;
#pragma unroll
    for (int n = 0; n < RP / 8; ++n) {
      const int rank = n * 8 + lane % 4 * 2;
      const float low = g[n * 4 + half * 2], high = g[n * 4 + half * 2 + 1];
      if (by_rank) base[rank * a.D + col] = low, base[(rank + 1) * a.D + col] = high;
      else *reinterpret_cast<float2*>(base + col * RP + rank) = make_float2(low, high);
    }
  }
}

}  // namespace
}  // namespace zerolora
