// Y[T,D] (+)= keep * (H[T,R] Q^T) + bias on mma.sync: reads little and writes Y once in 16-byte pieces.
// It prefills the output that the frozen product then accumulates into (beta = 1).
#include <algorithm>

#include "common.cuh"

namespace zerolora {
namespace {

constexpr int kRows = 128, kCols = 128, kThreads = 256, kGroup = 32, kPad = 8;
constexpr int kMaxExpandRank = 256;  // Q of one tile must fit into shared memory

template <typename T> __device__ __forceinline__ uint4 load16(const T* address, bool valid) {
  return valid ? *reinterpret_cast<const uint4*>(address) : make_uint4(0, 0, 0, 0);
}

// In C of m16n8, a thread owns columns 2c and 2c+1 of each 8. The columns of a group of 32 are distributed over four
// such products so that a thread's 8 values are adjacent in memory, one 16-byte store: column 8c + 2j + e is column 2c
// + e of product j.
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

// Loads Q stored by rank, with R a multiple of 8. Each thread reads one column; threads of a warp read adjacent
// columns.
template <typename T, int kSteps>
__device__ __forceinline__ void load_q_by_rank(T* shared, const Expand& e, int64_t col0, int depth) {
  constexpr int kBatch = kSteps > 0 ? kSteps : 1;  // loads in flight before the first is stored
  const int col = threadIdx.x % kCols;
  for (int first = threadIdx.x / kCols * 8; first < depth; first += kBatch * 16) {
    T values[kBatch][8];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int rank = first + b * 16;
      const bool valid = col0 + col < e.D && rank < e.R;
      const T* const q = static_cast<const T*>(e.q) + rank * e.ldq + col0 + col;
#pragma unroll
      for (int i = 0; i < 8; ++i) values[b][i] = valid ? q[i * e.ldq] : from_float<T>(0.f);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      uint4 packed;
      memcpy(&packed, values[b], 16);
      *reinterpret_cast<uint4*>(shared + shared_row(col) * (depth + kPad) + first + b * 16) = packed;
    }
  }
}

// Loads the A operand of m16n8k16 directly from H, which is small and stays in the caches.
template <typename T> __device__ __forceinline__ void load_a(uint32_t (&a)[4], const Expand& e, int64_t row, int rank) {
  const T* const h = static_cast<const T*>(e.h);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t r = row + i % 2 * 8;
    const int k = rank + i / 2 * 8;
    a[i] = r < e.T && k < e.R ? *reinterpret_cast<const uint32_t*>(h + r * e.ldh + k) : 0u;
  }
}

// Stores a 16-byte piece of a row; with kAdd, adds the bias and the old values in fp32.
template <typename T, bool kAdd>
__device__ __forceinline__ void finish(T* address, const Expand& e, uint4 keep, const float (&c)[4][4], int half,
                                       int64_t col) {
  uint4 old_bits{}, bias_bits{};
  if constexpr (kAdd) {
    old_bits = load16(address, e.accumulate);
    bias_bits = load16(static_cast<const T*>(e.bias) + col, e.bias != nullptr);
  }
  T old[8], bias[8];
  memcpy(old, &old_bits, 16);
  memcpy(bias, &bias_bits, 16);
  const uint32_t words[4] = {keep.x, keep.y, keep.z, keep.w};
  uint32_t packed[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float low = c[j][half * 2], high = c[j][half * 2 + 1];
    if constexpr (kAdd)
      packed[j] = pack2<T>((words[j] & 1u ? low : 0.f) + to_float(bias[2 * j]) + to_float(old[2 * j]),
                           (words[j] >> 16 ? high : 0.f) + to_float(bias[2 * j + 1]) + to_float(old[2 * j + 1]));
    else packed[j] = pack2<T>(low, high) & words[j];
  }
  // An assignment may be compiled to four 4-byte stores.
  __stwb(reinterpret_cast<uint4*>(address), make_uint4(packed[0], packed[1], packed[2], packed[3]));
}

// Computes c = H Q^T for 16 rows and a group of 32 columns. kSteps: steps of 16 ranks, with A in registers; 0: any
// rank, with A reloaded for each group.
template <typename T, int kSteps>
__device__ __forceinline__ void multiply_group(float (&c)[4][4], uint32_t (&a)[kSteps > 0 ? kSteps : 1][4],
                                               const Expand& e, int64_t row, uint32_t q, int depth) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < (kSteps > 0 ? kSteps : depth / 16); ++k) {
    if constexpr (kSteps == 0) load_a<T>(a[0], e, row, k * 16 + lane % 4 * 2);
    const uint32_t (&left)[4] = a[kSteps > 0 ? k : 0];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t b[4];
      ldmatrix(b, q + (pair * 16 * (depth + kPad) + k * 16) * 2);
      mma<T>(c[pair * 2], left, b[0], b[1]);
      mma<T>(c[pair * 2 + 1], left, b[2], b[3]);
    }
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kBlocksFewer = 1;  // with more blocks ptxas spills up to 24 bytes per thread
#else
constexpr int kBlocksFewer = 0;
#endif

// A CTA keeps Q of its columns and iterates over its rows. Without kAdd there is always a mask; threshold 0 keeps all.
// Drawing the mask saturates the integer units, so every other instruction in the loop adds time.
template <typename T, int kSteps, bool kAdd>
__global__ void __launch_bounds__(kThreads, (kSteps > 1 ? 3 : 4) - kBlocksFewer)
    expand_kernel(const __grid_constant__ Expand e, const int64_t col_tiles, const int64_t rows_per_cta) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) char raw[];
  T* const q = reinterpret_cast<T*>(raw);
  const int depth = kSteps > 0 ? kSteps * 16 : (e.R + 15) / 16 * 16;
  const int64_t row_begin = blockIdx.x / col_tiles * rows_per_cta, col0 = blockIdx.x % col_tiles * kCols;
  const int64_t row_end = min(e.T, row_begin + rows_per_cta);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, piece = lane % 4;
  wait_for_predecessor();
  const Mask mask(e.dropout, e.D);
  if (e.q_by_rank) load_q_by_rank<T, kSteps>(q, e, col0, depth);
  else load_q(q, e, col0, depth);
  __syncthreads();
  const uint32_t b_address = shared_address(q + (lane % 8 + lane / 16 * 8) * (depth + kPad) + lane / 8 % 2 * 8);
  const int cols = static_cast<int>(min(e.D - col0, int64_t{kCols})) - piece * 8;  // from this thread's first column
#pragma unroll 1
  for (int64_t row = row_begin + warp * 16 + lane / 4; row - lane / 4 < row_end; row += kRows) {
    uint32_t a[kSteps > 0 ? kSteps : 1][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) load_a<T>(a[k], e, row, k * 16 + piece * 2);
    const uint64_t counter = mask.counter(row, col0 + piece * 8);
    T* const y = static_cast<T*>(e.y) + row * e.ldy + col0 + piece * 8;
    uint32_t kept[2] = {};  // Dropout::bits of this thread's two rows
    if (e.dropout.stored) {
      const uint32_t* const bits = e.dropout.bits + (col0 / kCols * e.T + row) * 4 + piece;
      if (row < e.T) kept[0] = bits[0];
      if (row + 8 < e.T) kept[1] = bits[8 * 4];
    }
#pragma unroll 1
    for (int group = 0; group < kCols / kGroup; ++group) {
      float c[4][4] = {};
      multiply_group<T, kSteps>(c, a, e, row, b_address + group * kGroup * (depth + kPad) * 2, depth);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 keep = make_uint4(~0u, ~0u, ~0u, ~0u);
        if (e.dropout.stored) keep = unpack_kept<0>(kept[half] >> 4 * group);
        else if (!kAdd || e.dropout.seed != nullptr)
          keep = mask.draw(counter + 8 * half * mask.groups + group * (kGroup / 8));
        if (group * kGroup < cols && row + 8 * half < e.T)
          finish<T, kAdd>(y + 8 * half * e.ldy + group * kGroup, e, keep, c, half, col0 + group * kGroup + piece * 8);
      }
    }
  }
#endif
}

template <typename T, int kSteps, bool kAdd>
cudaError_t start(const Expand& e, const Device& device, cudaStream_t stream) {
  constexpr int64_t kLongest = 8;  // tiles
  const int64_t col_tiles = (e.D + kCols - 1) / kCols, row_tiles = (e.T + kRows - 1) / kRows;
  const int64_t wanted = 4 * device.multiprocessors;  // CTAs: enough to fill the GPU
  const int64_t length = std::clamp((col_tiles * row_tiles + wanted - 1) / wanted, int64_t{1}, kLongest);
  const int64_t ctas = col_tiles * ((row_tiles + length - 1) / length);
  const int depth = kSteps > 0 ? kSteps * 16 : (e.R + 15) / 16 * 16, bytes = kCols * (depth + kPad) * 2;
  const auto kernel = expand_kernel<T, kSteps, kAdd>;
  if (bytes > 48 * 1024) {
    const cudaError_t status = allow_shared_bytes<expand_kernel<T, kSteps, kAdd>>(bytes);
    if (status != cudaSuccess) return status;
  }
  return launch_overlapped(kernel, dim3(static_cast<unsigned>(ctas)), kThreads, bytes, device.capability >= 90, 1,
                           stream, e, col_tiles, length * kRows);
}

template <typename T, bool kAdd> cudaError_t dispatch(const Expand& e, const Device& device, cudaStream_t stream) {
  switch ((e.R + 15) / 16) {
    case 1: return start<T, 1, kAdd>(e, device, stream);
    case 2: return start<T, 2, kAdd>(e, device, stream);
    case 3: return start<T, 3, kAdd>(e, device, stream);
    case 4: return start<T, 4, kAdd>(e, device, stream);
    default: return start<T, 0, kAdd>(e, device, stream);
  }
}

template <typename T> cudaError_t dispatch(const Expand& e, const Device& device, cudaStream_t stream) {
  const bool add = e.accumulate || e.bias != nullptr;
  return add ? dispatch<T, true>(e, device, stream) : dispatch<T, false>(e, device, stream);
}

// y *= keep, for cases the tensor-core kernel does not support. A thread draws once, for 8 adjacent elements.
template <typename T>
__global__ void __launch_bounds__(kThreads) mask_kernel(T* y, int64_t ldy, int64_t T_rows, int64_t D, Dropout dropout) {
  const Mask mask(dropout, D);
  const int64_t groups = (D + 7) / 8, index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= T_rows * groups) return;
  const int64_t row = index / groups, col = index % groups * 8;
  const uint4 keep = mask.draw(mask.counter(row, col));
  const uint32_t words[4] = {keep.x, keep.y, keep.z, keep.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (col + i >= D) break;
    if (!(words[i / 2] >> (i % 2 * 16) & 1u)) y[row * ldy + col + i] = from_float<T>(0.f);
  }
}

}  // namespace

bool expand_supported(const Expand& e, const Device& device) {
  return e.dtype != DType::f32 && device.capability >= 80 && e.D % 8 == 0 && e.R % 8 == 0 && e.R <= kMaxExpandRank &&
         aligned(e.h, e.ldh) && (e.q_by_rank || aligned(e.q, e.ldq)) && aligned(e.y, e.ldy) && aligned(e.bias, 0);
}

cudaError_t launch_expand(const Expand& e, const Device& device, cudaStream_t stream) {
  if (e.T == 0 || e.D == 0) return cudaSuccess;
  if (expand_wgmma_supported(e, device)) return launch_expand_wgmma(e, device, stream);
  return e.dtype == DType::f16 ? dispatch<__half>(e, device, stream) : dispatch<__nv_bfloat16>(e, device, stream);
}

cudaError_t launch_mask(DType dtype, void* y, int64_t ldy, int64_t T, int64_t D, Dropout dropout, cudaStream_t stream) {
  if (T == 0 || D == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>((T * ((D + 7) / 8) + kThreads - 1) / kThreads);
  by_type(dtype, [&](auto* element) {
    mask_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<decltype(element)>(y), ldy, T, D, dropout);
  });
  return cudaGetLastError();
}

}  // namespace zerolora
