// Sorts the token-expert pairs by expert, stably and without the host: counts the experts in runs of 512 pairs, then
// computes each run's positions from the counts before it. The counts are integers, so the order of additions does not
// matter.
#include "experts.h"

namespace zerolora {
namespace {

constexpr int kSortWarps = kSortPairs / 32, kPlanThreads = 1024;

__device__ __forceinline__ int bucket(const ExpertSort& job, int64_t pair) {
  const int64_t expert = job.index[pair];
  return expert < 0 || expert >= job.E ? job.E : static_cast<int>(expert);
}

// Returns the sum of the values of all earlier threads in the CTA; `sums` has 32 elements.
__device__ __forceinline__ int exclusive_sum(int value, int* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int before = 0;
  for (int w = 0; w < warps; ++w)
    if (w < warp) before += sums[w];
  __syncthreads();
  return before + sum - value;
}

__global__ void __launch_bounds__(kSortPairs) count_kernel(const ExpertSort job) {
  __shared__ int counts[kMaxExperts + 1];
  for (int e = threadIdx.x; e <= job.E; e += kSortPairs) counts[e] = 0;
  __syncthreads();
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kSortPairs + threadIdx.x;
  if (pair < job.N) atomicAdd(counts + bucket(job, pair), 1);
  __syncthreads();
  for (int e = threadIdx.x; e <= job.E; e += kSortPairs)
    job.counts[static_cast<int64_t>(blockIdx.x) * (job.E + 1) + e] = counts[e];
}

__global__ void __launch_bounds__(kSortPairs) place_kernel(const ExpertSort job) {
  __shared__ int first[kMaxExperts + 1], sums[32];
  __shared__ uint16_t in_warp[kSortWarps][kMaxExperts + 1];
  for (int i = threadIdx.x; i < kSortWarps * (kMaxExperts + 1); i += kSortPairs) (&in_warp[0][0])[i] = 0;
  // Find where each expert's rows begin, and how many of them are in earlier runs.
  int begin = 0;
  for (int base = 0; base <= job.E; base += kSortPairs) {
    const int e = base + threadIdx.x;
    int total = 0, before = 0;
    if (e <= job.E)
      for (unsigned run = 0; run < gridDim.x; ++run) {
        const int count = job.counts[static_cast<int64_t>(run) * (job.E + 1) + e];
        if (run < blockIdx.x) before += count;
        total += count;
      }
    const int ahead = begin + exclusive_sum(total, sums);
    if (e <= job.E) first[e] = ahead + before;
    if (e < job.E && blockIdx.x == 0) job.ends[e] = ahead + total;
    if (threadIdx.x == kSortPairs - 1) sums[0] = ahead + total;
    __syncthreads();
    begin = sums[0];
    __syncthreads();
  }
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kSortPairs + threadIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int e = pair < job.N ? bucket(job, pair) : -1;
  unsigned same = 0;
  for (int other = 0; other < 32; ++other) same |= (__shfl_sync(~0u, e, other) == e ? 1u : 0u) << other;
  const int rank = __popc(same & ((1u << lane) - 1));
  if (e >= 0 && rank == 0) in_warp[warp][e] = static_cast<uint16_t>(__popc(same));
  __syncthreads();
  if (e < 0) return;
  int row = first[e] + rank;
  for (int w = 0; w < warp; ++w) row += in_warp[w][e];
  job.order[row] = static_cast<int>(pair);
}

__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const ExpertPlan job) {
  __shared__ int sums[32], total;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kPlanThreads + threadIdx.x;
  if (row < job.N) job.place[job.order[row]] = static_cast<int>(row);
  if (blockIdx.x > 0) return;
  const int e = threadIdx.x;
  const int begin = e == 0 || e >= job.E ? 0 : job.ends[e - 1], end = e < job.E ? job.ends[e] : begin;
  const auto list = [&](int2* target, int64_t room, int rows) {
    const int tiles = (max(end - begin, 0) + rows - 1) / rows, first = exclusive_sum(tiles, sums);
    for (int i = 0; i < tiles; ++i) target[first + i] = make_int2(e, begin + i * rows);
    if (threadIdx.x == kPlanThreads - 1) total = first + tiles;
    __syncthreads();
    for (int64_t i = total + threadIdx.x; i < room; i += kPlanThreads) target[i] = make_int2(-1, 0);
  };
  list(job.pairs, most_pairs(job.N, job.E), kPairRows);
  if (e == 0) job.pairs[most_pairs(job.N, job.E)] = make_int2(total, 0);
  __syncthreads();
  list(job.tiles, most_tiles(job.N, job.E), kTileRows);
}

}  // namespace

cudaError_t launch_expert_sort(const ExpertSort& job, cudaStream_t stream) {
  if (job.E < 1 || job.E > kMaxExperts) return cudaErrorInvalidValue;
  if (job.N == 0) return cudaMemsetAsync(job.ends, 0, job.E * sizeof(int), stream);
  const unsigned runs = static_cast<unsigned>((job.N + kSortPairs - 1) / kSortPairs);
  count_kernel<<<runs, kSortPairs, 0, stream>>>(job);
  place_kernel<<<runs, kSortPairs, 0, stream>>>(job);
  return cudaGetLastError();
}

cudaError_t launch_expert_plan(const ExpertPlan& job, cudaStream_t stream) {
  if (job.E < 1 || job.E > kMaxExperts) return cudaErrorInvalidValue;
  const unsigned blocks = static_cast<unsigned>((job.N + kPlanThreads - 1) / kPlanThreads);
  plan_kernel<<<blocks == 0 ? 1 : blocks, kPlanThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace zerolora
