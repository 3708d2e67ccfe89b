// The frozen product fused with the adapter's term, on Hopper (sm_90a):
//     Y[T,D] = keep * (H[T,R] Q) + sum over parts of X[T,K] W (+ bias[D]),   fp32 sums, rounded once
//
// One CTA per multiprocessor iterates over tiles of 128 rows x 256 columns. A copying thread fills a ring of stages, 64
// deep in K: H and Q first, then X and W of every part; two warpgroups of 64 rows multiply. Two CTAs of adjacent rows
// form a cluster and share W: each copies its part of a stage to both. Between the adapter's products and the others
// the accumulators are masked, with bits from an earlier pass that are fetched one tile ahead. The sums are stored
// through two swizzled boxes per warpgroup while the ring already receives the next tile.
#ifdef ZEROLORA_HOPPER  // set by the builder for builds that contain sm_90a
#include "frozen_tiles.cuh"
#endif
#include <algorithm>

#include "kernels.h"

namespace zerolora {
#ifdef ZEROLORA_HOPPER
namespace {

template <bool kForward> __device__ __forceinline__ void copy_tiles(const Args& args, uint32_t base) {
  const Barriers barriers{base + kBarriers};
  const int rank = cluster_rank();
  Ring at;
  for (Walk walk(args); walk.inside(args); walk.next(args)) {
    const auto fill = [&](const CUtensorMap* x, const CUtensorMap* w, int k) {
      const uint32_t stage = base + at.stage * kStageBytes, ready = barriers.full(at.stage);
      barrier_wait(barriers.empty(at.stage), at.parity ^ 1);
      barrier_expect(ready, kStageBytes);
      copy_box(stage, x, k, walk.row, ready);
      constexpr int kShare = kCols / kCluster, kStep = kForward ? kShare : kBoxCols;
#pragma unroll
      for (int i = 0; i < kShare; i += kStep) {
        const int col = rank * kShare + i, at_col = walk.col + col;
        const uint32_t target = stage + kXBytes + col * kBoxRow;  // 64 columns are 64 rows of 128 bytes either way
        copy_box(target, w, kForward ? k : at_col, kForward ? at_col : k, ready, (1 << kCluster) - 1);
      }
      at.next(kStages);
    };
    for (int i = args.rank_tiles; i-- > 0;) fill(&args.h, &args.q, i * kDepth);  // the partial one first
    for (int part = 0; part < args.parts; ++part)
      for (int i = 0; i < args.depth_tiles[part]; ++i) fill(&args.x[part], &args.w[part], i * kDepth);
  }
  let_successor_start();
}

template <typename T, bool kForward, bool kMore>
__device__ __forceinline__ void multiply_tiles(const Args& args, uint32_t base) {
  constexpr bool kBias = kForward && kMore, kMask = !kForward && kMore;
  const Barriers barriers{base + kBarriers};
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform, so that descriptors use uniform registers
  const int thread = threadIdx.x % 128;
  const uint32_t boxes = base + kOut + group * kBuffers * kOutBytes;
  Ring at, done;
  float c[128];
  Kept kept;
  const auto release = [&] {
    if (thread < kCluster) barrier_arrive_remote(remote_address(barriers.empty(done.stage), thread));
    done.next(kStages);
  };
  // Leaves its products in flight to keep the tensor cores busy, and waits for the previous stage's products.
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
  const int whole_ranks = args.rank_tiles - (short_steps > 0 ? 1 : 0);
  Walk walk(args);
  if constexpr (kMask) kept.load(args, walk.row, walk.col);
  while (walk.inside(args)) {
    bool first = true;
    if (short_steps > 0) multiply(short_steps, true), first = false;
    int tiles = whole_ranks + args.all_depth_tiles;
    if constexpr (kMask) {
      for (; tiles > args.all_depth_tiles; --tiles, first = false) multiply(4, first);
      wgmma_wait<0>();
      hold(c);
      kept.apply(c);
    }
    for (; tiles > 0; --tiles, first = false) multiply(4, first);
    const int row = walk.row + group * kGroupRows, col = walk.col;
    walk.next(args);
    if constexpr (kMask)
      if (walk.inside(args)) kept.load(args, walk.row, walk.col);  // in flight while this tile is stored
    wgmma_wait<0>();
    hold(c);
    release();
    store_columns<T, kBias, 0>(args, c, row, col, boxes);
    store_columns<T, kBias, 1>(args, c, row, col, boxes);
    store_columns<T, kBias, 2>(args, c, row, col, boxes);
    store_columns<T, kBias, 3>(args, c, row, col, boxes);
  }
  if (thread == 0) store_wait<0>();  // shared memory must outlive its readers
}

// kMore: with a bias (forward) or a mask (backward).
template <typename T, bool kForward, bool kMore>
__global__ void __launch_bounds__(kThreads, 1) frozen_kernel(const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw[];
  const uint32_t base = (shared_address(raw) + 1023) / 1024 * 1024;
  init_barriers({base + kBarriers});
  if (threadIdx.x < kConsumers) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    multiply_tiles<T, kForward, kMore>(args, base);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopierRegisters));
    if (threadIdx.x == kConsumers) copy_tiles<kForward>(args, base);
  }
  cluster_sync();  // do not exit while the other CTA still signals these barriers
#endif
}

template <auto kKernel> int slots(const Device& device) {
  static std::atomic<int> known;
  if (known.load() == 0) {
    const int clusters = device.multiprocessors / kCluster;
    known.store(count_concurrent_ctas(kKernel, clusters * kCluster, kThreads, kBytes, kCluster, clusters - 2));
  }
  return known.load();
}

template <typename T, bool kForward, bool kMore>
cudaError_t launch(const Args& args, const Device& device, cudaStream_t stream) {
  constexpr auto kernel = frozen_kernel<T, kForward, kMore>;
  const cudaError_t status = allow_shared_bytes<frozen_kernel<T, kForward, kMore>>(kBytes);
  if (status != cudaSuccess) return status;
  const int ctas = std::min(slots<frozen_kernel<T, kForward, kMore>>(device), args.tiles * kCluster);
  return launch_overlapped(kernel, dim3(static_cast<unsigned>(ctas)), kThreads, kBytes, true, kCluster, stream, args);
}

template <typename T>
cudaError_t dispatch(const Args& args, bool forward, const Device& device, cudaStream_t stream) {
  if (forward)
    return args.bias != nullptr ? launch<T, true, true>(args, device, stream)
                                : launch<T, true, false>(args, device, stream);
  return args.bits != nullptr && args.R > 0 ? launch<T, false, true>(args, device, stream)
                                            : launch<T, false, false>(args, device, stream);
}

cudaError_t describe(Args& args, const Frozen& job) {
  const auto map_w = [&](CUtensorMap* map, const void* w, int64_t ld, int64_t depth) {
    return job.forward ? make_map(map, job.dtype, w, ld, job.D, depth, kCols / kCluster, kDepth)
                       : make_map(map, job.dtype, w, ld, depth, job.D, kDepth, kBoxCols);
  };
  args.parts = job.parts, args.R = job.R, args.rank_tiles = (job.R + kDepth - 1) / kDepth;
  args.bias = job.bias, args.bits = job.bits, args.T = job.T, args.D = job.D;
  args.row_tiles = static_cast<int>((job.T + kRows * kCluster - 1) / (kRows * kCluster));
  args.col_tiles = static_cast<int>((job.D + kCols - 1) / kCols);
  args.tiles = args.row_tiles * args.col_tiles;
  cudaError_t status = make_map(&args.y, job.dtype, job.y, job.ldy, job.T, job.D, kGroupRows, kBoxCols);
  if (status == cudaSuccess && job.R > 0)
    status = make_map(&args.h, job.dtype, job.h, job.ldh, job.T, job.R, kRows, kDepth);
  if (status == cudaSuccess && job.R > 0) status = map_w(&args.q, job.q, job.ldq, job.R);
  for (int i = 0; i < job.parts; ++i) {
    const FrozenPart& part = job.part[i];
    args.depth_tiles[i] = static_cast<int>((part.K + kDepth - 1) / kDepth);
    args.all_depth_tiles += args.depth_tiles[i];
    if (status == cudaSuccess) status = make_map(&args.x[i], job.dtype, part.x, part.ldx, job.T, part.K, kRows, kDepth);
    if (status == cudaSuccess) status = map_w(&args.w[i], part.w, part.ldw, part.K);
  }
  return status;
}

}  // namespace

bool frozen_supported(const Frozen& job, const Device& device) {
  constexpr int64_t kMost = int64_t{1} << 30;  // the copy engine has 32-bit coordinates
  if (device.capability != 90 || job.dtype == DType::f32 || job.parts < 1 || job.parts > kMaxParts) return false;
  if (job.T > kMost || job.D > kMost || job.D % 8 != 0 || !aligned(job.y, job.ldy) || !aligned(job.bias, 0))
    return false;
  if (job.R > 0 && !(aligned(job.h, job.ldh) && aligned(job.q, job.ldq))) return false;
  if ((job.forward ? job.bits != nullptr : job.bias != nullptr) || !aligned(job.bits, 0)) return false;
  for (int i = 0; i < job.parts; ++i) {
    const FrozenPart& part = job.part[i];
    if (part.K < 1 || part.K > kMost || !aligned(part.x, part.ldx) || !aligned(part.w, part.ldw)) return false;
  }
  return true;
}

cudaError_t launch_frozen(const Frozen& job, const Device& device, cudaStream_t stream) {
  if (job.T == 0 || job.D == 0) return cudaSuccess;
  Args args{};
  const cudaError_t status = describe(args, job);
  if (status != cudaSuccess) return status;
  return job.dtype == DType::f16 ? dispatch<__half>(args, job.forward, device, stream)
                                 : dispatch<__nv_bfloat16>(args, job.forward, device, stream);
}
#else
bool frozen_supported(const Frozen&, const Device&) { return false; }
cudaError_t launch_frozen(const Frozen&, const Device&, cudaStream_t) { return cudaErrorNotSupported; }
#endif

}  // namespace zerolora
