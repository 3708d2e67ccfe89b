// Dequantizes NF4 and MXFP4 of all experts to f32, f16 or bf16 in one launch; experts are quantized separately.
#include "common.cuh"
#include "experts.h"

namespace zerolora {
namespace {

constexpr int kThreads = 256, kPerThread = 8;

// A quantization block has a multiple of 8 values, so a thread's 8 values share one maximum.
template <typename T> __global__ void __launch_bounds__(kThreads) nf4_kernel(const ExpertNf4 job, T* out) {
  __shared__ float code[16], nested_code[256];
  const Nf4& w = job.weight;
  if (threadIdx.x < 16) code[threadIdx.x] = w.code[threadIdx.x];
  if (w.nested_code != nullptr) nested_code[threadIdx.x] = w.nested_code[threadIdx.x];
  __syncthreads();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPerThread, e = blockIdx.y;
  if (i >= w.count) return;
  const int64_t blocks = w.count / w.block, block = i / w.block;
  float maximum;
  if (w.nested_code == nullptr) {
    maximum = static_cast<const float*>(w.absmax)[e * blocks + block];
  } else {
    const int64_t nested = (blocks + w.nested_block - 1) / w.nested_block;
    const uint8_t q = static_cast<const uint8_t*>(w.absmax)[e * blocks + block];
    // Round after the product and after the sum, as bitsandbytes does: the values must agree bitwise.
    maximum = __fadd_rn(__fmul_rn(nested_code[q], w.nested_absmax[e * nested + block / w.nested_block]), w.offset[e]);
  }
  uint32_t bytes;
  memcpy(&bytes, w.packed + (e * w.count + i) / 2, 4);
  float v[8];
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    v[2 * b] = code[bytes >> (8 * b + 4) & 15u] * maximum;
    v[2 * b + 1] = code[bytes >> (8 * b) & 15u] * maximum;
  }
  store8(out + e * w.count + i, v);
}

// Decodes E2M1: a sign, two bits of exponent, one of mantissa. Low nibble first; 32 values share a scale 2^(s - 127).
__device__ __forceinline__ float e2m1(uint32_t nibble) {
  const uint32_t exponent = nibble >> 1 & 3u, mantissa = nibble & 1u;
  const float size = exponent == 0 ? 0.5f * mantissa : __uint_as_float((exponent + 126u) << 23 | mantissa << 22);
  return nibble & 8u ? -size : size;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    mxfp4_kernel(const uint8_t* blocks, const uint8_t* scales, int64_t groups, T* out) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, group = at / 4;
  if (group >= groups) return;
  uint32_t bytes;
  memcpy(&bytes, blocks + at * 4, 4);
  const int scale = scales[group] - 127;
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = ldexpf(e2m1(bytes >> (4 * i) & 15u), scale);
  store8(out + at * 8, v);
}

}  // namespace

cudaError_t launch_expert_nf4(const ExpertNf4& job, DType dtype, void* out, cudaStream_t stream) {
  const Nf4& w = job.weight;
  if (w.block % kPerThread != 0 || w.count % w.block != 0) return cudaErrorInvalidValue;
  if (w.count == 0 || job.E == 0) return cudaSuccess;
  constexpr int64_t kPerBlock = kThreads * kPerThread;
  const dim3 grid(static_cast<unsigned>((w.count + kPerBlock - 1) / kPerBlock), static_cast<unsigned>(job.E));
  by_type(dtype,
          [&](auto* element) { nf4_kernel<<<grid, kThreads, 0, stream>>>(job, static_cast<decltype(element)>(out)); });
  return cudaGetLastError();
}

cudaError_t launch_mxfp4(const uint8_t* blocks, const uint8_t* scales, int64_t groups, DType dtype, void* out,
                         cudaStream_t stream) {
  if (groups == 0) return cudaSuccess;
  const unsigned grid = static_cast<unsigned>((groups * 4 + kThreads - 1) / kThreads);
  by_type(dtype, [&](auto* element) {
    mxfp4_kernel<<<grid, kThreads, 0, stream>>>(blocks, scales, groups, static_cast<decltype(element)>(out));
  });
  return cudaGetLastError();
}

}  // namespace zerolora
