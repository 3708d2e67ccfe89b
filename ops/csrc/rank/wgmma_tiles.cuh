// Parts of the wgmma kernel: the CTAs' position in the problem, the layout of shared memory, the products of one tile,
// and the stores of the accumulators. Legend and overview: rank_wgmma.cu.
#pragma once
#include "exchange.cuh"
#include "sums.cuh"

namespace zerolora {
namespace {

constexpr int kRows = 128, kCols = kWgmmaCols, kConsumers = 256, kCopiers = 128;
constexpr int kBox = 64 * 2;  // bytes in a row of a box of Z: one 128-byte swizzle atom
// In passes for U alone or G alone: bytes of 128 rows x 64 columns, and of a tile. Sizes for all passes: Layout.
constexpr int kHalfBytes = kRows * kBox, kTileBytes = 2 * kHalfBytes;
constexpr int kBitsRow = 16;          // bytes of Dropout::bits in a row of a tile
constexpr int kSharedBytes = 232448;  // the limit per block

struct Problem {
  CUtensorMap z, p, v;
  int64_t T, D;
  float *u, *g;
  int first_cta,
      ctas_abreast;           // CTAs before this problem's; CTAs of adjacent columns or, for G alone, of adjacent rows
  int first_target, targets;  // of U, or of G in a pass for G alone; none: the kernel stores partial sums
};
struct Args {
  Problem problem[kMaxMerged];
  int count, cluster;
  int64_t rows_per_split, cols_per_split;
  Dropout dropout;
  Target target[kMaxGroup];  // all problems'
  DType out_dtype;
  bool accumulate;
};

// The work of one CTA and the partial sums it writes.
struct Place {
  int64_t row0, col0;
  int u_split, g_split;
};

template <int RP, int kBlocks, bool kU, bool kG> struct Layout {
  static constexpr bool kBoth = kU && kG;
  // dY has no dropout. Drawing is limited by latency, so use as many warps as the accumulators leave registers for.
  static constexpr int kMaskers = kBoth ? 0 : kBlocks * RP <= 64 ? 512 : 256;
  static constexpr int kThreads = kConsumers + kCopiers + kMaskers;
  // setmaxnreg redistributes the registers of the launch: 168 for each of 384 threads, 96 of 640, 72 of 896. Requesting
  // more than the others release hangs forever.
  static constexpr int kConsumerRegisters = kBoth ? 216 : kMaskers == 512 ? 88 : 168;
  static constexpr int kMaskerRegisters = kMaskers == 512 ? 72 : 56;
  static constexpr int kCopierRegisters = kBoth ? 56 : kMaskers == 512 ? 40 : 32;
  static_assert(128 * (2 * kConsumerRegisters + kCopierRegisters) + kMaskers * kMaskerRegisters <=
                    kThreads * (65536 / kThreads / 8 * 8),
                "the warpgroups request more registers than a block has");
  static constexpr int kTileRows = wgmma_rows(kBoth, RP);
  static constexpr int kHalf = kTileRows * kBox, kTile = 2 * kHalf;  // bytes of 64 columns, and of 128
  static constexpr int kVBytes = kG ? kTileRows * RP * 2 : 0;
  static constexpr int kPBytes = kBoth ? kBlocks * kCols * RP * 2 : 0;  // both: P of the CTA's columns is resident
  static constexpr int kPTileBytes = kU && !kG ? kCols * RP * 2 : 0;    // U alone: P is copied with each tile
  static constexpr int kBitsBytes = kG && !kU ? kRows * kBitsRow : 0;   // G alone: the mask may be stored
  static constexpr int kStageBytes = kTile + kPTileBytes + kBitsBytes;
  static constexpr int kExchangeBytes = kBoth ? kExchanges * Slices<RP>::kBytes : 0;
  // V of a row of tiles is copied when the tile `stages` before the row's first is done; by then the row that used this
  // slot before must also be done.
  static constexpr int v_slots(int stages) { return kG ? (stages + 2 * kBlocks - 2) / kBlocks : 0; }
  static constexpr int bytes(int stages) {  // 1024: alignment of the atoms
    return 1024 + kPBytes + stages * kStageBytes + v_slots(stages) * kVBytes + kExchangeBytes + (3 * stages + 8) * 8;
  }
  static constexpr int fitting(int stages) { return bytes(stages) <= kSharedBytes ? stages : fitting(stages - 1); }
  static constexpr int kStages = kBoth ? fitting(10) : RP == 64 ? 4 : 5;
  static constexpr int kVSlots = v_slots(kStages);
  static constexpr int kExchange = kPBytes + kStages * kStageBytes + kVSlots * kVBytes;
  static constexpr int kBarriers = kExchange + kExchangeBytes, kBytes = bytes(kStages);
};

// The barriers of a stage: copied (full), masked, and read by both warpgroups (empty).
template <int kStages> struct Barriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t full(int stage) const { return base + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return base + (kStages + stage) * 8; }
  __device__ __forceinline__ uint32_t masked(int stage) const { return base + (2 * kStages + stage) * 8; }
  __device__ __forceinline__ uint32_t p_full(int block) const { return base + (3 * kStages + block) * 8; }
  __device__ __forceinline__ uint32_t slices_full() const { return base + (3 * kStages + 4) * 8; }
  __device__ __forceinline__ uint32_t slices_free() const { return base + (3 * kStages + 4 + kExchanges) * 8; }
};

// Multiplies U of 64 rows, which begin at z; kHalf: bytes of the tile's first 64 columns.
template <typename T, int RP, int kHalf, bool kByRank>
__device__ __forceinline__ void tile_u(float (&u)[RP / 2], uint32_t z, uint32_t p) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t a = descriptor<1024, Swizzle::b128>(z + half * kHalf + k * 32);
      if constexpr (kByRank) {
        wgmma<T, 0, 0>(u, a, descriptor<1024, Swizzle::b128>(p + half * RP * kBox + k * 32));
      } else {
        constexpr int kRow = RP * 2;
        wgmma<T, 0, 1>(u, a, descriptor<8 * kRow, row_swizzle<kRow>()>(p + (half * 64 + k * 16) * kRow));
      }
    }
}

// Multiplies G of 64 columns, which begin at z.
template <typename T, int RP, int kTileRows>
__device__ __forceinline__ void tile_g(float (&g)[RP / 2], uint32_t z, uint32_t v) {
  constexpr int kRow = RP * 2;
#pragma unroll
  for (int k = 0; k < kTileRows / 16; ++k)
    wgmma<T, 1, 1>(g, descriptor<1024, Swizzle::b128>(z + k * 16 * kBox),
                   descriptor<8 * kRow, row_swizzle<kRow>()>(v + k * 16 * kRow));
}

// The destination of sums: a target or, for G alone, partial sums. A copy, because indexed kernel parameters are slow.
struct Sink {
  void* out;
  int64_t ld;
  float scale;
  int begin, rank;
  DType dtype;
  bool accumulate;
};
__device__ __forceinline__ Sink make_sink(const Args& args, const Problem& a, int i) {
  const Target& target = args.target[a.first_target + i];
  return {target.out, target.ld, target.scale, target.begin, target.rank, args.out_dtype, args.accumulate};
}

// Stores 4 adjacent sums: ranks from `rank` of one row, or (kByRank) columns from `at` of one rank.
template <bool kByRank> __device__ __forceinline__ void put(const Sink& sink, int rank, int64_t at, float4 v) {
  const int within = rank - sink.begin;
  if (within < 0 || within >= sink.rank) return;
  const float sum[4] = {v.x * sink.scale, v.y * sink.scale, v.z * sink.scale, v.w * sink.scale};
  const int64_t place = kByRank ? within * sink.ld + at : at * sink.ld + within;
  write_sums(sink.dtype, sink.out, place, sum, kByRank ? 4 : min(4, sink.rank - within), sink.accumulate);
}

// Stores 64 rows of one split's partial sums in units; `row0` is the first row of this warpgroup, `rows` their total.
template <int RP>
__device__ __forceinline__ void store_partial(const float (&c)[RP / 2], float* partial, int64_t rows, int64_t row0) {
  const int64_t first = row0 + threadIdx.x / 32 % 4 * 16;
  float4* const base = reinterpret_cast<float4*>(partial + first * RP) + threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int pair = 0; pair < RP / 16; ++pair) {
      const float4 value = quad(c, half, pair);
      if (first + half * kUnitRows < rows) base[(half * (RP / 16) + pair) * 32] = value;
    }
}
template <int RP> __device__ __forceinline__ float* partial_u(const Problem& a, int split) {
  return a.u + split * unit_rows(a.T) * RP;
}
template <int RP> __device__ __forceinline__ float* partial_g(const Problem& a, int split) {
  return a.g + split * unit_rows(a.D) * RP;
}

// Stores 16-byte piece i, counted from the unit of row0, as partial sums or into a target.
template <int RP>
__device__ __forceinline__ void store_partial_piece(float* partial, int64_t rows, int64_t row0, int i, float4 sum) {
  if (row0 + i / (2 * RP) * kUnitRows < rows) reinterpret_cast<float4*>(partial + row0 * RP)[i] = sum;
}
template <int RP>
__device__ __forceinline__ void store_result_piece(const Sink& sink, int64_t rows, int64_t row0, int i, float4 sum) {
  const int lane = i % 32;
  const int64_t row = row0 + i / (2 * RP) * kUnitRows + lane / 4;
  if (row < rows) put<false>(sink, i / 32 % (RP / 16) * 16 + quad_column(lane), row, sum);
}

// Returns whether a pass for one result moves its sums to shared memory, to add them over a cluster or to write whole
// rows of the result. The partial sums of a single CTA are stored directly, in the order of the accumulators.
__device__ __forceinline__ bool sums_through_shared(const Args& args, const Problem& a) {
  return args.cluster > 1 || a.targets > 0;
}
__device__ __forceinline__ void shared_sums_sync(const Args& args) {
  if (args.cluster > 1) cluster_sync();
  else named_sync(kConsumers);
}

// Stores partial sums of G as [R,D].
template <int RP>
__device__ __forceinline__ void store_g_by_rank(const float (&g)[RP / 2], const Problem& a, int64_t col0, int split) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t col = col0 + threadIdx.x / 32 % 4 * 16 + lane / 4 + half * 8;
    if (col >= a.D) continue;
    float* const base = a.g + (static_cast<int64_t>(split) * RP + lane % 4 * 2) * a.D + col;
#pragma unroll
    for (int n = 0; n < RP / 8; ++n)
      base[n * 8 * a.D] = g[n * 4 + half * 2], base[(n * 8 + 1) * a.D] = g[n * 4 + half * 2 + 1];
  }
}

// Adds U over the CTAs of a cluster with all 256 multiplying threads, and stores it. In shared memory it is [unit of 8
// rows][pair of 8 ranks][lane], 16 bytes each, which is the order of the accumulators.
template <int RP>
__device__ __forceinline__ void add_u(const float (&u)[RP / 2], const Args& args, const Problem& a, char* shared,
                                      const Place& place) {
  constexpr int kPairs = RP / 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float4* const own = reinterpret_cast<float4*>(shared);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair)
      own[((warp * 2 + half) * kPairs + pair) * 32 + lane] = quad(u, half, pair);
  shared_sums_sync(args);
  const uint32_t base = shared_address(shared);
  const auto address = [=](int piece) { return base + piece * 16; };
  const Share share = add_over_cluster<kConsumers>(kRows * RP / 4, args.cluster, address);
  if (a.targets == 0) {
    float* const partial = partial_u<RP>(a, place.u_split);
#pragma unroll 4
    for (int piece = share.first; piece < share.last; piece += kConsumers)
      store_partial_piece<RP>(partial, a.T, place.row0, piece, load_shared(address(piece)));
  }
  for (int i = 0; i < a.targets; ++i) {
    const Sink sink = make_sink(args, a, i);
#pragma unroll 4
    for (int piece = share.first; piece < share.last; piece += kConsumers)
      store_result_piece<RP>(sink, a.T, place.row0, piece, load_shared(address(piece)));
  }
}

// Adds and stores G: [RP][columns of the CTA] in shared memory, with rows 4 longer so that ranks use different banks.
template <int RP, int kBlocks>
__device__ __forceinline__ void add_g(const float (&g)[kBlocks][RP / 2], const Args& args, const Problem& a,
                                      char* shared, const Place& place) {
  constexpr int kRow = kBlocks * kCols + 4, kPieces = kBlocks * kCols / 4;  // of a rank
  const int lane = threadIdx.x % 32;
  float* const own = reinterpret_cast<float*>(shared) + threadIdx.x / 32 * 16 + lane / 4 + lane % 4 * 2 * kRow;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < RP / 8; ++n) {
        float* const at = own + n * 8 * kRow + block * kCols + half * 8;
        at[0] = g[block][n * 4 + half * 2], at[kRow] = g[block][n * 4 + half * 2 + 1];
      }
  shared_sums_sync(args);
  const uint32_t base = shared_address(shared);
  const auto address = [=](int piece) { return base + (piece / kPieces * kRow + piece % kPieces * 4) * 4; };
  const Share share = add_over_cluster<kConsumers>(RP * kPieces, args.cluster, address);
  for (int i = 0; i < max(a.targets, 1); ++i) {
    const Sink sink = a.targets == 0 ? Sink{a.g + place.g_split * a.D * RP, a.D, 1.f, 0, RP, DType::f32, false}
                                     : make_sink(args, a, i);
#pragma unroll 4
    for (int piece = share.first; piece < share.last; piece += kConsumers) {
      const int64_t col = place.col0 + piece % kPieces * 4;
      if (col < a.D) put<true>(sink, piece / kPieces, col, load_shared(address(piece)));
    }
  }
}

}  // namespace
}  // namespace zerolora
