// Parts of the frozen product: the layout of shared memory, the order of the tiles, the mask, and the stores of the
// accumulators. Overview: frozen.cu.
#pragma once
#include "hopper.cuh"

namespace zerolora {
namespace {

constexpr int kRows = kFrozenRows, kCols = kFrozenCols, kDepth = 64, kGroupRows = 64, kStages = 4, kBuffers = 2;
constexpr int kCluster = kFrozenCluster;  // CTAs of adjacent rows, which share W
constexpr int kWalked = 8;                // row tiles of clusters that are traversed column by column
constexpr int kConsumers = 256, kThreads = kConsumers + 128;
constexpr int kConsumerRegisters = 232, kCopierRegisters = 40;
static_assert(256 * kConsumerRegisters + 128 * kCopierRegisters <= kThreads * 168,
              "more registers than a multiprocessor has");
constexpr int kBoxRow = 128, kBoxCols = 64;  // bytes and values in a row of a box: one 128-byte swizzle atom
constexpr int kXBytes = kRows * kBoxRow, kWBytes = kCols * kBoxRow, kStageBytes = kXBytes + kWBytes;
constexpr int kOutBytes = kGroupRows * kBoxRow, kAtomBytes = kDepth * kBoxRow;  // W as [K,D]: 64 columns x 64 of K
constexpr int kOut = kStages * kStageBytes, kBarriers = kOut + 2 * kBuffers * kOutBytes;
constexpr int kBytes = 1024 + kBarriers + 2 * kStages * 8;  // 1024: alignment of the atoms
static_assert(kBytes <= 232448, "more shared memory than a Hopper block can use");

struct Args {
  CUtensorMap x[kMaxParts], w[kMaxParts], h, q, y;
  int depth_tiles[kMaxParts], parts, R, rank_tiles, all_depth_tiles;
  int row_tiles, col_tiles, tiles;  // of a cluster
  const void* bias;
  const uint32_t* bits;
  int64_t T, D;
};

// Barriers of a stage: copied (full), and read by the warpgroups of every CTA that it was copied to (empty).
struct Barriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t full(int stage) const { return base + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return base + (kStages + stage) * 8; }
};

// Initializes the barriers of both CTAs of a cluster, and waits for the previous kernel.
__device__ __forceinline__ void init_barriers(const Barriers& barriers) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(barriers.full(i), 1);
      barrier_init(barriers.empty(i), 2 * kCluster);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();
  wait_for_predecessor();
}

// A CTA's tiles. Groups of row tiles are traversed column by column, so that concurrent tiles share X and W in L2.
struct Walk {
  int tile = static_cast<int>(blockIdx.x) / kCluster, row = 0, col = 0;
  __device__ __forceinline__ explicit Walk(const Args& args) { locate(args); }
  __device__ __forceinline__ bool inside(const Args& args) const { return tile < args.tiles; }
  __device__ __forceinline__ void next(const Args& args) {
    tile += static_cast<int>(gridDim.x) / kCluster;
    locate(args);
  }
  __device__ __forceinline__ void locate(const Args& args) {
    const int per_group = kWalked * args.col_tiles, first = tile / per_group * kWalked;
    const int rows = min(kWalked, args.row_tiles - first), within = tile % per_group;
    row = ((first + within % max(rows, 1)) * kCluster + cluster_rank()) * kRows;
    col = within / max(rows, 1) * kCols;
  }
};

// Multiplies by zero, which uses only the floating-point pipe; a select would also use the comparison pipe.
__device__ __forceinline__ void zero_dropped(float& value, uint32_t kept) {
  asm("{\n.reg .pred dropped;\nsetp.eq.u32 dropped, %1, 0;\n@dropped mul.f32 %0, %0, 0f00000000;\n}"
      : "+f"(value)
      : "r"(kept));
}

// This thread's mask bits: for rows lane / 4 and lane / 4 + 8 of its warp's 16, in two blocks of 128 columns.
struct Kept {
  uint4 words[2][2];
  __device__ __forceinline__ void load(const Args& args, int row, int col) {
    row += threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const int64_t t = row + half * 8, d = col + block * 128;
        if (t < args.T && d < args.D)
          words[half][block] = *reinterpret_cast<const uint4*>(args.bits + (d / 128 * args.T + t) * 4);
      }
  }
  // Columns 8n + 2j and + 1 of a row belong to bits 4q + j and 16 + 4q + j of word n % 4, q = n / 4: common.cuh.
  __device__ __forceinline__ void apply(float (&c)[128]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const uint4 w = words[half][block];
        const int j = threadIdx.x % 4;
        const uint32_t shifted[4] = {w.x >> j, w.y >> j, w.z >> j, w.w >> j};
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            zero_dropped(c[(block * 16 + n) * 4 + half * 2 + e], shifted[n % 4] & 1u << (n / 4 * 4 + e * 16));
      }
  }
};

// Writes accumulators to a box of shared memory in the copy engine's layout: 16-byte piece p of row r is at piece
// p ^ r % 8. `address`: this lane's row and first piece.
template <typename T, bool kBias, int kBox>
__device__ __forceinline__ void to_shared(const float (&c)[128], const uint32_t* bias, int columns, uint32_t address) {
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t words[4];
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const float* const v = c + kBox * 32 + pair * 8 + piece * 4;
      float low = 0.f, high = 0.f;
      if (kBias && pair * 16 + piece * 8 < columns) {
        T both[2];
        memcpy(both, bias + pair * 8 + piece * 4, 4);
        low = to_float(both[0]), high = to_float(both[1]);
      }
      words[piece * 2] = kBias ? pack2<T>(v[0] + low, v[1] + high) : pack2<T>(v[0], v[1]);
      words[piece * 2 + 1] = kBias ? pack2<T>(v[2] + low, v[3] + high) : pack2<T>(v[2], v[3]);
    }
    store_matrices(address ^ pair * 32, words);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine reads through another proxy
}

template <typename T, bool kBias, int kBox>
__device__ __forceinline__ void store_columns(const Args& args, const float (&c)[128], int row, int col,
                                              uint32_t boxes) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, buffer = kBox % kBuffers;
  const int box_row = threadIdx.x / 32 % 4 * 16 + lane % 16;  // matrices of a store: rows 0-7 and 8-15, the next piece
  const uint32_t box = boxes + buffer * kOutBytes;
  col += kBox * kBoxCols;
  const int columns = static_cast<int>(args.D) - col;
  const uint32_t* const bias = static_cast<const uint32_t*>(args.bias) + col / 2 + lane % 4;  // pairs of columns
  to_shared<T, kBias, kBox>(c, bias, columns, box + box_row * kBoxRow + (lane / 16 ^ box_row % 8) * 16);
  const bool leader = threadIdx.x % 128 == 0;
  if (leader) store_wait<0>();  // wait for the other box's store: every warp may write it after the barrier
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
  if (leader && columns > 0 && row < args.T) store_box(&args.y, col, row, box);
  if (leader) store_commit();
}

}  // namespace
}  // namespace zerolora
