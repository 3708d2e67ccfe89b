// From tensors to kernel launches: checks, layouts, workspaces from torch's allocator, the current stream.
// Legend: T tokens, I in, O out, R rank; siblings' ranks lie side by side, each padded to a multiple of 8.
#pragma once
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

#include "kernels.h"

namespace zerolora {

using at::Tensor;
using Tensors = std::vector<Tensor>;

inline void check(cudaError_t status, const char* what) {
  TORCH_CHECK(status == cudaSuccess, "zerolora: ", what, ": ", cudaGetErrorString(status));
}

inline const Device& card_of(const Tensor& tensor) {
  constexpr int kMaxDevices = 64;
  static std::array<Device, kMaxDevices> devices;
  static std::array<std::once_flag, kMaxDevices> known;
  const int index = tensor.get_device();
  TORCH_CHECK(index >= 0 && index < kMaxDevices, "zerolora: CUDA device index ", index, " is not in 0..",
              kMaxDevices - 1);
  std::call_once(known[index], [index] {
    const auto read = [index](cudaDeviceAttr attribute) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, attribute, index), "reading a device attribute");
      return value;
    };
    devices[index] =
        Device{read(cudaDevAttrMultiProcessorCount),
               10 * read(cudaDevAttrComputeCapabilityMajor) + read(cudaDevAttrComputeCapabilityMinor),
               read(cudaDevAttrMaxSharedMemoryPerBlockOptin), read(cudaDevAttrMaxSharedMemoryPerMultiprocessor)};
  });
  return devices[index];
}

inline DType type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return DType::f32;
    case at::kHalf: return DType::f16;
    case at::kBFloat16: return DType::bf16;
    default:
      TORCH_CHECK_VALUE(false, "dtype=", tensor.scalar_type(),
                        ": the CUDA operator takes float32, float16 and bfloat16");
  }
}

inline Tensor rows_of(const Tensor& tensor, int64_t width) {  // [T, width] with contiguous rows, a view where possible
  const Tensor flat = tensor.reshape({-1, width});
  return flat.stride(1) == 1 && (flat.stride(0) >= width || flat.size(0) <= 1) ? flat : flat.contiguous();
}

inline int64_t row_stride(const Tensor& rows) { return rows.size(0) <= 1 ? rows.size(1) : rows.stride(0); }

inline Dropout dropout_of(double p, const std::optional<Tensor>& seed) {
  if (p == 0.0) return {};
  TORCH_CHECK_VALUE(p > 0.0 && p < 1.0, "dropout=", p, ": must lie in [0, 1)");
  TORCH_CHECK_VALUE(seed.has_value() && seed->is_cuda() && seed->scalar_type() == at::kLong && seed->numel() == 1,
                    "dropout=", p, ": needs one int64 seed on the device of x");
  const auto threshold = static_cast<uint32_t>(p * 32768.0 + 0.5);
  return {seed->const_data_ptr<int64_t>(), threshold < 32767u ? threshold : 32767u,
          static_cast<float>(1.0 / (1.0 - p))};
}

// Where the siblings' ranks lie in the concatenation.
struct Layout {
  std::vector<int> begin, rank, padded;
  int total = 0;
  explicit Layout(const Tensors& ranks_first) {
    TORCH_CHECK_VALUE(!ranks_first.empty() && ranks_first.size() <= kMaxSegments, "group of ", ranks_first.size(),
                      " siblings: 1 to ", kMaxSegments, " are supported");
    for (const Tensor& down : ranks_first) {
      const int r = static_cast<int>(down.size(0));
      TORCH_CHECK_VALUE(r >= 1 && r <= 256, "r=", r, ": the CUDA operator takes ranks from 1 to 256");
      begin.push_back(total);
      rank.push_back(r);
      padded.push_back((r + 7) / 8 * 8);
      total += padded.back();
    }
  }
  size_t size() const { return begin.size(); }
};

// A of all siblings as [total, I] in x's type; B of one sibling as [O, padded].
inline Tensor pack_downs(const Tensors& downs, const Layout& layout, const Tensor& x) {
  if (downs.size() == 1 && layout.padded[0] == layout.rank[0]) return downs[0].to(x.scalar_type()).contiguous();
  Tensor packed = at::zeros({layout.total, downs[0].size(1)}, x.options());
  for (size_t i = 0; i < downs.size(); ++i) packed.narrow(0, layout.begin[i], layout.rank[i]).copy_(downs[i]);
  return packed;
}
inline Tensor pack_up(const Tensor& up, int padded, const Tensor& x) {
  if (up.size(1) == padded) return up.to(x.scalar_type()).contiguous();
  Tensor packed = at::zeros({up.size(0), padded}, x.options());
  packed.narrow(1, 0, up.size(1)).copy_(up);
  return packed;
}

struct PassOutputs {
  std::vector<Segment> u, g;
  DType u_type = DType::f32, g_type = DType::f32;
  bool accumulate_g = false;
};

inline Reduction reduction(const std::vector<Segment>& segments, DType type, int rank_base, bool accumulate) {
  Reduction job;
  job.out_dtype = type;
  job.rank_base = rank_base;
  job.accumulate = accumulate;
  job.segments = static_cast<int>(segments.size());
  std::copy(segments.begin(), segments.end(), job.segment);
  return job;
}

// Runs the primitive for any rank, kRankChunk ranks a launch, and reduces each launch's partials into the outputs.
inline void rank_pass(RankPass pass, const PassOutputs& out, const Tensor& like, cudaStream_t stream) {
  const Device& device = card_of(like);
  const int total = pass.R;
  const int64_t element = like.element_size();
  const char *p = static_cast<const char*>(pass.p), *v = static_cast<const char*>(pass.v);
  const bool want_u = !out.u.empty(), want_g = !out.g.empty();  // not the pointers: without tokens they are null
  for (int base = 0; base < total; base += kRankChunk) {
    pass.R = std::min(kRankChunk, total - base);
    if (p != nullptr) pass.p = p + base * (pass.p_by_rank ? pass.ldp : 1) * element;
    if (v != nullptr) pass.v = v + base * element;
    const Plan plan = plan_rank_pass(pass, device);
    const Tensor workspace = at::empty({plan.u_floats + plan.g_floats}, like.options().dtype(at::kFloat));
    float* const u = workspace.mutable_data_ptr<float>();
    float* const g = u + plan.u_floats;
    check(launch_rank_pass(pass, plan, u, g, stream), "launching the rank-space kernel");
    Reduction jobs[2];
    int count = 0;
    if (want_u) {
      Reduction& job = jobs[count++] = reduction(out.u, out.u_type, base, false);
      job.partial = u, job.splits = plan.d_splits, job.rows = pass.T, job.cols = pass.R;
      job.ld_partial = plan.rank_pad, job.split_stride = pass.T * plan.rank_pad;
    }
    if (want_g) {
      Reduction& job = jobs[count++] = reduction(out.g, out.g_type, base, out.accumulate_g);
      job.partial = g, job.splits = pass.T == 0 ? 0 : plan.t_splits, job.split_stride = pass.D * plan.rank_pad;
      job.rank_rows = pass.g_by_rank;
      job.rows = pass.g_by_rank ? pass.R : pass.D, job.cols = pass.g_by_rank ? pass.D : pass.R;
      job.ld_partial = pass.g_by_rank ? pass.D : plan.rank_pad;
    }
    check(launch_reduce(jobs, count, device, stream), "launching the reduction");
  }
}

inline RankPass pass_over(const Tensor& rows) {
  RankPass pass;
  pass.dtype = type_of(rows);
  pass.z = rows.const_data_ptr();
  pass.ldz = row_stride(rows), pass.T = rows.size(0), pass.D = rows.size(1);
  return pass;
}

// y = m * (h Q) + bias (or y += ...), with h [T,R] and Q [R,D] or its transpose [D,R].
inline void expand(const Tensor& h, const Tensor& q, bool q_by_column, const std::optional<Tensor>& bias, Tensor& y,
                   bool accumulate, const Dropout& dropout, cudaStream_t stream) {
  Expand job;
  job.dtype = type_of(y);
  job.h = h.const_data_ptr(), job.ldh = row_stride(h);
  job.q = q.const_data_ptr(), job.ldq = row_stride(q), job.q_by_column = q_by_column;
  job.bias = bias.has_value() ? bias->const_data_ptr() : nullptr;
  job.y = y.mutable_data_ptr(), job.ldy = row_stride(y), job.T = y.size(0), job.D = y.size(1);
  job.R = static_cast<int>(h.size(1));
  job.accumulate = accumulate, job.dropout = dropout;
  // Without a mask cuBLAS is faster above rank 16, and where it adds (docs/ops.md).
  const bool ours = dropout.seed != nullptr || (job.R <= 16 && !accumulate);
  if (ours && expand_supported(job, card_of(y))) {
    check(launch_expand(job, card_of(y), stream), "launching the expansion");
    return;
  }
  const Tensor right = q_by_column ? q.t() : q;
  if (dropout.seed == nullptr) {
    if (accumulate) y.addmm_(h, right);
    else if (bias.has_value()) at::addmm_out(y, *bias, h, right);
    else at::mm_out(y, h, right);
    return;
  }
  Tensor product = accumulate ? at::mm(h, right) : at::mm_out(y, h, right);
  check(launch_mask(job.dtype, product.mutable_data_ptr(), row_stride(product), job.T, job.D, dropout, stream),
        "launching the mask");
  if (accumulate) y.add_(product);
  if (bias.has_value()) y.add_(*bias);
}

// h = s (m*x) A^T for all siblings, [T, total].
inline Tensor project(const Tensor& x, const Tensors& downs, const Layout& layout, at::ArrayRef<double> scales,
                      const Dropout& dropout, cudaStream_t stream) {
  const Tensor packed = pack_downs(downs, layout, x);
  Tensor h = at::empty({x.size(0), layout.total}, x.options());
  const bool one_scale = std::all_of(scales.begin(), scales.end(), [&](double s) { return s == scales[0]; });
  if (dropout.seed == nullptr && one_scale)  // a pass for U alone: cuBLAS is 5 to 15 % faster (docs/ops.md)
    return at::addmm_out(h, h, x, packed.t(), 0.0, scales[0]);
  RankPass pass = pass_over(x);
  pass.p = packed.const_data_ptr(), pass.ldp = x.size(1), pass.p_by_rank = true, pass.R = layout.total;
  pass.dropout = dropout;
  PassOutputs out;
  out.u_type = type_of(h);
  for (size_t i = 0; i < layout.size(); ++i)
    out.u.push_back({layout.begin[i], layout.padded[i], static_cast<float>(scales[i]) * dropout.keep_scale,
                     static_cast<char*>(h.mutable_data_ptr()) + layout.begin[i] * h.element_size(), layout.total});
  rank_pass(pass, out, x, stream);
  return h;
}

// Below this many tokens everything stays in the L2: there a second read costs little, and adding the adapter after the
// frozen product costs less than accumulating the product into a prefilled output (docs/ops.md).
constexpr int64_t kFewTokens = 4096;

// Two products of cuBLAS instead of one pass of ours: few tokens at a high rank, or fp32, which is bound by arithmetic.
inline bool products_win(const Tensor& rows, int64_t rank, const Tensor& result) {
  if (rows.size(0) == 0 || result.scalar_type() != rows.scalar_type()) return false;
  return rows.scalar_type() == at::kFloat ? rank > 16 : rank > 32 && rows.size(0) < kFewTokens;
}

// One pass over dY: dh = s dY B into its columns of `dh`, dB = dY^T h into `grad_up` (h carries s already).
inline void backward_outer(const Tensor& grad, const Tensor& up, const Tensor& h, Tensor& dh, Tensor& grad_up,
                           double scale, bool accumulate, cudaStream_t stream) {
  if (products_win(grad, h.size(1), grad_up) && up.size(1) == h.size(1)) {
    at::addmm_out(dh, dh, grad, up, 0.0, scale);
    at::addmm_out(grad_up, grad_up, grad.t(), h, accumulate ? 1.0 : 0.0);
    return;
  }
  RankPass pass = pass_over(grad);
  const Tensor packed = pack_up(up, static_cast<int>(h.size(1)), grad);
  pass.p = packed.const_data_ptr(), pass.ldp = packed.size(1), pass.R = static_cast<int>(h.size(1));
  PassOutputs out;
  out.u_type = type_of(dh);
  out.u.push_back({0, pass.R, static_cast<float>(scale), dh.mutable_data_ptr(), row_stride(dh)});
  pass.v = h.const_data_ptr(), pass.ldv = row_stride(h);
  out.g_type = type_of(grad_up), out.accumulate_g = accumulate;
  out.g.push_back({0, static_cast<int>(up.size(1)), 1.f, grad_up.mutable_data_ptr(), up.size(1)});
  rank_pass(pass, out, grad, stream);
}

// One pass over x: dA = dh^T (m*x) for all siblings.
inline void backward_inner(const Tensor& x, const Tensor& dh, const Layout& layout, Tensors& grad_downs,
                           const Dropout& dropout, bool accumulate, cudaStream_t stream) {
  if (dropout.seed == nullptr && layout.size() == 1 && layout.rank[0] == layout.total &&
      products_win(x, layout.total, grad_downs[0])) {
    at::addmm_out(grad_downs[0], grad_downs[0], dh.t(), x, accumulate ? 1.0 : 0.0);
    return;
  }
  RankPass pass = pass_over(x);
  pass.v = dh.const_data_ptr(), pass.ldv = row_stride(dh), pass.R = layout.total;
  pass.g_by_rank = true, pass.dropout = dropout;
  PassOutputs out;
  out.g_type = type_of(grad_downs[0]), out.accumulate_g = accumulate;
  for (size_t i = 0; i < layout.size(); ++i)
    out.g.push_back({layout.begin[i], layout.rank[i], dropout.keep_scale, grad_downs[i].mutable_data_ptr(), x.size(1)});
  rank_pass(pass, out, x, stream);
}

}  // namespace zerolora
