// Copies adapters in one launch into the type and the padded, contiguous layout that the tensor-core kernels read.
#include "common.cuh"

namespace zerolora {
namespace {

constexpr int kThreads = 256, kPerThread = 4;
struct Jobs {
  PackJob job[kMaxPackJobs];
  unsigned end[kMaxPackJobs];  // first block after each job's
};

__device__ __forceinline__ float load(const PackJob& j, int64_t row, int64_t col) {
  if (row >= j.rows || col >= j.cols) return 0.f;
  const int64_t at = row * j.row_stride + col * j.col_stride;
  switch (j.source_dtype) {
    case DType::f32: return static_cast<const float*>(j.source)[at];
    case DType::f16: return to_float(static_cast<const __half*>(j.source)[at]);
    default: return to_float(static_cast<const __nv_bfloat16*>(j.source)[at]);
  }
}

__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ Jobs jobs) {
  int which = 0;
  while (blockIdx.x >= jobs.end[which]) ++which;
  const PackJob& j = jobs.job[which];
  const int64_t block = blockIdx.x - (which == 0 ? 0 : jobs.end[which - 1]);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t index = (block * kPerThread + i) * kThreads + threadIdx.x;
    if (index >= j.target_rows * j.target_cols) return;
    const float value = load(j, index / j.target_cols, index % j.target_cols);
    switch (j.target_dtype) {
      case DType::f32: static_cast<float*>(j.target)[index] = value; break;
      case DType::f16: static_cast<__half*>(j.target)[index] = from_float<__half>(value); break;
      default: static_cast<__nv_bfloat16*>(j.target)[index] = from_float<__nv_bfloat16>(value);
    }
  }
}

}  // namespace

cudaError_t launch_pack(const PackJob* jobs, int count, cudaStream_t stream) {
  constexpr int64_t kPerBlock = kThreads * kPerThread;
  if (count > kMaxPackJobs) return cudaErrorInvalidValue;
  Jobs all{};
  unsigned blocks = 0;
  for (int i = 0; i < count; ++i) {
    all.job[i] = jobs[i];
    blocks += static_cast<unsigned>((jobs[i].target_rows * jobs[i].target_cols + kPerBlock - 1) / kPerBlock);
    all.end[i] = blocks;
  }
  if (blocks == 0) return cudaSuccess;
  pack_kernel<<<blocks, kThreads, 0, stream>>>(all);
  return cudaGetLastError();
}

}  // namespace zerolora
