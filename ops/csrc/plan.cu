// Chooses the kernel for a rank pass, and how its work is cut: tensor cores where type, alignment and card allow them.
#include "kernels.h"

namespace zerolora {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool aligned(const void* pointer, int64_t ld) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && ld % 8 == 0; }

// Shared memory of the mma.sync kernel.
int mma_bytes(const RankPass& pass, int rank_pad, int col_blocks, int stages) {
  const bool u = pass.p != nullptr, g = pass.v != nullptr;
  const int stage =
      kMmaRows * kMmaCols * 2 + (g ? kMmaRows * rank_pad * 2 : 0) + (u && !g ? kMmaCols * rank_pad * 2 : 0);
  return (u && g ? col_blocks * kMmaCols * rank_pad * 2 : 0) + stages * stage;
}

struct Tile {
  int64_t rows, cols, slots;  // slots: CTAs that run at once
};

// Time in units of one tile: the CTAs run in waves, a CTA pays kStartup tiles, partials are written and read in L2.
double cost_of(const Tile& tile, int64_t ctas, int64_t tiles, int64_t partial_floats) {
  constexpr double kStartup = 3.0, kL2 = 0.5, kWriteAndRead = 8.0;
  const double tile_bytes = static_cast<double>(tile.rows * tile.cols * 2);
  return static_cast<double>(ceil_div(ctas, tile.slots)) * (static_cast<double>(tiles) + kStartup) +
         kL2 * kWriteAndRead * static_cast<double>(partial_floats) / tile_bytes / static_cast<double>(tile.slots);
}

// Tries every way to cut the work for one width of the CTA's column range; keeps the cheapest of these and `best`.
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
    const double cost = cost_of(tile, fixed * real, length * (g ? col_blocks : 1), plan.u_floats + plan.g_floats);
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

bool tensor_cores_take(const RankPass& pass, const Device& device) {
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

Plan plan_rank_wgmma(const RankPass& pass, const Device& device) {
  Plan best = tensor_core_plan(pass, Path::wgmma);
  if (pass.T == 0) return best;
  double cost = -1.0;
  const Tile tile{kWgmmaRows, kWgmmaCols, device.multiprocessors};
  try_splits(pass, tile, 1, best, best, cost);
  if (pass.v != nullptr) try_splits(pass, tile, kWgmmaBlocks, tensor_core_plan(pass, Path::wgmma), best, cost);
  return best;
}

Plan plan_rank_pass(const RankPass& pass, const Device& device) {
  if (!tensor_cores_take(pass, device)) return plan_rank_simt(pass, device);
#ifdef ZEROLORA_HOPPER  // the build holds sm_90a code; without it the Hopper kernels are empty
  if (device.capability == 90) return plan_rank_wgmma(pass, device);
#endif
  return plan_rank_mma(pass, device);
}

cudaError_t launch_rank_pass(const RankPass& pass, const Plan& plan, float* u_partial, float* g_partial,
                             cudaStream_t stream) {
  if (pass.T == 0) return cudaSuccess;
  switch (plan.path) {
#ifdef ZEROLORA_HOPPER
    case Path::wgmma: return launch_rank_wgmma(pass, plan, u_partial, g_partial, stream);
#endif
    case Path::mma: return launch_rank_mma(pass, plan, u_partial, g_partial, stream);
    case Path::simt: return launch_rank_simt(pass, plan, u_partial, g_partial, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace zerolora
