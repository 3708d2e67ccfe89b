// Instructions of Hopper (sm_90a): transaction barriers, the bulk tensor copy engine, warpgroup matrix products.
#pragma once
#include <cuda.h>

#include "common.cuh"

namespace zerolora {

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
#define ZL_WAIT(instruction)                                                             \
  asm volatile("{\n.reg .pred done;\nagain:\n" instruction                               \
               " done, [%0], %1;\n@done bra over;\nbra again;\nover:\n}" ::"r"(barrier), \
               "r"(parity)                                                               \
               : "memory")
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  ZL_WAIT("mbarrier.try_wait.parity.shared.b64");
}
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  ZL_WAIT("mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64");
}
#undef ZL_WAIT

// A position in a ring of stages, and the parity of the barriers in this round.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// CTAs of a cluster run concurrently and can access each other's shared memory.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ void cluster_sync() {  // every thread must call it
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Avoids the release above, which waits for this thread's stores to device memory: microseconds on a busy GPU. This
// only publishes barriers after `fence.mbarrier_init`; receivers must wait for data from other CTAs separately.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ uint32_t remote_address(uint32_t address, int rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// Relaxed, as this only signals that values were read, and their use has already waited for them. A release would also
// wait for this thread's stores to device memory.
__device__ __forceinline__ void barrier_arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Stores 16 bytes into another CTA's shared memory; that CTA's barrier counts the bytes.
__device__ __forceinline__ void store_remote(uint32_t target, float4 v, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}
// Loads 16 bytes from this CTA's shared memory; `load_remote` loads from another CTA's.
__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
__device__ __forceinline__ float4 load_remote(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address));
  return v;
}
// Synchronizes some warps of a CTA; `threads` counts those that wait and those that only arrive.
__device__ __forceinline__ void named_sync(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }
__device__ __forceinline__ void named_arrive(int threads) {
  asm volatile("bar.arrive 1, %0;" ::"r"(threads) : "memory");
}

// Prefetches a tensor map. As a launch parameter it may be read before the previous kernel ends.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads a box of a 2-D tensor at (column, row) into shared memory; elements outside the tensor become zeros.
__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap* map, int column, int row,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          target),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Copies to this address in every CTA of the cluster with its bit set in `ctas`; each CTA's own barrier counts its
// bytes.
__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap* map, int column, int row, uint32_t barrier,
                                         uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(ctas)
      : "memory");
}

// For data that is read once: its lines are evicted from L2 first.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_box_once(uint32_t target, const CUtensorMap* map, int column, int row,
                                              uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}],"
      " [%4], %5;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// Copies `bytes`, a multiple of 16, between addresses that are aligned to 16.
__device__ __forceinline__ void copy_bytes(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
               : "memory");
}

// Returns a shared-memory matrix descriptor (PTX ISA, "Matrix-descriptor"): address, stride between groups of 8,
// swizzle width. kAtomBytes: stride between swizzle atoms along M or N if the rows run that way; unused by operands one
// atom wide.
enum class Swizzle : uint64_t { b128 = 1, b64 = 2, b32 = 3 };
template <int kGroupBytes, Swizzle kSwizzle, int kAtomBytes = 16>
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(kAtomBytes >> 4) << 16 |
         static_cast<uint64_t>(kGroupBytes >> 4) << 32 | static_cast<uint64_t>(kSwizzle) << 62;
}
// Moves a descriptor forward by `bytes` with one addition: no shared-memory address overflows 32 bits.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, int bytes) {
  return (descriptor & ~0xFFFFFFFFull) | (static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes >> 4));
}
template <int kBytes> __host__ __device__ constexpr Swizzle row_swizzle() {  // of rows of kBytes
  return kBytes == 128 ? Swizzle::b128 : kBytes == 64 ? Swizzle::b64 : Swizzle::b32;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending = 0> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Prevents the compiler from moving accumulators across the asynchronous products.
template <int N> __device__ __forceinline__ void hold(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

#define ZL_C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define ZL_C16(i) ZL_C4(i), ZL_C4(i + 4), ZL_C4(i + 8), ZL_C4(i + 12)
#define ZL_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define ZL_R32 ZL_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"

// c[64, 2 * registers] += a[64,16] b[16, 2 * registers]; trans: the operand's rows run along M (or N), not along K.
#define ZL_WGMMA(type, columns, outputs, operands, ...)                                                             \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" outputs "}, " operands ";" \
               : __VA_ARGS__                                                                                        \
               : "l"(a), "l"(b), "n"(kTransA), "n"(kTransB))
#define ZL_DEFINE_WGMMA(registers, ...)                                                  \
  template <typename T, int kTransA, int kTransB>                                        \
  __device__ __forceinline__ void wgmma(float (&c)[registers], uint64_t a, uint64_t b) { \
    if constexpr (std::is_same<T, __half>::value) ZL_WGMMA("f16", __VA_ARGS__);          \
    else ZL_WGMMA("bf16", __VA_ARGS__);                                                  \
  }
ZL_DEFINE_WGMMA(8, "16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8, %9, 1, 1, 1, %10, %11", ZL_C4(0), ZL_C4(4))
ZL_DEFINE_WGMMA(16, "32", ZL_R16, "%16, %17, 1, 1, 1, %18, %19", ZL_C16(0))
ZL_DEFINE_WGMMA(32, "64", ZL_R32, "%32, %33, 1, 1, 1, %34, %35", ZL_C16(0), ZL_C16(16))
#undef ZL_DEFINE_WGMMA
#undef ZL_WGMMA

#define ZL_C64(i) ZL_C16(i), ZL_C16(i + 16), ZL_C16(i + 32), ZL_C16(i + 48)
#define ZL_R128                                                                                              \
  ZL_R32                                                                                                     \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57" \
  ",%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83" \
  ",%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107" \
  ",%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// 256 columns; `add` selects at run time whether it adds to c.
template <typename T, int kTransA, int kTransB>
__device__ __forceinline__ void wgmma(float (&c)[128], uint64_t a, uint64_t b, bool add) {
#define ZL_WGMMA(type)                                                          \
  asm volatile(                                                                 \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"                         \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" ZL_R128 \
      "}, %128, %129, add, 1, 1, %131, %132;\n}"                                \
      : ZL_C64(0), ZL_C64(64)                                                   \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransA), "n"(kTransB))
  if constexpr (std::is_same<T, __half>::value) ZL_WGMMA("f16");
  else ZL_WGMMA("bf16");
#undef ZL_WGMMA
}

// Returns 4 adjacent columns, from 16 * pair + quad_column(), of row lane / 4 (+ 8 if `half`) of the accumulators of a
// product 64 rows high. Two lanes exchange values of two pieces of 8 columns (2 * pair and the next).
template <int N> __device__ __forceinline__ float4 quad(const float (&c)[N], int half, int pair) {
  const bool odd = threadIdx.x % 2 == 1;
  const int i = pair * 8 + half * 2;
  const float x = __shfl_xor_sync(~0u, odd ? c[i] : c[i + 4], 1);
  const float y = __shfl_xor_sync(~0u, odd ? c[i + 1] : c[i + 5], 1);
  return make_float4(odd ? x : c[i], odd ? y : c[i + 1], odd ? c[i + 4] : x, odd ? c[i + 5] : y);
}

// Stores a box of shared memory to a 2-D tensor at (column, row); elements outside the tensor are not written. A
// thread's stores form groups; `store_wait` waits until all but the newest kPending have read their shared memory.
__device__ __forceinline__ void store_box(const CUtensorMap* map, int column, int row, uint32_t source) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(column),
               "r"(row), "r"(source)
               : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Stores four matrices of 8 rows x 16 bytes. Word i of a lane is its part of matrix i, as in the accumulators of a
// product; lanes 8i to 8i + 7 pass the addresses of the rows of matrix i.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Finds cuTensorMapEncodeTiled through the runtime, so that the library need not link libcuda.
using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
inline Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

inline cudaError_t make_map(CUtensorMap* map, DType dtype, const void* data, int64_t ld, int64_t rows, int64_t cols,
                            int box_rows, int box_cols) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t size[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[1] = {static_cast<cuuint64_t>(ld) * 2};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_cols), static_cast<cuuint32_t>(box_rows)}, step[2] = {1, 1};
  const CUtensorMapSwizzle swizzle = box_cols == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box_cols == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                      : CU_TENSOR_MAP_SWIZZLE_32B;
  const auto describe = [&] {
    return encode(map, dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                  const_cast<void*>(data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = describe();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {  // a new thread, such as autograd's, may have no context yet
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) return cudaErrorInvalidValue;
    status = describe();
  }
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace zerolora
