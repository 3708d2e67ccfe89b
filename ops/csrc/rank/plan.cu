// Chooses the kernel of a rank pass and how to split its work: tensor cores if type, alignment and GPU allow them.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "kernels.h"

namespace zerolora {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the shared memory of the mma.sync kernel in bytes.
int mma_bytes(const RankPass& pass, int rank_pad, int col_blocks, int stages) {
  const bool u = pass.p != nullptr, g = pass.v != nullptr;
  const int stage =
      kMmaRows * kMmaCols * 2 + (g ? kMmaRows * rank_pad * 2 : 0) + (u && !g ? kMmaCols * rank_pad * 2 : 0);
  return (u && g ? col_blocks * kMmaCols * rank_pad * 2 : 0) + stages * stage;
}

struct Tile {
  int64_t rows, cols, slots;  // slots: CTAs that run at once
};

// Estimates the time in units of one tile: CTAs run in waves, each costs kStartup tiles more, and partial sums are
// written and read in L2.
double estimate_cost(const Tile& tile, int64_t ctas, int64_t tiles, int64_t partial_floats) {
  constexpr double kStartup = 3.0, kL2 = 0.5, kWriteAndRead = 8.0;
  const double tile_bytes = static_cast<double>(tile.rows * tile.cols * 2);
  return static_cast<double>(ceil_div(ctas, tile.slots)) * (static_cast<double>(tiles) + kStartup) +
         kL2 * kWriteAndRead * static_cast<double>(partial_floats) / tile_bytes / static_cast<double>(tile.slots);
}

// Tries all splits of the work for one width of the CTA's column range; keeps the cheapest of these and `best`.
void try_splits(const RankPass& pass, const Tile& tile, int col_blocks, Plan plan, Plan& best, double& best_cost) {
  plan.d_blocks_per_cta = col_blocks;
  const int64_t row_blocks = ceil_div(pass.T, tile.rows), columns = ceil_div(pass.D, tile.cols);
  const bool g = pass.v != nullptr, u = pass.p != nullptr;
  const int64_t fixed = g ? ceil_div(columns, col_blocks) : row_blocks, cut = g ? row_blocks : columns;
  for (int64_t splits = 1; splits <= cut && splits <= 1024; ++splits) {
    const int64_t length = ceil_div(cut, splits), real = ceil_div(cut, length);
    plan.rows_per_split = (g ? length : 1) * tile.rows;
    plan.cols_per_split = (g ? col_blocks : length) * tile.cols;
    plan.t_splits = static_cast<int>(g ? real : row_blocks);
    plan.d_splits = static_cast<int>(g ? fixed : real);
    plan.u_floats = u ? plan.d_splits * pass.T * plan.rank_pad : 0;
    plan.g_floats = g ? plan.t_splits * pass.D * plan.rank_pad : 0;
    const double cost = estimate_cost(tile, fixed * real, length * (g ? col_blocks : 1), plan.u_floats + plan.g_floats);
    if (best_cost < 0 || cost < best_cost) best = plan, best_cost = cost;
  }
}

Plan tensor_core_plan(const RankPass& pass, Path path) {
  Plan plan;
  plan.path = path;
  plan.rank_pad = pass.R <= 16 ? 16 : pass.R <= 32 ? 32 : 64;
  plan.d_splits = plan.t_splits = 0;
  return plan;
}

bool tensor_cores_supported(const RankPass& pass, const Device& device) {
  return pass.dtype != DType::f32 && device.capability >= 80 && pass.R <= kRankChunk && pass.R % 8 == 0 &&
         pass.D % 8 == 0 && aligned(pass.z, pass.ldz) && aligned(pass.p, pass.p == nullptr ? 0 : pass.ldp) &&
         aligned(pass.v, pass.v == nullptr ? 0 : pass.ldv) &&
         (pass.p == nullptr || pass.p_by_rank == (pass.v == nullptr)) &&
         mma_bytes(pass, 64, 1, 2) <= device.shared_bytes;
}

}  // namespace

Plan plan_rank_mma(const RankPass& pass, const Device& device) {
  Plan best = tensor_core_plan(pass, Path::mma);
  if (pass.T == 0) return best;
  double cost = -1.0;
  const int widest = pass.v == nullptr ? 1 : 64 / best.rank_pad;
  for (int col_blocks = 1; col_blocks <= widest; col_blocks += widest > 1 ? widest - 1 : 1) {
    Plan plan = tensor_core_plan(pass, Path::mma);
    plan.stages = 4;
    const auto fits = [&](int per_multiprocessor) {
      const int bytes = mma_bytes(pass, plan.rank_pad, col_blocks, plan.stages);
      return bytes <= device.shared_bytes && per_multiprocessor * (bytes + 1024) <= device.shared_bytes_sm;
    };
    while (plan.stages > 2 && !fits(2)) --plan.stages;
    const Tile tile{kMmaRows, kMmaCols, static_cast<int64_t>(device.multiprocessors) * (fits(2) ? 2 : 1)};
    try_splits(pass, tile, col_blocks, plan, best, cost);
  }
  return best;
}

#ifdef ZEROLORA_HOPPER  // the build contains sm_90a code
namespace {

int64_t tile_rows(const RankPass& pass) {
  return wgmma_rows(pass.p != nullptr && pass.v != nullptr, tensor_core_plan(pass, Path::wgmma).rank_pad);
}

// All times below are in microseconds, all rates in bytes per microsecond; fitted on an H200 (docs/lab/operators.md).
// There are two sets: "hot" for kHot tokens and more, measured right after large products, which heat the GPU and
// lower its clock as training does; "cool" for fewer tokens. Costs that are equal for all splits are omitted, as are
// those that changed no important choice (tests/bench/plan_constants.py), so these costs only serve comparison.
constexpr int64_t kHot = 2048;
constexpr double kRead = 3.3e6;  // rate of a reduction's reads

// A pass for both results. Times of a CTA for a tile, however few others run, and for each row of tiles, which is
// longer if it adds to its cluster's U; together all CTAs read and write at `memory`. Rank 32 uses the tiles of rank 64
// and, on a hot GPU, its times.
struct TimesOfBoth {
  double cluster, tile, row, row_clustered, memory;
};
constexpr TimesOfBoth kHotLow{1.17, 0.55, 0.27, 0.27, 4.02e6};  // tiles of 128 rows
constexpr TimesOfBoth kHotHigh{2.3, 0.39, 0.72, 0.0, 3.7e6};    // tiles of 64 rows
constexpr TimesOfBoth kCoolLow{0.5, 0.4, 0.32, 0.23, 3.7e6};
constexpr TimesOfBoth kCoolRank32{0.5, 0.31, 0.34, 0.2, 3.7e6};
constexpr TimesOfBoth kCoolRank64{0.5, 0.37, 0.37, 0.2, 3.7e6};
constexpr double kKept = 60e6;  // bytes of partial sums that stay in L2; others are written to and read from memory

// A pass for one result. A cluster costs `cluster`, plus `each` for each CTA after the first; a CTA that sums through
// shared memory adds 128 columns or rows of 64 ranks in `sum`; `reduction` is the cost of another launch without its
// reads.
struct TimesOfOne {
  double cluster, each, wave, tile, row, sum, memory, reduction;
};
constexpr TimesOfOne kHotU{0.98, 0.0, 0.0, 0.44, 0.0, 2.68, 4.33e6, 3.16};
constexpr TimesOfOne kHotG{0.42, 0.0, 1.25, 0.3, 0.08, 1.62, 4.14e6, 1.15};
constexpr TimesOfOne kCoolU{0.0, 0.06, 0.0, 0.2, 0.0, 0.0, 3.95e6, 2.18};
constexpr TimesOfOne kCoolG{0.42, 0.0, 1.25, 0.2, 0.08, 1.38, 4.14e6, 1.76};
constexpr double kDrawn = 1.7;  // additional time of a tile for drawing the mask

bool drawn(const RankPass& pass) { return pass.dropout.seed != nullptr && !pass.dropout.stored; }

struct Cost {
  const RankWork& first;
  int64_t ctas, tiles_each;
  int slots;
  double u_bytes, g_bytes;  // of partial sums

  double waves() const { return static_cast<double>(ceil_div(ctas, slots)); }
  double running() const { return static_cast<double>(std::min<int64_t>(ctas, slots)); }
  double tiles() const { return static_cast<double>(tiles_each); }
  bool hot() const { return first.pass.T >= kHot; }

  double both_results() const {
    const Plan& plan = first.plan;
    const bool clustered = plan.cluster > 1, high = tile_rows(first.pass) == 64;
    const TimesOfBoth& times = hot()                 ? (high ? kHotHigh : kHotLow)
                               : plan.rank_pad == 16 ? kCoolLow
                               : plan.rank_pad == 32 ? kCoolRank32
                                                     : kCoolRank64;
    const double row = times.row + (clustered ? times.row_clustered : 0.0);
    const double u_row = plan.rank_pad * 4.0 / (plan.d_blocks_per_cta * plan.cluster);
    const double tile_bytes = static_cast<double>(tile_rows(first.pass)) * (kWgmmaCols * 2 + u_row);
    const double per_tile = std::max(times.tile + row / plan.d_blocks_per_cta, running() * tile_bytes / times.memory);
    return (clustered ? times.cluster : 0.0) + waves() * tiles() * per_tile + g_bytes / times.memory +
           (u_bytes + g_bytes) / kRead + 2.0 * std::max(0.0, u_bytes + g_bytes - kKept) / times.memory;
  }

  double one_result() const {
    const Plan& plan = first.plan;
    const bool u = first.pass.p != nullptr;
    const TimesOfOne& times = hot() ? (u ? kHotU : kHotG) : u ? kCoolU : kCoolG;
    const double tile_bytes = static_cast<double>(tile_rows(first.pass) * kWgmmaCols * 2);
    const double alone = times.tile + times.row / plan.d_blocks_per_cta + (drawn(first.pass) ? kDrawn : 0.0);
    const double shared = running() * tile_bytes / times.memory;
    const double per_tile = std::cbrt(alone * alone * alone + shared * shared * shared);  // a smooth maximum
    const bool through_shared = plan.cluster > 1 || plan.finished;
    const double sum = through_shared ? times.sum * plan.rank_pad / 64 * (u ? 1 : plan.d_blocks_per_cta) : 0.0;
    const double partials = u_bytes + g_bytes;
    return (plan.cluster > 1 ? times.cluster + times.each * (plan.cluster - 1) : 0.0) +
           waves() * (tiles() * per_tile + times.wave + sum) + (partials > 0.0 ? times.reduction : 0.0) +
           partials / kRead;
  }
};

// Estimates the time of the works on wgmma.
double wgmma_cost(const RankWork* works, int count, int64_t ctas, int64_t tiles_each, int slots) {
  Cost cost{works[0], ctas, tiles_each, slots, 0.0, 0.0};
  for (int i = 0; i < count; ++i) {
    cost.u_bytes += 4.0 * static_cast<double>(works[i].plan.u_floats);
    cost.g_bytes += 4.0 * static_cast<double>(works[i].plan.g_floats);
  }
  return works[0].pass.p != nullptr && works[0].pass.v != nullptr ? cost.both_results() : cost.one_result();
}

// How to split: a CTA's width in column blocks, its cluster, and its length in tiles of rows (for U alone, of columns).
struct Cut {
  int blocks = 1, cluster = 1;
  int64_t length = 1;
};

// Writes the plans of the works for a split; returns the number of CTAs.
int64_t cut(RankWork* works, int count, const Cut& how) {
  int64_t ctas = 0;
  for (int i = 0; i < count; ++i) {
    const RankPass& pass = works[i].pass;
    Plan& plan = works[i].plan;
    const bool u = pass.p != nullptr, g = pass.v != nullptr;
    const int64_t rows = tile_rows(pass), row_blocks = ceil_div(pass.T, rows), columns = ceil_div(pass.D, kWgmmaCols);
    plan.d_blocks_per_cta = how.blocks, plan.cluster = how.cluster;
    plan.rows_per_split = (g ? how.length : 1) * rows;
    plan.cols_per_split = (g ? how.blocks : how.length) * kWgmmaCols;
    plan.t_splits = static_cast<int>(ceil_div(row_blocks, (g ? how.length : 1) * (u ? 1 : how.cluster)));
    plan.d_splits = static_cast<int>(ceil_div(columns, (g ? how.blocks : how.length) * (u ? how.cluster : 1)));
    plan.finished = (u ? plan.d_splits : plan.t_splits) == 1 && (!u || !g || how.cluster > 1);
    plan.u_floats = u && !plan.finished ? plan.d_splits * unit_rows(pass.T) * plan.rank_pad : 0;
    plan.g_floats = g && (u || !plan.finished) ? plan.t_splits * unit_rows(pass.D) * plan.rank_pad : 0;
    ctas += static_cast<int64_t>(plan.t_splits) * plan.d_splits * how.cluster;
  }
  return ctas;
}

// Calls visit(split, its cost) for every split of the works that the kernel supports.
template <typename Visit> void try_cuts(RankWork* works, int count, const Device& device, Visit visit) {
  constexpr int64_t kLongestSum = 16384;                     // rows: tensor cores lose bits in longer sums
  constexpr int kClusters[] = {1, 2, 3, 4, 6, kMaxCluster};  // 5 and 7 leave multiprocessors of a GPC idle
  const RankPass& first = works[0].pass;
  const bool g = first.v != nullptr, both = g && first.p != nullptr;
  const int64_t longest = g ? ceil_div(first.T, tile_rows(first)) : ceil_div(first.D, kWgmmaCols);
  // If the mask is drawn for G only, the drawing warps limit the speed: clusters and more columns per CTA took 10 to
  // 15 % longer.
  const bool one_wide = g && !both && drawn(first);
  for (const int cluster : kClusters) {
    if (both && (cluster & (cluster - 1)) != 0) continue;  // must divide the 8 or 16 units of a row of tiles
    if (one_wide && cluster > 1) break;
    const int slots = wgmma_slots(cluster, device);
    for (int blocks = 1; blocks <= (g && !one_wide ? 4 : 1); blocks *= 2)
      for (int64_t splits = 1; splits <= longest && splits <= 1024; ++splits) {
        const int64_t length = ceil_div(longest, splits);
        if (ceil_div(longest, length) != splits || (g && length * tile_rows(first) > kLongestSum)) continue;
        const Cut how{blocks, cluster, length};
        const int64_t ctas = cut(works, count, how);
        visit(how, wgmma_cost(works, count, ctas, length * (g ? blocks : 1), slots));
      }
  }
}

}  // namespace

// Plans the works with the cheapest split.
void plan_rank_wgmma(RankWork* works, int count, const Device& device) {
  for (int i = 0; i < count; ++i) works[i].plan = tensor_core_plan(works[i].pass, Path::wgmma);
  works[0].plan.merged = count;
  if (works[0].pass.T == 0) return;
  double least = -1.0;
  Cut best;
  try_cuts(works, count, device, [&](const Cut& how, double cost) {
    if (least < 0.0 || cost < least) least = cost, best = how;
  });
  cut(works, count, best);
}

namespace {

// Returns how many works, starting with the first, may share a launch.
int mergeable(const RankWork* works, int count, const Device& device) {
  const auto both = [](const RankPass& pass) { return pass.p != nullptr && pass.v != nullptr; };
  const RankPass& first = works[0].pass;
  const int pad = tensor_core_plan(first, Path::wgmma).rank_pad;
  int n = 1;
  while (n < count && n < kMaxMerged && both(first) && both(works[n].pass) && works[n].pass.T == first.T &&
         works[n].pass.dtype == first.dtype && tensor_cores_supported(works[n].pass, device) &&
         tensor_core_plan(works[n].pass, Path::wgmma).rank_pad == pad)
    ++n;
  return n;
}

using Key = std::array<int64_t, 4 + kMaxMerged>;
Key make_key(const RankWork* works, int count) {
  const RankPass& first = works[0].pass;
  Key key{count, first.T, tensor_core_plan(first, Path::wgmma).rank_pad,
          (first.p != nullptr ? 1 : 0) + (first.v != nullptr ? 2 : 0) + (drawn(first) ? 4 : 0)};
  for (int i = 0; i < count; ++i) key[4 + i] = works[i].pass.D;
  return key;
}

// Plans the works, from a cache if possible: planning takes microseconds, and a model repeats the same few plans.
void cached_plan(RankWork* works, int count, const Device& device) {
  constexpr size_t kMost = 4096;  // limits its growth with batches of many lengths
  thread_local std::map<Key, std::array<Plan, kMaxMerged>> plans;
  const Key key = make_key(works, count);
  const auto found = plans.find(key);
  if (found != plans.end()) {
    for (int i = 0; i < count; ++i) works[i].plan = found->second[i];
    return;
  }
  plan_rank_wgmma(works, count, device);
  if (plans.size() >= kMost) plans.clear();
  std::array<Plan, kMaxMerged>& entry = plans[key];
  for (int i = 0; i < count; ++i) entry[i] = works[i].plan;
}

}  // namespace
#endif

void plan_rank_works(RankWork* works, int count, const Device& device) {
  for (int i = 0; i < count;) {
    if (!tensor_cores_supported(works[i].pass, device)) {
      works[i].plan = plan_rank_simt(works[i].pass, device);
      ++i;
      continue;
    }
#ifdef ZEROLORA_HOPPER
    if (device.capability == 90) {
      const int merged = mergeable(works + i, count - i, device);
      cached_plan(works + i, merged, device);
      i += merged;
      continue;
    }
#endif
    works[i].plan = plan_rank_mma(works[i].pass, device);
    ++i;
  }
}

bool wgmma_supported(const RankPass& pass, const Device& device) {
#ifdef ZEROLORA_HOPPER
  return device.capability == 90 && tensor_cores_supported(pass, device);
#else
  return false;
#endif
}

cudaError_t launch_rank_works(const RankWork* works, int count, const Device&, cudaStream_t stream) {
  cudaError_t status = cudaSuccess;
  for (int i = 0; i < count && status == cudaSuccess; i += works[i].plan.merged) {
    if (works[i].pass.T == 0) continue;
    switch (works[i].plan.path) {
#ifdef ZEROLORA_HOPPER
      case Path::wgmma: status = launch_rank_wgmma(works + i, works[i].plan.merged, stream); break;
#endif
      case Path::mma: status = launch_rank_mma(works[i], stream); break;
      case Path::simt: status = launch_rank_simt(works[i], stream); break;
      default: status = cudaErrorInvalidValue;
    }
  }
  return status;
}

}  // namespace zerolora
