// U of a tile's 128 rows, added over the CTAs of a cluster: each CTA is given a slice of the rows, gets that slice from
// every CTA through distributed shared memory, and adds them in the order of the CTAs.
#pragma once
#include "hopper.cuh"

namespace zerolora {

constexpr int kAdders = 96;  // threads that add: three warps beside the one that copies

// Slices lie as [CTA it came from][warp][half][pair of 8 ranks][lane], 16 bytes each: the order of the accumulators, so
// that a warp's store fills 512 bytes in a row.
template <int RP> struct Slices {
  static constexpr int kPairs = RP / 16, kPerWarp = 2 * kPairs * 32;  // pieces of 16 bytes
  int warps;                                                          // of one slice: 16 rows each
  __device__ explicit Slices(int cluster) : warps(kWgmmaRows / 16 / cluster) {}
  __device__ __forceinline__ int pieces() const { return warps * kPerWarp; }
};

// From the accumulators of m64nRPk16: warp w holds rows 16 w to 16 w + 15, which belong to one slice. Two lanes trade
// halves of two pieces of 8 ranks, so that each stores 16 bytes.
template <int RP>
__device__ __forceinline__ void send_slices(const float (&u)[RP / 2], uint32_t exchange, uint32_t full, int cluster) {
  const Slices<RP> slices(cluster);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, owner = warp / slices.warps;
  const bool odd = lane % 2 == 1;
  const uint32_t slice = address_in(exchange, owner), barrier = address_in(full, owner);
  int piece = cluster_rank() * slices.pieces() + warp % slices.warps * Slices<RP>::kPerWarp + lane;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < RP / 8; n += 2, piece += 32) {
      const float2 a = make_float2(u[n * 4 + half * 2], u[n * 4 + half * 2 + 1]);
      const float2 b = make_float2(u[n * 4 + 4 + half * 2], u[n * 4 + 4 + half * 2 + 1]);
      const float x = __shfl_xor_sync(~0u, odd ? a.x : b.x, 1), y = __shfl_xor_sync(~0u, odd ? a.y : b.y, 1);
      store_remote(slice + piece * 16, odd ? make_float4(x, y, b.x, b.y) : make_float4(a.x, a.y, x, y), barrier);
    }
}

// Adds the slices of `row_blocks` tiles one after the other into U[T, RP] and says to each sender when it may go on.
template <int RP>
__device__ __forceinline__ void add_slices(float* u, int64_t T, int64_t row0, int row_blocks, const char* exchange,
                                           uint32_t full, uint32_t free, int cluster) {
  const int thread = static_cast<int>(threadIdx.x) % 128 - (128 - kAdders);
  const Slices<RP> slices(cluster);
  const float4* const pieces = reinterpret_cast<const float4*>(exchange);
  row0 += cluster_rank() * slices.warps * 16;
  for (int block = 0; block < row_blocks; ++block, row0 += kWgmmaRows) {
    if (thread == 0) barrier_expect(full, kWgmmaRows * RP * 4);
    barrier_wait_cluster(full, block & 1);
    for (int i = thread; i < slices.pieces(); i += kAdders) {
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int s = 0; s < kMaxCluster; ++s) {
        if (s >= cluster) break;
        const float4 value = pieces[s * slices.pieces() + i];
        sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
      }
      const int lane = i % 32, pair = i / 32 % Slices<RP>::kPairs, rows8 = i / (32 * Slices<RP>::kPairs);
      const int64_t row = row0 + rows8 * 8 + lane / 4;
      if (row < T) *reinterpret_cast<float4*>(u + row * RP + pair * 16 + lane % 2 * 8 + lane % 4 / 2 * 4) = sum;
    }
    asm volatile("bar.sync 1, %0;" ::"n"(kAdders) : "memory");
    if (thread < cluster) barrier_arrive_remote(address_in(free, thread));
  }
}

}  // namespace zerolora
