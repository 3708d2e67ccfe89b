// Adds sums over the CTAs of a cluster in a fixed order through distributed shared memory: U of a row of tiles while a
// pass for both results continues, or the result of a pass for one result at its end.
#pragma once
#include "hopper.cuh"

namespace zerolora {

constexpr int kAdders = 96;    // threads that add: the copying thread's warpgroup without that thread's warp
constexpr int kExchanges = 2;  // rows of tiles that may be in flight

// Each CTA adds one slice of the rows, which it receives from every CTA. Slices are stored as [sending CTA][unit of 8
// rows][pair of 8 ranks][lane], 16 bytes each: the order of the accumulators, so that a warp stores 512 contiguous
// bytes.
template <int RP> struct Slices {
  static constexpr int kRows = wgmma_rows(true, RP), kUnits = kRows / 8, kPairs = RP / 16, kUnit = kPairs * 32;
  static constexpr int kBytes = kUnits * kUnit * 16;
  int units;  // of one slice
  __device__ explicit Slices(int cluster) : units(kUnits / cluster) {}
};

// Sends the accumulators of m64nRPk16, of which warp w owns units 2 w and 2 w + 1: warps of both warpgroups if a
// tile has 128 rows, of one otherwise.
template <int RP>
__device__ __forceinline__ void send_slices(const float (&u)[RP / 2], uint32_t exchange, uint32_t full, int cluster) {
  using S = Slices<RP>;
  const S slices(cluster);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % (S::kUnits / 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int unit = warp * 2 + half, owner = unit / slices.units;
    const uint32_t slice = (cluster_rank() * slices.units + unit % slices.units) * S::kUnit * 16;
    const uint32_t target = remote_address(exchange, owner) + slice, barrier = remote_address(full, owner);
#pragma unroll
    for (int pair = 0; pair < S::kPairs; ++pair)
      store_remote(target + (pair * 32 + lane) * 16, quad(u, half, pair), barrier);
  }
}

// Adds the slices of `row_blocks` rows of tiles one after the other, passes each piece of 16 bytes to put(first row of
// the slice, piece, sum), and signals each sender when it may continue. full, free: the barriers of the first buffer,
// followed by those of the second.
template <int RP, typename Put>
__device__ __forceinline__ void add_slices(Put put, int64_t row0, int row_blocks, const char* exchange, uint32_t full,
                                           uint32_t free, int cluster) {
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
      put(row0, i, sum);
    }
    if (block + kExchanges >= row_blocks) continue;  // no sender waits for this signal; they may have exited
    named_sync(kAdders);
    if (thread < cluster) barrier_arrive_remote(remote_address(free + buffer * 8, thread));
  }
}

// Adds the 16-byte pieces at address(piece) over all CTAs, for pieces from `piece` in steps of kThreads, and stores the
// sums in this CTA. A thread has 8 loads in flight, of as many pieces as a cluster of up to kMost CTAs allows.
template <int kThreads, int kMost, typename Address>
__device__ __forceinline__ void add_pieces(int piece, int last, int cluster, Address address) {
  constexpr int kAtOnce = kMaxCluster / kMost;
  const int own = cluster_rank();
#pragma unroll 1
  for (; piece < last; piece += kAtOnce * kThreads) {
    float4 value[kAtOnce][kMost];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (piece + i * kThreads >= last) break;
      const uint32_t from = address(piece + i * kThreads);
#pragma unroll
      for (int s = 0; s < kMost; ++s) {
        if (s == own) value[i][s] = load_shared(from);
        else if (s < cluster) value[i][s] = load_remote(remote_address(from, s));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (piece + i * kThreads >= last) break;
      float4 sum = value[i][0];
#pragma unroll
      for (int s = 1; s < kMost; ++s)
        if (s < cluster) sum.x += value[i][s].x, sum.y += value[i][s].y, sum.z += value[i][s].z, sum.w += value[i][s].w;
      store_shared(address(piece + i * kThreads), sum);
    }
  }
}

// Pieces of one thread: from `first` up to `last`, in steps of the number of threads.
struct Share {
  int first, last;
};

// Adds the `pieces` over the cluster, a part in each CTA; returns which sums this thread computed.
template <int kThreads, typename Address>
__device__ __forceinline__ Share add_over_cluster(int pieces, int cluster, Address address) {
  const int each = (pieces + cluster - 1) / cluster, begin = cluster_rank() * each;
  const Share share{begin + static_cast<int>(threadIdx.x), min(pieces, begin + each)};
  if (cluster > 4) add_pieces<kThreads, 8>(share.first, share.last, cluster, address);
  else if (cluster > 2) add_pieces<kThreads, 4>(share.first, share.last, cluster, address);
  else if (cluster > 1) add_pieces<kThreads, 2>(share.first, share.last, cluster, address);
  return share;
}

}  // namespace zerolora
