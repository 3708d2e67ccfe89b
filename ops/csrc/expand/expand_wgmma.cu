// Y[T,D] = H[T,R] Q^T (+ bias) on Hopper (sm_90a): little is read, so the kernel mostly stores. It writes the output
// that the frozen product then accumulates into (beta = 1).
//
// One CTA per multiprocessor: a copying thread, and four warpgroups that multiply. Tiles of 64 rows x 512 columns,
// eight boxes of 64 columns, are ordered by column block, and each CTA processes consecutive ones: Q of the 512 columns
// stays in shared memory, H passes through a ring. A warpgroup moves two boxes of a tile, one after the other, from
// accumulators into a swizzled box of shared memory, which the bulk copy engine stores: three of its boxes may be in
// flight while it computes the fourth. Nothing is written outside Y.
#ifdef ZEROLORA_HOPPER  // set by the builder for builds that contain sm_90a
#include "hopper.cuh"
#endif
#include <algorithm>

#include "kernels.h"

namespace zerolora {
#ifdef ZEROLORA_HOPPER
namespace {

constexpr int kRows = 64, kCols = 512, kBoxCols = 64, kGroups = 4, kBuffers = 4;
constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 32;
constexpr int kBoxRow = kBoxCols * 2, kBoxBytes = kRows * kBoxRow;  // a row is one 128-byte swizzle atom
constexpr int kCopiedRows = 256;                                    // of Q as [D,R]: the limit for a box
constexpr int64_t kLeastRows = 4096;                                // prefills start there (kFewTokens of passes.h)

struct Args {
  CUtensorMap h, q, y;
  const void* bias;
  int64_t D;
  int row_tiles, tiles_each, longer;  // the first `longer` CTAs process one tile more than `tiles_each`
};

template <int RP> struct Layout {
  static constexpr int kRankRow = RP * 2, kHBytes = kRows * kRankRow, kStages = 4;
  static constexpr int kQ = kGroups * kBuffers * kBoxBytes, kQBytes = kCols * kRankRow;
  static constexpr int kH = kQ + kQBytes, kBarriers = kH + kStages * kHBytes;
  static constexpr int kBytes = 1024 + kBarriers + (2 * kStages + 2) * 8;  // 1024: alignment of the atoms
  static_assert(kBytes <= 232448, "more shared memory than a Hopper block can use");
};

// Barriers of a stage of H: copied (full), and read by every warpgroup (empty); the same for Q of a column block.
template <int kStages> struct Barriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t full(int stage) const { return base + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return base + (kStages + stage) * 8; }
  __device__ __forceinline__ uint32_t q_full() const { return base + 2 * kStages * 8; }
  __device__ __forceinline__ uint32_t q_empty() const { return base + (2 * kStages + 1) * 8; }
};

// The consecutive tiles of a CTA, and the position in the ring of H.
template <int kStages> struct Run {
  int tile, end, row_tile, col_block, stage = 0;
  uint32_t parity = 0;
  bool new_columns = true;
  __device__ __forceinline__ explicit Run(const Args& args)
      : tile(static_cast<int>(blockIdx.x) * args.tiles_each + min(static_cast<int>(blockIdx.x), args.longer)),
        end(tile + args.tiles_each + (static_cast<int>(blockIdx.x) < args.longer ? 1 : 0)),
        row_tile(tile % args.row_tiles),
        col_block(tile / args.row_tiles) {}
  __device__ __forceinline__ void next(const Args& args) {
    ++tile;
    new_columns = ++row_tile == args.row_tiles;
    if (new_columns) row_tile = 0, ++col_block;
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <int RP, bool kByRank>
__device__ __forceinline__ void copy_tiles(const Args& args, uint32_t base) {
  using L = Layout<RP>;
  const Barriers<L::kStages> barriers{base + L::kBarriers};
  uint32_t q_parity = 0;
  for (Run<L::kStages> run(args); run.tile < run.end; run.next(args)) {
    if (run.new_columns) {
      barrier_wait(barriers.q_empty(), q_parity ^ 1);
      q_parity ^= 1;
      barrier_expect(barriers.q_full(), L::kQBytes);
      constexpr int kStep = kByRank ? kBoxCols : kCopiedRows;
      for (int col = 0; col < kCols; col += kStep) {
        const uint32_t target = base + L::kQ + col * L::kRankRow;
        const int at = run.col_block * kCols + col;
        copy_box(target, &args.q, kByRank ? at : 0, kByRank ? 0 : at, barriers.q_full());
      }
    }
    barrier_wait(barriers.empty(run.stage), run.parity ^ 1);
    barrier_expect(barriers.full(run.stage), L::kHBytes);
    copy_box(base + L::kH + run.stage * L::kHBytes, &args.h, 0, run.row_tile * kRows, barriers.full(run.stage));
  }
}

// Sets c[64, 64 columns from `col`] = bias, in the order of the accumulators; D is a multiple of 8.
template <typename T>
__device__ __forceinline__ void init_with_bias(float (&c)[32], const void* bias, int64_t col, int64_t D) {
#pragma unroll
  for (int i = 0; i < 32; ++i) c[i] = 0.f;
  if (bias == nullptr) return;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int64_t at = col + n * 8 + threadIdx.x % 4 * 2;
    const uint32_t word = at < D ? *reinterpret_cast<const uint32_t*>(static_cast<const T*>(bias) + at) : 0u;
    T pair[2];
    memcpy(pair, &word, 4);
    c[n * 4] = c[n * 4 + 2] = to_float(pair[0]);
    c[n * 4 + 1] = c[n * 4 + 3] = to_float(pair[1]);
  }
}

// Adds c[64, 64] += H of a tile times Q^T of a box; the box is [64 columns, RP], or by rank [RP, 64 columns].
template <typename T, int RP, bool kByRank>
__device__ __forceinline__ void multiply(float (&c)[32], uint32_t h, uint32_t q) {
  constexpr int kRankRow = Layout<RP>::kRankRow;
  hold(c);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < RP / 16; ++k) {
    const uint64_t a = descriptor<8 * kRankRow, row_swizzle<kRankRow>()>(h + k * 32);
    if constexpr (kByRank) wgmma<T, 0, 1>(c, a, descriptor<8 * kBoxRow, Swizzle::b128>(q + k * 16 * kBoxRow));
    else wgmma<T, 0, 0>(c, a, descriptor<8 * kRankRow, row_swizzle<kRankRow>()>(q + k * 32));
  }
  wgmma_commit();
  wgmma_wait();
  hold(c);
}

// Writes accumulators to a box of shared memory in the copy engine's layout: 16-byte piece p of row r is at piece
// p ^ r % 8, so that the 8 rows of a matrix use all banks. `address`: this lane's row and first piece.
template <typename T> __device__ __forceinline__ void to_shared(const float (&c)[32], uint32_t address) {
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack2<T>(c[pair * 8 + i * 2], c[pair * 8 + i * 2 + 1]);
    store_matrices(address ^ pair * 32, words);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine reads through another proxy
}

template <typename T, int RP, bool kByRank>
__device__ __forceinline__ void write_tiles(const Args& args, uint32_t base) {
  using L = Layout<RP>;
  const Barriers<L::kStages> barriers{base + L::kBarriers};
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 % 4 * 16 + lane % 16;  // matrices of a store: rows 0-7 and 8-15, then the next piece
  const uint32_t boxes = base + group * kBuffers * kBoxBytes;
  const uint32_t address = boxes + row * kBoxRow + (lane / 16 ^ row % 8) * 16;
  const bool leader = threadIdx.x % 128 == 0;
  uint32_t q_parity = 0;
  uint32_t buffer = 0;
  for (Run<L::kStages> run(args); run.tile < run.end; run.next(args)) {
    if (run.new_columns) barrier_wait(barriers.q_full(), q_parity), q_parity ^= 1;
    barrier_wait(barriers.full(run.stage), run.parity);
#pragma unroll
    for (int i = 0; i < kCols / kBoxCols / kGroups; ++i) {
      const int box = i * kGroups + group;
      const int col = run.col_block * kCols + box * kBoxCols;
      float c[32];
      init_with_bias<T>(c, args.bias, col, args.D);
      multiply<T, RP, kByRank>(c, base + L::kH + run.stage * L::kHBytes, base + L::kQ + box * kBoxCols * L::kRankRow);
      to_shared<T>(c, address + buffer * kBoxBytes);
      // After the barrier every warp may write the next buffer, because its previous store has been read.
      if (leader) store_wait<kBuffers - 2>();
      asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
      if (leader) {
        if (col < args.D) store_box(&args.y, col, run.row_tile * kRows, boxes + buffer * kBoxBytes);
        store_commit();
      }
      buffer = (buffer + 1) % kBuffers;
    }
    if (leader) {
      barrier_arrive(barriers.empty(run.stage));
      if (run.row_tile + 1 == args.row_tiles) barrier_arrive(barriers.q_empty());
    }
  }
  let_successor_start();
  if (leader) store_wait<0>();  // shared memory must outlive its readers
}

template <typename T, int RP, bool kByRank>
__global__ void __launch_bounds__(kThreads, 1) expand_wgmma_kernel(const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = Layout<RP>;
  extern __shared__ char raw[];
  const uint32_t base = (shared_address(raw) + 1023) / 1024 * 1024;
  const Barriers<L::kStages> barriers{base + L::kBarriers};
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      barrier_init(barriers.full(i), 1);
      barrier_init(barriers.empty(i), kGroups);
    }
    barrier_init(barriers.q_full(), 1);
    barrier_init(barriers.q_empty(), kGroups);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  wait_for_predecessor();
  if (threadIdx.x < kConsumers) write_tiles<T, RP, kByRank>(args, base);
  else if (threadIdx.x == kConsumers) copy_tiles<RP, kByRank>(args, base);
#endif
}

template <typename T, int RP, bool kByRank>
cudaError_t launch(const Expand& e, const Device& device, cudaStream_t stream) {
  Args args{};
  args.bias = e.bias, args.D = e.D;
  args.row_tiles = static_cast<int>((e.T + kRows - 1) / kRows);
  const int tiles = args.row_tiles * static_cast<int>((e.D + kCols - 1) / kCols);
  const int ctas = std::min(device.multiprocessors, tiles);
  args.tiles_each = tiles / ctas, args.longer = tiles % ctas;
  cudaError_t status = make_map(&args.h, e.dtype, e.h, e.ldh, e.T, e.R, kRows, RP);
  if (status == cudaSuccess)
    status = kByRank ? make_map(&args.q, e.dtype, e.q, e.ldq, e.R, e.D, RP, kBoxCols)
                     : make_map(&args.q, e.dtype, e.q, e.ldq, e.D, e.R, kCopiedRows, RP);
  if (status == cudaSuccess) status = make_map(&args.y, e.dtype, e.y, e.ldy, e.T, e.D, kRows, kBoxCols);
  constexpr int kBytes = Layout<RP>::kBytes;
  if (status == cudaSuccess) status = allow_shared_bytes<expand_wgmma_kernel<T, RP, kByRank>>(kBytes);
  if (status != cudaSuccess) return status;
  return launch_overlapped(expand_wgmma_kernel<T, RP, kByRank>, dim3(static_cast<unsigned>(ctas)), kThreads, kBytes,
                           true, 1, stream, args);
}

template <typename T, int RP> cudaError_t dispatch(const Expand& e, const Device& device, cudaStream_t stream) {
  return e.q_by_rank ? launch<T, RP, true>(e, device, stream) : launch<T, RP, false>(e, device, stream);
}

template <typename T> cudaError_t dispatch_rank(const Expand& e, const Device& device, cudaStream_t stream) {
  return e.R <= 16   ? dispatch<T, 16>(e, device, stream)
         : e.R <= 32 ? dispatch<T, 32>(e, device, stream)
                     : dispatch<T, 64>(e, device, stream);
}

}  // namespace

bool expand_wgmma_supported(const Expand& e, const Device& device) {
  return device.capability == 90 && e.dtype != DType::f32 && !e.accumulate && e.dropout.seed == nullptr &&
         e.T >= kLeastRows && e.D > 0 && e.D % 8 == 0 && e.R > 0 && e.R <= kRankChunk && aligned(e.h, e.ldh) &&
         aligned(e.q, e.ldq) && aligned(e.y, e.ldy) && aligned(e.bias, 0);
}

cudaError_t launch_expand_wgmma(const Expand& e, const Device& device, cudaStream_t stream) {
  return e.dtype == DType::f16 ? dispatch_rank<__half>(e, device, stream)
                               : dispatch_rank<__nv_bfloat16>(e, device, stream);
}
#else
bool expand_wgmma_supported(const Expand&, const Device&) { return false; }
cudaError_t launch_expand_wgmma(const Expand&, const Device&, cudaStream_t) { return cudaErrorNotSupported; }
#endif

}  // namespace zerolora
