// The transpose of an 8-bit weight, which tensor cores want for dX (both operands along the sum), and int32 sums of
// 8-bit products to y.
#include "eight_bit.h"
#include "vectors.cuh"

namespace zerolora {
namespace {

constexpr int kTile = 128, kThreads = 256, kWords = kTile / 4, kPitch = kWords + 1;

__device__ __forceinline__ uint32_t load_word(const Turn& job, int64_t row, int64_t col) {
  if (row >= job.rows || col >= job.cols) return 0;
  return __ldcs(reinterpret_cast<const uint32_t*>(job.source + row * job.cols + col));
}

// Tiles of 128 x 128 through shared memory in words of four bytes; widths and addresses are multiples of 4.
__global__ void __launch_bounds__(kThreads) turn_kernel(const Turn job) {
  __shared__ uint32_t tile[kTile * kPitch];  // [column][word of rows]
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kTile,
                first_col = static_cast<int64_t>(blockIdx.x) * kTile;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int block = warp; block < kWords; block += kThreads / 32) {  // four rows, four columns a lane
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = load_word(job, first_row + block * 4 + i, first_col + lane * 4);
    const uint32_t a = __byte_perm(r[0], r[1], 0x5140), b = __byte_perm(r[2], r[3], 0x5140);
    const uint32_t c = __byte_perm(r[0], r[1], 0x7362), d = __byte_perm(r[2], r[3], 0x7362);
    uint32_t* const at = tile + lane * 4 * kPitch + block;
    at[0] = __byte_perm(a, b, 0x5410), at[kPitch] = __byte_perm(a, b, 0x7632);
    at[2 * kPitch] = __byte_perm(c, d, 0x5410), at[3 * kPitch] = __byte_perm(c, d, 0x7632);
  }
  __syncthreads();
#pragma unroll 4
  for (int column = warp; column < kTile; column += kThreads / 32) {
    const int64_t row = first_row + lane * 4, col = first_col + column;
    if (row < job.rows && col < job.cols)
      *reinterpret_cast<uint32_t*>(job.target + col * job.ld + row) = tile[column * kPitch + lane];
  }
}

__global__ void __launch_bounds__(kThreads) turn_any_kernel(const Turn job) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < job.rows * job.cols; i += stride)
    job.target[i % job.cols * job.ld + i / job.cols] = job.source[i];
}

template <typename T> __global__ void __launch_bounds__(kThreads) rescale_kernel(const Rescale job) {
  const int64_t row = blockIdx.y, first = static_cast<int64_t>(blockIdx.x) * kThreads * 4 + threadIdx.x;
  const float scale = job.row[row];
  T* const y = static_cast<T*>(job.y) + row * job.ldy;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t n = first + i * kThreads;
    if (n >= job.N) return;
    float value = static_cast<float>(job.sums[row * job.N + n]) * scale;
    if (job.column != nullptr) value *= job.column[n];
    if (job.bias != nullptr) value += to_float(static_cast<const T*>(job.bias)[n]);
    if (job.accumulate) value += to_float(y[n]);
    y[n] = from_float<T>(value);
  }
}

}  // namespace

cudaError_t launch_turn(const Turn& job, cudaStream_t stream) {
  if (job.rows == 0 || job.cols == 0) return cudaSuccess;
  const auto by_four = [](const void* data, int64_t size) {
    return reinterpret_cast<uintptr_t>(data) % 4 == 0 && size % 4 == 0;
  };
  if (by_four(job.source, job.cols) && by_four(job.target, job.ld) && job.rows % 4 == 0) {
    const dim3 grid(static_cast<unsigned>((job.cols + kTile - 1) / kTile),
                    static_cast<unsigned>((job.rows + kTile - 1) / kTile));
    turn_kernel<<<grid, kThreads, 0, stream>>>(job);
  } else {
    turn_any_kernel<<<1024, kThreads, 0, stream>>>(job);
  }
  return cudaGetLastError();
}

cudaError_t launch_rescale(const Rescale& job, cudaStream_t stream) {
  if (job.T == 0 || job.N == 0) return cudaSuccess;
  if (job.T > 65535) return cudaErrorInvalidValue;  // callers go in smaller pieces
  const dim3 grid(static_cast<unsigned>((job.N + kThreads * 4 - 1) / (kThreads * 4)), static_cast<unsigned>(job.T));
  by_type(job.dtype,
          [&](auto* of) { rescale_kernel<std::remove_pointer_t<decltype(of)>><<<grid, kThreads, 0, stream>>>(job); });
  return cudaGetLastError();
}

}  // namespace zerolora
