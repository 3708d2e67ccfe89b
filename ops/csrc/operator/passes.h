// The passes of the forward and the backward as kernel launches, or as cuBLAS products if those are faster.
// Legend: T tokens, I in, O out, R rank; the ranks of a group are concatenated, each padded to a multiple of 8.
#pragma once
#include <algorithm>

#include "adapters.h"

namespace zerolora {

// Below this many tokens everything stays in L2, so a second read costs little, and adding the adapter after the frozen
// product is faster than accumulating the product into a prefilled output (docs/lab/operators.md).
constexpr int64_t kFewTokens = 4096;
// Below this many tokens our pass for h, which is a single launch, is faster than cuBLAS's product.
constexpr int64_t kOwnProjection = 2048;

// A matrix to read, and the results to compute from it.
struct Job {
  RankPass pass;
  std::vector<Target> u, g;
  DType u_type = DType::f32, g_type = DType::f32;
  bool accumulate_g = false;
};

inline RankPass pass_over(const Matrix& z) {
  RankPass pass;
  pass.dtype = z.type, pass.z = z.data, pass.ldz = z.ld, pass.T = z.rows, pass.D = z.cols;
  return pass;
}

// Returns the part of a target within the ranks [base, base + R) of one launch, in that launch's numbering.
inline Target clip_target(const Target& target, int base, int R, bool by_rank, DType type) {
  Target part = target;
  const int first = std::max(target.begin, base), last = std::min(target.begin + target.rank, base + R);
  part.begin = first - base, part.rank = std::max(0, last - first);
  part.out = static_cast<char*>(target.out) + (first - target.begin) * (by_rank ? target.ld : 1) * element_bytes(type);
  return part;
}

// Returns the reduction of the partial sums that a launch writes for a target.
inline Reduction make_reduction(const Target& target, const RankWork& work, bool is_g, DType type, bool accumulate) {
  const RankPass& pass = work.pass;
  Reduction r;
  r.scale = target.scale, r.out = target.out, r.out_dtype = type, r.accumulate = accumulate, r.ld_out = target.ld;
  const bool by_rank = is_g && pass.g_by_rank;
  const int64_t rows = is_g ? pass.D : pass.T;
  r.in_units = work.plan.path == Path::wgmma && !by_rank;
  r.ld_partial = by_rank ? pass.D : work.plan.rank_pad;
  r.partial = is_g ? work.g : work.u;
  if (r.in_units) r.begin = target.begin;
  else r.partial += target.begin * (by_rank ? pass.D : 1);
  r.split_stride = (r.in_units ? unit_rows(rows) : rows) * work.plan.rank_pad;
  r.splits = is_g ? (pass.T == 0 ? 0 : work.plan.t_splits) : work.plan.d_splits;
  r.rows = by_rank ? target.rank : is_g ? pass.D : pass.T;
  r.cols = by_rank ? pass.D : target.rank;
  return r;
}

// Runs the primitive for every job with at most kRankChunk ranks per launch, merging the projections of a group if
// the kernel can, and adds the partial sums in one launch. A job's first launch stores the mask's bits for the others.
inline void run_passes(const std::vector<Job>& jobs, const Tensor& like, cudaStream_t stream) {
  const Device& device = device_info(like);
  std::vector<RankWork> works;
  for (const Job& job : jobs)
    for (int base = 0; base < job.pass.R; base += kRankChunk) {
      RankWork& work = works.emplace_back();
      RankPass& pass = work.pass = job.pass;
      pass.R = std::min(kRankChunk, job.pass.R - base);
      pass.dropout.stored = pass.dropout.bits != nullptr && base > 0;
      const int64_t element = element_bytes(pass.dtype);
      if (pass.p != nullptr)
        pass.p = static_cast<const char*>(pass.p) + base * (pass.p_by_rank ? pass.ldp : 1) * element;
      if (pass.v != nullptr) pass.v = static_cast<const char*>(pass.v) + base * element;
    }
  plan_rank_works(works.data(), static_cast<int>(works.size()), device);
  int64_t floats = 0;
  for (const RankWork& work : works) floats += work.plan.u_floats + work.plan.g_floats;
  const Tensor workspace = at::empty({floats}, like.options().dtype(at::kFloat));
  float* next = workspace.mutable_data_ptr<float>();
  for (RankWork& work : works) {
    work.u = next, work.g = next + work.plan.u_floats;
    next += work.plan.u_floats + work.plan.g_floats;
  }
  std::vector<Reduction> reductions;
  size_t at = 0;
  for (const Job& job : jobs)
    for (int base = 0; base < job.pass.R; base += kRankChunk) {
      RankWork& work = works[at++];
      const auto add = [&](const std::vector<Target>& targets, bool is_g, DType type, bool accumulate) {
        const bool finished = work.plan.finished && is_g == job.u.empty();
        if (finished) work.out_dtype = type, work.accumulate = accumulate;
        for (const Target& target : targets) {
          const Target part = clip_target(target, base, work.pass.R, is_g && job.pass.g_by_rank, type);
          if (part.rank == 0) continue;
          if (finished) work.target[work.targets++] = part;
          else reductions.push_back(make_reduction(part, work, is_g, type, accumulate));
        }
      };
      add(job.u, false, job.u_type, false), add(job.g, true, job.g_type, job.accumulate_g);
    }
  const RankWork& first = works[0];
  const cudaError_t status = launch_rank_works(works.data(), static_cast<int>(works.size()), device, stream);
  TORCH_CHECK(status == cudaSuccess, "zerolora: launching the rank pass of T=", text(first.pass.T),
              ", D=", text(first.pass.D), ", R=", text(first.pass.R), " on path ",
              text(static_cast<int>(first.plan.path)), ": ", cudaGetErrorString(status));
  check(launch_reduce(reductions.data(), static_cast<int>(reductions.size()), device, stream),
        "launching the reduction");
}

// Describes y = h Q^T, with Q as [D,R] or, by rank, [R,D].
inline Expand expand_job(const Matrix& y, const Matrix& h, const Matrix& q, bool by_rank) {
  Expand job;
  job.dtype = y.type;
  job.h = h.data, job.ldh = h.ld, job.q = q.data, job.ldq = q.ld, job.q_by_rank = by_rank;
  job.y = y.data, job.ldy = y.ld, job.T = y.rows, job.D = y.cols, job.R = static_cast<int>(h.cols);
  return job;
}

// Computes y = keep * (h Q^T) + bias (or adds it to y), with h [T,R] and Q [D,R] (or [R,D]: by_rank). Without a mask
// and a bias, `prefill` or cuBLAS is faster (docs/lab/operators.md).
inline void expand(const Matrix& h, const Matrix& q, bool by_rank, const Tensor& bias, const Matrix& y, bool accumulate,
                   const Dropout& dropout, const Tensor& like, cudaStream_t stream) {
  Expand job = expand_job(y, h, q, by_rank);
  job.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  job.accumulate = accumulate, job.dropout = dropout;
  if (expand_supported(job, device_info(like))) {
    check(launch_expand(job, device_info(like), stream), "launching the expansion");
    return;
  }
  Matrix target = y;
  if (accumulate) {
    target.owner = at::empty({y.rows, y.cols}, like.options());
    target.data = target.owner.data_ptr(), target.ld = y.cols;
  }
  product(target, 1.f, h, false, q, !by_rank, 0.f, stream);
  if (dropout.seed != nullptr)
    check(launch_mask(y.type, target.data, target.ld, y.rows, y.cols, dropout, stream), "launching the mask");
  const auto view = [&](const Matrix& m) { return at::from_blob(m.data, {m.rows, m.cols}, {m.ld, 1}, like.options()); };
  if (accumulate) view(y).add_(view(target));
  if (bias.defined()) view(y).add_(bias);
}

// Computes y = h Q^T with Hopper's kernel, with Q as [D,R] or, by rank, [R,D]; returns false if that kernel does not
// support the case.
inline bool prefill(const Matrix& y, const Matrix& h, const Matrix& q, bool by_rank, const Tensor& like,
                    cudaStream_t stream) {
  const Expand job = expand_job(y, h, q, by_rank);
  if (!expand_wgmma_supported(job, device_info(like))) return false;
  check(launch_expand_wgmma(job, device_info(like), stream), "launching the prefill");
  return true;
}

// Returns h = s (m*x) A^T of the whole group, [T, total].
inline Tensor project(const Tensor& x, const Matrix& rows, const Matrix& downs, const Layout& layout,
                      at::ArrayRef<double> scales, const Dropout& dropout, cudaStream_t stream) {
  const Tensor h = at::empty({rows.rows, layout.total}, x.options());
  const Matrix out = flatten_rows(h);
  const bool one_scale = std::all_of(scales.begin(), scales.end(), [&](double s) { return s == scales[0]; });
  std::vector<Job> jobs(1);
  Job& job = jobs[0];
  job.pass = pass_over(rows);
  job.pass.p = downs.data, job.pass.ldp = downs.ld, job.pass.p_by_rank = true, job.pass.R = layout.total;
  job.pass.dropout = dropout;
  const bool own = rows.rows < kOwnProjection && wgmma_supported(job.pass, device_info(x));
  if (dropout.seed == nullptr && one_scale && !own) {  // cuBLAS is a few percent faster (docs/lab/operators.md)
    product(out, static_cast<float>(scales[0]), rows, false, downs, true, 0.f, stream);
    return h;
  }
  job.u_type = out.type;
  for (size_t i = 0; i < layout.size(); ++i)
    job.u.push_back({layout.begin[i], layout.padded[i], static_cast<float>(scales[i]) * dropout.keep_scale,
                     out.columns(layout.begin[i], layout.padded[i]).data, out.ld});
  run_passes(jobs, x, stream);
  return h;
}

// Returns whether two cuBLAS products are faster than our pass: in fp32, where arithmetic is the limit, and for a
// rank that needs several launches over a matrix that stays in L2 (docs/lab/operators.md). Groups share our pass.
inline bool prefer_products(const Matrix& z, int64_t rank, size_t projections) {
  constexpr int64_t kCached = 1 << 25, kSmall = 1 << 22;  // elements
  const int64_t elements = z.rows * z.cols;
  if (z.type == DType::f32) return rank > (elements < kSmall ? 16 : 8);
  return rank > kRankChunk && projections == 1 && elements < kCached;
}

// Inputs and outputs of the backward of one projection. `scale` includes the factor of m; without data in grad_up there
// is no dB.
struct Outer {
  Matrix grad, up, h, dh, grad_up;
  float scale = 1.f;
};

// Computes dh = s dY B and dB = dY^T h (h contains s) in one pass over each dY; a group shares the launches.
inline void backward_outer(const std::vector<Outer>& projections, bool accumulate, const Tensor& like,
                           cudaStream_t stream) {
  std::vector<Job> jobs;
  for (const Outer& o : projections) {
    const bool fits = o.grad_up.type == o.grad.type && o.grad_up.cols == o.h.cols;
    if (o.grad_up.data == nullptr || (fits && prefer_products(o.grad, o.h.cols, projections.size()))) {
      product(o.dh, o.scale, o.grad, false, o.up, false, 0.f, stream);
      if (o.grad_up.data != nullptr) product(o.grad_up, 1.f, o.grad, true, o.h, false, accumulate ? 1.f : 0.f, stream);
      continue;
    }
    Job& job = jobs.emplace_back();
    job.pass = pass_over(o.grad);
    job.pass.p = o.up.data, job.pass.ldp = o.up.ld, job.pass.R = static_cast<int>(o.h.cols);
    job.pass.v = o.h.data, job.pass.ldv = o.h.ld;
    job.u_type = o.dh.type;
    job.u.push_back({0, job.pass.R, o.scale, o.dh.data, o.dh.ld});
    job.g_type = o.grad_up.type, job.accumulate_g = accumulate;
    job.g.push_back({0, static_cast<int>(o.grad_up.cols), 1.f, o.grad_up.data, o.grad_up.ld});
  }
  if (!jobs.empty()) run_passes(jobs, like, stream);
}

// Allocates the mask's bits if the pass over x can store them for the masked dh A; otherwise returns an undefined
// tensor.
inline Tensor empty_mask_bits(const Matrix& rows, int rank, const Tensor& like) {
  RankPass pass = pass_over(rows);
  pass.R = std::min(kRankChunk, rank);
  if (!wgmma_supported(pass, device_info(like))) return {};
  return at::empty({(rows.cols + kWgmmaCols - 1) / kWgmmaCols, rows.rows, 4}, like.options().dtype(at::kInt));
}

// Computes dA = dh^T (m*x) of the whole group in one pass over x, with the factor of m in dh.
inline void backward_inner(const Matrix& rows, const Matrix& dh, const Layout& layout, const Tensors& grad_downs,
                           const Dropout& dropout, bool accumulate, const Tensor& like, cudaStream_t stream) {
  // For one projection cuBLAS also reads x once, and is faster while x is small.
  if (dropout.seed == nullptr && layout.size() == 1 && layout.rank[0] == layout.total &&
      to_dtype(grad_downs[0]) == rows.type && (rows.type == DType::f32 || rows.rows < kFewTokens)) {
    product(flatten_rows(grad_downs[0]), 1.f, dh, true, rows, false, accumulate ? 1.f : 0.f, stream);
    return;
  }
  std::vector<Job> jobs(1);
  Job& job = jobs[0];
  job.pass = pass_over(rows);
  job.pass.v = dh.data, job.pass.ldv = dh.ld, job.pass.R = layout.total;
  job.pass.g_by_rank = true, job.pass.dropout = dropout;
  job.g_type = to_dtype(grad_downs[0]), job.accumulate_g = accumulate;
  for (size_t i = 0; i < layout.size(); ++i)
    job.g.push_back({layout.begin[i], layout.rank[i], 1.f, grad_downs[i].data_ptr(), rows.cols});
  run_passes(jobs, like, stream);
}

}  // namespace zerolora
