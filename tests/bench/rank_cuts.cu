// Times ways to cut the passes over dY and over x (with their reduction) on sm_90a. Standard input has a line for each:
// kind T D R, columns of a CTA in blocks, CTAs of a cluster, tiles of a CTA; microseconds come out, a line for a line.
// From kHot tokens on (ops/csrc/rank/plan.cu) right after whole products. `rank_cuts slots` says what clusters fill.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "common.cuh"
#include "plan.cu"

namespace zerolora {  // of the planner's other kernels none is wanted here
cudaError_t launch_rank_mma(const RankWork&, cudaStream_t) { return cudaErrorNotSupported; }
Plan plan_rank_simt(const RankPass&, const Device&) { return {}; }
cudaError_t launch_rank_simt(const RankWork&, cudaStream_t) { return cudaErrorNotSupported; }

namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "rank_cuts: %s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

template <typename T> T* room(int64_t count) {
  void* data = nullptr;
  check(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)), "allocating");
  return static_cast<T*>(data);
}

__global__ void fill(__nv_bfloat16* data, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
    uint32_t hash = static_cast<uint32_t>(i) * 2654435761u + seed;
    hash ^= hash >> 15, hash *= 2246822519u, hash ^= hash >> 13;
    data[i] = __float2bfloat16(static_cast<float>(hash & 0xffff) / 32768.f - 1.f);
  }
}

enum class Kind { dy, h, da };  // U = Z P and G = Z^T V; U alone; G alone

class Bench {
 public:
  explicit Bench(const Device& device) : device_(device) {
    fill<<<2048, 256>>>(pool_, kPool, 1), fill<<<256, 256>>>(p_, kMost, 2), fill<<<256, 256>>>(v_, kMost, 3);
    check(cudaStreamCreate(&stream_), "creating a stream");
    heater_.forward = false, heater_.parts = 1, heater_.part[0] = {pool_, 14336, pool_ + (200ll << 20), 4096, 14336};
    heater_.T = 8192, heater_.D = 4096, heater_.y = room<__nv_bfloat16>(8192 * 4096), heater_.ldy = 4096;
  }

  double microseconds(Kind kind, int64_t T, int64_t D, int R, const Cut& how) {
    RankWork work;
    RankPass& pass = work.pass;
    pass.dtype = DType::bf16, pass.T = T, pass.D = D, pass.ldz = D, pass.R = R, pass.z = pool_;
    if (kind != Kind::da) pass.p = p_, pass.p_by_rank = kind == Kind::h, pass.ldp = pass.p_by_rank ? D : R;
    if (kind != Kind::h) pass.v = v_, pass.ldv = R, pass.g_by_rank = kind == Kind::da;
    work.plan = tensor_core_plan(pass, Path::wgmma);
    cut(&work, 1, how);
    return microseconds(work);
  }

 private:
  static constexpr int64_t kPool = 760ll << 20, kMost = 32768 * 64;  // elements

  double microseconds(RankWork& work) {
    const RankPass& pass = work.pass;
    const int64_t pad = work.plan.rank_pad, size = pass.T * pass.D;
    const int sets = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(kPool / size, 8)));
    work.u = workspace_, work.g = workspace_ + work.plan.u_floats;
    std::vector<Reduction> jobs;
    work.targets = 0, work.out_dtype = DType::bf16;
    const auto result = [&](bool is_g, __nv_bfloat16* out) {
      const int64_t rows = is_g ? pass.D : pass.T, ld = is_g && pass.g_by_rank ? pass.D : pass.R;
      if (work.plan.finished && is_g == (pass.p == nullptr)) {
        Target& target = work.target[work.targets++];
        target.rank = pass.R, target.out = out, target.ld = ld;
        return;
      }
      Reduction& job = jobs.emplace_back();
      job.partial = is_g ? work.g : work.u, job.splits = is_g ? work.plan.t_splits : work.plan.d_splits;
      job.in_units = !(is_g && pass.g_by_rank);
      job.rows = job.in_units ? rows : pass.R, job.cols = job.ld_out = ld;
      job.ld_partial = job.in_units ? pad : pass.D, job.split_stride = (job.in_units ? unit_rows(rows) : rows) * pad;
      job.out = out, job.out_dtype = DType::bf16;
    };
    if (pass.p != nullptr) result(false, u_);
    if (pass.v != nullptr) result(true, g_);
    constexpr int kCalls = 12, kRounds = 5;
    cudaGraph_t graph;
    cudaGraphExec_t run;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing");
    for (int i = 0; i < kCalls; ++i) {
      work.pass.z = pool_ + i % sets * size;
      check(launch_rank_works(&work, 1, device_, stream_), "launching a pass");
      check(launch_reduce(jobs.data(), static_cast<int>(jobs.size()), device_, stream_), "launching a reduction");
    }
    check(cudaStreamEndCapture(stream_, &graph), "capturing");
    check(cudaGraphInstantiate(&run, graph, 0), "making a graph");
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "creating an event"), check(cudaEventCreate(&end), "creating an event");
    std::vector<float> times;
    for (int round = 0; round < kRounds; ++round) {
      for (int i = 0; pass.T >= kHot && i < (heated_ ? 4 : 24); ++i)  // 16 in a row lower the clock
        check(launch_frozen(heater_, device_, stream_), "launching a product");
      heated_ = pass.T >= kHot;
      check(cudaEventRecord(begin, stream_), "timing"), check(cudaGraphLaunch(run, stream_), "launching a graph");
      check(cudaEventRecord(end, stream_), "timing"), check(cudaEventSynchronize(end), "running");
      float milliseconds = 0.f;
      check(cudaEventElapsedTime(&milliseconds, begin, end), "timing");
      if (round > 0) times.push_back(milliseconds * 1e3f / kCalls);
    }
    check(cudaEventDestroy(begin), "timing"), check(cudaEventDestroy(end), "timing");
    check(cudaGraphExecDestroy(run), "freeing a graph"), check(cudaGraphDestroy(graph), "freeing a graph");
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  Device device_;
  bool heated_ = false;
  cudaStream_t stream_ = nullptr;
  Frozen heater_;
  __nv_bfloat16 *pool_ = room<__nv_bfloat16>(kPool), *p_ = room<__nv_bfloat16>(kMost), *v_ = room<__nv_bfloat16>(kMost);
  __nv_bfloat16 *u_ = room<__nv_bfloat16>(kMost), *g_ = room<__nv_bfloat16>(kMost);
  float* workspace_ = room<float>(1ll << 28);
};

}  // namespace
}  // namespace zerolora

int main(int argc, char** argv) {
  using namespace zerolora;
  cudaDeviceProp card;
  check(cudaGetDeviceProperties(&card, 0), "asking for the card");
  if (card.major != 9 || card.minor != 0) {
    std::fprintf(stderr, "rank_cuts: compute capability 9.0 is needed, this card has %d.%d\n", card.major, card.minor);
    return 2;
  }
  const Device device{card.multiProcessorCount, 90, static_cast<int>(card.sharedMemPerBlockOptin),
                      static_cast<int>(card.sharedMemPerMultiprocessor)};
  if (argc > 1 && std::strcmp(argv[1], "slots") == 0) {
    for (int cluster = 0; cluster <= kMaxCluster; ++cluster)
      std::printf("%d ", cluster == 0 || cluster == 5 || cluster == 7 ? 0 : wgmma_slots(cluster, device));
    return 0;
  }
  Bench bench(device);
  int kind, R;
  long long T, D, length;
  Cut how;
  while (std::scanf("%d %lld %lld %d %d %d %lld", &kind, &T, &D, &R, &how.blocks, &how.cluster, &length) == 7) {
    how.length = length;
    std::printf("%.2f\n", bench.microseconds(static_cast<Kind>(kind), T, D, R, how));
    std::fflush(stdout);
  }
}
