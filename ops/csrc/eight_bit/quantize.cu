// Rows of 16 or 32 bits to 8, each by its own largest magnitude: one CTA a row, which stays in registers between the
// two looks at it. Siblings' gradients go side by side into one matrix, times the scales of their weights' rows.
#include <algorithm>
#include <cuda_fp8.h>

#include "eight_bit.h"
#include "vectors.cuh"

namespace zerolora {
namespace {

constexpr int kVector = 8;  // values that a thread takes at once
constexpr float kSmallest = 0x1p-100f;

struct Args {
  Quantize job;
  int end[kMaxSiblings];  // of each part, in vectors
};

// Magnitudes compare as their bits do, and a NaN is above all of them.
__device__ __forceinline__ uint32_t magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

__device__ __forceinline__ uint32_t largest_of_row(uint32_t largest) {
  __shared__ uint32_t of_warp[32];
  const auto of_lanes = [](uint32_t value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = max(value, __shfl_xor_sync(~0u, value, step));
    return value;
  };
  largest = of_lanes(largest);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  return of_lanes(threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0);
}

template <bool kFp8> __device__ __forceinline__ float scale_of(uint32_t largest) {
  const float scale = __fdiv_rn(__uint_as_float(largest), kFp8 ? 448.f : 127.f);
  return scale < kSmallest ? kSmallest : scale;
}

template <bool kFp8> __device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
  if constexpr (kFp8) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
    return low | static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3)) << 16;
  } else {
    const auto byte = [](float v) { return static_cast<uint32_t>(max(-127, min(127, __float2int_rn(v)))) & 255u; };
    return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
  }
}

// Where a vector lies, and its factors.
template <typename T> struct Place {
  const T* values;
  const float* factor;
  __device__ __forceinline__ Place(const Args& a, int64_t row, int vector) {
    int p = 0;
    while (vector >= a.end[p]) ++p;
    const QuantizePart& part = a.job.part[p];
    const int64_t column = static_cast<int64_t>(vector - (p == 0 ? 0 : a.end[p - 1])) * kVector;
    values = static_cast<const T*>(part.data) + row * part.ld + column;
    factor = part.factor == nullptr ? nullptr : part.factor + column;
  }
};

__device__ __forceinline__ void times(float (&v)[kVector], const float* factor) {
  if (factor == nullptr) return;
  const float4 low = reinterpret_cast<const float4*>(factor)[0], high = reinterpret_cast<const float4*>(factor)[1];
  v[0] *= low.x, v[1] *= low.y, v[2] *= low.z, v[3] *= low.w;
  v[4] *= high.x, v[5] *= high.y, v[6] *= high.z, v[7] *= high.w;
}

template <typename T> __device__ __forceinline__ void spread(float (&v)[kVector], const uint4& raw) {
  T values[kVector];
  memcpy(values, &raw, 16);
#pragma unroll
  for (int i = 0; i < kVector; ++i) v[i] = to_float(values[i]);
}

// 16-bit values, in whole vectors of 16 bytes; kHeld of them a thread.
template <typename T, bool kFp8, int kHeld, int kThreads>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const __grid_constant__ Args a) {
  const int64_t row = blockIdx.x;
  const int vectors = static_cast<int>(a.job.K / kVector);
  uint4 raw[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int vector = static_cast<int>(threadIdx.x + i * blockDim.x);
    if (vector < vectors) raw[i] = __ldcs(reinterpret_cast<const uint4*>(Place<T>(a, row, vector).values));
  }
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int vector = static_cast<int>(threadIdx.x + i * blockDim.x);
    if (vector >= vectors) continue;
    float v[kVector];
    spread<T>(v, raw[i]);
    times(v, Place<T>(a, row, vector).factor);
#pragma unroll
    for (int e = 0; e < kVector; ++e) largest = max(largest, magnitude(v[e]));
  }
  const float scale = scale_of<kFp8>(largest_of_row(largest)), inverse = __frcp_rn(scale);
  if (threadIdx.x == 0) a.job.scale[row] = scale;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int vector = static_cast<int>(threadIdx.x + i * blockDim.x);
    if (vector >= vectors) continue;
    float v[kVector];
    spread<T>(v, raw[i]);
    times(v, Place<T>(a, row, vector).factor);
#pragma unroll
    for (float& each : v) each *= inverse;
    *reinterpret_cast<uint2*>(a.job.q + row * a.job.K + static_cast<int64_t>(vector) * kVector) =
        make_uint2(pack<kFp8>(v[0], v[1], v[2], v[3]), pack<kFp8>(v[4], v[5], v[6], v[7]));
  }
}

// Any type, width and alignment: value by value, read twice.
template <typename T, bool kFp8> __global__ void __launch_bounds__(256)
    quantize_any_kernel(const __grid_constant__ Args a) {
  const int64_t row = blockIdx.x;
  const auto each = [&](auto use) {
    int64_t at = 0;
    for (int p = 0; p < a.job.parts; at += a.job.part[p++].width) {
      const QuantizePart& part = a.job.part[p];
      const T* const values = static_cast<const T*>(part.data) + row * part.ld;
      for (int64_t i = threadIdx.x; i < part.width; i += blockDim.x)
        use(at + i, to_float(values[i]) * (part.factor == nullptr ? 1.f : part.factor[i]));
    }
  };
  uint32_t largest = 0;
  each([&](int64_t, float value) { largest = max(largest, magnitude(value)); });
  const float scale = scale_of<kFp8>(largest_of_row(largest)), inverse = __frcp_rn(scale);
  if (threadIdx.x == 0) a.job.scale[row] = scale;
  each([&](int64_t at, float value) {
    a.job.q[row * a.job.K + at] = static_cast<uint8_t>(pack<kFp8>(value * inverse, 0.f, 0.f, 0.f));
  });
}

template <typename T, bool kFp8> void start(const Args& args, bool in_vectors, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(args.job.T);
  const int vectors = static_cast<int>(args.job.K / kVector);
  if constexpr (sizeof(T) == 2) {
    const auto run = [&](auto kernel, int most) {
      kernel<<<rows, std::min(most, (vectors + 31) / 32 * 32), 0, stream>>>(args);
    };
    if (in_vectors && vectors <= 256) return run(quantize_kernel<T, kFp8, 1, 256>, 256);
    if (in_vectors && vectors <= 2 * 256) return run(quantize_kernel<T, kFp8, 2, 256>, 256);
    if (in_vectors && vectors <= 4 * 256) return run(quantize_kernel<T, kFp8, 4, 256>, 256);
    if (in_vectors && vectors <= 7 * 256) return run(quantize_kernel<T, kFp8, 7, 256>, 256);
    if (in_vectors && vectors <= 14 * 256) return run(quantize_kernel<T, kFp8, 14, 256>, 256);
    if (in_vectors && vectors <= 7 * 1024) return run(quantize_kernel<T, kFp8, 7, 1024>, 1024);
  }
  quantize_any_kernel<T, kFp8><<<rows, 256, 0, stream>>>(args);
}

}  // namespace

cudaError_t launch_quantize(const Quantize& job, cudaStream_t stream) {
  if (job.T == 0) return cudaSuccess;
  if (job.T > 0x7fffffff || job.K > 0x7fffffff) return cudaErrorInvalidValue;
  Args args{job, {}};
  bool in_vectors = reinterpret_cast<uintptr_t>(job.q) % kVector == 0;
  int end = 0;
  for (int i = 0; i < job.parts; ++i) {
    const QuantizePart& part = job.part[i];
    in_vectors = in_vectors && part.width % kVector == 0 && part.ld % kVector == 0 && on_vector(part.data) &&
                 on_vector(part.factor);
    args.end[i] = end += static_cast<int>(part.width / kVector);
  }
  by_type(job.dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    if (job.fp8) start<T, true>(args, in_vectors, stream);
    else start<T, false>(args, in_vectors, stream);
  });
  return cudaGetLastError();
}

}  // namespace zerolora
