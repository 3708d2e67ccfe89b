// Transposes 8-bit weights for dX, because 8-bit tensor cores need both operands contiguous along the sum, and converts
// int32 sums of 8-bit products to y.
#include "eight_bit.h"
#include "vectors.cuh"

namespace zerolora {
namespace {

constexpr int kTile = 128, kThreads = 256, kPieces = kTile / 16, kWords = kTile / 4;

// The rows of a part that a block transposes.
struct Piece {
  const uint8_t* source;
  int64_t row, rows, target_row;  // first row and number of rows in the part; first row among all parts' rows
  __device__ __forceinline__ Piece(const TransposeBytes& job, unsigned block) {
    int64_t first = 0, begin = static_cast<int64_t>(block) * kTile;
    int p = 0;
    while (begin >= tiled(job.part[p].rows)) begin -= tiled(job.part[p].rows), first += job.part[p].rows, ++p;
    source = job.part[p].source, row = begin, rows = job.part[p].rows, target_row = first + begin;
  }
  static __host__ __device__ int64_t tiled(int64_t rows) { return (rows + kTile - 1) / kTile * kTile; }
};

// Transposes tiles of 128 x 128, loading and storing 16 bytes at a time. A thread packs four rows of 16 columns into
// one word per column; the layout in shared memory avoids bank conflicts when words are stored and when four are read.
__global__ void __launch_bounds__(kThreads) transpose_bytes_kernel(const __grid_constant__ TransposeBytes job) {
  __shared__ __align__(16) uint32_t tile[kTile * kWords];  // [column][word of four rows]
  const auto word = [](int column, int row) { return column * kWords + (row / 4 ^ column / 16 * 4); };
  const Piece piece(job, blockIdx.y);
  const int64_t first_col = static_cast<int64_t>(blockIdx.x) * kTile;
  const int at = static_cast<int>(threadIdx.x) % kPieces * 16, line = static_cast<int>(threadIdx.x) / kPieces;
  uint32_t r[4][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t row = piece.row + line * 4 + i, col = first_col + at;
    if (row >= piece.rows || col >= job.cols) continue;
    const uint4 bytes = __ldcs(reinterpret_cast<const uint4*>(piece.source + row * job.cols + col));
    r[i][0] = bytes.x, r[i][1] = bytes.y, r[i][2] = bytes.z, r[i][3] = bytes.w;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t a = __byte_perm(r[0][j], r[1][j], 0x5140), b = __byte_perm(r[2][j], r[3][j], 0x5140);
    const uint32_t c = __byte_perm(r[0][j], r[1][j], 0x7362), d = __byte_perm(r[2][j], r[3][j], 0x7362);
    const int column = at + j * 4, row = line * 4;
    tile[word(column, row)] = __byte_perm(a, b, 0x5410), tile[word(column + 1, row)] = __byte_perm(a, b, 0x7632);
    tile[word(column + 2, row)] = __byte_perm(c, d, 0x5410), tile[word(column + 3, row)] = __byte_perm(c, d, 0x7632);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = line + i * (kThreads / kPieces);
    if (piece.row + at < piece.rows && first_col + column < job.cols)
      *reinterpret_cast<uint4*>(job.target + (first_col + column) * job.ld + piece.target_row + at) =
          *reinterpret_cast<const uint4*>(tile + word(column, at));
  }
}

__global__ void __launch_bounds__(kThreads) transpose_any_bytes_kernel(const __grid_constant__ TransposeBytes job) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  uint8_t* target = job.target;
  for (int p = 0; p < job.parts; target += job.part[p++].rows)
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < job.part[p].rows * job.cols;
         i += stride)
      target[i % job.cols * job.ld + i / job.cols] = job.part[p].source[i];
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
    if (job.accumulate) value += to_float(y[n]);
    y[n] = from_float<T>(value);
  }
}

}  // namespace

cudaError_t launch_transpose_bytes(const TransposeBytes& job, cudaStream_t stream) {
  int64_t rows = 0, tiled = 0;
  bool by_16 = job.cols % 16 == 0 && job.ld % 16 == 0 && on_vector(job.target);
  for (int p = 0; p < job.parts; ++p) {
    rows += job.part[p].rows, tiled += Piece::tiled(job.part[p].rows);
    by_16 = by_16 && job.part[p].rows % 16 == 0 && on_vector(job.part[p].source);
  }
  if (rows == 0 || job.cols == 0) return cudaSuccess;
  if (by_16 && tiled / kTile <= 65535) {
    const dim3 grid(static_cast<unsigned>((job.cols + kTile - 1) / kTile), static_cast<unsigned>(tiled / kTile));
    transpose_bytes_kernel<<<grid, kThreads, 0, stream>>>(job);
  } else {
    transpose_any_bytes_kernel<<<1024, kThreads, 0, stream>>>(job);
  }
  return cudaGetLastError();
}

cudaError_t launch_rescale(const Rescale& job, cudaStream_t stream) {
  if (job.T == 0 || job.N == 0) return cudaSuccess;
  if (job.T > 65535) return cudaErrorInvalidValue;  // callers split the work
  const dim3 grid(static_cast<unsigned>((job.N + kThreads * 4 - 1) / (kThreads * 4)), static_cast<unsigned>(job.T));
  by_type(job.dtype,
          [&](auto* of) { rescale_kernel<std::remove_pointer_t<decltype(of)>><<<grid, kThreads, 0, stream>>>(job); });
  return cudaGetLastError();
}

}  // namespace zerolora
