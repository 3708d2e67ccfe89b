// The rank-space primitive on plain fused multiply-adds: for every type, shape and alignment, on compute capability 7.0
// or higher. In fp32 arithmetic is the limit, not reading Z, so U and G are computed by two kernels.
#include "common.cuh"

namespace zerolora {
namespace {

constexpr int kThreads = 256, kLong = 64, kShort = 32, kRanks = 16;  // a CTA computes 64 rows (or columns) x 16 ranks

struct Args {
  const void *z, *p, *v;
  int64_t ldz, T, D, p_rank, p_column, ldv, rows_per_split, cols_per_split;
  int R, rank_pad;
  bool g_by_rank;
  Dropout dropout;
  float *u, *g;
};

// Loads 8 adjacent elements of a row of Z as fp32, with zeros for dropped ones.
template <typename T>
__device__ __forceinline__ void load8(float (&out)[8], const Args& a, const Mask& mask, int64_t row, int64_t col,
                                      int64_t row_end, int64_t col_end) {
  const T* z = static_cast<const T*>(a.z);
  uint4 keep = make_uint4(~0u, ~0u, ~0u, ~0u);
  if (a.dropout.seed != nullptr) keep = mask.draw(mask.counter(row, col));
  const uint32_t words[4] = {keep.x, keep.y, keep.z, keep.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool kept = (words[i / 2] >> (i % 2 * 16) & 1u) != 0;
    const bool valid = row < row_end && col + i < col_end;
    out[i] = valid && kept ? to_float(z[row * a.ldz + col + i]) : 0.f;
  }
}

// U[64 rows, 16 ranks] over the split's columns. grid: x = 64 rows, y = column split, z = 16 ranks.
template <typename T> __global__ void __launch_bounds__(kThreads) project_kernel(const Args a) {
  __shared__ float z[kLong][kShort + 1];
  __shared__ float4 p[kShort][kRanks / 4];
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * kLong, col_begin = blockIdx.y * a.cols_per_split;
  const int64_t col_end = min(a.D, col_begin + a.cols_per_split);
  const int rank0 = blockIdx.z * kRanks, row = threadIdx.x % kLong, quad = threadIdx.x / kLong;
  const Mask mask(a.dropout, a.D);
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int64_t col0 = col_begin; col0 < col_end; col0 += kShort) {
    float values[8];
    const int load_row = threadIdx.x / 4, load_col = threadIdx.x % 4 * 8;
    load8<T>(values, a, mask, row0 + load_row, col0 + load_col, a.T, col_end);
#pragma unroll
    for (int i = 0; i < 8; ++i) z[load_row][load_col + i] = values[i];
    for (int i = threadIdx.x; i < kShort * kRanks; i += kThreads) {
      // The index that is contiguous in memory varies fastest.
      const int col = a.p_column == 1 ? i % kShort : i / kRanks, rank = a.p_column == 1 ? i / kShort : i % kRanks;
      const bool valid = col0 + col < col_end && rank0 + rank < a.R;
      const T* address = static_cast<const T*>(a.p) + (rank0 + rank) * a.p_rank + (col0 + col) * a.p_column;
      reinterpret_cast<float*>(p[col])[rank] = valid ? to_float(*address) : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kShort; ++k) {
      const float left = z[row][k];
      const float4 right = p[k][quad];
      sum.x += left * right.x, sum.y += left * right.y, sum.z += left * right.z, sum.w += left * right.w;
    }
    __syncthreads();
  }
  if (row0 + row < a.T)
    reinterpret_cast<float4*>(a.u + (blockIdx.y * a.T + row0 + row) * a.rank_pad + rank0)[quad] = sum;
}

// G[64 columns, 16 ranks] over the split's rows. grid: x = row split, y = 64 columns, z = 16 ranks.
template <typename T> __global__ void __launch_bounds__(kThreads) outer_kernel(const Args a) {
  __shared__ float z[kShort][kLong + 1];
  __shared__ float4 v[kShort][kRanks / 4];
  const int64_t col0 = static_cast<int64_t>(blockIdx.y) * kLong, row_begin = blockIdx.x * a.rows_per_split;
  const int64_t row_end = min(a.T, row_begin + a.rows_per_split);
  const int rank0 = blockIdx.z * kRanks, col = threadIdx.x % kLong, quad = threadIdx.x / kLong;
  const Mask mask(a.dropout, a.D);
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int64_t row0 = row_begin; row0 < row_end; row0 += kShort) {
    float values[8];
    const int load_row = threadIdx.x / 8, load_col = threadIdx.x % 8 * 8;
    load8<T>(values, a, mask, row0 + load_row, col0 + load_col, row_end, a.D);
#pragma unroll
    for (int i = 0; i < 8; ++i) z[load_row][load_col + i] = values[i];
    for (int i = threadIdx.x; i < kShort * kRanks; i += kThreads) {
      const int row = i / kRanks, rank = i % kRanks;
      const bool valid = row0 + row < row_end && rank0 + rank < a.R;
      const T* address = static_cast<const T*>(a.v) + (row0 + row) * a.ldv + rank0 + rank;
      reinterpret_cast<float*>(v[row])[rank] = valid ? to_float(*address) : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kShort; ++k) {
      const float left = z[k][col];
      const float4 right = v[k][quad];
      sum.x += left * right.x, sum.y += left * right.y, sum.z += left * right.z, sum.w += left * right.w;
    }
    __syncthreads();
  }
  if (col0 + col >= a.D) return;
  if (a.g_by_rank) {
    float* out = a.g + (static_cast<int64_t>(blockIdx.x) * a.rank_pad + rank0 + quad * 4) * a.D + col0 + col;
    out[0] = sum.x, out[a.D] = sum.y, out[2 * a.D] = sum.z, out[3 * a.D] = sum.w;
  } else {
    reinterpret_cast<float4*>(a.g + (blockIdx.x * a.D + col0 + col) * a.rank_pad + rank0)[quad] = sum;
  }
}

template <typename T> cudaError_t launch(const Args& a, const Plan& plan, cudaStream_t stream) {
  const unsigned ranks = static_cast<unsigned>(plan.rank_pad / kRanks);
  if (a.p != nullptr) {
    const dim3 grid(static_cast<unsigned>((a.T + kLong - 1) / kLong), static_cast<unsigned>(plan.d_splits), ranks);
    project_kernel<T><<<grid, kThreads, 0, stream>>>(a);
  }
  if (a.v != nullptr) {
    const dim3 grid(static_cast<unsigned>(plan.t_splits), static_cast<unsigned>((a.D + kLong - 1) / kLong), ranks);
    outer_kernel<T><<<grid, kThreads, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns a split length, a multiple of the tile, that gives about `wanted` splits.
int64_t split_length(int64_t length, int64_t wanted, int64_t tile) {
  const int64_t tiles = length < 1 ? 1 : ceil_div(length, tile), splits = wanted < 1       ? 1
                                                                          : wanted > tiles ? tiles
                                                                                           : wanted;
  return ceil_div(tiles, splits) * tile;
}

}  // namespace

Plan plan_rank_simt(const RankPass& pass, const Device& device) {
  constexpr int64_t kBlocksPerMultiprocessor = 6;
  Plan plan;
  plan.path = Path::simt;
  plan.rank_pad = static_cast<int>(ceil_div(pass.R, kRanks)) * kRanks;
  const int64_t slots = device.multiprocessors * kBlocksPerMultiprocessor, rank_tiles = plan.rank_pad / kRanks;
  plan.cols_per_split = split_length(pass.D, slots / (ceil_div(pass.T, kLong) * rank_tiles + 1), 2 * kShort);
  plan.rows_per_split = split_length(pass.T, slots / (ceil_div(pass.D, kLong) * rank_tiles), 2 * kShort);
  plan.d_splits = static_cast<int>(ceil_div(pass.D, plan.cols_per_split));
  plan.t_splits = static_cast<int>(ceil_div(pass.T, plan.rows_per_split));
  if (pass.p != nullptr) plan.u_floats = plan.d_splits * pass.T * plan.rank_pad;
  if (pass.v != nullptr) plan.g_floats = plan.t_splits * pass.D * plan.rank_pad;
  return plan;
}

cudaError_t launch_rank_simt(const RankWork& work, cudaStream_t stream) {
  const RankPass& pass = work.pass;
  const Plan& plan = work.plan;
  Args args{};
  args.z = pass.z, args.p = pass.p, args.v = pass.v, args.ldz = pass.ldz, args.ldv = pass.ldv;
  args.T = pass.T, args.D = pass.D, args.R = pass.R, args.rank_pad = plan.rank_pad, args.dropout = pass.dropout;
  args.p_rank = pass.p_by_rank ? pass.ldp : 1, args.p_column = pass.p_by_rank ? 1 : pass.ldp;
  args.rows_per_split = plan.rows_per_split, args.cols_per_split = plan.cols_per_split;
  args.u = work.u, args.g = work.g, args.g_by_rank = pass.g_by_rank;
  cudaError_t status = cudaErrorInvalidValue;
  by_type(pass.dtype, [&](auto* type) { status = launch<std::remove_pointer_t<decltype(type)>>(args, plan, stream); });
  return status;
}

}  // namespace zerolora
