// The rank-space primitive on Hopper (sm_90a): the bulk copy engine loads Z once, and wgmma reads it from shared memory
// twice, along its columns for U and along its rows for G.
//
// One CTA per multiprocessor: a copying thread, up to four warpgroups that draw the dropout mask into the tile (passes
// over x only), and two that multiply, on tiles of 128 columns and 128 rows (64 if both results are needed above rank
// 16):
//     U[64 rows of this warpgroup, R]     += Z[64, 128] P[128, R]         over the CTA's column blocks
//     G[64 columns of this warpgroup, R]  += Z[rows, 64]^T V[rows, R]     over the CTA's row blocks
// The CTAs of a cluster add their sums through shared memory (exchange.cuh), in the order of their columns or rows: a
// cluster stores one partial sum instead of one per CTA, or the result if it sums all of its terms. In a pass for both,
// CTAs of adjacent columns add U, one row of tiles after the other; with tiles of 64 rows the warpgroups alternate on
// U, so that one multiplies while the other sends. Passes for one result add at their end; in a pass for G the CTAs of
// a cluster have adjacent rows.
#ifdef ZEROLORA_HOPPER  // set by the builder for builds that contain sm_90a
#include <algorithm>

#include "wgmma_products.cuh"

namespace zerolora {
namespace {

template <int RP, int kBlocks, bool kU, bool kG>
__device__ __forceinline__ void copy_tiles(const Problem& a, const uint32_t* bits, uint32_t base, int tiles,
                                           int col_blocks, const Place& place) {
  using L = Layout<RP, kBlocks, kU, kG>;
  const uint32_t ring = base + L::kPBytes, v = ring + L::kStages * L::kStageBytes;
  const Barriers<L::kStages> barriers{base + L::kBarriers};
  Ring at;
  const uint64_t policy = evict_first_policy();  // leave L2 to the partial sums, which the reduction reads soon
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile, at.next(L::kStages)) {
    const int row = static_cast<int>(place.row0) + tile / col_blocks * L::kTileRows, block = tile % col_blocks;
    const int col = static_cast<int>(place.col0) + block * kCols;
    const uint32_t stage = ring + at.stage * L::kStageBytes, ready = barriers.full(at.stage);
    const bool stored = L::kBitsBytes > 0 && bits != nullptr && col < a.D;
    const uint32_t bits_bytes = stored ? static_cast<uint32_t>(min(a.T - row, int64_t{kRows})) * kBitsRow : 0;
    barrier_wait(barriers.empty(at.stage), at.parity ^ 1);
    barrier_expect(ready, L::kTile + bits_bytes + L::kPTileBytes + (kG && block == 0 ? L::kVBytes : 0));
    copy_box_once(stage, &a.z, col, row, ready, policy);
    copy_box_once(stage + L::kHalf, &a.z, col + 64, row, ready, policy);
    if (stored) copy_bytes(stage + kTileBytes, bits + (col / kCols * a.T + row) * 4, bits_bytes, ready);
    if constexpr (kG)
      if (block == 0) copy_box(v + tile / col_blocks % L::kVSlots * L::kVBytes, &a.v, 0, row, ready);
    if constexpr (kU && !kG) {
      copy_box(stage + kTileBytes, &a.p, col, 0, ready);
      copy_box(stage + kTileBytes + RP * kBox, &a.p, col + 64, 0, ready);
    }
    if constexpr (kU && kG) {
      if (tile < kBlocks) {
        barrier_expect(barriers.p_full(tile), kCols * RP * 2);
        copy_box(base + tile * kCols * RP * 2, &a.p, 0, col, barriers.p_full(tile));
      }
    }
  }
}

// Masks tiles in place; wgmma reads shared memory through another proxy, which needs a fence. In each row a thread
// masks the pieces of 8 elements `piece`, + 4, + 8 and + 12: those of one word of Dropout::bits.
template <int RP, int kBlocks, bool kU, bool kG>
__device__ __forceinline__ void mask_tiles(const Dropout& dropout, const Problem& a, char* shared, int tiles,
                                           const Place& place) {
  using L = Layout<RP, kBlocks, kU, kG>;
  const Barriers<L::kStages> barriers{shared_address(shared) + L::kBarriers};
  const Mask mask(dropout, a.D);
  const bool stored = L::kBitsBytes > 0 && dropout.stored;
  const int thread = static_cast<int>(threadIdx.x) - kConsumers - kCopiers;
  const int row = thread / 32 * 8 + thread % 8, piece = thread / 8 % 4;
  const int slot = (piece ^ row % 8) * 16;  // swizzled; the piece 4 further is at slot ^ 64
  Ring at;
  for (int tile = 0; tile < tiles; ++tile, at.next(L::kStages)) {
    const int tile_row = static_cast<int>(place.row0) + (kG ? tile / kBlocks : 0) * kRows;
    const int tile_col = static_cast<int>(place.col0) + (kG ? tile % kBlocks : tile) * kCols;
    char* const stage = shared + L::kPBytes + at.stage * L::kStageBytes;
#pragma unroll 1
    for (int mask_row = row; mask_row < kRows; mask_row += L::kMaskers / 4) {
      uint4 keep[4];
      if (!stored) {  // four draws hide each other's latency
        const uint64_t counter = mask.counter(tile_row + mask_row, tile_col + piece * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) keep[i] = mask.draw(counter + 4 * i);
        if (L::kBitsBytes > 0 && dropout.bits != nullptr && tile_row + mask_row < a.T && tile_col < a.D)
          dropout.bits[(tile_col / kCols * a.T + tile_row + mask_row) * 4 + piece] =
              pack_kept(keep[0]) | pack_kept(keep[1]) << 4 | pack_kept(keep[2]) << 8 | pack_kept(keep[3]) << 12;
      }
      if (mask_row == row) barrier_wait(barriers.full(at.stage), at.parity);  // the first draws need no tile
      if (stored) {
        const uint32_t word = reinterpret_cast<const uint32_t*>(stage + kTileBytes)[mask_row * 4 + piece];
        keep[0] = unpack_kept<0>(word), keep[1] = unpack_kept<1>(word);
        keep[2] = unpack_kept<2>(word), keep[3] = unpack_kept<3>(word);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        char* const values = stage + half * kHalfBytes + mask_row * kBox;
        uint4* const near = reinterpret_cast<uint4*>(values + slot);
        uint4* const far = reinterpret_cast<uint4*>(values + (slot ^ 64));
        const uint4 first = *near, second = *far;
        *near = zero_dropped(first, keep[2 * half]);
        *far = zero_dropped(second, keep[2 * half + 1]);
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(barriers.masked(at.stage));
  }
}

template <typename T, int RP, int kBlocks, bool kU, bool kG>
__global__ void __launch_bounds__(Layout<RP, kBlocks, kU, kG>::kThreads, 1)
    wgmma_kernel(const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = Layout<RP, kBlocks, kU, kG>;
  extern __shared__ char raw[];
  char* const shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const Barriers<L::kStages> barriers{shared_address(shared) + L::kBarriers};
  int which = 0;
  while (which + 1 < args.count && static_cast<int>(blockIdx.x) >= args.problem[which + 1].first_cta) ++which;
  const Problem& a = args.problem[which];
  const int cta = static_cast<int>(blockIdx.x) - a.first_cta;
  Place place;
  const int line = cta / a.ctas_abreast, abreast = cta % a.ctas_abreast;
  place.row0 = (kU ? line : abreast) * args.rows_per_split, place.col0 = (kU ? abreast : line) * args.cols_per_split;
  place.u_split = abreast / args.cluster, place.g_split = kU ? line : abreast / args.cluster;
  const int64_t col_end = min(a.D, place.col0 + args.cols_per_split);
  const int64_t row_end = min(a.T, place.row0 + args.rows_per_split);
  const int col_blocks = kG ? kBlocks : static_cast<int>((col_end - place.col0 + kCols - 1) / kCols);
  const int row_blocks = static_cast<int>((row_end - place.row0 + L::kTileRows - 1) / L::kTileRows);
  const int tiles = row_blocks * col_blocks;
  if (threadIdx.x == 0) {
    prefetch_map(&a.z);
    if constexpr (kU) prefetch_map(&a.p);
    if constexpr (kG) prefetch_map(&a.v);
    for (int i = 0; i < L::kStages; ++i) {
      barrier_init(barriers.full(i), 1);
      barrier_init(barriers.empty(i), 2);
      barrier_init(barriers.masked(i), L::kMaskers > 0 ? L::kMaskers / 32 : 1);
    }
    if constexpr (L::kBoth) {
      for (int i = 0; i < kBlocks; ++i) barrier_init(barriers.p_full(i), 1);
      for (int i = 0; i < kExchanges; ++i) {
        barrier_init(barriers.slices_full() + i * 8, 1);
        barrier_init(barriers.slices_free() + i * 8, args.cluster);
      }
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if constexpr (L::kBoth) cluster_sync_relaxed();  // the other CTAs' barriers are ready too
  else __syncthreads();
  wait_for_predecessor();
  if (threadIdx.x < kConsumers) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(L::kConsumerRegisters));
    if constexpr (L::kBoth) consume_both<T, RP, kBlocks>(args, a, shared_address(shared), row_blocks, place);
    else consume_tiles<T, RP, kBlocks, kU, kG>(args, a, shared, tiles, place);
  } else if (threadIdx.x < kConsumers + kCopiers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(L::kCopierRegisters));
    if (threadIdx.x == kConsumers)
      copy_tiles<RP, kBlocks, kU, kG>(a, args.dropout.stored ? args.dropout.bits : nullptr, shared_address(shared),
                                      tiles, col_blocks, place);
    if constexpr (L::kBoth)
      if (args.cluster > 1 && threadIdx.x >= kConsumers + kCopiers - kAdders) {
        const auto add = [&](auto put) {
          add_slices<RP>(put, place.row0, row_blocks, shared + L::kExchange, barriers.slices_full(),
                         barriers.slices_free(), args.cluster);
        };
        if (a.targets == 0) {
          add([partial = partial_u<RP>(a, place.u_split), rows = a.T](int64_t row, int piece, float4 sum) {
            store_partial_piece<RP>(partial, rows, row, piece, sum);
          });
        } else {
          add([sink = make_sink(args, a, 0), rows = a.T](int64_t row, int piece, float4 sum) {
            store_result_piece<RP>(sink, rows, row, piece, sum);
          });
        }
      }
  } else if constexpr (L::kMaskers > 0) {
    // With 512 maskers, each keeps the registers that it was launched with.
    if constexpr (L::kMaskers == 256) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(L::kMaskerRegisters));
    if (args.dropout.seed != nullptr) mask_tiles<RP, kBlocks, kU, kG>(args.dropout, a, shared, tiles, place);
    if (sums_through_shared(args, a)) named_arrive(kConsumers + L::kMaskers);
  }
  if (!L::kBoth && args.cluster == 1) return;
  if (!L::kBoth && threadIdx.x >= kConsumers) cluster_sync_relaxed();  // the sums are in shared memory
  cluster_sync_relaxed();  // do not exit while other CTAs access this one's shared memory
#endif
}

template <typename T, int RP, int kBlocks, bool kU, bool kG>
cudaError_t launch(const Args& args, int ctas, cudaStream_t stream) {
  constexpr auto kernel = wgmma_kernel<T, RP, kBlocks, kU, kG>;
  constexpr int kBytes = Layout<RP, kBlocks, kU, kG>::kBytes;
  static_assert(kBytes <= kSharedBytes, "more shared memory than a Hopper block can use");
  const cudaError_t status = allow_shared_bytes<wgmma_kernel<T, RP, kBlocks, kU, kG>>(kBytes);
  if (status != cudaSuccess) return status;
  return launch_overlapped(kernel, dim3(static_cast<unsigned>(ctas)), Layout<RP, kBlocks, kU, kG>::kThreads, kBytes,
                           true, args.cluster, stream, args);
}

template <typename T, int RP, bool kU>
cudaError_t dispatch_width(const Args& args, int col_blocks, int ctas, cudaStream_t stream) {
  switch (col_blocks) {
    case 1: return launch<T, RP, 1, kU, true>(args, ctas, stream);
    case 2: return launch<T, RP, 2, kU, true>(args, ctas, stream);
    case 4: return launch<T, RP, 4, kU, true>(args, ctas, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <typename T, int RP>
cudaError_t dispatch(const Args& args, const RankWork& first, int ctas, cudaStream_t stream) {
  const int width = first.plan.d_blocks_per_cta;
  if (first.pass.v == nullptr) return launch<T, RP, 1, true, false>(args, ctas, stream);
  if ((first.pass.p == nullptr) != first.pass.g_by_rank) return cudaErrorInvalidValue;
  return first.pass.p == nullptr ? dispatch_width<T, RP, false>(args, width, ctas, stream)
                                 : dispatch_width<T, RP, true>(args, width, ctas, stream);
}

template <typename T>
cudaError_t dispatch_rank(const Args& args, const RankWork& first, int ctas, cudaStream_t stream) {
  switch (first.plan.rank_pad) {
    case 16: return dispatch<T, 16>(args, first, ctas, stream);
    case 32: return dispatch<T, 32>(args, first, ctas, stream);
    case 64: return dispatch<T, 64>(args, first, ctas, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t describe(Problem& problem, const RankWork& work) {
  const RankPass& pass = work.pass;
  const int rank_pad = work.plan.rank_pad, rows = wgmma_rows(pass.p != nullptr && pass.v != nullptr, rank_pad);
  problem.T = pass.T, problem.D = pass.D, problem.u = work.u, problem.g = work.g;
  problem.ctas_abreast = (pass.p != nullptr ? work.plan.d_splits : work.plan.t_splits) * work.plan.cluster;
  cudaError_t status = make_map(&problem.z, pass.dtype, pass.z, pass.ldz, pass.T, pass.D, rows, 64);
  if (status == cudaSuccess && pass.p != nullptr)
    status = pass.p_by_rank ? make_map(&problem.p, pass.dtype, pass.p, pass.ldp, pass.R, pass.D, rank_pad, 64)
                            : make_map(&problem.p, pass.dtype, pass.p, pass.ldp, pass.D, pass.R, kCols, rank_pad);
  if (status == cudaSuccess && pass.v != nullptr)
    status = make_map(&problem.v, pass.dtype, pass.v, pass.ldv, pass.T, pass.R, rows, rank_pad);
  return status;
}

}  // namespace

// Clusters of 8 leave 12 of 132 multiprocessors idle.
int wgmma_slots(int cluster, const Device& device) {
  static std::atomic<int> known[kMaxCluster + 1];
  if (cluster == 1) return device.multiprocessors;
  if (known[cluster].load() == 0) {
    using L = Layout<16, 4, true, true>;
    constexpr auto kernel = wgmma_kernel<__nv_bfloat16, 16, 4, true, true>;
    const int fallback = (device.multiprocessors - 2 * cluster) / cluster;
    const bool allowed = allow_shared_bytes<kernel>(L::kBytes) == cudaSuccess;
    known[cluster].store(allowed ? count_concurrent_ctas(kernel, kMaxCluster * device.multiprocessors, L::kThreads,
                                                         L::kBytes, cluster, fallback)
                                 : fallback * cluster);
  }
  return known[cluster].load();
}

cudaError_t launch_rank_wgmma(const RankWork* works, int count, cudaStream_t stream) {
  const RankWork& first = works[0];
  Args args{};
  int ctas = 0, targets = 0;
  for (int i = 0; i < count; ++i) {
    const RankWork& work = works[i];
    Problem& problem = args.problem[i];
    const cudaError_t status = describe(problem, work);
    if (status != cudaSuccess) return status;
    problem.first_cta = ctas, problem.first_target = targets, problem.targets = work.targets;
    ctas += work.plan.t_splits * work.plan.d_splits * work.plan.cluster;
    if (work.targets == 0) continue;
    const bool both = work.pass.v != nullptr && work.pass.p != nullptr;
    if (both && (work.targets > 1 || work.plan.cluster == 1)) return cudaErrorInvalidValue;
    if (targets > 0 &&
        (work.out_dtype != args.out_dtype || work.accumulate != args.accumulate || targets + work.targets > kMaxGroup))
      return cudaErrorInvalidValue;
    args.out_dtype = work.out_dtype, args.accumulate = work.accumulate;
    targets = static_cast<int>(std::copy_n(work.target, work.targets, args.target + targets) - args.target);
  }
  args.count = count, args.cluster = first.plan.cluster;
  args.rows_per_split = first.plan.rows_per_split, args.cols_per_split = first.plan.cols_per_split;
  args.dropout = first.pass.dropout;
  return first.pass.dtype == DType::f16 ? dispatch_rank<__half>(args, first, ctas, stream)
                                        : dispatch_rank<__nv_bfloat16>(args, first, ctas, stream);
}

}  // namespace zerolora
#endif
