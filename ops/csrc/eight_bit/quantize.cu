// Quantizes 16-bit or fp32 rows to 8 bits by their largest magnitude, reading memory once. The gradients of a group
// are concatenated into one matrix and multiplied by the scales of their weights' rows.
#include <algorithm>
#include <cuda_fp8.h>

#include "eight_bit.h"
#include "vectors.cuh"

namespace zerolora {
namespace {

constexpr int kVector = 8;     // values per load of a thread
constexpr int kHeld = 4;       // vectors of a row per thread
constexpr int kStages = 3;     // rows per CTA in flight: one is processed while the others are copied
constexpr int kThreads = 896;  // per multiprocessor, in one or more CTAs: more would leave too few registers
constexpr int kMostWarps = 32;
constexpr int kWideHeld = 7, kWideThreads = 1024;  // for wider rows
constexpr float kSmallest = 0x1p-100f;

struct Origin {
  const char* first;  // where the first row would begin if this were the only part
  uint32_t pitch;     // bytes between rows
};
struct Args {
  Quantize job;
  int end[kMaxGroup];  // of each part, in vectors
  Origin origin[kMaxGroup];
};

// The bits of magnitudes compare like the magnitudes, and those of a NaN are largest.
__device__ __forceinline__ uint32_t magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

// Returns the maximum over a CTA's threads; consecutive calls must use different words of shared memory.
__device__ __forceinline__ uint32_t row_maximum(uint32_t largest, uint32_t (&warp_maxima)[kMostWarps]) {
  const auto warp_maximum = [](uint32_t value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, value);
#else
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = max(value, __shfl_xor_sync(~0u, value, step));
    return value;
#endif
  };
  largest = warp_maximum(largest);
  if (threadIdx.x % 32 == 0) warp_maxima[threadIdx.x / 32] = largest;
  __syncthreads();
  return warp_maximum(threadIdx.x % 32 < blockDim.x / 32 ? warp_maxima[threadIdx.x % 32] : 0);
}

template <bool kFp8> __device__ __forceinline__ float compute_scale(uint32_t largest) {
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

// The part that a vector belongs to, and its first column there.
struct Place {
  int part, column;
  __device__ __forceinline__ Place(const Args& a, int vector) : part(0) {
    while (vector >= a.end[part]) ++part;
    column = (vector - (part == 0 ? 0 : a.end[part - 1])) * kVector;
  }
  template <typename T> __device__ __forceinline__ const T* values(const Args& a, int64_t row) const {
    return static_cast<const T*>(a.job.part[part].data) + row * a.job.part[part].ld + column;
  }
  __device__ __forceinline__ void factors(float (&of)[kVector], const Args& a, bool held = true) const {
    const float* const factor = held ? a.job.part[part].factor : nullptr;
#pragma unroll
    for (int e = 0; e < kVector; e += 4) {
      const float4 four =
          factor == nullptr ? make_float4(1.f, 1.f, 1.f, 1.f) : *reinterpret_cast<const float4*>(factor + column + e);
      of[e] = four.x, of[e + 1] = four.y, of[e + 2] = four.z, of[e + 3] = four.w;
    }
  }
};

template <typename T> __device__ __forceinline__ void spread(float (&v)[kVector], const uint4& raw) {
  if constexpr (std::is_same<T, __nv_bfloat16>::value) {  // by hand, because the compiler needs three instructions for
                                                          // a pair
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[2 * i] = __uint_as_float(words[i] << 16), v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  } else {
    T values[kVector];
    memcpy(values, &raw, 16);
#pragma unroll
    for (int i = 0; i < kVector; ++i) v[i] = to_float(values[i]);
  }
}

template <bool kFp8> __device__ __forceinline__ uint2 packed(const float (&v)[kVector]) {
  return make_uint2(pack<kFp8>(v[0], v[1], v[2], v[3]), pack<kFp8>(v[4], v[5], v[6], v[7]));
}

__device__ __forceinline__ uint64_t wide_product(int row, uint32_t width) {  // one instruction, as neither is negative
  return static_cast<uint64_t>(static_cast<uint32_t>(row)) * width;
}

// For 16-bit values in vectors of 16 bytes. CTAs are persistent and process many rows; their threads keep the factors
// of the columns in registers. A thread only reads values it copied itself, so rows need no barrier. The last rows are
// processed first because they are still in L2 from the previous kernel.
template <typename T, bool kFp8, bool kFactors>
__global__ void __launch_bounds__(kThreads, 1) quantize_kernel(const __grid_constant__ Args a) {
  extern __shared__ uint4 ring[];  // [stage][vector of a thread][thread]
  __shared__ uint32_t warp_maxima[2][kMostWarps];
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int vectors = static_cast<int>(a.job.K / kVector);
  const int stride = static_cast<int>(gridDim.x), first = static_cast<int>(a.job.T) - 1 - static_cast<int>(blockIdx.x);
  const auto held = [&](int i) { return thread + i * threads < vectors; };
  uint32_t parts = 0;  // of this thread's vectors, a byte each
  float factor[kHeld][kVector];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const Place place(a, held(i) ? thread + i * threads : 0);
    parts |= static_cast<uint32_t>(place.part) << 8 * i;
    if constexpr (kFactors) place.factors(factor[i], a, held(i));
  }
  const auto fetch = [&](int row, int stage) {
    if (row >= 0)
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const Origin& of = a.origin[parts >> 8 * i & 255u];
        const char* const from = of.first + wide_product(row, of.pitch) + (thread + i * threads) * 16u;
        copy_async(shared_address(ring + (stage * kHeld + i) * threads + thread), from, held(i));
      }
    copy_commit();
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) fetch(first - stage * stride, stage);
  int stage = 0, turn = 0;
  for (int row = first; row >= 0; row -= stride, turn ^= 1) {
    fetch(row - (kStages - 1) * stride, stage == 0 ? kStages - 1 : stage - 1);  // into the slot of the previous row
    copy_wait<kStages - 1>();
    const uint4* const mine = ring + stage * kHeld * threads + thread;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      float v[kVector];
      spread<T>(v, mine[i * threads]);
#pragma unroll
      for (int e = 0; e < kVector; ++e)  // |v f| as |v| |f|: magnitudes of operands are free
        largest = max(largest, kFactors ? __float_as_uint(fabsf(v[e]) * fabsf(factor[i][e])) : magnitude(v[e]));
    }
    const float scale = compute_scale<kFp8>(row_maximum(largest, warp_maxima[turn])), inverse = __frcp_rn(scale);
    if (thread == 0) a.job.scale[row] = scale;
    uint8_t* const q = a.job.q + wide_product(row, static_cast<uint32_t>(a.job.K));
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      float v[kVector];
      spread<T>(v, mine[i * threads]);
#pragma unroll
      for (int e = 0; e < kVector; ++e) v[e] = (kFactors ? v[e] * factor[i][e] : v[e]) * inverse;
      const uint2 bytes = packed<kFp8>(v);
      if (held(i)) *reinterpret_cast<uint2*>(q + (thread + i * threads) * 8u) = bytes;
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
}

// For rows too wide for quantize_kernel, and for GPUs older than Ampere: one CTA per row.
template <typename T, bool kFp8>
__global__ void __launch_bounds__(kWideThreads) quantize_wide_kernel(const __grid_constant__ Args a) {
  __shared__ uint32_t warp_maxima[kMostWarps];
  const int64_t row = blockIdx.x;
  const int vectors = static_cast<int>(a.job.K / kVector);
  uint4 raw[kWideHeld];
  const auto each = [&](auto use) {
#pragma unroll
    for (int i = 0; i < kWideHeld; ++i)
      if (const int vector = static_cast<int>(threadIdx.x) + i * kWideThreads; vector < vectors)
        use(raw[i], Place(a, vector), vector);
  };
  const auto value = [&](float (&v)[kVector], const uint4& from, const Place& place) {
    float factor[kVector];
    place.factors(factor, a);
    spread<T>(v, from);
#pragma unroll
    for (int e = 0; e < kVector; ++e) v[e] *= factor[e];
  };
  each([&](uint4& to, const Place& place, int) {
    to = __ldcs(reinterpret_cast<const uint4*>(place.values<T>(a, row)));
  });
  uint32_t largest = 0;
  each([&](const uint4& from, const Place& place, int) {
    float v[kVector];
    value(v, from, place);
#pragma unroll
    for (float each : v) largest = max(largest, magnitude(each));
  });
  const float scale = compute_scale<kFp8>(row_maximum(largest, warp_maxima)), inverse = __frcp_rn(scale);
  if (threadIdx.x == 0) a.job.scale[row] = scale;
  each([&](const uint4& from, const Place& place, int vector) {
    float v[kVector];
    value(v, from, place);
#pragma unroll
    for (float& each : v) each *= inverse;
    *reinterpret_cast<uint2*>(a.job.q + row * a.job.K + static_cast<int64_t>(vector) * kVector) = packed<kFp8>(v);
  });
}

// For any type, width and alignment: reads each value separately, and twice.
template <typename T, bool kFp8> __global__ void __launch_bounds__(256)
    quantize_any_kernel(const __grid_constant__ Args a) {
  __shared__ uint32_t warp_maxima[kMostWarps];
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
  const float scale = compute_scale<kFp8>(row_maximum(largest, warp_maxima)), inverse = __frcp_rn(scale);
  if (threadIdx.x == 0) a.job.scale[row] = scale;
  each([&](int64_t at, float value) {
    a.job.q[row * a.job.K + at] = static_cast<uint8_t>(pack<kFp8>(value * inverse, 0.f, 0.f, 0.f));
  });
}

// Returns false if the rows are too wide.
template <typename T, bool kFp8, bool kFactors>
bool start_persistent(const Args& args, const Device& device, cudaStream_t stream) {
  constexpr int kLanes = 32 * kHeld;
  const int64_t vectors = args.job.K / kVector, warps = (vectors + kLanes - 1) / kLanes;
  if (device.capability < 80 || warps > kThreads / 32) return false;
  const int threads = static_cast<int>(warps) * 32, bytes = kStages * kHeld * threads * 16;
  constexpr int kOther = 2048;  // other shared memory of a CTA, in bytes
  constexpr auto kernel = quantize_kernel<T, kFp8, kFactors>;
  if (bytes + kOther > device.shared_bytes || allow_shared_bytes<kernel>(bytes) != cudaSuccess) return false;
  // Without this, shared memory may suffice for only one CTA.
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  const int at_once = std::min(kThreads / threads, device.shared_bytes_sm / (bytes + kOther));
  const int64_t blocks = std::min<int64_t>(args.job.T, device.multiprocessors * at_once);
  kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(args);
  return true;
}

template <typename T, bool kFp8>
void start(const Args& args, bool in_vectors, const Device& device, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(args.job.T);
  if constexpr (sizeof(T) == 2) {
    bool factors = false;
    for (int i = 0; i < args.job.parts; ++i) factors = factors || args.job.part[i].factor != nullptr;
    if (in_vectors && (factors ? start_persistent<T, kFp8, true>(args, device, stream)
                               : start_persistent<T, kFp8, false>(args, device, stream)))
      return;
    if (in_vectors && args.job.K <= kVector * kWideHeld * kWideThreads)
      return quantize_wide_kernel<T, kFp8><<<rows, kWideThreads, 0, stream>>>(args);
  }
  quantize_any_kernel<T, kFp8><<<rows, 256, 0, stream>>>(args);
}

}  // namespace

cudaError_t launch_quantize(const Quantize& job, const Device& device, cudaStream_t stream) {
  if (job.T == 0) return cudaSuccess;
  if (job.T > 0x7fffffff || job.K > 0x7fffffff) return cudaErrorInvalidValue;
  Args args{job, {}, {}};
  bool in_vectors = job.K > 0 && reinterpret_cast<uintptr_t>(job.q) % kVector == 0;
  int end = 0;
  for (int i = 0; i < job.parts; ++i) {
    const QuantizePart& part = job.part[i];
    in_vectors = in_vectors && part.width % kVector == 0 && part.ld % kVector == 0 && on_vector(part.data) &&
                 on_vector(part.factor) && part.ld <= 0x7fffffff;
    args.origin[i] = {static_cast<const char*>(part.data) - end * 16, static_cast<uint32_t>(part.ld * 2)};
    args.end[i] = end += static_cast<int>(part.width / kVector);
  }
  by_type(job.dtype, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    if (job.fp8) start<T, true>(args, in_vectors, device, stream);
    else start<T, false>(args, in_vectors, device, stream);
  });
  return cudaGetLastError();
}

}  // namespace zerolora
