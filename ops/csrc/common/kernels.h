// The torch-free interface of the LoRA kernels. Pointers are device memory; launches go to the given stream.
// Legend: T tokens, D columns of the matrix that is read (I or O), R rank (the ranks of a group concatenated, each
// padded to 8).
//
// One primitive does all rank-space work. It reads Z[T,D] once and computes
//     U[T,R] = (m*Z) P        and/or        G[D,R] = (m*Z)^T V,
// as fp32 partial sums over D-splits (for U) and T-splits (for G), or as final sums if the CTAs that share a result can
// add theirs through shared memory. `reduce` adds the partial sums. Both add in a fixed order without atomics, so the
// bits of a result depend only on the shapes and the GPU's number of multiprocessors.
#pragma once
#include <cstdint>
#include <cuda_runtime_api.h>

namespace zerolora {

enum class DType : int { f32 = 0, f16 = 1, bf16 = 2 };

// Returns whether rows of 16-bit values, `ld` apart, can be copied in 16-byte pieces.
inline bool aligned(const void* pointer, int64_t ld) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && ld % 8 == 0;
}

constexpr int kMaxGroup = 16;
constexpr int kRankChunk = 64;                // maximum ranks of a tensor-core launch
constexpr int kMmaRows = 64, kMmaCols = 128;  // tile of Z on mma.sync
constexpr int kWgmmaCols = 128;               // columns of a tile on wgmma
// Returns the number of rows in a wgmma tile. If both results are needed, U is stored after every row of tiles. Above
// rank 16 that is slow, so the two warpgroups alternate on U of smaller tiles: one sends while the other multiplies.
constexpr int wgmma_rows(bool both, int rank_pad) { return both && rank_pad > 16 ? 64 : 128; }
constexpr int kMaxCluster = 8;  // CTAs that add their sums in shared memory
// wgmma stores partial sums of U, and of G in a pass for both, as [unit of 8 rows][pair of 8 ranks][lane], 16 bytes
// each. This is the order of the accumulators, so that a warp stores 512 contiguous bytes. Row by row, with 64 ranks,
// it would store runs of 64 bytes, and be half as fast.
constexpr int kUnitRows = 8;
__host__ __device__ constexpr int64_t unit_rows(int64_t rows) { return (rows + kUnitRows - 1) / kUnitRows * kUnitRows; }

// m = keep / (1 - p), with keep drawn from Philox4x32-7 with the key *seed and one 15-bit number per element. The
// kernels only apply keep; the caller puts the factor into the scale of a reduction, or into dh for dh A.
struct Dropout {
  const int64_t* seed = nullptr;  // null: no dropout
  uint32_t threshold = 0;         // elements with a number below it are dropped: round(p * 32768)
  float keep_scale = 1.f;         // 1 / (1 - p)
  // keep of a matrix [T,D] as bits, [ceil(D / 128), T, 4] words of 32; in a row of 128 columns (common.cuh):
  //   columns  0-7  8-15  16-23  24-31  32-39  40-47  48-55  56-63  64-71  ...  120-127
  //   word       0     1      2      3      0      1      2      3      0  ...        3
  // If not null, a rank pass for G on wgmma writes the bits here. Once they are `stored`, such passes and
  // `launch_expand` read them instead of drawing; the other paths always draw.
  uint32_t* bits = nullptr;
  bool stored = false;
};

struct RankPass {
  DType dtype = DType::f32;
  const void* z = nullptr;
  int64_t ldz = 0, T = 0, D = 0;
  const void* p = nullptr;  // [R,D] (p_by_rank) or [D,R]; null: no U
  int64_t ldp = 0;
  bool p_by_rank = false;
  const void* v = nullptr;  // [T,R]; null: no G
  int64_t ldv = 0;
  bool g_by_rank = false;  // G as [R,D] instead of [D,R]; on wgmma true exactly if only G is needed
  int R = 0;               // ranks of this launch, at most kRankChunk on the tensor-core path
  Dropout dropout;
};

struct Device {
  int multiprocessors = 0;
  int capability = 0;       // 10 * major + minor
  int shared_bytes = 0;     // limit per block
  int shared_bytes_sm = 0;  // limit per multiprocessor
};

enum class Path : int { simt = 0, mma = 1, wgmma = 2 };

struct Plan {
  Path path = Path::simt;
  int rank_pad = 0;                // ranks in a row of the partial sums
  int d_blocks_per_cta = 1;        // blocks of 128 columns
  int cluster = 1;                 // CTAs that add their U, or their G in a pass for G only, in shared memory (wgmma)
  bool finished = false;           // the CTAs write the result itself instead of partial sums (wgmma)
  int merged = 1;                  // works, including this one, that share its launch
  int d_splits = 1, t_splits = 1;  // partial sums of U, of G
  int64_t rows_per_split = 0, cols_per_split = 0;
  int stages = 0;
  int64_t u_floats = 0, g_floats = 0;  // workspace
};

// Destination of the ranks [begin, begin + rank) of a result, times `scale`.
struct Target {
  int begin = 0, rank = 0;
  float scale = 1.f;
  void* out = nullptr;
  int64_t ld = 0;
};

// One pass: its split, and the destination of its partial sums or finished result.
struct RankWork {
  RankPass pass;
  Plan plan;
  float *u = nullptr, *g = nullptr;
  Target target[kMaxGroup];
  int targets = 0;
  DType out_dtype = DType::f32;
  bool accumulate = false;
};

// With T = 0, t_splits is 0: nothing is launched and the reduction writes zeros to G. On wgmma, passes over several
// matrices for U and G (over the dY of each projection in the backward) share a launch.
void plan_rank_works(RankWork* works, int count, const Device& device);
cudaError_t launch_rank_works(const RankWork* works, int count, const Device& device, cudaStream_t stream);
bool wgmma_supported(const RankPass& pass, const Device& device);

constexpr int kMaxMerged = 6;  // works in one launch: their descriptors are kernel parameters, limited to 4 KiB
void plan_rank_wgmma(RankWork* works, int count, const Device& device);
int wgmma_slots(int cluster, const Device& device);  // CTAs that run at once, in clusters of this size
cudaError_t launch_rank_wgmma(const RankWork* works, int count, cudaStream_t stream);
Plan plan_rank_mma(const RankPass& pass, const Device& device);
cudaError_t launch_rank_mma(const RankWork& work, cudaStream_t stream);
Plan plan_rank_simt(const RankPass& pass, const Device& device);
cudaError_t launch_rank_simt(const RankWork& work, cudaStream_t stream);

// out[i, j] (+)= scale * sum over s of partial[s, i, j] (in units: of partial[s, i, begin + j]).
struct Reduction {
  const float* partial = nullptr;
  bool in_units = false;  // partial sums in units of 8 rows (above), ld_partial ranks wide; else row by row
  int begin = 0;
  int splits = 0;
  DType out_dtype = DType::f32;
  int64_t rows = 0, cols = 0, ld_partial = 0, split_stride = 0;
  void* out = nullptr;
  int64_t ld_out = 0;
  float scale = 1.f;
  bool accumulate = false;
};
constexpr int kMaxReductions = 36;  // in one launch: dh and dB for 16 projections, and some for ranks in chunks
cudaError_t launch_reduce(const Reduction* jobs, int count, const Device& device, cudaStream_t stream);

// target[i, j] = source[i, j], padded with zeros: converts adapters of any type, stride and rank to the kernels'
// layout.
struct PackJob {
  const void* source = nullptr;
  DType source_dtype = DType::f32, target_dtype = DType::f32;
  int64_t row_stride = 0, col_stride = 1, rows = 0, cols = 0;
  void* target = nullptr;
  int64_t target_rows = 0, target_cols = 0;  // the target is contiguous
};
constexpr int kMaxPackJobs = 2 * kMaxGroup;
cudaError_t launch_pack(const PackJob* jobs, int count, cudaStream_t stream);

// Y[T,D] (+)= keep * (H[T,R] Q[D,R]^T) + bias[D], for f16 and bf16 with 16-byte aligned rows (except Q by rank).
struct Expand {
  DType dtype = DType::bf16;
  const void* h = nullptr;
  int64_t ldh = 0;
  const void* q = nullptr;  // [D,R], or [R,D] (q_by_rank)
  int64_t ldq = 0;
  bool q_by_rank = false;
  const void* bias = nullptr;
  void* y = nullptr;
  int64_t ldy = 0, T = 0, D = 0;
  int R = 0;
  bool accumulate = false;
  Dropout dropout;
};
bool expand_supported(const Expand& job, const Device& device);
cudaError_t launch_expand(const Expand& job, const Device& device, cudaStream_t stream);
// The same as `Expand` on Hopper, without a mask or accumulation: for many rows and few ranks.
bool expand_wgmma_supported(const Expand& job, const Device& device);
cudaError_t launch_expand_wgmma(const Expand& job, const Device& device, cudaStream_t stream);

// y *= keep in place, for types and shapes that `launch_expand` does not support.
cudaError_t launch_mask(DType dtype, void* y, int64_t ldy, int64_t T, int64_t D, Dropout dropout, cudaStream_t stream);

// The frozen product fused with the adapter's term on Hopper, rounded once:
//     Y[T,D] = keep * (H[T,R] Q) + sum over parts of X[T,K] W (+ bias[D])
// forward: W is [D,K] and Q [D,R]; else W is [K,D] and Q [R,D]. R = 0: the plain product. Rows are 16-byte aligned.
constexpr int kMaxParts = 4;
constexpr int kFrozenRows = 128, kFrozenCols = 256, kFrozenCluster = 2;  // a CTA's tile; CTAs of adjacent rows
struct FrozenPart {
  const void* x = nullptr;
  int64_t ldx = 0;
  const void* w = nullptr;
  int64_t ldw = 0, K = 0;
};
struct Frozen {
  DType dtype = DType::bf16;
  FrozenPart part[kMaxParts];
  int parts = 0;
  bool forward = true;
  const void *h = nullptr, *q = nullptr;
  int64_t ldh = 0, ldq = 0;
  int R = 0;
  const void* bias = nullptr;  // forward only
  void* y = nullptr;
  int64_t ldy = 0, T = 0, D = 0;
  const uint32_t* bits = nullptr;  // Dropout::bits, backward only; null: no dropout
};
bool frozen_supported(const Frozen& job, const Device& device);
cudaError_t launch_frozen(const Frozen& job, const Device& device, cudaStream_t stream);

// bitsandbytes NF4: 2 values per byte, high nibble first; value = code[q] * absmax[i / block]; with double quantization
// absmax[b] = nested_code[absmax_q[b]] * nested_absmax[b / nested_block] + *offset.
struct Nf4 {
  const uint8_t* packed = nullptr;
  const float* code = nullptr;         // [16]
  const void* absmax = nullptr;        // float[blocks], or uint8[blocks] if nested
  const float* nested_code = nullptr;  // [256], null: not nested
  const float* nested_absmax = nullptr;
  const float* offset = nullptr;
  int64_t count = 0;
  int block = 64, nested_block = 256;  // powers of two
};
cudaError_t launch_nf4(const Nf4& weight, DType dtype, void* out, cudaStream_t stream);

}  // namespace zerolora
