// Adds the partial sums of rank passes in the order of their splits, scales them, and writes them or adds them to the
// results, in one launch for all results of a group.
#include <algorithm>

#include "sums.cuh"

namespace zerolora {
namespace {

constexpr int kThreads = 256;
struct Jobs {
  Reduction job[kMaxReductions];
  unsigned end[kMaxReductions];  // first block after each job's
  bool discard[kMaxReductions];  // only this job reads these L2 lines
};
constexpr int kLine = 128;  // bytes

// Drops a line from L2 without writing it to memory, because its values are not needed again.
__device__ __forceinline__ void discard_line(const float* line) {
#if __CUDA_ARCH__ >= 800
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(__cvta_generic_to_global(line)) : "memory");
#endif
}

// Adds up to N partial sums, with all loads in flight before the first is added; loading a remainder one by one would
// wait for each load. Positions past the last one reload it without adding it.
template <int N, int V>
__device__ __forceinline__ void add_partials(float (&sum)[V], const float* source, int64_t stride, int first,
                                             int splits) {
  float values[N][V];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float* const from = source + min(first + i, splits - 1) * stride;
    if constexpr (V == 4) *reinterpret_cast<float4*>(values[i]) = __ldcs(reinterpret_cast<const float4*>(from));
    else values[i][0] = *from;
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int k = 0; k < V; ++k) sum[k] += first + i < splits ? values[i][k] : 0.f;
}

// A thread computes V adjacent elements of a row. Rows of partial sums are padded, so reading V stays within them. Four
// blocks per multiprocessor: with eight, 32 registers would halve the loads in flight.
constexpr int kMostBlocks = 4;
template <int V>
__global__ void __launch_bounds__(kThreads, kMostBlocks) reduce_kernel(const __grid_constant__ Jobs jobs) {
  int which = 0;
  while (blockIdx.x >= jobs.end[which]) ++which;
  const Reduction& r = jobs.job[which];
  const uint32_t block = blockIdx.x - (which == 0 ? 0 : jobs.end[which - 1]);
  const int64_t index = static_cast<int64_t>(block) * kThreads + threadIdx.x;
  int64_t row, col;
  const float* source = r.partial;
  if (r.in_units) {
    const uint32_t lane = threadIdx.x % 32, pairs = static_cast<uint32_t>(r.ld_partial) / 16;
    const uint32_t piece = block * (kThreads / 32) + threadIdx.x / 32;
    row = static_cast<int64_t>(piece / pairs) * kUnitRows + lane / 4;
    col = static_cast<int64_t>(piece % pairs) * 16 + quad_column(static_cast<int>(lane)) - r.begin;
    if (row >= r.rows || col < 0 || col >= r.cols) return;
    source += index * V;
  } else {
    const int64_t per_row = (r.cols + V - 1) / V;
    if (index >= r.rows * per_row) return;
    row = index / per_row, col = index % per_row * V;
    source += row * r.ld_partial + col;
  }
  wait_for_predecessor();
  float sum[V] = {};
  int first = 0;
  for (; r.splits - first > 2; first += 8) add_partials<8>(sum, source, r.split_stride, first, r.splits);
  if (first < r.splits) add_partials<2>(sum, source, r.split_stride, first, r.splits);
#pragma unroll
  for (int k = 0; k < V; ++k) sum[k] *= r.scale;
  const int valid = static_cast<int>(min(static_cast<int64_t>(V), r.cols - col));
  write_sums(r.out_dtype, r.out, row * r.ld_out + col, sum, valid, r.accumulate);
  if constexpr (V == 4) {
    constexpr int kReaders = kLine / 16;  // threads that read one line
    if (!jobs.discard[which]) return;
    const int lane = threadIdx.x % 32, reader = lane % kReaders;
    __syncwarp(((1u << kReaders) - 1) << (lane - reader));  // all readers are done
    for (int s = reader; s < r.splits; s += kReaders) discard_line(source - reader * V + s * r.split_stride);
  }
}

// Returns whether only this job reads the cache lines of its partial sums.
bool owns_lines(const Reduction& r) {
  return r.cols == r.ld_partial && reinterpret_cast<uintptr_t>(r.partial) % kLine == 0 &&
         r.split_stride * 4 % kLine == 0 && r.rows * r.cols * 4 % kLine == 0 &&
         (!r.in_units || r.rows % kUnitRows == 0);
}

int64_t count_threads(const Reduction& r, int width) {
  return r.in_units ? unit_rows(r.rows) * r.ld_partial / width : r.rows * ((r.cols + width - 1) / width);
}

// Returns the shared memory per block that limits a multiprocessor to its fraction of the blocks. Without this limit,
// the first free multiprocessors run as many blocks as fit, and few do all reads: 64 of them for 256 blocks.
int spreading_shared_bytes(unsigned blocks, const Device& device) {
  const int share = static_cast<int>((blocks + device.multiprocessors - 1) / device.multiprocessors);
  if (device.capability < 90 || share >= kMostBlocks) return 0;
  constexpr int kReserved = 1024;  // of each block, by the driver
  return std::min(device.shared_bytes, device.shared_bytes_sm / share - kReserved) / 16 * 16;
}

template <int V> cudaError_t launch(const Jobs& jobs, unsigned blocks, const Device& device, cudaStream_t stream) {
  const cudaError_t status = allow_shared_bytes<reduce_kernel<V>>(device.shared_bytes);
  if (status != cudaSuccess) return status;
  return launch_overlapped(reduce_kernel<V>, dim3(blocks), kThreads, spreading_shared_bytes(blocks, device),
                           device.capability >= 90, 1, stream, jobs);
}

cudaError_t launch(const Reduction* unsorted, int count, const Device& device, cudaStream_t stream) {
  Jobs all{};
  Reduction jobs[kMaxReductions];  // the longest first
  std::copy(unsorted, unsorted + count, jobs);
  std::stable_sort(jobs, jobs + count, [](const Reduction& a, const Reduction& b) { return a.splits > b.splits; });
  bool quads = true;  // 16-byte aligned groups of 4 in every row
  for (int i = 0; i < count; ++i)
    quads = quads && jobs[i].ld_partial % 4 == 0 && jobs[i].split_stride % 4 == 0 &&
            reinterpret_cast<uintptr_t>(jobs[i].partial) % 16 == 0;
  const int width = quads ? 4 : 1;
  if (!quads && std::any_of(jobs, jobs + count, [](const Reduction& r) { return r.in_units; }))
    return cudaErrorInvalidValue;
  unsigned blocks = 0;
  for (int i = 0; i < count; ++i) {
    all.job[i] = jobs[i];
    blocks += static_cast<unsigned>((count_threads(jobs[i], width) + kThreads - 1) / kThreads);
    all.end[i] = blocks, all.discard[i] = device.capability >= 80 && owns_lines(jobs[i]);
  }
  if (blocks == 0) return cudaSuccess;
  return quads ? launch<4>(all, blocks, device, stream) : launch<1>(all, blocks, device, stream);
}

}  // namespace

cudaError_t launch_reduce(const Reduction* jobs, int count, const Device& device, cudaStream_t stream) {
  for (int first = 0; first < count; first += kMaxReductions) {
    const int some = count - first < kMaxReductions ? count - first : kMaxReductions;
    const cudaError_t status = launch(jobs + first, some, device, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace zerolora
