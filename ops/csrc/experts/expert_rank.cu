// The rank-space passes of the experts' adapters: the projection of rows, which may also copy them into the experts'
// order, and the gradients of the factors, which are sums over the rows of one expert.
#include "expert_tiles.cuh"

namespace zerolora {
namespace {

// ---- U = scale (m*Z) P^T ------------------------------------------------------------------------------------------

// kTiles: tiles of 8 ranks; 0: only a copy. A warp processes 16 rows, 32 columns at a time.
template <typename T, int kTiles, bool kMask>
__global__ void __launch_bounds__(kWarps * 32) project_kernel(const ExpertProject job, int rank_begin) {
  const Span span = find_span(job.rows, blockIdx.x);
  if (span.expert < 0) return;
  const int lane = threadIdx.x % 32, piece = lane % 4 * 8;
  const int row0 = span.row + threadIdx.x / 32 * 16 + lane / 4, row1 = row0 + 8;
  const bool valid0 = row0 < span.end, valid1 = row1 < span.end;
  if (__all_sync(~0u, !valid0)) return;
  const T* const z0 = typed<T>(job.z) + (valid0 ? source_row(job.rows, row0) : 0) * job.D;
  const T* const z1 = typed<T>(job.z) + (valid1 ? source_row(job.rows, row1) : 0) * job.D;
  const T* const p = typed<T>(job.p) + (static_cast<int64_t>(span.expert) * job.R + rank_begin + lane / 4) * job.D;
  T *const copy0 = static_cast<T*>(job.copy) + row0 * job.D, *const copy1 = static_cast<T*>(job.copy) + row1 * job.D;
  const Mask mask(job.dropout, job.D);
  const int64_t pair0 = kMask && valid0 ? job.rows.order[row0] : 0, pair1 = kMask && valid1 ? job.rows.order[row1] : 0;
  float sums[kTiles > 0 ? kTiles : 1][4] = {};
#pragma unroll 2
  for (int64_t d = piece; d < (job.D + 31) / 32 * 32; d += 32) {
    const bool inside = d < job.D;
    uint4 top = load16(z0 + d, valid0 && inside), bottom = load16(z1 + d, valid1 && inside);
    if (job.copy != nullptr && inside) {
      if (valid0) *reinterpret_cast<uint4*>(copy0 + d) = top;
      if (valid1) *reinterpret_cast<uint4*>(copy1 + d) = bottom;
    }
    if constexpr (kTiles > 0) {
      if constexpr (kMask) {
        top = zero_dropped(top, mask.draw(mask.counter(pair0, d)));
        bottom = zero_dropped(bottom, mask.draw(mask.counter(pair1, d)));
      }
      project_octets<T, kTiles>(sums, top, bottom, p + d, job.D, inside);
    }
  }
  if constexpr (kTiles > 0) {
    const float scale = job.scale * (kMask ? job.dropout.keep_scale : 1.f);
    const bool valid[2] = {valid0, valid1};
    const int64_t row[2] = {row0, row1};
    store_projected<T, kTiles>(sums, static_cast<T*>(job.u) + rank_begin, job.R, valid, row, scale);
  }
}

template <typename T, bool kMask> void project(ExpertProject job, cudaStream_t stream) {
  const unsigned tiles = static_cast<unsigned>(most_tiles(job.rows.N, job.rows.E));
  constexpr int kThreads = kWarps * 32;
  if (job.R == 0) project_kernel<T, 0, false><<<tiles, kThreads, 0, stream>>>(job, 0);
  for (int begin = 0; begin < job.R; job.copy = nullptr) {
    const int left = job.R - begin;
    if (left >= 64) project_kernel<T, 8, kMask><<<tiles, kThreads, 0, stream>>>(job, begin), begin += 64;
    else if (left >= 32) project_kernel<T, 4, kMask><<<tiles, kThreads, 0, stream>>>(job, begin), begin += 32;
    else project_kernel<T, 2, kMask><<<tiles, kThreads, 0, stream>>>(job, begin), begin += 16;
  }
}

// ---- G = V^T (m*Z) ------------------------------------------------------------------------------------------------

constexpr int kStageRows = 64, kCols = 128, kStages = 3, kPieces = kCols / 8;

template <int kRanks> struct Stage {
  static constexpr int kZ = kStageRows * kCols * 2, kV = kStageRows * kRanks * 2, kBytes = kZ + kV;
};
// Returns the offset of a 16-byte piece of a row; pieces of 8 consecutive rows are in different banks.
template <int kRowPieces> __device__ __forceinline__ uint32_t swizzled_offset(int row, int piece) {
  constexpr int kSpread = kRowPieces < 8 ? kRowPieces : 8;
  const int rotation = kRowPieces >= 8 ? row % 8 : row / (8 / kRowPieces) % kSpread;
  return static_cast<uint32_t>((row * kRowPieces + (piece ^ rotation)) * 16);
}

// One CTA per expert and 128 columns; a warp computes 32 of the columns and all ranks.
template <typename T, int kRanks, bool kMask>
__global__ void __launch_bounds__(128) gradient_kernel(const ExpertGradient job, int rank_begin, bool f32) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) char raw[];
  const uint32_t base = shared_address(raw);
  const int e = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int begin = e == 0 ? 0 : job.rows.ends[e - 1], end = job.rows.ends[e];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kCols;
  constexpr int kRankPieces = kRanks / 8, kTilesM = kRanks / 16;
  const Mask mask(job.dropout, job.D);
  const auto fill = [&](int from, int stage) {
    const uint32_t z = base + stage * Stage<kRanks>::kBytes, v = z + Stage<kRanks>::kZ;
    if (from < end) {
#pragma unroll
      for (int i = 0; i < kStageRows * kPieces / 128; ++i) {
        const int at = i * 128 + threadIdx.x, r = at / kPieces, piece = at % kPieces, row = from + r;
        const int64_t d = col + piece * 8;
        const bool valid = row < end && d < job.D;
        const T* const source = typed<T>(job.z) + (valid ? source_row(job.rows, row) * job.D + d : 0);
        copy_async(z + swizzled_offset<kPieces>(r, piece), source, valid);
      }
      for (int at = threadIdx.x; at < kStageRows * kRankPieces; at += 128) {
        const int r = at / kRankPieces, piece = at % kRankPieces, row = from + r;
        const bool valid = row < end;
        const T* const source =
            typed<T>(job.v) + (valid ? static_cast<int64_t>(row) * job.ldv + rank_begin + piece * 8 : 0);
        copy_async(v + swizzled_offset<kRankPieces>(r, piece), source, valid);
      }
    }
    copy_commit();
  };
  float sums[kTilesM][4][4] = {};
  for (int s = 0; s < kStages - 1; ++s) fill(begin + s * kStageRows, s);
  int stage = 0;
  for (int from = begin; from < end; from += kStageRows, stage = (stage + 1) % kStages) {
    copy_wait<kStages - 2>();
    __syncthreads();
    fill(from + (kStages - 1) * kStageRows, (stage + kStages - 1) % kStages);
    const uint32_t z = base + stage * Stage<kRanks>::kBytes, v = z + Stage<kRanks>::kZ;
    if constexpr (kMask) {
#pragma unroll 2
      for (int i = 0; i < kStageRows * kPieces / 128; ++i) {
        const int at = i * 128 + threadIdx.x, r = at / kPieces, piece = at % kPieces, row = from + r;
        if (row >= end) continue;
        uint4* const values = reinterpret_cast<uint4*>(raw + (z - base) + swizzled_offset<kPieces>(r, piece));
        *values = zero_dropped(*values, mask.draw(mask.counter(job.rows.order[row], col + piece * 8)));
      }
      __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < kStageRows; k += 16) {
      uint32_t b[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ldmatrix_trans(b[half], z + swizzled_offset<kPieces>(k + lane % 16, warp * 4 + half * 2 + lane / 16));
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        uint32_t a[4];
        ldmatrix_trans(a, v + swizzled_offset<kRankPieces>(k + lane % 8 + lane / 16 * 8, m * 2 + lane / 8 % 2));
#pragma unroll
        for (int n = 0; n < 4; ++n) mma<T>(sums[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
  copy_wait<0>();
#pragma unroll
  for (int m = 0; m < kTilesM; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int rank = rank_begin + m * 16 + lane / 4 + i / 2 * 8;
        const int64_t d = col + warp * 32 + n * 8 + lane % 4 * 2 + i % 2;
        if (rank >= job.R || d >= job.D) continue;
        const int64_t at =
            job.transposed ? (e * job.D + d) * job.R + rank : (static_cast<int64_t>(e) * job.R + rank) * job.D + d;
        const float value = sums[m][n][i];
        if (f32) static_cast<float*>(job.g)[at] = value;
        else static_cast<T*>(job.g)[at] = from_float<T>(value);
      }
#endif
}

template <typename T, int kRanks, bool kMask>
cudaError_t gradient_chunk(const ExpertGradient& job, int begin, cudaStream_t stream) {
  constexpr int kBytes = kStages * Stage<kRanks>::kBytes;
  const cudaError_t status = allow_shared_bytes<gradient_kernel<T, kRanks, kMask>>(kBytes);
  if (status != cudaSuccess) return status;
  const dim3 grid(static_cast<unsigned>((job.D + kCols - 1) / kCols), static_cast<unsigned>(job.rows.E));
  gradient_kernel<T, kRanks, kMask><<<grid, 128, kBytes, stream>>>(job, begin, job.out_dtype == DType::f32);
  return cudaGetLastError();
}

template <typename T, bool kMask> cudaError_t gradient(const ExpertGradient& job, cudaStream_t stream) {
  cudaError_t status = cudaSuccess;
  for (int begin = 0; begin < job.R && status == cudaSuccess;) {
    const int left = (job.R - begin + 15) / 16 * 16;
    if (left >= 64) status = gradient_chunk<T, 64, kMask>(job, begin, stream), begin += 64;
    else if (left >= 32) status = gradient_chunk<T, 32, kMask>(job, begin, stream), begin += 32;
    else status = gradient_chunk<T, 16, kMask>(job, begin, stream), begin += 16;
  }
  return status;
}

}  // namespace

cudaError_t launch_expert_project(const ExpertProject& job, cudaStream_t stream) {
  if (job.D % 8 != 0 || job.R % 16 != 0) return cudaErrorInvalidValue;
  if (job.rows.N == 0) return cudaSuccess;
  return by_half(job.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    job.dropout.seed != nullptr ? project<T, true>(job, stream) : project<T, false>(job, stream);
  });
}

cudaError_t launch_expert_gradient(const ExpertGradient& job, cudaStream_t stream) {
  if (job.D % 8 != 0 || job.ldv % 16 != 0 || job.R > job.ldv) return cudaErrorInvalidValue;
  cudaError_t status = cudaSuccess;
  const cudaError_t type_status = by_half(job.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    status = job.dropout.seed != nullptr ? gradient<T, true>(job, stream) : gradient<T, false>(job, stream);
  });
  return status != cudaSuccess ? status : type_status;
}

}  // namespace zerolora
