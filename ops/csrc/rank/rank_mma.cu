// The rank-space primitive on mma.sync (compute capability 8.0 or higher, f16 and bf16): Z is read once for U and G.
//
// A CTA of 4 warps computes 128 * kBlocks columns and a range of rows, over tiles of 64 rows x 128 columns:
//     U[64, R]   += Ztile[64, 128] P[128, R]     each warp 16 rows; summed over the CTA's column blocks in registers
//     G[128, R]  += Ztile^T[128, 64] V[64, R]    each warp 32 columns; summed over the CTA's rows in registers
// Both read the tile from shared memory with ldmatrix, transposed for G, so device memory is read once.
#include "common.cuh"

namespace zerolora {
namespace {

constexpr int kRows = kMmaRows, kCols = kMmaCols, kThreads = 128, kChunks = kCols / 8;  // a chunk is 16 bytes: 8 values

// Returns the position of a chunk in rows of `kPerRow` chunks, permuted so that 8 rows of a column use different banks.
template <int kPerRow> __device__ __forceinline__ int swizzle(int row, int chunk) {
  constexpr int kRowsPerLine = kPerRow >= 8 ? 1 : 8 / kPerRow;
  constexpr int kMask = kPerRow >= 8 ? 7 : kPerRow - 1;
  return row * kPerRow + (chunk ^ ((row / kRowsPerLine) & kMask));
}

struct Args {
  const char *z, *p, *v;
  int64_t ldz, ldp, ldv, T, D, rows_per_split, cols_per_split;
  int R;
  Dropout dropout;
  float *u, *g;
  bool g_by_rank;
};

template <int RP, int kBlocks, bool kU, bool kG> struct Shape {
  static constexpr int kZBytes = kRows * kCols * 2;
  static constexpr int kVBytes = kG ? kRows * RP * 2 : 0;
  static constexpr int kPTileBytes = kU && !kG ? kCols * RP * 2 : 0;       // U alone: P is copied with each tile
  static constexpr int kPBytes = kU && kG ? kBlocks * kCols * RP * 2 : 0;  // both: the CTA's columns are fixed, P stays
  static constexpr int kStageBytes = kZBytes + kVBytes + kPTileBytes;
  static constexpr int bytes(int stages) { return kPBytes + stages * kStageBytes; }
};

// Copies rows [row0, row0+kCount) of a [*, R] matrix, padded with zeros to RP ranks, as [row][rank] chunks.
template <int RP, int kCount>
__device__ __forceinline__ void load_ranks(uint32_t target, const char* source, int64_t ld, int64_t row0, int64_t rows,
                                           int R) {
  constexpr int kPerRow = RP / 8;
#pragma unroll
  for (int i = threadIdx.x; i < kCount * kPerRow; i += kThreads) {
    const int row = i / kPerRow, chunk = i % kPerRow;
    const bool valid = row0 + row < rows && chunk * 8 < R;
    const char* address = valid ? source + ((row0 + row) * ld + chunk * 8) * 2 : source;
    copy_async(target + swizzle<kPerRow>(row, chunk) * 16, address, valid);
  }
}

// Copies columns [col0, col0+128) of a [R, D] matrix as [rank][column] chunks.
template <int RP>
__device__ __forceinline__ void load_by_rank(uint32_t target, const char* source, int64_t ld, int64_t col0, int64_t D,
                                             int R) {
#pragma unroll
  for (int i = threadIdx.x; i < RP * kChunks; i += kThreads) {
    const int rank = i / kChunks, chunk = i % kChunks;
    const bool valid = rank < R && col0 + chunk * 8 < D;
    const char* address = valid ? source + (rank * ld + col0 + chunk * 8) * 2 : source;
    copy_async(target + swizzle<kChunks>(rank, chunk) * 16, address, valid);
  }
}

__device__ __forceinline__ void load_z(uint32_t target, const Args& a, int64_t row0, int64_t col0, int64_t row_end) {
#pragma unroll
  for (int i = 0; i < kRows * kChunks / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads, row = index / kChunks, chunk = index % kChunks;
    const bool valid = row0 + row < row_end && col0 + chunk * 8 < a.D;
    const char* address = valid ? a.z + ((row0 + row) * a.ldz + col0 + chunk * 8) * 2 : a.z;
    copy_async(target + swizzle<kChunks>(row, chunk) * 16, address, valid);
  }
}

// Masks in place the chunks that this thread copied itself, which it sees without a barrier.
__device__ __forceinline__ void mask_z(char* tile, const Mask& mask, int64_t row0, int64_t col0) {
#pragma unroll 2
  for (int i = 0; i < kRows * kChunks / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads, row = index / kChunks, chunk = index % kChunks;
    uint4* values = reinterpret_cast<uint4*>(tile + swizzle<kChunks>(row, chunk) * 16);
    *values = zero_dropped(*values, mask.draw(mask.counter(row0 + row, col0 + chunk * 8)));
  }
}

// U[16 rows of this warp, RP] += Z[16, 128] P[128, RP]; P is stored as [rank][column] (kByRank) or [column][rank].
template <typename T, int RP, bool kByRank>
__device__ __forceinline__ void tile_u(float (&u)[RP / 8][4], uint32_t z, uint32_t p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < kCols / 16; ++k) {
    uint32_t a[4];
    ldmatrix(a, z + swizzle<kChunks>(warp * 16 + lane % 16, k * 2 + lane / 16) * 16);
#pragma unroll
    for (int n = 0; n < RP / 16; ++n) {
      uint32_t b[4];
      if constexpr (kByRank) {
        const int rank = n * 16 + lane % 8 + lane / 16 * 8;
        ldmatrix(b, p + swizzle<kChunks>(rank, k * 2 + lane / 8 % 2) * 16);
      } else {
        const int column = k * 16 + lane % 16;
        ldmatrix_trans(b, p + swizzle<RP / 8>(column, n * 2 + lane / 16) * 16);
      }
      mma<T>(u[n * 2], a, b[0], b[1]);
      mma<T>(u[n * 2 + 1], a, b[2], b[3]);
    }
  }
}

// G[32 columns of this warp, RP] += Z[64, 32]^T V[64, RP].
template <typename T, int RP> __device__ __forceinline__ void tile_g(float (&g)[2][RP / 8][4], uint32_t z, uint32_t v) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
    uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row = k * 16 + lane % 8 + lane / 16 * 8;
      ldmatrix_trans(a[m], z + swizzle<kChunks>(row, warp * 4 + m * 2 + lane / 8 % 2) * 16);
    }
#pragma unroll
    for (int n = 0; n < RP / 16; ++n) {
      uint32_t b[4];
      ldmatrix_trans(b, v + swizzle<RP / 8>(k * 16 + lane % 16, n * 2 + lane / 16) * 16);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma<T>(g[m][n * 2], a[m], b[0], b[1]);
        mma<T>(g[m][n * 2 + 1], a[m], b[2], b[3]);
      }
    }
  }
}

template <int RP> __device__ __forceinline__ void store_u(const float (&u)[RP / 8][4], const Args& a, int64_t row0) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* base = a.u + static_cast<int64_t>(blockIdx.y) * a.T * RP;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = row0 + warp * 16 + lane / 4 + half * 8;
    if (row >= a.T) continue;
#pragma unroll
    for (int n = 0; n < RP / 8; ++n)
      *reinterpret_cast<float2*>(base + row * RP + n * 8 + lane % 4 * 2) =
          make_float2(u[n][half * 2], u[n][half * 2 + 1]);
  }
}

template <int RP> __device__ __forceinline__ void store_g(const float (&g)[2][RP / 8][4], const Args& a, int64_t col0) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* base = a.g + static_cast<int64_t>(blockIdx.x) * a.D * RP;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t col = col0 + warp * 32 + m * 16 + lane / 4 + half * 8;
      if (col >= a.D) continue;
#pragma unroll
      for (int n = 0; n < RP / 8; ++n) {
        const int rank = n * 8 + lane % 4 * 2;
        if (a.g_by_rank) {
          base[rank * a.D + col] = g[m][n][half * 2];
          base[(rank + 1) * a.D + col] = g[m][n][half * 2 + 1];
        } else {
          *reinterpret_cast<float2*>(base + col * RP + rank) = make_float2(g[m][n][half * 2], g[m][n][half * 2 + 1]);
        }
      }
    }
}

// grid: x = row split, y = column split. kG: tiles run over (row block, column block), G of all blocks in registers.
// kU alone: one row block, tiles run over the split's columns.
template <typename T, int RP, int kBlocks, bool kU, bool kG>
__global__ void __launch_bounds__(kThreads, 2) rank_kernel(const Args a, const int stages) {
#if __CUDA_ARCH__ >= 800
  using S = Shape<RP, kBlocks, kU, kG>;
  extern __shared__ __align__(128) char shared[];
  char* const ring = shared + S::kPBytes;
  const int64_t col_begin = blockIdx.y * a.cols_per_split, col_end = min(a.D, col_begin + a.cols_per_split);
  const int64_t row_begin = blockIdx.x * a.rows_per_split, row_end = min(a.T, row_begin + a.rows_per_split);
  const int col_blocks = kG ? kBlocks : static_cast<int>((col_end - col_begin + kCols - 1) / kCols);
  const int tiles = static_cast<int>((row_end - row_begin + kRows - 1) / kRows) * col_blocks;
  const Mask mask(a.dropout, a.D);

  auto fetch = [&](int tile) {
    if (tile < tiles) {
      const int64_t row = row_begin + tile / col_blocks * kRows, col = col_begin + tile % col_blocks * kCols;
      const uint32_t stage = shared_address(ring + tile % stages * S::kStageBytes);
      load_z(stage, a, row, col, row_end);
      // V of a row block is copied with its first tile; as many V slots as stages, so none is overwritten too early.
      if constexpr (kG)
        if (tile % kBlocks == 0)
          load_ranks<RP, kRows>(shared_address(ring + tile / kBlocks % stages * S::kStageBytes) + S::kZBytes, a.v,
                                a.ldv, row, row_end, a.R);
      if constexpr (kU && !kG) load_by_rank<RP>(stage + S::kZBytes, a.p, a.ldp, col, a.D, a.R);
    }
    copy_commit();
  };

  if constexpr (kU && kG) load_ranks<RP, kBlocks * kCols>(shared_address(shared), a.p, a.ldp, col_begin, a.D, a.R);
  for (int tile = 0; tile < stages - 1; ++tile) fetch(tile);

  float u[kU ? RP / 8 : 1][4] = {};
  float g[kG ? kBlocks : 1][2][kG ? RP / 8 : 1][4] = {};
  auto arrive = [&](int tile) {  // waits until all threads see the tile and the previous tile's slot is free
    if (stages == 4) copy_wait<2>();
    else if (stages == 3) copy_wait<1>();
    else copy_wait<0>();
    char* const stage = ring + tile % stages * S::kStageBytes;
    if (a.dropout.seed != nullptr)
      mask_z(stage, mask, row_begin + tile / col_blocks * kRows, col_begin + tile % col_blocks * kCols);
    __syncthreads();
    fetch(tile + stages - 1);
    return shared_address(stage);
  };

  if constexpr (kG) {
    for (int block_row = 0; block_row * kBlocks < tiles; ++block_row) {
      const uint32_t v = shared_address(ring + block_row % stages * S::kStageBytes) + S::kZBytes;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const uint32_t z = arrive(block_row * kBlocks + block);
        if constexpr (kU) tile_u<T, RP, false>(u, z, shared_address(shared) + block * kCols * RP * 2);
        tile_g<T, RP>(g[block], z, v);
      }
      if constexpr (kU) {
        store_u<RP>(u, a, row_begin + block_row * kRows);
#pragma unroll
        for (int n = 0; n < RP / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) u[n][i] = 0.f;
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) store_g<RP>(g[block], a, col_begin + block * kCols);
  } else {
    for (int tile = 0; tile < tiles; ++tile) {
      const uint32_t z = arrive(tile);
      tile_u<T, RP, true>(u, z, z + S::kZBytes);
    }
    store_u<RP>(u, a, row_begin);
  }
  copy_wait<0>();
#endif
}

template <typename T, int RP, int kBlocks, bool kU, bool kG>
cudaError_t launch(const Args& args, const Plan& plan, cudaStream_t stream) {
  const auto kernel = rank_kernel<T, RP, kBlocks, kU, kG>;
  const int bytes = Shape<RP, kBlocks, kU, kG>::bytes(plan.stages);
  const cudaError_t status = allow_shared_bytes<rank_kernel<T, RP, kBlocks, kU, kG>>(bytes);
  if (status != cudaSuccess) return status;
  kernel<<<dim3(static_cast<unsigned>(plan.t_splits), static_cast<unsigned>(plan.d_splits)), kThreads, bytes, stream>>>(
      args, plan.stages);
  return cudaGetLastError();
}

template <typename T, int RP> cudaError_t dispatch(const Args& args, const Plan& plan, cudaStream_t stream) {
  if (args.v == nullptr) return launch<T, RP, 1, true, false>(args, plan, stream);
  constexpr int kWide = 64 / RP;  // as many column blocks as their G leaves registers for
  const bool wide = plan.d_blocks_per_cta == kWide;
  if (args.p == nullptr)
    return wide ? launch<T, RP, kWide, false, true>(args, plan, stream)
                : launch<T, RP, 1, false, true>(args, plan, stream);
  return wide ? launch<T, RP, kWide, true, true>(args, plan, stream) : launch<T, RP, 1, true, true>(args, plan, stream);
}

template <typename T> cudaError_t dispatch_rank(const Args& args, const Plan& plan, cudaStream_t stream) {
  switch (plan.rank_pad) {
    case 16: return dispatch<T, 16>(args, plan, stream);
    case 32: return dispatch<T, 32>(args, plan, stream);
    case 64: return dispatch<T, 64>(args, plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_rank_mma(const RankWork& work, cudaStream_t stream) {
  const RankPass& pass = work.pass;
  const Plan& plan = work.plan;
  Args args{};
  args.z = static_cast<const char*>(pass.z), args.p = static_cast<const char*>(pass.p);
  args.v = static_cast<const char*>(pass.v), args.ldz = pass.ldz, args.ldp = pass.ldp, args.ldv = pass.ldv;
  args.T = pass.T, args.D = pass.D, args.R = pass.R, args.dropout = pass.dropout;
  args.rows_per_split = plan.rows_per_split, args.cols_per_split = plan.cols_per_split;
  args.u = work.u, args.g = work.g, args.g_by_rank = pass.g_by_rank;
  return pass.dtype == DType::f16 ? dispatch_rank<__half>(args, plan, stream)
                                  : dispatch_rank<__nv_bfloat16>(args, plan, stream);
}

}  // namespace zerolora
