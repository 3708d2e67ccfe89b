// The torch-free interface of the experts' kernels. Legend: T tokens, K experts per token, N = T K rows sorted by
// expert, E experts, D columns, R rank (padded to 16), I intermediate. Counts stay on the device: launches are large
// enough for any routing, and a CTA finds its expert and its rows in a list of tiles.
#pragma once
#include "kernels.h"

namespace zerolora {

constexpr int kTileRows = 64;  // rows of one expert that a CTA processes together
constexpr int kMaxExperts = 1024;
constexpr int kSortPairs = 512;  // pairs per CTA of the sort
constexpr int kPairRows = kFrozenRows * kFrozenCluster;
__host__ __device__ constexpr int64_t most_pairs(int64_t N, int64_t E) { return (N + kPairRows - 1) / kPairRows + E; }
__host__ __device__ constexpr int64_t most_tiles(int64_t N, int64_t E) { return (N + kTileRows - 1) / kTileRows + E; }

// order[N]: the pair t K + k of each row; rows of pairs without an expert come last, after ends[E - 1].
struct ExpertSort {
  const int64_t* index = nullptr;  // [N]
  int64_t N = 0;
  int E = 0;
  int* counts = nullptr;  // [ceil(N / kSortPairs), E + 1]
  int *order = nullptr, *ends = nullptr;
};
cudaError_t launch_expert_sort(const ExpertSort& job, cudaStream_t stream);

// place[N]: the row of each pair; tiles[most_tiles]: expert and first row of each, or -1; pairs[most_pairs]: the same
// for pairs of adjacent product tiles, followed by their number.
struct ExpertPlan {
  const int *order = nullptr, *ends = nullptr;
  int64_t N = 0;
  int E = 0;
  int* place = nullptr;
  int2 *tiles = nullptr, *pairs = nullptr;
};
cudaError_t launch_expert_plan(const ExpertPlan& job, cudaStream_t stream);

// Y[N,D] = H[N,R] Q + X[N,K] W, on Hopper. forward: W is [E,D,K] and Q [E,D,R]; else W is [E,K,D] and Q [E,R,D].
struct ExpertProduct {
  DType dtype = DType::bf16;
  int64_t N = 0, K = 0, D = 0, E = 0;
  bool forward = true;
  const void *x = nullptr, *w = nullptr, *h = nullptr, *q = nullptr;
  int R = 0;
  void* y = nullptr;
  const int* ends = nullptr;
  const int2* pairs = nullptr;
  const int* pair_count = nullptr;
};
bool expert_product_supported(const ExpertProduct& job, const Device& device);
cudaError_t launch_expert_product(const ExpertProduct& job, const Device& device, cudaStream_t stream);

// The rows of an operand.
struct ExpertRows {
  const int2* tiles = nullptr;
  const int *ends = nullptr, *order = nullptr;
  int64_t N = 0;
  int E = 0;
  int per_source = 0;  // row n of the operand is stored in row order[n] / per_source; 0: in row n
};

// U[N,R] = scale (m*Z) P^T with P[E,R,D], and/or a copy of Z's rows in the order of the experts.
struct ExpertProject {
  DType dtype = DType::bf16;
  ExpertRows rows;
  const void* z = nullptr;
  int64_t D = 0;
  const void* p = nullptr;
  int R = 0;
  float scale = 1.f;
  void *u = nullptr, *copy = nullptr;
  Dropout dropout;
};
cudaError_t launch_expert_project(const ExpertProject& job, cudaStream_t stream);

// G[E,R,D] = V^T (keep*Z), or its transpose [E,D,R], summed over the rows of each expert; V includes 1/(1-p).
struct ExpertGradient {
  DType dtype = DType::bf16, out_dtype = DType::bf16;
  ExpertRows rows;
  const void *z = nullptr, *v = nullptr;  // v [N, ldv]
  int64_t D = 0;
  int ldv = 0, R = 0;  // R: ranks to compute
  bool transposed = false;
  void* g = nullptr;
  Dropout dropout;
};
cudaError_t launch_expert_gradient(const ExpertGradient& job, cudaStream_t stream);

// Y[N,D] += keep * (H[N,R] Q^T) + bias with Q[E,D,R] and bias[E,D], in place.
struct ExpertExpand {
  DType dtype = DType::bf16;
  ExpertRows rows;
  const void *h = nullptr, *q = nullptr, *bias = nullptr;
  void* y = nullptr;
  int64_t D = 0;
  int R = 0;
  Dropout dropout;
};
cudaError_t launch_expert_expand(const ExpertExpand& job, cudaStream_t stream);

// y[T,D] = sum over k of w[t,k] rows[place[t,k]] (w null: 1); rows without an expert are skipped.
struct ExpertCombine {
  DType dtype = DType::bf16;
  const void* rows = nullptr;
  const int *place = nullptr, *ends = nullptr;
  const float* w = nullptr;
  int64_t T = 0, D = 0;
  int K = 0, E = 0;
  void* y = nullptr;
};
cudaError_t launch_expert_combine(const ExpertCombine& job, cudaStream_t stream);

enum class Gate : int { silu = 0, gelu = 1, gelu_tanh = 2, clamped = 3 };

// u = u0 + h B^T + bias with B[E,2I,R]; a = f(gate of u) up of u. Backward, with g[N,I] the gradient of a for the
// weight 1: g' = g + keep * (dh A) with A as [E,I,R], dw[pair] = a.g', and du from w[pair] g'.
struct ExpertGate {
  DType dtype = DType::bf16;
  ExpertRows rows;
  Gate kind = Gate::silu;
  bool interleaved = false;
  float alpha = 1.f, limit = 0.f;
  int64_t I = 0;
  const void *u = nullptr, *h = nullptr, *b = nullptr, *bias = nullptr;
  int R = 0;
  void* act = nullptr;  // [N,I]; optional in the backward
  const void* g = nullptr;
  const void *dh = nullptr, *a = nullptr;
  int R_down = 0;
  const float* w = nullptr;
  float* dw = nullptr;
  void* du = nullptr;  // [N,2I]; null in the forward
  // The projection of the result, for few ranks (kMostFused): scale (m*a) P^T with P[E,R_out,I] forward, and
  // scale du P^T with P[E,R_out,2I] backward.
  const void* p = nullptr;
  int R_out = 0;
  float scale = 1.f;
  void* projected = nullptr;
  Dropout dropout;  // of a in the forward, of dh A in the backward
};
constexpr int kMostFused = 32;
cudaError_t launch_expert_gate(const ExpertGate& job, cudaStream_t stream);

// W[E, count] in `dtype`, with each expert quantized separately: see ops/experts.py, ExpertMatrix.
struct ExpertNf4 {
  Nf4 weight;  // count: of one expert
  int64_t E = 0;
};
cudaError_t launch_expert_nf4(const ExpertNf4& job, DType dtype, void* out, cudaStream_t stream);
cudaError_t launch_mxfp4(const uint8_t* blocks, const uint8_t* scales, int64_t groups, DType dtype, void* out,
                         cudaStream_t stream);

}  // namespace zerolora
