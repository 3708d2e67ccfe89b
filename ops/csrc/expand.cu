// Y[T,D] (+)= m * (H[T,R] Q^T) + bias on mma.sync: little is read, Y is written once in 16-byte pieces.
// It prefills the output that the frozen product then accumulates into (beta = 1).
#include "common.cuh"

namespace zerolora {
namespace {

constexpr int kRows = 128, kCols = 128, kThreads = 256, kGroup = 32, kPad = 8;
constexpr int kMaxExpandRank = 256;  // Q of one tile must fit into shared memory

template <typename T> __device__ __forceinline__ uint4 load16(const T* address, bool valid) {
  return valid ? *reinterpret_cast<const uint4*>(address) : make_uint4(0, 0, 0, 0);
}

// In C of m16n8 a thread holds columns 2c, 2c+1 of each 8. The columns of a group of 32 are dealt to four such products
// so that a thread's 8 values are neighbours in memory, one 16-byte store: column 8c + 2j + e is column 2c + e of
// product j.
__device__ __forceinline__ int shared_row(int column) {
  return column / kGroup * kGroup + column % 8 / 2 * 8 + column % kGroup / 8 * 2 + column % 2;
}

template <typename T> __device__ __forceinline__ void load_q(T* shared, const Expand& e, int64_t col0, int depth) {
  const T* const q = static_cast<const T*>(e.q);
  const int per_row = depth / 8;
  for (int i = threadIdx.x; i < kCols * per_row; i += kThreads) {
    const int col = i / per_row, rank = i % per_row * 8;
    *reinterpret_cast<uint4*>(shared + shared_row(col) * (depth + kPad) + rank) =
        load16(q + (col0 + col) * e.ldq + rank, col0 + col < e.D && rank < e.R);
  }
}

// The A operand of m16n8k16 straight from H: it is small and stays in the caches.
template <typename T> __device__ __forceinline__ void load_a(uint32_t (&a)[4], const Expand& e, int64_t row, int rank) {
  const T* const h = static_cast<const T*>(e.h);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t r = row + i % 2 * 8;
    const int k = rank + i / 2 * 8;
    a[i] = r < e.T && k < e.R ? *reinterpret_cast<const uint32_t*>(h + r * e.ldh + k) : 0u;
  }
}

// Mask, bias and the old values join in fp32 here, on 16-byte pieces of a row.
template <typename T>
__device__ __forceinline__ void finish(const Expand& e, const Mask& mask, const float (&c)[4][4], int half, int64_t row,
                                       int64_t col) {
  T* const address = static_cast<T*>(e.y) + row * e.ldy + col;
  uint4 keep = make_uint4(~0u, ~0u, ~0u, ~0u);
  if (e.dropout.seed != nullptr) {
    const uint4 n = mask.draw(row, col);
    keep = make_uint4(mask.keep_bits(n.x), mask.keep_bits(n.y), mask.keep_bits(n.z), mask.keep_bits(n.w));
  }
  const uint32_t words[4] = {keep.x, keep.y, keep.z, keep.w};
  const uint4 old_bits = load16(address, e.accumulate);
  const uint4 bias_bits = load16(static_cast<const T*>(e.bias) + col, e.bias != nullptr);
  T old[8], bias[8];
  memcpy(old, &old_bits, 16);
  memcpy(bias, &bias_bits, 16);
  uint32_t packed[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float low = (words[j] & 1u) ? c[j][half * 2] * mask.keep_scale : 0.f;
    const float high = (words[j] >> 16) ? c[j][half * 2 + 1] * mask.keep_scale : 0.f;
    packed[j] = pack2<T>(low + to_float(bias[2 * j]) + to_float(old[2 * j]),
                         high + to_float(bias[2 * j + 1]) + to_float(old[2 * j + 1]));
  }
  *reinterpret_cast<uint4*>(address) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

// kSteps: 16 ranks each, A in registers; 0: any rank, A loaded again for each group of columns.
template <typename T, int kSteps>
__global__ void __launch_bounds__(kThreads) expand_kernel(const __grid_constant__ Expand e, const int64_t col_tiles) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) char raw[];
  T* const q = reinterpret_cast<T*>(raw);
  const int depth = kSteps > 0 ? kSteps * 16 : (e.R + 15) / 16 * 16;
  const int64_t row0 = blockIdx.x / col_tiles * kRows, col0 = blockIdx.x % col_tiles * kCols;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = row0 + warp * 16 + lane / 4;
  wait_for_predecessor();
  const Mask mask(e.dropout, e.D);
  uint32_t a[kSteps > 0 ? kSteps : 1][4];
  load_q(q, e, col0, depth);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) load_a<T>(a[k], e, row, k * 16 + lane % 4 * 2);
  __syncthreads();
  const uint32_t b_address = shared_address(q + (lane % 8 + lane / 16 * 8) * (depth + kPad) + lane / 8 % 2 * 8);
#pragma unroll 1
  for (int group = 0; group < kCols / kGroup; ++group) {
    const int64_t col = col0 + group * kGroup + lane % 4 * 8;
    float c[4][4] = {};
#pragma unroll
    for (int k = 0; k < (kSteps > 0 ? kSteps : depth / 16); ++k) {
      if constexpr (kSteps == 0) load_a<T>(a[0], e, row, k * 16 + lane % 4 * 2);
      const uint32_t (&left)[4] = a[kSteps > 0 ? k : 0];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t b[4];
        ldmatrix(b, b_address + ((group * kGroup + pair * 16) * (depth + kPad) + k * 16) * 2);
        mma<T>(c[pair * 2], left, b[0], b[1]);
        mma<T>(c[pair * 2 + 1], left, b[2], b[3]);
      }
    }
    if (col >= e.D) continue;
    if (row < e.T) finish<T>(e, mask, c, 0, row, col);
    if (row + 8 < e.T) finish<T>(e, mask, c, 1, row + 8, col);
  }
#endif
}

template <typename T, int kSteps> cudaError_t start(const Expand& e, const Device& device, cudaStream_t stream) {
  const int64_t col_tiles = (e.D + kCols - 1) / kCols, row_tiles = (e.T + kRows - 1) / kRows;
  const int depth = kSteps > 0 ? kSteps * 16 : (e.R + 15) / 16 * 16, bytes = kCols * (depth + kPad) * 2;
  const auto kernel = expand_kernel<T, kSteps>;
  if (bytes > 48 * 1024) {
    const cudaError_t status = allow_shared_bytes<expand_kernel<T, kSteps>>(bytes);
    if (status != cudaSuccess) return status;
  }
  return launch_overlapped(kernel, dim3(static_cast<unsigned>(col_tiles * row_tiles)), kThreads, bytes,
                           device.capability >= 90, 1, stream, e, col_tiles);
}

template <typename T> cudaError_t dispatch(const Expand& e, const Device& device, cudaStream_t stream) {
  switch ((e.R + 15) / 16) {
    case 1: return start<T, 1>(e, device, stream);
    case 2: return start<T, 2>(e, device, stream);
    case 3: return start<T, 3>(e, device, stream);
    case 4: return start<T, 4>(e, device, stream);
    default: return start<T, 0>(e, device, stream);
  }
}

// y *= m, for what the tensor-core kernel does not take. One thread, 8 neighbours: one draw.
template <typename T>
__global__ void __launch_bounds__(kThreads) mask_kernel(T* y, int64_t ldy, int64_t T_rows, int64_t D, Dropout dropout) {
  const Mask mask(dropout, D);
  const int64_t groups = (D + 7) / 8, index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= T_rows * groups) return;
  const int64_t row = index / groups, col = index % groups * 8;
  const uint4 n = mask.draw(row, col);
  const uint32_t words[4] = {mask.keep_bits(n.x), mask.keep_bits(n.y), mask.keep_bits(n.z), mask.keep_bits(n.w)};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (col + i >= D) break;
    T* const value = y + row * ldy + col + i;
    *value =
        (words[i / 2] >> (i % 2 * 16) & 1u) ? from_float<T>(to_float(*value) * mask.keep_scale) : from_float<T>(0.f);
  }
}

bool aligned(const void* pointer, int64_t ld) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && ld % 8 == 0; }

}  // namespace

bool expand_supported(const Expand& e, const Device& device) {
  return e.dtype != DType::f32 && device.capability >= 80 && e.D % 8 == 0 && e.R % 8 == 0 && e.R <= kMaxExpandRank &&
         aligned(e.h, e.ldh) && aligned(e.q, e.ldq) && aligned(e.y, e.ldy) && aligned(e.bias, 0);
}

cudaError_t launch_expand(const Expand& e, const Device& device, cudaStream_t stream) {
  if (e.T == 0 || e.D == 0) return cudaSuccess;
  return e.dtype == DType::f16 ? dispatch<__half>(e, device, stream) : dispatch<__nv_bfloat16>(e, device, stream);
}

cudaError_t launch_mask(DType dtype, void* y, int64_t ldy, int64_t T, int64_t D, Dropout dropout, cudaStream_t stream) {
  if (T == 0 || D == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>((T * ((D + 7) / 8) + kThreads - 1) / kThreads);
  switch (dtype) {
    case DType::f32: mask_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<float*>(y), ldy, T, D, dropout); break;
    case DType::f16: mask_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<__half*>(y), ldy, T, D, dropout); break;
    case DType::bf16:
      mask_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<__nv_bfloat16*>(y), ldy, T, D, dropout);
      break;
  }
  return cudaGetLastError();
}

}  // namespace zerolora
