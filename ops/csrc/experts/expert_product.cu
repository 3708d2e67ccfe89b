// The frozen product of all experts fused with the adapter's term, on Hopper (sm_90a):
//     Y[N,D] = H[N,R] Q + X[N,K] W   for rows sorted by expert, each with its expert's W and Q; fp32 sums, rounded once
//
// Like frozen.cu, it uses frozen_tiles.cuh: clusters of two CTAs of adjacent rows share W. A cluster's tile has 256
// rows of one expert and 256 columns; the list of tiles is on the device. An expert's rows seldom fill its last tile: a
// warpgroup without rows multiplies nothing, and a partial tile is stored row by row, because the next rows belong to
// another expert.
#ifdef ZEROLORA_HOPPER
#include "frozen_tiles.cuh"
#endif
#include <algorithm>

#include "experts.h"

namespace zerolora {
#ifdef ZEROLORA_HOPPER
namespace {

struct GroupedArgs {
  CUtensorMap x, w, h, q, y;
  int depth_tiles, rank_tiles, R, col_tiles;
  int64_t K, D;
  const int2* pairs;  // expert and first row
  const int *pair_count, *ends;
  void* out;
};

struct GroupedWalk {
  int tile = static_cast<int>(blockIdx.x) / kCluster, tiles, expert = 0, row = 0, end = 0, col = 0;
  __device__ __forceinline__ explicit GroupedWalk(const GroupedArgs& args) : tiles(*args.pair_count * args.col_tiles) {
    locate(args);
  }
  __device__ __forceinline__ bool inside() const { return tile < tiles; }
  __device__ __forceinline__ void next(const GroupedArgs& args) {
    tile += static_cast<int>(gridDim.x) / kCluster;
    locate(args);
  }
  __device__ __forceinline__ void locate(const GroupedArgs& args) {
    if (!inside()) return;
    const int2 pair = args.pairs[tile / args.col_tiles];
    expert = pair.x, row = pair.y + cluster_rank() * kRows, end = args.ends[expert];
    col = tile % args.col_tiles * kCols;
  }
};

template <bool kForward> __device__ __forceinline__ void copy_grouped(const GroupedArgs& args, uint32_t base) {
  const Barriers barriers{base + kBarriers};
  const int rank = cluster_rank();
  Ring at;
  for (GroupedWalk walk(args); walk.inside(); walk.next(args)) {
    const auto fill = [&](const CUtensorMap* x, const CUtensorMap* w, int k, int depth) {
      const uint32_t stage = base + at.stage * kStageBytes, ready = barriers.full(at.stage);
      barrier_wait(barriers.empty(at.stage), at.parity ^ 1);
      barrier_expect(ready, kStageBytes);
      copy_box(stage, x, k, walk.row, ready);
      constexpr int kShare = kCols / kCluster, kStep = kForward ? kShare : kBoxCols;
      // Weights of consecutive experts are adjacent: what a box reads beyond its expert is multiplied by zeros of X, or
      // not stored.
      const int first = walk.expert * (kForward ? static_cast<int>(args.D) : depth);
#pragma unroll
      for (int i = 0; i < kShare; i += kStep) {
        const int col = rank * kShare + i, at_col = walk.col + col;
        const uint32_t target = stage + kXBytes + col * kBoxRow;
        copy_box(target, w, kForward ? k : at_col, first + (kForward ? at_col : k), ready, (1 << kCluster) - 1);
      }
      at.next(kStages);
    };
    for (int i = args.rank_tiles; i-- > 0;) fill(&args.h, &args.q, i * kDepth, args.R);
    for (int i = 0; i < args.depth_tiles; ++i) fill(&args.x, &args.w, i * kDepth, static_cast<int>(args.K));
  }
}

// Stores 64 columns of a warpgroup's rows; rows from `end` belong to another expert.
template <typename T, int kBox>
__device__ __forceinline__ void store_grouped(const GroupedArgs& args, const float (&c)[128], int row, int end, int col,
                                              uint32_t boxes) {
  const int thread = threadIdx.x % 128, group = threadIdx.x / 128, lane = threadIdx.x % 32, buffer = kBox % kBuffers;
  const int box_row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  const uint32_t box = boxes + buffer * kOutBytes;
  col += kBox * kBoxCols;
  to_shared<T, false, kBox>(c, nullptr, 0, box + box_row * kBoxRow + (lane / 16 ^ box_row % 8) * 16);
  const bool leader = thread == 0, whole = row + kGroupRows <= end;
  if (leader) store_wait<0>();  // wait for the other box's store: every warp may write it after the barrier
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
  if (col >= args.D) return;
  if (whole) {
    if (leader) store_box(&args.y, col, row, box), store_commit();
    return;
  }
#pragma unroll
  for (int i = 0; i < kGroupRows * 8 / 128; ++i) {
    const int at = i * 128 + thread, r = at / 8, piece = at % 8;
    if (row + r >= end || col + piece * 8 >= args.D) continue;
    const float4 values = load_shared(box + r * kBoxRow + (piece ^ r % 8) * 16);
    T* const target = static_cast<T*>(args.out) + (row + r) * args.D + col + piece * 8;
    *reinterpret_cast<float4*>(target) = values;
  }
}

template <typename T, bool kForward>
__device__ __forceinline__ void multiply_grouped(const GroupedArgs& args, uint32_t base) {
  const Barriers barriers{base + kBarriers};
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform, so that descriptors use uniform registers
  const int thread = threadIdx.x % 128;
  const uint32_t boxes = base + kOut + group * kBuffers * kOutBytes;
  Ring at, done;
  float c[128];
  const auto release = [&] {
    if (thread < kCluster) barrier_arrive_remote(remote_address(barriers.empty(done.stage), thread));
    done.next(kStages);
  };
  const auto multiply = [&](int steps, bool first) {
    const uint32_t x = base + at.stage * kStageBytes, w = x + kXBytes;
    const uint64_t a = descriptor<1024, Swizzle::b128>(x + group * kGroupRows * kBoxRow);
    const uint64_t b = descriptor<1024, Swizzle::b128, kForward ? 16 : kAtomBytes>(w);
    barrier_wait(barriers.full(at.stage), at.parity);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (k < steps)
        wgmma<T, 0, !kForward>(c, advance(a, k * 32), advance(b, k * (kForward ? 32 : 16 * kBoxRow)), !first || k > 0);
    wgmma_commit();
    at.next(kStages);
    wgmma_wait<1>();
    if (!first) release();
  };
  const int short_steps = (args.R % kDepth + 15) / 16 % 4;  // of the partial rank tile
  const int stages = args.rank_tiles + args.depth_tiles;
  GroupedWalk walk(args);
  while (walk.inside()) {
    const int row = walk.row + group * kGroupRows, end = walk.end, col = walk.col;
    if (row >= end) {  // no rows: release the stages unread
      for (int i = 0; i < stages; ++i) {
        barrier_wait(barriers.full(at.stage), at.parity);
        at.next(kStages);
        release();
      }
      walk.next(args);
      continue;
    }
    bool first = true;
    int left = stages;
    if (short_steps > 0) multiply(short_steps, true), first = false, --left;
    for (; left > 0; --left, first = false) multiply(4, first);
    walk.next(args);
    wgmma_wait<0>();
    hold(c);
    release();
    store_grouped<T, 0>(args, c, row, end, col, boxes);
    store_grouped<T, 1>(args, c, row, end, col, boxes);
    store_grouped<T, 2>(args, c, row, end, col, boxes);
    store_grouped<T, 3>(args, c, row, end, col, boxes);
  }
  if (thread == 0) store_wait<0>();  // shared memory must outlive its readers
}

template <typename T, bool kForward>
__global__ void __launch_bounds__(kThreads, 1) grouped_kernel(const __grid_constant__ GroupedArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw[];
  const uint32_t base = (shared_address(raw) + 1023) / 1024 * 1024;
  init_barriers({base + kBarriers});
  if (threadIdx.x < kConsumers) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    multiply_grouped<T, kForward>(args, base);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopierRegisters));
    if (threadIdx.x == kConsumers) copy_grouped<kForward>(args, base);
  }
  cluster_sync();  // do not exit while the other CTA still signals these barriers
#endif
}

template <typename T, bool kForward>
cudaError_t launch(const GroupedArgs& args, int64_t most, const Device& device, cudaStream_t stream) {
  const cudaError_t status = allow_shared_bytes<grouped_kernel<T, kForward>>(kBytes);
  if (status != cudaSuccess) return status;
  // The two CTAs of a cluster share a GPC, which may have an odd number of multiprocessors.
  const int64_t ctas = std::min<int64_t>(device.multiprocessors / kCluster, most * args.col_tiles) * kCluster;
  return launch_overlapped(grouped_kernel<T, kForward>, dim3(static_cast<unsigned>(ctas)), kThreads, kBytes, true,
                           kCluster, stream, args);
}

}  // namespace

bool expert_product_supported(const ExpertProduct& job, const Device& device) {
  constexpr int64_t kMost = int64_t{1} << 30;  // the copy engine has 32-bit coordinates
  if (device.capability != 90 || job.dtype == DType::f32 || job.K < 1 || job.K % 8 != 0 || job.D % 8 != 0) return false;
  if (job.N > kMost || job.E * std::max(job.D, job.K) > kMost || job.R % 8 != 0) return false;
  for (const void* pointer : {job.x, job.w, job.h, job.q, static_cast<const void*>(job.y)})
    if (!aligned(pointer, 0)) return false;
  return true;
}

cudaError_t launch_expert_product(const ExpertProduct& job, const Device& device, cudaStream_t stream) {
  if (job.N == 0 || job.D == 0) return cudaSuccess;
  GroupedArgs args{};
  args.K = job.K, args.D = job.D, args.R = job.R, args.out = job.y;
  args.depth_tiles = static_cast<int>((job.K + kDepth - 1) / kDepth), args.rank_tiles = (job.R + kDepth - 1) / kDepth;
  args.col_tiles = static_cast<int>((job.D + kCols - 1) / kCols);
  args.pairs = job.pairs, args.pair_count = job.pair_count, args.ends = job.ends;
  const auto map_w = [&](CUtensorMap* map, const void* w, int64_t depth) {
    return job.forward ? make_map(map, job.dtype, w, depth, job.E * job.D, depth, kCols / kCluster, kDepth)
                       : make_map(map, job.dtype, w, job.D, job.E * depth, job.D, kDepth, kBoxCols);
  };
  cudaError_t status = make_map(&args.y, job.dtype, job.y, job.D, job.N, job.D, kGroupRows, kBoxCols);
  if (status == cudaSuccess) status = make_map(&args.x, job.dtype, job.x, job.K, job.N, job.K, kRows, kDepth);
  if (status == cudaSuccess) status = map_w(&args.w, job.w, job.K);
  if (status == cudaSuccess && job.R > 0)
    status = make_map(&args.h, job.dtype, job.h, job.R, job.N, job.R, kRows, kDepth);
  if (status == cudaSuccess && job.R > 0) status = map_w(&args.q, job.q, job.R);
  if (status != cudaSuccess) return status;
  const int64_t most = most_pairs(job.N, job.E);
  const bool half = job.dtype == DType::f16;
  if (job.forward)
    return half ? launch<__half, true>(args, most, device, stream)
                : launch<__nv_bfloat16, true>(args, most, device, stream);
  return half ? launch<__half, false>(args, most, device, stream)
              : launch<__nv_bfloat16, false>(args, most, device, stream);
}
#else
bool expert_product_supported(const ExpertProduct&, const Device&) { return false; }
cudaError_t launch_expert_product(const ExpertProduct&, const Device&, cudaStream_t) { return cudaErrorNotSupported; }
#endif

}  // namespace zerolora
