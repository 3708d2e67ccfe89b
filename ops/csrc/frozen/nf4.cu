// Dequantizes NF4 (bitsandbytes layout), including double-quantized block maxima, to f32, f16 or bf16 in one kernel.
#include "common.cuh"

namespace zerolora {
namespace {

constexpr int kThreads = 256, kPerThread = 8, kUnroll = 4;

struct Args {
  Nf4 w;
  int block_shift, nested_shift;
};

__device__ __forceinline__ float block_maximum(const Args& a, const float* nested_code, int64_t block) {
  if (a.w.nested_code == nullptr) return static_cast<const float*>(a.w.absmax)[block];
  const uint8_t q = static_cast<const uint8_t*>(a.w.absmax)[block];
  // Round after the product and after the sum, as bitsandbytes does: the values must agree bitwise.
  return __fadd_rn(__fmul_rn(nested_code[q], a.w.nested_absmax[block >> a.nested_shift]), *a.w.offset);
}

template <typename T> __global__ void __launch_bounds__(kThreads) nf4_kernel(const Args a, T* out) {
  __shared__ float code[16], nested_code[256];
  if (threadIdx.x < 16) code[threadIdx.x] = a.w.code[threadIdx.x];
  if (a.w.nested_code != nullptr) nested_code[threadIdx.x] = a.w.nested_code[threadIdx.x];
  __syncthreads();
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kUnroll * kThreads + threadIdx.x) * kPerThread;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + static_cast<int64_t>(u) * kThreads * kPerThread;
    if (i >= a.w.count) return;
    const float maximum = block_maximum(a, nested_code, i >> a.block_shift);
    if (i + kPerThread <= a.w.count) {
      uint32_t bytes;
      memcpy(&bytes, a.w.packed + i / 2, 4);
      float v[8];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        v[2 * b] = code[bytes >> (8 * b + 4) & 15u] * maximum;
        v[2 * b + 1] = code[bytes >> (8 * b) & 15u] * maximum;
      }
      store8(out + i, v);
    } else {
      for (int64_t k = i; k < a.w.count; ++k) {
        const uint8_t byte = a.w.packed[k / 2];
        out[k] = from_float<T>(code[k % 2 == 0 ? byte >> 4 : byte & 15] * maximum);
      }
    }
  }
}

int exact_log2(int power) {
  int shift = 0;
  while ((1 << shift) < power) ++shift;
  return shift;
}

}  // namespace

cudaError_t launch_nf4(const Nf4& weight, DType dtype, void* out, cudaStream_t stream) {
  if (weight.count == 0) return cudaSuccess;
  const Args args{weight, exact_log2(weight.block), exact_log2(weight.nested_block)};
  constexpr int64_t kPerBlock = static_cast<int64_t>(kThreads) * kPerThread * kUnroll;
  const unsigned blocks = static_cast<unsigned>((weight.count + kPerBlock - 1) / kPerBlock);
  by_type(dtype, [&](auto* element) {
    nf4_kernel<<<blocks, kThreads, 0, stream>>>(args, static_cast<decltype(element)>(out));
  });
  return cudaGetLastError();
}

}  // namespace zerolora
