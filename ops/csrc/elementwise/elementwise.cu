// SiLU or GELU times another matrix, and rotary embedding, in one pass over memory each.
#include "vectors.cuh"

namespace zerolora {
namespace {

constexpr int kThreads = 256, kUnroll = 2;

template <typename T> __device__ __forceinline__ float sigmoid(float v) {
  // The fast versions have errors of 2^-21, far below the rounding of 16-bit types, and keep the kernel memory-bound.
  if constexpr (sizeof(T) == 4) return 1.f / (1.f + expf(-v));
  else return __fdividef(1.f, 1.f + __expf(-v));
}

// f(v) and its slope.
struct Value {
  float value, slope;
};
template <typename T, Activation kActivation> __device__ __forceinline__ Value activated(float v) {
  if constexpr (kActivation == Activation::silu) {
    const float s = sigmoid<T>(v);
    return {v * s, s * (1.f + v * (1.f - s))};
  }
  // (1 + tanh(z)) / 2 is sigmoid(2 z).
  constexpr float kTwice = 1.5957691216057308f, kCube = 0.044715f;
  const float z = kTwice * v * (1.f + kCube * v * v), s = sigmoid<T>(z);
  // The slope multiplies 1 - s by v^3, including the rounding error of the subtraction, which is 2^-25 in fp32.
  const float rest = sizeof(T) == 4 ? sigmoid<T>(-z) : 1.f - s;
  return {v * s, s * (1.f + v * rest * kTwice * (1.f + 3.f * kCube * v * v))};
}

// A block processes one piece of a row: kThreads * kUnroll vectors. A row has `chunks` pieces.
struct Piece {
  int64_t t, begin;
  __device__ Piece(unsigned chunks, int width)
      : t(blockIdx.x / chunks),
        begin((static_cast<int64_t>(blockIdx.x % chunks) * kThreads * kUnroll + threadIdx.x) * width) {}
  __device__ __forceinline__ int64_t column(int u, int width) const { return begin + u * kThreads * width; }
};

template <typename T, int W>
__device__ __forceinline__ void load_piece(Pack<T, W> (&packs)[kUnroll], const Rows& rows, const Piece& at, int64_t D) {
  const T* row = static_cast<const T*>(rows.data) + at.t * rows.ld;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u)
    if (at.column(u, W) < D) packs[u] = load<T, W>(row + at.column(u, W));
}
template <typename T, int W>
__device__ __forceinline__ void store_piece(const Pack<T, W> (&packs)[kUnroll], void* to, int64_t ld, const Piece& at,
                                            int64_t D) {
  T* row = static_cast<T*>(to) + at.t * ld;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u)
    if (at.column(u, W) < D) store<T, W>(row + at.column(u, W), packs[u]);
}

template <typename T, int W, Activation kActivation>
__global__ void __launch_bounds__(kThreads) gated_mul_kernel(const GatedMul a, const unsigned chunks) {
  const Piece at(chunks, W);
  Pack<T, W> gate[kUnroll], up[kUnroll];
  load_piece(gate, a.gate, at, a.D);
  load_piece(up, a.up, at, a.D);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u)
#pragma unroll
    for (int w = 0; w < W; ++w) {
      const float value = activated<T, kActivation>(to_float(gate[u].values[w])).value;
      gate[u].values[w] = from_float<T>(to_float(from_float<T>(value)) * to_float(up[u].values[w]));
    }
  store_piece(gate, a.out, a.D, at, a.D);
}

template <typename T, int W, Activation kActivation>
__global__ void __launch_bounds__(kThreads) gated_mul_backward_kernel(const GatedMul a, const unsigned chunks) {
  const Piece at(chunks, W);
  Pack<T, W> gate[kUnroll], up[kUnroll], grad[kUnroll];
  load_piece(gate, a.gate, at, a.D);
  load_piece(up, a.up, at, a.D);
  load_piece(grad, a.grad, at, a.D);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u)
#pragma unroll
    for (int w = 0; w < W; ++w) {
      const Value f = activated<T, kActivation>(to_float(gate[u].values[w]));
      const float g = to_float(grad[u].values[w]);
      gate[u].values[w] = from_float<T>(g * to_float(up[u].values[w]) * f.slope);
      up[u].values[w] = from_float<T>(g * to_float(from_float<T>(f.value)));
    }
  store_piece(gate, a.grad_gate, a.ld_grads, at, a.D);
  store_piece(up, a.grad_up, a.ld_grads, at, a.D);
}

template <typename T, int W, Activation kActivation>
void start_gated(const GatedMul& job, bool backward, cudaStream_t stream) {
  const int64_t per_block = static_cast<int64_t>(kThreads) * kUnroll * W;
  const unsigned chunks = static_cast<unsigned>((job.D + per_block - 1) / per_block);
  const unsigned blocks = static_cast<unsigned>(chunks * job.T);
  if (backward) gated_mul_backward_kernel<T, W, kActivation><<<blocks, kThreads, 0, stream>>>(job, chunks);
  else gated_mul_kernel<T, W, kActivation><<<blocks, kThreads, 0, stream>>>(job, chunks);
}
template <typename T, int W> void start_gated(const GatedMul& job, bool backward, cudaStream_t stream) {
  if (job.activation == Activation::silu) start_gated<T, W, Activation::silu>(job, backward, stream);
  else start_gated<T, W, Activation::gelu>(job, backward, stream);
}

cudaError_t launch_gated(GatedMul job, bool backward, cudaStream_t stream) {
  if (job.T == 0 || job.D == 0) return cudaSuccess;
  const bool dense =
      job.gate.ld == job.D && job.up.ld == job.D && (!backward || (job.grad.ld == job.D && job.ld_grads == job.D));
  if (dense) {  // one long row, so that no chunk ends early at the end of a token
    job.D *= job.T, job.T = 1;
    job.gate.ld = job.up.ld = job.grad.ld = job.ld_grads = job.D;
  }
  by_type(job.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const bool wide = job.D % kWide<T> == 0 && job.ld_grads % kWide<T> == 0 && on_vector(job.gate, kWide<T>) &&
                      on_vector(job.up, kWide<T>) && on_vector(job.grad, kWide<T>) && on_vector(job.out) &&
                      on_vector(job.grad_gate) && on_vector(job.grad_up);
    if (wide) start_gated<T, kWide<T>>(job, backward, stream);
    else start_gated<T, 1>(job, backward, stream);
  });
  return cudaGetLastError();
}

// Rotary embedding: a block per token, a thread per pair of vectors.
constexpr int kRopeThreads = 512;

template <typename T, int W> __global__ void __launch_bounds__(kRopeThreads) rope_kernel(const Rope a) {
  const int64_t token = blockIdx.x, b = token / a.T, t = token % a.T;
  const T* cos = static_cast<const T*>(a.cos) + b * a.angle_stride_b + t * a.angle_stride_t;
  const T* sin = static_cast<const T*>(a.sin) + b * a.angle_stride_b + t * a.angle_stride_t;
  const int half = a.R / 2, rotated = half / W, pairs = a.D / (2 * W), tasks = (a.q.heads + a.k.heads) * pairs;
  for (int task = static_cast<int>(threadIdx.x); task < tasks; task += static_cast<int>(blockDim.x)) {
    const int row = task / pairs, j = task % pairs;
    const bool is_q = row < a.q.heads;
    const Heads& side = is_q ? a.q : a.k;
    const int head = is_q ? row : row - a.q.heads;
    const T* in = static_cast<const T*>(side.data) + b * side.stride_b + t * side.stride_t + head * side.stride_h;
    T* out = static_cast<T*>(side.out) + (token * side.heads + head) * a.D;
    const int first = j < rotated ? j * W : a.R + (j - rotated) * 2 * W, second = first + (j < rotated ? half : W);
    Pack<T, W> x1 = load<T, W>(in + first), x2 = load<T, W>(in + second);
    if (j < rotated) {
      const Pack<T, W> cos1 = load<T, W>(cos + first), cos2 = load<T, W>(cos + second);
      const Pack<T, W> sin1 = load<T, W>(sin + first), sin2 = load<T, W>(sin + second);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const float v1 = to_float(x1.values[w]), v2 = to_float(x2.values[w]);
        // The transpose of [c1 -s1; s2 c2] swaps the two sines and their signs.
        const float s1 = to_float(a.transposed ? sin2.values[w] : sin1.values[w]) * (a.transposed ? -1.f : 1.f);
        const float s2 = to_float(a.transposed ? sin1.values[w] : sin2.values[w]) * (a.transposed ? -1.f : 1.f);
        x1.values[w] = from_float<T>(v1 * to_float(cos1.values[w]) - v2 * s1);
        x2.values[w] = from_float<T>(v2 * to_float(cos2.values[w]) + v1 * s2);
      }
    }
    store<T, W>(out + first, x1);
    store<T, W>(out + second, x2);
  }
}

template <typename T, int W> void start_rope(const Rope& job, cudaStream_t stream) {
  const int tasks = (job.q.heads + job.k.heads) * (job.D / (2 * W));
  const int turns = (tasks + kRopeThreads - 1) / kRopeThreads;
  const unsigned threads = static_cast<unsigned>(((tasks + turns - 1) / turns + 31) / 32 * 32);
  rope_kernel<T, W><<<static_cast<unsigned>(job.B * job.T), threads, 0, stream>>>(job);
}

}  // namespace

cudaError_t launch_gated_mul(const GatedMul& job, cudaStream_t stream) { return launch_gated(job, false, stream); }
cudaError_t launch_gated_mul_backward(const GatedMul& job, cudaStream_t stream) {
  return launch_gated(job, true, stream);
}

cudaError_t launch_rope(const Rope& job, cudaStream_t stream) {
  if (job.B == 0 || job.T == 0 || job.D == 0 || job.q.heads + job.k.heads == 0) return cudaSuccess;
  by_type(job.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int kPair = 2 * kWide<T>;
    const bool wide = job.D % kPair == 0 && job.R % kPair == 0 && on_vector(job.q, kWide<T>) &&
                      on_vector(job.k, kWide<T>) && on_vector(job.cos) && on_vector(job.sin) &&
                      job.angle_stride_b % kWide<T> == 0 && job.angle_stride_t % kWide<T> == 0;
    if (wide) start_rope<T, kWide<T>>(job, stream);
    else start_rope<T, 1>(job, stream);
  });
  return cudaGetLastError();
}

}  // namespace zerolora
