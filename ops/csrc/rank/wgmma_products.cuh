// The multiplying warpgroups' work, for one result or both. Legend and overview: rank_wgmma.cu.
#pragma once
#include <type_traits>

#include "wgmma_tiles.cuh"

namespace zerolora {
namespace {

// Multiplies the tiles of a pass for U alone or G alone.
template <typename T, int RP, int kBlocks, bool kU, bool kG>
__device__ __forceinline__ void consume_tiles(const Args& args, const Problem& a, char* shared, int tiles,
                                              const Place& place) {
  using L = Layout<RP, kBlocks, kU, kG>;
  static_assert((kU ? kRows * RP : RP * (kBlocks * kCols + 4)) * 4 <= L::kBarriers,
                "the sums do not fit into the ring");
  const uint32_t base = shared_address(shared);
  const uint32_t v = base + L::kStages * L::kStageBytes;  // the ring is at the start, without P
  const Barriers<L::kStages> barriers{base + L::kBarriers};
  const int group = threadIdx.x / 128;
  const bool dropout = args.dropout.seed != nullptr;
  float c[kBlocks][RP / 2] = {};
  Ring at;
  auto arrive = [&] {
    barrier_wait(dropout ? barriers.masked(at.stage) : barriers.full(at.stage), at.parity);
    wgmma_fence();
    return base + at.stage * L::kStageBytes;
  };
  auto release = [&](int block) {
    wgmma_commit();
    wgmma_wait();
    if (threadIdx.x % 128 == 0) barrier_arrive(barriers.empty(at.stage));
    at.next(L::kStages);
    hold(c[block]);
  };
  if constexpr (kG) {
    for (int block_row = 0; block_row * kBlocks < tiles; ++block_row) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const uint32_t z = arrive() + group * kHalfBytes;
        tile_g<T, RP, kRows>(c[block], z, v + block_row % L::kVSlots * L::kVBytes);
        release(block);
      }
    }
    let_successor_start();
    if (sums_through_shared(args, a)) {
      named_sync(kConsumers + L::kMaskers);  // the other group may still read the memory that the sums overwrite
      add_g<RP, kBlocks>(c, args, a, shared, place);
      return;
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      store_g_by_rank<RP>(c[block], a, place.col0 + block * kCols + group * 64, place.g_split);
  } else {
    for (int tile = 0; tile < tiles; ++tile) {
      const uint32_t z = arrive();
      tile_u<T, RP, kHalfBytes, true>(c[0], z + group * 64 * kBox, z + kTileBytes);
      release(0);
    }
    let_successor_start();
    if (sums_through_shared(args, a)) {
      named_sync(kConsumers + L::kMaskers);
      add_u<RP>(c[0], args, a, shared, place);
      return;
    }
    store_partial<RP>(c[0], partial_u<RP>(a, place.u_split), a.T, place.row0 + group * 64);
  }
}

// Multiplies the tiles of a pass for both. With tiles of 128 rows each warpgroup computes U of 64 of them; with tiles
// of 64 rows, warpgroup `row % 2` computes all of U.
template <typename T, int RP, int kBlocks>
__device__ __forceinline__ void consume_both(const Args& args, const Problem& a, uint32_t base, int row_blocks,
                                             const Place& place) {
  using L = Layout<RP, kBlocks, true, true>;
  constexpr bool kAlternate = L::kTileRows == 64;
  const uint32_t ring = base + L::kPBytes, v = ring + L::kStages * L::kStageBytes;
  const Barriers<L::kStages> barriers{base + L::kBarriers};
  const int group = threadIdx.x / 128, first_row = kAlternate ? 0 : group * 64;
  float u[RP / 2] = {};
  float g[kBlocks][RP / 2] = {};
  Ring at;
  auto multiply_row = [&](auto computes_u, int row) {
    constexpr bool kComputesU = decltype(computes_u)::value;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (kComputesU && row < 2) barrier_wait(barriers.p_full(block), 0);
      barrier_wait(barriers.full(at.stage), at.parity);
      wgmma_fence();
      const uint32_t z = ring + at.stage * L::kStageBytes;
      if constexpr (kComputesU) tile_u<T, RP, L::kHalf, false>(u, z + first_row * kBox, base + block * kCols * RP * 2);
      tile_g<T, RP, L::kTileRows>(g[block], z + group * L::kHalf, v + row % L::kVSlots * L::kVBytes);
      wgmma_commit();
      wgmma_wait();
      if (threadIdx.x % 128 == 0) barrier_arrive(barriers.empty(at.stage));
      at.next(L::kStages);
      if constexpr (kComputesU) hold(u);
      hold(g[block]);
      if (row + 1 == row_blocks) {  // G is complete, and is stored while the next tiles are in flight
        if (block == kBlocks - 1) let_successor_start();
        store_partial<RP>(g[block], partial_g<RP>(a, place.g_split), a.D, place.col0 + block * kCols + group * 64);
      }
    }
  };
  for (int row = 0; row < row_blocks; ++row) {
    if constexpr (kAlternate) {
      if (row % 2 != group) {
        multiply_row(std::false_type{}, row);
        continue;
      }
    }
    multiply_row(std::true_type{}, row);
    if (args.cluster > 1) {
      const int buffer = row % kExchanges;
      barrier_wait_cluster(barriers.slices_free() + buffer * 8, (row / kExchanges & 1) ^ 1);
      send_slices<RP>(u, base + L::kExchange + buffer * Slices<RP>::kBytes, barriers.slices_full() + buffer * 8,
                      args.cluster);
    } else {
      store_partial<RP>(u, partial_u<RP>(a, place.u_split), a.T, place.row0 + row * L::kTileRows + first_row);
    }
#pragma unroll
    for (int i = 0; i < RP / 2; ++i) u[i] = 0.f;
  }
}

}  // namespace
}  // namespace zerolora
