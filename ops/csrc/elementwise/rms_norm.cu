// RMSNorm and its derivative in one pass over memory each, without atomics, so that results are bitwise reproducible. A
// team of threads (blockDim.x) keeps a row in registers, V vectors of W elements per thread.
#include "vectors.cuh"

namespace zerolora {
namespace {

constexpr int kNormThreads = 512;                               // maximum threads per team
constexpr int kNormBlock = 256;                                 // threads per block if teams are at most a warp
template <int W> constexpr int kMostVectors = W == 1 ? 16 : 8;  // per thread: as many as fit its registers

// Returns the sum over a team, added in a fixed order, to all threads. Call it once per kernel: the shared words are
// not protected against reuse.
__device__ __forceinline__ float team_sum(float value) {
  const int team = static_cast<int>(blockDim.x);
  for (int step = min(team, 32) / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  if (team <= 32) return value;
  __shared__ float partial[kNormThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  if (lane == 0) partial[warp] = value;
  __syncthreads();
  value = lane < team / 32 ? partial[lane] : 0.f;
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

struct Position {
  int64_t t;
  bool active;
  // Teams past the last row repeat it and store nothing, because their warp needs them for the sum.
  __device__ explicit Position(int64_t T) : t(static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y) {
    active = t < T;
    t = active ? t : T - 1;
  }
};
template <int W> __device__ __forceinline__ int column(int v) {
  return (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * W;
}
template <typename T, int W, int V>
__device__ __forceinline__ void load_row(Pack<T, W> (&packs)[V], const Rows& rows, int64_t t, int64_t D) {
  const T* row = static_cast<const T*>(rows.data) + t * rows.ld;
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (column<W>(v) < D) packs[v] = load<T, W>(row + column<W>(v));
}

template <typename T, int W, int V>
__global__ void __launch_bounds__(kNormThreads, V > 4 ? 1 : 2) rms_norm_kernel(const RmsNorm a) {
  const Position at(a.T);
  Pack<T, W> x[V];
  load_row(x, a.x, at.t, a.D);
  float squares = 0.f;
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (column<W>(v) < a.D)
#pragma unroll
      for (int w = 0; w < W; ++w) squares += to_float(x[v].values[w]) * to_float(x[v].values[w]);
  const float rstd = rsqrtf(team_sum(squares) / static_cast<float>(a.D) + a.eps);
  if (!at.active) return;
  if (threadIdx.x == 0) a.rstd[at.t] = rstd;
  T* out = static_cast<T*>(a.out) + at.t * a.D;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int d = column<W>(v);
    if (d >= a.D) continue;
    const Pack<T, W> weight = load<T, W>(static_cast<const T*>(a.weight) + d);
#pragma unroll
    for (int w = 0; w < W; ++w) {
      const float normal = to_float(x[v].values[w]) * rstd, factor = to_float(weight.values[w]);
      x[v].values[w] = a.offset == 0.f ? from_float<T>(to_float(from_float<T>(normal)) * factor)
                                       : from_float<T>(normal * (a.offset + factor));
    }
    store<T, W>(out + d, x[v]);
  }
}

// With g = grad (offset + w): dx = rstd (g - x rstd^2 mean over d of g x).
template <typename T, int W, int V>
__global__ void __launch_bounds__(kNormThreads) rms_norm_backward_kernel(const RmsNorm a) {
  const Position at(a.T);
  Pack<T, W> x[V], grad[V];
  load_row(x, a.x, at.t, a.D);
  load_row(grad, a.grad, at.t, a.D);
  const T* weights = static_cast<const T*>(a.weight);
  float product = 0.f;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (column<W>(v) >= a.D) continue;
    const Pack<T, W> weight = load<T, W>(weights + column<W>(v));
#pragma unroll
    for (int w = 0; w < W; ++w)
      product += to_float(grad[v].values[w]) * (a.offset + to_float(weight.values[w])) * to_float(x[v].values[w]);
  }
  const float rstd = a.rstd[at.t];
  const float along = team_sum(product) / static_cast<float>(a.D) * rstd * rstd;
  if (!at.active) return;
  T* out = static_cast<T*>(a.out) + at.t * a.D;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int d = column<W>(v);
    if (d >= a.D) continue;
    const Pack<T, W> weight = load<T, W>(weights + d);
#pragma unroll
    for (int w = 0; w < W; ++w) {
      const float g = to_float(grad[v].values[w]) * (a.offset + to_float(weight.values[w]));
      x[v].values[w] = from_float<T>(rstd * (g - to_float(x[v].values[w]) * along));
    }
    store<T, W>(out + d, x[v]);
  }
}

template <typename T, int W, int V>
void start_norm(const RmsNorm& job, dim3 block, bool backward, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>((job.T + block.y - 1) / block.y);
  if (backward) rms_norm_backward_kernel<T, W, V><<<blocks, block, 0, stream>>>(job);
  else rms_norm_kernel<T, W, V><<<blocks, block, 0, stream>>>(job);
}

template <typename T, int W> cudaError_t launch_norm(const RmsNorm& job, bool backward, cudaStream_t stream) {
  const int64_t vectors = (job.D + W - 1) / W;
  if (vectors > kMostVectors<W> * kNormThreads) return cudaErrorInvalidValue;
  if (vectors <= 32) {
    unsigned team = 8;
    while (team < vectors) team *= 2;
    start_norm<T, W, 1>(job, dim3(team, kNormBlock / team), backward, stream);
  } else if (vectors <= 128) {
    start_norm<T, W, 4>(job, dim3(32, kNormBlock / 32), backward, stream);
  } else if (vectors <= 4 * kNormThreads) {
    start_norm<T, W, 4>(job, dim3(static_cast<unsigned>((vectors + 127) / 128 * 32)), backward, stream);
  } else {
    start_norm<T, W, kMostVectors<W>>(job, dim3(kNormThreads), backward, stream);
  }
  return cudaGetLastError();
}

cudaError_t launch_norm(const RmsNorm& job, bool backward, cudaStream_t stream) {
  if (job.T == 0 || job.D == 0) return cudaSuccess;
  cudaError_t status = cudaSuccess;
  by_type(job.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const bool wide = job.D % kWide<T> == 0 && on_vector(job.x, kWide<T>) && on_vector(job.grad, kWide<T>) &&
                      on_vector(job.weight) && on_vector(job.out);
    status = wide ? launch_norm<T, kWide<T>>(job, backward, stream) : launch_norm<T, 1>(job, backward, stream);
  });
  return status;
}

}  // namespace

int64_t widest_rms_norm(DType dtype, bool aligned) {
  if (!aligned) return kMostVectors<1> * kNormThreads;
  return kMostVectors<8> * kNormThreads * (dtype == DType::f32 ? kWide<float> : kWide<__half>);
}
cudaError_t launch_rms_norm(const RmsNorm& job, cudaStream_t stream) { return launch_norm(job, false, stream); }
cudaError_t launch_rms_norm_backward(const RmsNorm& job, cudaStream_t stream) { return launch_norm(job, true, stream); }

}  // namespace zerolora
