// The rank-space primitive on Hopper (sm_90a): Z arrives once through the bulk copy engine, wgmma reads it from shared
// memory twice, along its columns for U and along its rows for G.
//
// One CTA a multiprocessor: a copying thread, two warpgroups that draw the dropout mask into the tile (passes over x
// only), and two that multiply, on tiles of 128 rows x 128 columns:
//     U[64 rows of this warpgroup, R]     += Z[64, 128] P[128, R]        over the CTA's column blocks
//     G[64 columns of this warpgroup, R]  += Z[128, 64]^T V[128, R]      over the CTA's row blocks
#ifdef ZEROLORA_HOPPER  // set by the builder for builds that hold sm_90a, from CUDA 12.0
#include "hopper.cuh"

namespace zerolora {
namespace {

constexpr int kRows = kWgmmaRows, kCols = kWgmmaCols, kConsumers = 256, kCopiers = 128, kMaskerRegisters = 48;
constexpr int kBox = 64 * 2;              // bytes in a row of a box of Z: one 128-byte swizzle atom
constexpr int kHalfBytes = kRows * kBox;  // 128 rows x 64 columns
constexpr int kTileBytes = 2 * kHalfBytes;

struct Args {
  CUtensorMap z, p, v;
  int64_t T, D, rows_per_split, cols_per_split;
  Dropout dropout;
  float *u, *g;
  bool g_by_rank;
};

template <int RP, int kBlocks, bool kU, bool kG> struct Layout {
  static constexpr int kMaskers = kU && kG ? 0 : 256;  // dY is never dropped
  static constexpr int kThreads = kConsumers + kCopiers + kMaskers;
  // setmaxnreg moves registers within what the launch gave: 168 each to 384 threads, 96 each to 640. Asking for more
  // than the others return waits for ever: 128 * (2 * 216 + 56) <= 384 * 168, 128 * (2 * 176 + 24 + 2 * 48) <= 640
  // * 96.
  static constexpr int kConsumerRegisters = kMaskers == 0 ? 216 : 176, kCopierRegisters = kMaskers == 0 ? 56 : 24;
  static_assert(128 * (2 * kConsumerRegisters + kCopierRegisters) + kMaskers * kMaskerRegisters <=
                    kThreads * (65536 / kThreads / 8 * 8),
                "the warpgroups ask for more registers than there are");
  static constexpr int kVBytes = kG ? kRows * RP * 2 : 0;
  static constexpr int kPBytes = kU && kG ? kBlocks * kCols * RP * 2 : 0;  // both: P of the CTA's columns stays
  static constexpr int kPTileBytes = kU && !kG ? kCols * RP * 2 : 0;       // U alone: P travels with each tile
  static constexpr int kStages = RP == 64 ? 4 : 5;
  // A slot of V is overwritten when the tile `kStages` back is done: with 4 blocks to a row that is a row later.
  static constexpr int kVSlots = kG ? (kBlocks >= kStages - 1 ? 2 : kStages) : 0;
  static constexpr int kStageBytes = kTileBytes + kPTileBytes;
  static constexpr int kBarriers = kPBytes + kStages * kStageBytes + kVSlots * kVBytes;
  static constexpr int kBytes = 1024 + kBarriers + (3 * kStages + 1) * 8;  // 1024: the atoms want that alignment
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

template <int RP> __device__ __forceinline__ void store_u(const float (&u)[RP / 2], const Args& a, int64_t row0) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* base = a.u + static_cast<int64_t>(blockIdx.y) * a.T * RP;
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

template <int RP> __device__ __forceinline__ void store_g(const float (&g)[RP / 2], const Args& a, int64_t col0) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* base = a.g + static_cast<int64_t>(blockIdx.x) * a.D * RP;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t col = col0 + warp * 16 + lane / 4 + half * 8;
    if (col >= a.D) continue;
#pragma unroll
    for (int n = 0; n < RP / 8; ++n) {
      const int rank = n * 8 + lane % 4 * 2;
      const float low = g[n * 4 + half * 2], high = g[n * 4 + half * 2 + 1];
      if (a.g_by_rank) base[rank * a.D + col] = low, base[(rank + 1) * a.D + col] = high;
      else *reinterpret_cast<float2*>(base + col * RP + rank) = make_float2(low, high);
    }
  }
}

template <int RP, int kBlocks, bool kU, bool kG>
__device__ __forceinline__ void copy_tiles(const Args& a, uint32_t base, int tiles, int col_blocks, int64_t row0,
                                           int64_t col0) {
  using L = Layout<RP, kBlocks, kU, kG>;
  const uint32_t ring = base + L::kPBytes, v = ring + L::kStages * L::kStageBytes;
  const Barriers<L::kStages> barriers{base + L::kBarriers};
  if constexpr (kU && kG) {
    barrier_expect(barriers.p_full(), L::kPBytes);
    for (int block = 0; block < kBlocks; ++block)
      copy_box(base + block * kCols * RP * 2, &a.p, 0, static_cast<int>(col0) + block * kCols, barriers.p_full());
  }
  Ring at;
  for (int tile = 0; tile < tiles; ++tile, at.next(L::kStages)) {
    const int row = static_cast<int>(row0) + tile / col_blocks * kRows, block = tile % col_blocks;
    const int col = static_cast<int>(col0) + block * kCols;
    const uint32_t stage = ring + at.stage * L::kStageBytes, ready = barriers.full(at.stage);
    barrier_wait(barriers.empty(at.stage), at.parity ^ 1);
    barrier_expect(ready, kTileBytes + L::kPTileBytes + (kG && block == 0 ? L::kVBytes : 0));
    copy_box(stage, &a.z, col, row, ready);
    copy_box(stage + kHalfBytes, &a.z, col + 64, row, ready);
    if constexpr (kG)
      if (block == 0) copy_box(v + tile / col_blocks % L::kVSlots * L::kVBytes, &a.v, 0, row, ready);
    if constexpr (kU && !kG) {
      copy_box(stage + kTileBytes, &a.p, col, 0, ready);
      copy_box(stage + kTileBytes + RP * kBox, &a.p, col + 64, 0, ready);
    }
  }
}

// Drops elements in place; wgmma reads shared memory through another proxy, hence the fence.
template <int RP, int kBlocks, bool kU, bool kG>
__device__ __forceinline__ void mask_tiles(const Args& a, char* shared, int tiles, int col_blocks, int64_t row0,
                                           int64_t col0) {
  using L = Layout<RP, kBlocks, kU, kG>;
  const Barriers<L::kStages> barriers{shared_address(shared) + L::kBarriers};
  const Mask mask(a.dropout, a.D);
  Ring at;
  for (int tile = 0; tile < tiles; ++tile, at.next(L::kStages)) {
    const int64_t tile_row = row0 + tile / col_blocks * kRows, tile_col = col0 + tile % col_blocks * kCols;
    uint4* const values = reinterpret_cast<uint4*>(shared + L::kPBytes + at.stage * L::kStageBytes);
    constexpr int kBatch = 4;  // independent draws, so that one's latency hides behind the others
    for (int first = threadIdx.x - kConsumers - kCopiers; first < kTileBytes / 16; first += kBatch * L::kMaskers) {
      uint4 keep[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = first + b * L::kMaskers;
        const int half = i / (kHalfBytes / 16), row = i / 8 % kRows, chunk = (i ^ row) % 8;  // the atom's swizzle
        keep[b] = mask.draw(tile_row + row, tile_col + half * 64 + chunk * 8);
      }
      if (first < L::kMaskers) barrier_wait(barriers.full(at.stage), at.parity);  // the first draws need no tile
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        uint4* const chunk = values + first + b * L::kMaskers;
        *chunk = mask.zero(*chunk, keep[b]);
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_arrive(barriers.masked(at.stage));
  }
}

template <typename T, int RP, int kBlocks, bool kU, bool kG>
__device__ __forceinline__ void consume_tiles(const Args& a, uint32_t base, int tiles, int64_t row0, int64_t col0) {
  using L = Layout<RP, kBlocks, kU, kG>;
  const uint32_t ring = base + L::kPBytes, v = ring + L::kStages * L::kStageBytes;
  const Barriers<L::kStages> barriers{base + L::kBarriers};
  const int group = threadIdx.x / 128;
  const bool dropout = a.dropout.seed != nullptr;
  float u[RP / 2] = {};
  float g[kG ? kBlocks : 1][RP / 2] = {};
  Ring at;
  auto arrive = [&] {
    barrier_wait(dropout ? barriers.masked(at.stage) : barriers.full(at.stage), at.parity);
    wgmma_fence();
    return ring + at.stage * L::kStageBytes;
  };
  auto release = [&] {
    wgmma_commit();
    wgmma_wait();
    if (threadIdx.x % 128 == 0) barrier_arrive(barriers.empty(at.stage));
    at.next(L::kStages);
  };
  if constexpr (kU && kG) barrier_wait(barriers.p_full(), 0);
  if constexpr (kG) {
    for (int block_row = 0; block_row * kBlocks < tiles; ++block_row) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const uint32_t z = arrive();
        if constexpr (kU) tile_u<T, RP, false>(u, z, base + block * kCols * RP * 2, group);
        tile_g<T, RP>(g[block], z, v + block_row % L::kVSlots * L::kVBytes, group);
        release();
        hold(u);
        hold(g[block]);
        if (block == kBlocks - 1 && (block_row + 1) * kBlocks >= tiles) let_successor_start();
      }
      if constexpr (kU) {
        store_u<RP>(u, a, row0 + block_row * kRows);
#pragma unroll
        for (int i = 0; i < RP / 2; ++i) u[i] = 0.f;
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)  // warps 0-3 hold the first 64 columns of a block, 4-7 the others
      store_g<RP>(g[block], a, col0 + block * kCols);
  } else {
    for (int tile = 0; tile < tiles; ++tile) {
      const uint32_t z = arrive();
      tile_u<T, RP, true>(u, z, z + kTileBytes, group);
      release();
      hold(u);
    }
    let_successor_start();
    store_u<RP>(u, a, row0);
  }
}

template <typename T, int RP, int kBlocks, bool kU, bool kG>
__global__ void __launch_bounds__(Layout<RP, kBlocks, kU, kG>::kThreads, 1)
    wgmma_kernel(const __grid_constant__ Args a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = Layout<RP, kBlocks, kU, kG>;
  extern __shared__ char raw[];
  char* const shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const Barriers<L::kStages> barriers{shared_address(shared) + L::kBarriers};
  const int64_t col0 = blockIdx.y * a.cols_per_split, row0 = blockIdx.x * a.rows_per_split;
  const int64_t col_end = min(a.D, col0 + a.cols_per_split), row_end = min(a.T, row0 + a.rows_per_split);
  const int col_blocks = kG ? kBlocks : static_cast<int>((col_end - col0 + kCols - 1) / kCols);
  const int tiles = static_cast<int>((row_end - row0 + kRows - 1) / kRows) * col_blocks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      barrier_init(barriers.full(i), 1);
      barrier_init(barriers.empty(i), 2);
      barrier_init(barriers.masked(i), L::kMaskers > 0 ? L::kMaskers : 1);
    }
    barrier_init(barriers.p_full(), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  wait_for_predecessor();
  if (threadIdx.x < kConsumers) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(L::kConsumerRegisters));
    consume_tiles<T, RP, kBlocks, kU, kG>(a, shared_address(shared), tiles, row0, col0);
  } else if (threadIdx.x < kConsumers + kCopiers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(L::kCopierRegisters));
    if (threadIdx.x == kConsumers)
      copy_tiles<RP, kBlocks, kU, kG>(a, shared_address(shared), tiles, col_blocks, row0, col0);
  } else if constexpr (L::kMaskers > 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kMaskerRegisters));
    if (a.dropout.seed != nullptr) mask_tiles<RP, kBlocks, kU, kG>(a, shared, tiles, col_blocks, row0, col0);
  }
#endif
}

template <typename T, int RP, int kBlocks, bool kU, bool kG>
cudaError_t launch(const Args& args, const Plan& plan, cudaStream_t stream) {
  const auto kernel = wgmma_kernel<T, RP, kBlocks, kU, kG>;
  constexpr int kBytes = Layout<RP, kBlocks, kU, kG>::kBytes;
  static_assert(kBytes <= 232448, "more shared memory than a Hopper block may have");
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  return launch_overlapped(kernel, dim3(static_cast<unsigned>(plan.t_splits), static_cast<unsigned>(plan.d_splits)),
                           Layout<RP, kBlocks, kU, kG>::kThreads, kBytes, true, stream, args);
}

template <typename T, int RP>
cudaError_t dispatch(const Args& args, bool u, bool g, const Plan& plan, cudaStream_t stream) {
  if (!g) return launch<T, RP, 1, true, false>(args, plan, stream);
  const bool wide = plan.d_blocks_per_cta == kWgmmaBlocks;
  if (!u)
    return wide ? launch<T, RP, kWgmmaBlocks, false, true>(args, plan, stream)
                : launch<T, RP, 1, false, true>(args, plan, stream);
  return wide ? launch<T, RP, kWgmmaBlocks, true, true>(args, plan, stream)
              : launch<T, RP, 1, true, true>(args, plan, stream);
}

template <typename T>
cudaError_t dispatch_rank(const Args& args, bool u, bool g, const Plan& plan, cudaStream_t stream) {
  switch (plan.rank_pad) {
    case 16: return dispatch<T, 16>(args, u, g, plan, stream);
    case 32: return dispatch<T, 32>(args, u, g, plan, stream);
    case 64: return dispatch<T, 64>(args, u, g, plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_rank_wgmma(const RankPass& pass, const Plan& plan, float* u_partial, float* g_partial,
                              cudaStream_t stream) {
  Args args{};
  args.T = pass.T, args.D = pass.D, args.rows_per_split = plan.rows_per_split,
  args.cols_per_split = plan.cols_per_split;
  args.dropout = pass.dropout, args.u = u_partial, args.g = g_partial, args.g_by_rank = pass.g_by_rank;
  cudaError_t status = make_map(&args.z, pass.dtype, pass.z, pass.ldz, pass.T, pass.D, kRows, 64);
  if (status == cudaSuccess && pass.p != nullptr)
    status = pass.p_by_rank ? make_map(&args.p, pass.dtype, pass.p, pass.ldp, pass.R, pass.D, plan.rank_pad, 64)
                            : make_map(&args.p, pass.dtype, pass.p, pass.ldp, pass.D, pass.R, kCols, plan.rank_pad);
  if (status == cudaSuccess && pass.v != nullptr)
    status = make_map(&args.v, pass.dtype, pass.v, pass.ldv, pass.T, pass.R, kRows, plan.rank_pad);
  if (status != cudaSuccess) return status;
  const bool u = pass.p != nullptr, g = pass.v != nullptr;
  return pass.dtype == DType::f16 ? dispatch_rank<__half>(args, u, g, plan, stream)
                                  : dispatch_rank<__nv_bfloat16>(args, u, g, plan, stream);
}

}  // namespace zerolora
#endif
