// Adds the adapter's term and a bias to rows in the experts' order, and sums the rows of each token.
#include "expert_tiles.cuh"

namespace zerolora {
namespace {

template <typename T>
__global__ void __launch_bounds__(kWarps * 32) expand_kernel(const ExpertExpand job) {
  const Span span = find_span(job.rows, blockIdx.x);
  if (span.expert < 0) return;
  const int lane = threadIdx.x % 32;
  const int64_t row[2] = {span.row + threadIdx.x / 32 * 16 + lane / 4, span.row + threadIdx.x / 32 * 16 + lane / 4 + 8};
  const bool valid[2] = {row[0] < span.end, row[1] < span.end};
  if (__all_sync(~0u, !valid[0])) return;
  const int64_t e = span.expert;
  const T *const h = typed<T>(job.h), *const q = typed<T>(job.q) + e * job.D * job.R;
  const T* const bias = typed<T>(job.bias) + e * job.D;
  T* const y = static_cast<T*>(job.y);
  const Mask mask(job.dropout, job.D);
  const bool masked = job.dropout.seed != nullptr;
#pragma unroll 2
  for (int64_t first = 0; first < job.D; first += 32) {
    const int64_t c = first + lane % 4 * 8;
    const bool inside = c < job.D;
    float sum[2][8] = {};
    uint4 old[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (valid[i] && inside) old[i] = *reinterpret_cast<const uint4*>(y + row[i] * job.D + c);
    add_ranks(sum, h + row[0] * job.R, h + row[1] * job.R, valid[0], valid[1], q, first, 8, job.D, job.R);
    if (!inside) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!valid[i]) continue;
      if (masked) drop(sum[i], mask.draw(mask.counter(job.rows.order[row[i]], c)));
      float before[8], added[8] = {};
      unpack<T>(old[i], before);
      if (job.bias != nullptr) unpack<T>(load16(bias + c, true), added);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[i][j] += before[j] + added[j];
      *reinterpret_cast<uint4*>(y + row[i] * job.D + c) = pack8<T>(sum[i]);
    }
  }
}

constexpr int kCombineThreads = 256, kAtOnce = 8;

template <typename T> __global__ void __launch_bounds__(kCombineThreads) combine_kernel(const ExpertCombine job) {
  const int64_t octets = job.D / 8, at = static_cast<int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x;
  const int64_t t = at / octets, c = at % octets * 8;
  if (t >= job.T) return;
  const int last = job.ends[job.E - 1];
  float sum[8] = {};
  for (int k0 = 0; k0 < job.K; k0 += kAtOnce) {
    uint4 values[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t pair = t * job.K + k0 + i;
      const int row = k0 + i < job.K ? job.place[pair] : last;
      weight[i] = row < last && job.w != nullptr ? job.w[pair] : 1.f;
      values[i] = load16(typed<T>(job.rows) + static_cast<int64_t>(row) * job.D + c, row < last);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float v[8];
      unpack<T>(values[i], v);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] = fmaf(weight[i], v[j], sum[j]);
    }
  }
  *reinterpret_cast<uint4*>(static_cast<T*>(job.y) + t * job.D + c) = pack8<T>(sum);
}

}  // namespace

cudaError_t launch_expert_expand(const ExpertExpand& job, cudaStream_t stream) {
  if (job.D % 8 != 0 || job.R % 16 != 0) return cudaErrorInvalidValue;
  if (job.rows.N == 0) return cudaSuccess;
  const unsigned tiles = static_cast<unsigned>(most_tiles(job.rows.N, job.rows.E));
  return by_half(job.dtype, [&](auto* type) {
    expand_kernel<std::remove_pointer_t<decltype(type)>><<<tiles, kWarps * 32, 0, stream>>>(job);
  });
}

cudaError_t launch_expert_combine(const ExpertCombine& job, cudaStream_t stream) {
  if (job.D % 8 != 0) return cudaErrorInvalidValue;
  const int64_t blocks = (job.T * (job.D / 8) + kCombineThreads - 1) / kCombineThreads;
  if (blocks == 0) return cudaSuccess;
  return by_half(job.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    combine_kernel<T><<<static_cast<unsigned>(blocks), kCombineThreads, 0, stream>>>(job);
  });
}

}  // namespace zerolora
