// Parts of the wgmma kernel: the CTAs' position in the problem, the layout of shared memory, the products of one tile,
// and the stores of the accumulators. Legend and overview: rank_wgmma.cu.
#pragma once
#include "exchange.cuh"
#include "sums.cuh"

namespace zerolora {
namespace {

constexpr int kRows = 128, kCols = kWgmmaCols, kConsumers = 256, kCopiers = 128;
constexpr int kBox = 64 * 2;  // bytes in a row of a box of Z: one 128-byte swizzle atom
// Passes for U alone or G alone: bytes of 128 rows x 64 columns, and of a tile. Layout has those of all passes.
constexpr int kHalfBytes = kRows * kBox, kTileBytes = 2 * kHalfBytes;
constexpr int kBitsRow = 16;          // bytes of Dropout::bits in a row of a tile
constexpr int kSharedBytes = 232448;  // that a block may have

struct Problem {
  CUtensorMap z, p, v;
  int64_t T, D;
  float *u, *g;
  int first_cta, ctas_abreast;  // CTAs before this problem's; neighbours, side by side or (G alone) one below the other
  int first_target, targets;  // where U, or G where that alone is wanted, is finished here: else it leaves partial sums
};
struct Args {
  Problem problem[kMaxMerged];
  int count, cluster;
  int64_t rows_per_split, cols_per_split;
  Dropout dropout;
  Target target[kMaxSiblings];  // all problems'
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
  // dY is never dropped. Drawing is bound by latency, so use as many warps as the accumulators leave room for.
  static constexpr int kMaskers = kBoth ? 0 : kBlocks * RP <= 64 ? 512 : 256;
  static constexpr int kThreads = kConsumers + kCopiers + kMaskers;
  // setmaxnreg moves registers within what the launch gave: 168 each to 384 threads, 96 each to 640, 72 each to 896.
  // Asking for more than the others return waits forever.
  static constexpr int kConsumerRegisters = kBoth ? 216 : kMaskers == 512 ? 88 : 168;
  static constexpr int kMaskerRegisters = kMaskers == 512 ? 72 : 56;
  static constexpr int kCopierRegisters = kBoth ? 56 : kMaskers == 512 ? 40 : 32;
  static_assert(128 * (2 * kConsumerRegisters + kCopierRegisters) + kMaskers * kMaskerRegisters <=
                    kThreads * (65536 / kThreads / 8 * 8),
                "the warpgroups ask for more registers than there are");
  static constexpr int kTileRows = wgmma_rows(kBoth, RP);
  static constexpr int kHalf = kTileRows * kBox, kTile = 2 * kHalf;  // bytes of 64 columns, and of 128
  static constexpr int kVBytes = kG ? kTileRows * RP * 2 : 0;
  static constexpr int kPBytes = kBoth ? kBlocks * kCols * RP * 2 : 0;  // both: P of the CTA's columns stays
  static constexpr int kPTileBytes = kU && !kG ? kCols * RP * 2 : 0;    // U alone: P travels with each tile
  static constexpr int kBitsBytes = kG && !kU ? kRows * kBitsRow : 0;   // G alone: the mask may have been drawn before
  static constexpr int kStageBytes = kTile + kPTileBytes + kBitsBytes;
  static constexpr int kExchangeBytes = kBoth ? kExchanges * Slices<RP>::kBytes : 0;
  // V of a row of tiles is copied when the tile `stages` before the row's first is done; by then the row that used the
  // slot before must be.
  static constexpr int v_slots(int stages) { return kG ? (stages + 2 * kBlocks - 2) / kBlocks : 0; }
  static constexpr int bytes(int stages) {  // 1024: the atoms want that alignment
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

// U of 64 rows, which begin at z; kHalf: bytes of the tile's first 64 columns.
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
        wgmma<T, 0, 1>(u, a, descriptor<8 * kRow, swizzle_of<kRow>()>(p + (half * 64 + k * 16) * kRow));
      }
    }
}

// G of 64 columns, which begin at z.
template <typename T, int RP, int kTileRows>
__device__ __forceinline__ void tile_g(float (&g)[RP / 2], uint32_t z, uint32_t v) {
  constexpr int kRow = RP * 2;
#pragma unroll
  for (int k = 0; k < kTileRows / 16; ++k)
    wgmma<T, 1, 1>(g, descriptor<1024, Swizzle::b128>(z + k * 16 * kBox),
                   descriptor<8 * kRow, swizzle_of<kRow>()>(v + k * 16 * kRow));
}

// Where sums go: into a target, or (G alone) as partial sums. Read once, as parameters at an index are slow.
struct Sink {
  void* out;
  int64_t ld;
  float scale;
  int begin, rank;
  DType dtype;
  bool accumulate;
};
__device__ __forceinline__ Sink sink_of(const Args& args, const Problem& a, int i) {
  const Target& target = args.target[a.first_target + i];
  return {target.out, target.ld, target.scale, target.begin, target.rank, args.out_dtype, args.accumulate};
}

// 4 neighbours: of the ranks from `rank` on of one row, or (kByRank) of the columns from `at` on in one rank.
template <bool kByRank> __device__ __forceinline__ void put(const Sink& sink, int rank, int64_t at, float4 v) {
  const int within = rank - sink.begin;
  if (within < 0 || within >= sink.rank) return;
  const float sum[4] = {v.x * sink.scale, v.y * sink.scale, v.z * sink.scale, v.w * sink.scale};
  const int64_t place = kByRank ? within * sink.ld + at : at * sink.ld + within;
  write_sums(sink.dtype, sink.out, place, sum, kByRank ? 4 : min(4, sink.rank - within), sink.accumulate);
}

// One split's partial sums of `rows` rows, in units: 64 rows, `row0` the first of this warpgroup's.
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

// Piece i of 16 bytes of the units from that of row0 on: as partial sums, or into a target.
template <int RP>
__device__ __forceinline__ void keep_piece(float* partial, int64_t rows, int64_t row0, int i, float4 sum) {
  if (row0 + i / (2 * RP) * kUnitRows < rows) reinterpret_cast<float4*>(partial + row0 * RP)[i] = sum;
}
template <int RP>
__device__ __forceinline__ void put_piece(const Sink& sink, int64_t rows, int64_t row0, int i, float4 sum) {
  const int lane = i % 32;
  const int64_t row = row0 + i / (2 * RP) * kUnitRows + lane / 4;
  if (row < rows) put<false>(sink, i / 32 % (RP / 16) * 16 + quad_column(lane), row, sum);
}

// Whether a pass for one result moves its sums to shared memory: to add them over a cluster, or to write whole rows of
// the result. One CTA's partial sums are stored in the order of the accumulators.
__device__ __forceinline__ bool shares_sums(const Args& args, const Problem& a) {
  return args.cluster > 1 || a.targets > 0;
}
__device__ __forceinline__ void shared_sums_sync(const Args& args) {
  if (args.cluster > 1) cluster_sync();
  else named_sync(kConsumers);
}

// The same as [R,D].
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

// The sums of a pass for one result over the CTAs of a cluster, by all 256 threads that multiply. In shared memory U is
// [unit of 8 rows][pair of 8 ranks][lane], 16 bytes each, which is the order of the accumulators.
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
      keep_piece<RP>(partial, a.T, place.row0, piece, load_shared(address(piece)));
  }
  for (int i = 0; i < a.targets; ++i) {
    const Sink sink = sink_of(args, a, i);
#pragma unroll 4
    for (int piece = share.first; piece < share.last; piece += kConsumers)
      put_piece<RP>(sink, a.T, place.row0, piece, load_shared(address(piece)));
  }
}

// G is [RP][columns of the CTA], with 4 more in a row so that lanes of different ranks use different banks.
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
    const Sink sink =
        a.targets == 0 ? Sink{a.g + place.g_split * a.D * RP, a.D, 1.f, 0, RP, DType::f32, false} : sink_of(args, a, i);
#pragma unroll 4
    for (int piece = share.first; piece < share.last; piece += kConsumers) {
      const int64_t col = place.col0 + piece % kPieces * 4;
      if (col < a.D) put<true>(sink, piece / kPieces, col, load_shared(address(piece)));
    }
  }
}

}  // namespace
}  // namespace zerolora
