// Device helpers shared by the kernels: conversions, asynchronous copies, tensor-core instructions, the dropout mask.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

#include "kernels.h"

namespace zerolora {

template <typename T> __device__ __forceinline__ float to_float(T v);
template <> __device__ __forceinline__ float to_float(float v) { return v; }
template <> __device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
template <> __device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float(float v) { return v; }
template <> __device__ __forceinline__ __half from_float(float v) { return __float2half_rn(v); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float(float v) { return __float2bfloat16_rn(v); }

template <typename T> __device__ __forceinline__ uint32_t pack2(float low, float high) {
  T pair[2] = {from_float<T>(low), from_float<T>(high)};
  uint32_t word;
  memcpy(&word, pair, 4);
  return word;
}

// Packs 8 values into a 16-bit type.
template <typename T> __device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
  return make_uint4(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]), pack2<T>(v[6], v[7]));
}
template <typename T> __device__ __forceinline__ void store8(T* out, const float (&v)[8]) {
  if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint4*>(out) = pack8<T>(v);
  } else {
    reinterpret_cast<float4*>(out)[0] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4*>(out)[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory; writes zeros and does not read the address if `valid` is false.
__device__ __forceinline__ void copy_async(uint32_t target, const void* source, bool valid) {
#if __CUDA_ARCH__ >= 800
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void copy_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending> __device__ __forceinline__ void copy_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c[16,8] += a[16,16] b[16,8]
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == 2 && std::is_same<T, __half>::value) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

// Returns both halves of a product in one instruction; a 64-bit product would need another addition.
__device__ __forceinline__ uint2 multiply(uint32_t a, uint32_t b) {
  uint2 product;
  asm("{\n.reg .b64 wide;\nmul.wide.u32 wide, %2, %3;\nmov.b64 {%0, %1}, wide;\n}"
      : "=r"(product.x), "=r"(product.y)
      : "r"(a), "r"(b));
  return product;
}

// Philox4x32 with 7 rounds (Salmon et al., SC 2011, table 2: the fewest that pass BigCrush).
__device__ __forceinline__ uint4 philox(uint64_t key, uint64_t counter) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  const uint2 first = multiply(static_cast<uint32_t>(counter), 0xD2511F53u);  // the first round: the upper half is 0
  uint32_t c0 = static_cast<uint32_t>(counter >> 32) ^ k0, c1 = 0, c2 = first.y ^ k1, c3 = first.x;
#pragma unroll
  for (int round = 1; round < 7; ++round) {
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
    const uint2 low = multiply(c0, 0xD2511F53u), high = multiply(c2, 0xCD9E8D57u);
    c0 = high.y ^ c1 ^ k0, c2 = low.y ^ c3 ^ k1;
    c1 = high.x, c3 = low.x;
  }
  return make_uint4(c0, c1, c2, c3);
}

// Elements [t, 8*group .. 8*group + 7] share one Philox call. The mask depends only on the seed, t, d and the width,
// not on the kernel or the type. An element is kept if the low 15 bits of its number reach the threshold.
struct Mask {
  uint64_t key = 0, groups = 0;
  uint32_t thresholds = 0;  // the threshold in each half of the word
  __device__ Mask(const Dropout& d, int64_t width)
      : key(d.seed == nullptr ? 0 : static_cast<uint64_t>(*d.seed)),
        groups(static_cast<uint64_t>((width + 7) / 8)),
        thresholds(d.threshold | d.threshold << 16) {}
  __device__ __forceinline__ uint64_t counter(int64_t t, int64_t d) const {
    return static_cast<uint64_t>(t) * groups + static_cast<uint64_t>(d) / 8;
  }
  // Handles both halves at once: the top bit of 0x8000 + number - threshold means "keep"; prmt spreads it over its
  // half.
  __device__ __forceinline__ uint32_t keep_bits(uint32_t word) const {
    uint32_t bits;
    asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(bits) : "r"((word | 0x80008000u) - thresholds));
    return bits;
  }
  // Returns ones over the 16-bit values to keep among the 8 elements of one call.
  __device__ __forceinline__ uint4 draw(uint64_t counter) const {
    const uint4 n = philox(key, counter);
    return make_uint4(keep_bits(n.x), keep_bits(n.y), keep_bits(n.z), keep_bits(n.w));
  }
};
__device__ __forceinline__ uint4 zero_dropped(uint4 values, uint4 keep) {
  return make_uint4(values.x & keep.x, values.y & keep.y, values.z & keep.z, values.w & keep.w);
}

// Dropout::bits, where four calls share a word: of call q, element 2j is bit 4q + j and element 2j + 1 bit 16 + 4q + j.
__device__ __forceinline__ uint32_t pack_kept(uint4 keep) {  // as call 0
  return (keep.x & 0x00010001u) | (keep.y & 0x00020002u) | (keep.z & 0x00040004u) | (keep.w & 0x00080008u);
}
template <int kBit> __device__ __forceinline__ uint32_t spread_kept(uint32_t word) {
  uint32_t bits;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(bits) : "r"(word << (7 - kBit % 8)), "n"(kBit < 8 ? 0xAA88 : 0xBB99));
  return bits;
}
template <int kCall> __device__ __forceinline__ uint4 unpack_kept(uint32_t word) {
  return make_uint4(spread_kept<4 * kCall>(word), spread_kept<4 * kCall + 1>(word), spread_kept<4 * kCall + 2>(word),
                    spread_kept<4 * kCall + 3>(word));
}

// Returns the first of the 4 ranks, out of 16 adjacent ones, that a lane owns in a unit of partial sums (kernels.h).
__device__ __forceinline__ int quad_column(int lane) { return lane % 2 * 8 + lane % 4 / 2 * 4; }

// Waits for the previous kernel in the stream. A kernel launched with `launch_overlapped` may start before that kernel
// ends; before this call, it must not access memory that the previous kernel reads or writes.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Calls `run` with a null pointer of the element type.
template <typename Run> void by_type(DType dtype, Run run) {
  switch (dtype) {
    case DType::f32: run(static_cast<float*>(nullptr)); break;
    case DType::f16: run(static_cast<__half*>(nullptr)); break;
    case DType::bf16: run(static_cast<__nv_bfloat16*>(nullptr)); break;
  }
}

// Allows a kernel more than 48 KiB of shared memory; calls the driver once per kernel and device.
template <auto kKernel> cudaError_t allow_shared_bytes(int bytes) {
  static std::atomic<int> allowed[64];
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess || allowed[device % 64].load(std::memory_order_relaxed) >= bytes) return status;
  status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess) allowed[device % 64].store(bytes, std::memory_order_relaxed);
  return status;
}

// Launches a kernel so that, on compute capability 9.0 or higher, it may start while the previous one ends
// (programmatic dependent launch). `cluster`: number of CTAs with consecutive block indices in a cluster.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_overlapped(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, bool overlap,
                              int cluster, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes), config.stream = stream;
  config.attrs = attributes;
  if (overlap) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Returns how many CTAs run at once in clusters. A cluster lies within a GPC, which may leave multiprocessors idle;
// `fallback` is the number of clusters if the driver reports none.
template <typename Kernel>
int count_concurrent_ctas(Kernel kernel, int grid, int threads, int shared_bytes, int cluster, int fallback) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid)), config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes), config.attrs = &attribute, config.numAttrs = 1;
  int clusters = 0;
  const cudaError_t status = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  return (status == cudaSuccess && clusters > 0 ? clusters : fallback) * cluster;
}

}  // namespace zerolora
