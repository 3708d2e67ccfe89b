// Adds the partial sums of a rank pass in the order of their splits, scales, and writes or adds into the results.
#include "common.cuh"

namespace zerolora {
namespace {

constexpr int kThreads = 256;
struct Jobs {
  Reduction job[2];
  int64_t blocks[2];
};

template <typename T, int V>
__device__ __forceinline__ void write(const Segment& s, int64_t index, const float (&value)[V], bool accumulate) {
  T* const out = static_cast<T*>(s.out) + index;
#pragma unroll
  for (int i = 0; i < V; ++i) out[i] = from_float<T>(accumulate ? to_float(out[i]) + value[i] : value[i]);
}

// One thread: V neighbours of a row of the result, all in one segment (segments begin and end at multiples of 8 ranks,
// but for the last ranks of an odd one, which are written one by one).
template <int V> __global__ void __launch_bounds__(kThreads) reduce_kernel(const __grid_constant__ Jobs jobs) {
  wait_for_predecessor();
  const bool second = blockIdx.x >= jobs.blocks[0];
  const Reduction& r = jobs.job[second ? 1 : 0];
  const int64_t index = (blockIdx.x - (second ? jobs.blocks[0] : 0)) * kThreads + threadIdx.x;
  const int64_t per_row = (r.cols + V - 1) / V;
  if (index >= r.rows * per_row) return;
  const int64_t i = index / per_row, j = index % per_row * V;
  const int rank = r.rank_base + static_cast<int>(r.rank_rows ? i : j);
  int which = -1;
  for (int s = 0; s < r.segments; ++s)
    if (rank >= r.segment[s].begin && rank < r.segment[s].begin + r.segment[s].rank) which = s;
  if (which < 0) return;  // a padding rank
  const float* const source = r.partial + i * r.ld_partial + j;
  float sum[V] = {};
#pragma unroll 8
  for (int s = 0; s < r.splits; ++s) {
    float value[V];
    if constexpr (V == 4)
      *reinterpret_cast<float4*>(value) = *reinterpret_cast<const float4*>(source + s * r.split_stride);
    else value[0] = source[s * r.split_stride];
#pragma unroll
    for (int k = 0; k < V; ++k) sum[k] += value[k];
  }
  const Segment& segment = r.segment[which];
#pragma unroll
  for (int k = 0; k < V; ++k) sum[k] *= segment.scale;
  const int64_t row = r.rank_rows ? rank - segment.begin : i, col = r.rank_rows ? j : rank - segment.begin;
  const int64_t target = row * segment.ld + col;
  const int valid = r.rank_rows ? V : min(V, segment.rank - static_cast<int>(col));
  if (valid < V) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const float one[1] = {sum[k]};
      if (k >= valid) break;
      if (r.out_dtype == DType::f32) write<float, 1>(segment, target + k, one, r.accumulate);
      else if (r.out_dtype == DType::f16) write<__half, 1>(segment, target + k, one, r.accumulate);
      else write<__nv_bfloat16, 1>(segment, target + k, one, r.accumulate);
    }
  } else if (r.out_dtype == DType::f32) {
    write<float, V>(segment, target, sum, r.accumulate);
  } else if (r.out_dtype == DType::f16) {
    write<__half, V>(segment, target, sum, r.accumulate);
  } else {
    write<__nv_bfloat16, V>(segment, target, sum, r.accumulate);
  }
}

}  // namespace

cudaError_t launch_reduce(const Reduction* jobs, int count, const Device& device, cudaStream_t stream) {
  Jobs all{};
  bool quads = true;  // whole groups of 4 in every row, and 16-byte aligned ones
  for (int i = 0; i < count; ++i)
    quads = quads && jobs[i].cols % 4 == 0 && jobs[i].ld_partial % 4 == 0 && jobs[i].split_stride % 4 == 0 &&
            reinterpret_cast<uintptr_t>(jobs[i].partial) % 16 == 0;
  const int width = quads ? 4 : 1;
  for (int i = 0; i < count; ++i) {
    all.job[i] = jobs[i];
    all.blocks[i] = (jobs[i].rows * (jobs[i].cols / width) + kThreads - 1) / kThreads;
  }
  const int64_t blocks = all.blocks[0] + all.blocks[1];
  if (blocks == 0) return cudaSuccess;
  return launch_overlapped(quads ? reduce_kernel<4> : reduce_kernel<1>, dim3(static_cast<unsigned>(blocks)), kThreads,
                           0, device.capability >= 90, stream, all);
}

}  // namespace zerolora
