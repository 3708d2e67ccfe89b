// U of a row of tiles, added over the CTAs of a cluster: each CTA is given a slice of the rows, gets that slice from
// every CTA through distributed shared memory, and adds them in the order of the CTAs.
#pragma once
#include "hopper.cuh"

namespace zerolora {

constexpr int kAdders = 96;    // threads that add: three warps beside the one that copies
constexpr int kExchanges = 2;  // rows of tiles that may be on their way

// Slices lie as [CTA it came from][unit of 8 rows][pair of 8 ranks][lane], 16 bytes each: the order of the
// accumulators, so that a warp's store fills 512 bytes in a row.
template <int RP> struct Slices {
  static constexpr int kRows = wgmma_rows(true, RP), kUnits = kRows / 8, kPairs = RP / 16, kUnit = kPairs * 32;
  static constexpr int kBytes = kUnits * kUnit * 16;
  int units;  // of one slice
  __device__ explicit Slices(int cluster) : units(kUnits / cluster) {}
};

// From the accumulators of m64nRPk16, whose warp w holds the units 2 w and 2 w + 1: of both warpgroups where a tile has
// 128 rows, else of one.
template <int RP>
__device__ __forceinline__ void send_slices(const float (&u)[RP / 2], uint32_t exchange, uint32_t full, int cluster) {
  using S = Slices<RP>;
  const S slices(cluster);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % (S::kUnits / 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int unit = warp * 2 + half, owner = unit / slices.units;
    const uint32_t slice = (cluster_rank() * slices.units + unit % slices.units) * S::kUnit * 16;
    const uint32_t target = address_in(exchange, owner) + slice, barrier = address_in(full, owner);
#pragma unroll
    for (int pair = 0; pair < S::kPairs; ++pair)
      store_remote(target + (pair * 32 + lane) * 16, quad(u, half, pair), barrier);
  }
}

// Adds the slices of `row_blocks` rows of tiles one after the other into U[T, RP] and says to each sender when it may
// go on. full, free: the barriers of the first buffer, those of the second lie behind.
template <int RP>
__device__ __forceinline__ void add_slices(float* u, int64_t T, int64_t row0, int row_blocks, const char* exchange,
                                           uint32_t full, uint32_t free, int cluster) {
  using S = Slices<RP>;
  const int thread = static_cast<int>(threadIdx.x) % 128 - (128 - kAdders);
  const S slices(cluster);
  const int pieces = slices.units * S::kUnit;
  row0 += cluster_rank() * slices.units * 8;
  for (int block = 0; block < row_blocks; ++block, row0 += S::kRows) {
    const int buffer = block % kExchanges;
    const float4* const values = reinterpret_cast<const float4*>(exchange + buffer * S::kBytes);
    if (thread == 0) barrier_expect(full + buffer * 8, S::kBytes);
    barrier_wait_cluster(full + buffer * 8, block / kExchanges & 1);
    for (int i = thread; i < pieces; i += kAdders) {
      float4 value[kMaxCluster];
#pragma unroll
      for (int s = 0; s < kMaxCluster; ++s)
        value[s] = s < cluster ? values[s * pieces + i] : make_float4(0.f, 0.f, 0.f, 0.f);
      float4 sum = value[0];
#pragma unroll
      for (int s = 1; s < kMaxCluster; ++s)
        sum.x += value[s].x, sum.y += value[s].y, sum.z += value[s].z, sum.w += value[s].w;
      const int lane = i % 32, pair = i / 32 % S::kPairs, unit = i / S::kUnit;
      const int64_t row = row0 + unit * 8 + lane / 4;
      if (row < T) *reinterpret_cast<float4*>(u + row * RP + pair * 16 + lane % 2 * 8 + lane % 4 / 2 * 4) = sum;
    }
    if (block + kExchanges >= row_blocks) continue;  // nobody waits for it, and the sender may be gone
    adders_sync(kAdders);
    if (thread < cluster) barrier_arrive_remote(address_in(free + buffer * 8, thread));
  }
}

}  // namespace zerolora
