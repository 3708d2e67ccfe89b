// Helpers for the experts' kernels: a CTA's rows, and products of 16 rows from registers loaded in memory order.
//
// A product's K index may be permuted if both operands are, and so may its columns. Thus lanes load 8 or 16 adjacent
// bytes without shared memory. A lane loads rows lane / 4 and lane / 4 + 8 of the 16, and piece lane % 4 of a row.
#pragma once
#include "common.cuh"
#include "experts.h"

namespace zerolora {
namespace {

constexpr int kWarps = kTileRows / 16;

struct Span {
  int expert, row, end;  // end: of the expert's rows
};
__device__ __forceinline__ Span find_span(const ExpertRows& rows, int64_t tile) {
  const int2 found = rows.tiles[tile];
  return {found.x, found.y, found.x < 0 ? 0 : rows.ends[found.x]};
}
__device__ __forceinline__ int64_t source_row(const ExpertRows& rows, int row) {
  return rows.per_source == 0 ? row : rows.order[row] / rows.per_source;
}

template <typename T> __device__ __forceinline__ const T* typed(const void* p) { return static_cast<const T*>(p); }

template <typename T> __device__ __forceinline__ uint4 load16(const T* p, bool valid) {
  return valid ? __ldg(reinterpret_cast<const uint4*>(p)) : make_uint4(0, 0, 0, 0);
}
template <typename T> __device__ __forceinline__ uint2 load8(const T* p, bool valid) {
  return valid ? __ldg(reinterpret_cast<const uint2*>(p)) : make_uint2(0, 0);
}
template <typename T> __device__ __forceinline__ void unpack(uint4 words, float (&v)[8]) {
  T values[8];
  memcpy(values, &words, 16);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = to_float(values[i]);
}
// Zeroes the dropped values among 8 adjacent ones; `keep` has ones over the 16 bits of those to keep.
__device__ __forceinline__ void drop(float (&v)[8], uint4 keep) {
  const uint32_t words[4] = {keep.x, keep.y, keep.z, keep.w};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if ((words[i / 2] >> (i % 2 * 16) & 1u) == 0) v[i] = 0.f;
}

// Returns the lane's column of tile j of 4 in the second operand's order; `stride`: distance between lanes' columns.
__device__ __forceinline__ int octet_column(int j, int stride) {
  const int n = threadIdx.x % 32 / 4;
  return n / 2 * stride + j * 2 + n % 2;
}

// Adds v[half][8] += h[16,R] q^T for two rows and 8 adjacent columns, which are q's rows column + lane % 4 * stride to
// + 7; q has `limit` rows.
template <typename T>
__device__ __forceinline__ void add_ranks(float (&v)[2][8], const T* h0, const T* h1, bool valid0, bool valid1,
                                          const T* q, int64_t column, int stride, int64_t limit, int R) {
  const int piece = threadIdx.x % 4 * 4;
  for (int k = 0; k < R; k += 16) {
    const uint2 top = load8(h0 + k + piece, valid0), bottom = load8(h1 + k + piece, valid1);
    const uint32_t a[4] = {top.x, bottom.x, top.y, bottom.y};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t n = column + octet_column(j, stride);
      const uint2 b = load8(q + n * R + k + piece, n < limit);
      float c[4] = {v[0][2 * j], v[0][2 * j + 1], v[1][2 * j], v[1][2 * j + 1]};
      mma<T>(c, a, b.x, b.y);
      v[0][2 * j] = c[0], v[0][2 * j + 1] = c[1], v[1][2 * j] = c[2], v[1][2 * j + 1] = c[3];
    }
  }
}

// Adds sums[tile of 8 ranks][4] += z[16, 8 columns per lane] p^T; `p` points to the lane's rank of the first tile and
// the lane's columns; D: columns of p.
template <typename T, int kTiles>
__device__ __forceinline__ void project_octets(float (&sums)[kTiles][4], uint4 top, uint4 bottom, const T* p, int64_t D,
                                               bool inside) {
  const uint32_t a0[4] = {top.x, bottom.x, top.y, bottom.y}, a1[4] = {top.z, bottom.z, top.w, bottom.w};
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const uint4 b = load16(p + n * 8 * D, inside);
    mma<T>(sums[n], a0, b.x, b.y);
    mma<T>(sums[n], a1, b.z, b.w);
  }
}
template <typename T, int kTiles>
__device__ __forceinline__ void store_projected(const float (&sums)[kTiles][4], T* u, int R, const bool (&valid)[2],
                                                const int64_t (&row)[2], float scale) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (valid[i])
        *reinterpret_cast<uint32_t*>(u + row[i] * R + n * 8 + threadIdx.x % 4 * 2) =
            pack2<T>(sums[n][2 * i] * scale, sums[n][2 * i + 1] * scale);
}

}  // namespace

template <typename Run> cudaError_t by_half(DType dtype, Run run) {
  if (dtype == DType::f32) return cudaErrorInvalidValue;
  if (dtype == DType::f16) run(static_cast<__half*>(nullptr));
  else run(static_cast<__nv_bfloat16*>(nullptr));
  return cudaGetLastError();
}

}  // namespace zerolora
