// Stores of finished sums.
#pragma once
#include "common.cuh"

namespace zerolora {

// Converts the first `valid` of V adjacent sums, and writes them or adds them to the result.
template <typename T, int V>
__device__ __forceinline__ void write_sums(T* out, const float (&sum)[V], int valid, bool accumulate) {
  if constexpr (V == 4) {
    if (valid == V && !accumulate && reinterpret_cast<uintptr_t>(out) % (4 * sizeof(T)) == 0) {
      if constexpr (sizeof(T) == 2)
        *reinterpret_cast<uint2*>(out) = make_uint2(pack2<T>(sum[0], sum[1]), pack2<T>(sum[2], sum[3]));
      else *reinterpret_cast<float4*>(out) = make_float4(sum[0], sum[1], sum[2], sum[3]);
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < V; ++k)
    if (k < valid) out[k] = from_float<T>(accumulate ? to_float(out[k]) + sum[k] : sum[k]);
}

// at: offset from `out` in elements.
template <int V>
__device__ __forceinline__ void write_sums(DType dtype, void* out, int64_t at, const float (&sum)[V], int valid,
                                           bool accumulate) {
  switch (dtype) {
    case DType::f32: write_sums(static_cast<float*>(out) + at, sum, valid, accumulate); break;
    case DType::f16: write_sums(static_cast<__half*>(out) + at, sum, valid, accumulate); break;
    default: write_sums(static_cast<__nv_bfloat16*>(out) + at, sum, valid, accumulate);
  }
}

}  // namespace zerolora
