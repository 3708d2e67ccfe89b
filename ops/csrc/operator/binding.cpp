// CUDA implementations of the operators that ops/lora.py, ops/nf4.py and ops/primitives.py declare.
#include <torch/extension.h>
#include <torch/library.h>

#include <numeric>
#include <tuple>

#include "group.h"

namespace zerolora {
namespace {

Tensor lora_project(const Tensor& x, at::TensorList downs, at::ArrayRef<double> scales, double p,
                    const std::optional<Tensor>& seed) {
  check_downs(x, downs, scales, p);
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = current_stream(x);
  const Layout layout(downs);
  const Adapters adapters = pack_adapters(downs, {}, layout, x, stream);
  return project(x, flatten_rows(x), adapters.downs, layout, scales, make_dropout(p, seed), stream);
}

std::tuple<Tensors, Tensor> forward(const Tensor& x, at::IntArrayRef outs, const Weights& weights,
                                    at::TensorList biases, at::TensorList downs, at::TensorList ups,
                                    at::ArrayRef<double> scales, double p, const std::optional<Tensor>& seed,
                                    const std::optional<Tensor>& projected) {
  const auto write = [&](size_t i, const Matrix& y, const Matrix& rows, const Matrix& h, const Matrix& up,
                         const Tensor& bias,
                         cudaStream_t stream) { output(y, rows, weights.of(i), h, up, bias, x, stream); };
  return group_forward(x, outs, biases, downs, ups, scales, p, seed, projected, write);
}

std::tuple<Tensor, Tensors, Tensors> backward(at::TensorList grads, const Tensor& x, const Weights& weights,
                                              at::TensorList downs, at::TensorList ups, const Tensor& h,
                                              at::ArrayRef<double> scales, double p, const std::optional<Tensor>& seed,
                                              bool need_x, bool need_down, bool need_up) {
  const auto gradient = [&](const std::vector<Outer>& projections, const Matrix& dh, const Matrix& all_downs,
                            const Dropout& dropout, cudaStream_t stream) {
    return gradient_of_x(x, projections, weights, dh, all_downs, dropout, stream);
  };
  return group_backward(grads, x, downs, ups, h, scales, p, seed, need_x, need_down, need_up, gradient);
}

Matrix stored_weight(const Tensor& weight, const Tensor& x) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) == x.size(-1), "weight ", text(weight), " for x ", text(x),
                    ": expected [O, ", text(x.size(-1)), "]");
  TORCH_CHECK_VALUE(weight.scalar_type() == x.scalar_type() && weight.device() == x.device(), "weight is ",
                    type_name(weight), " on ", weight.device().str(), ", x is ", type_name(x), " on ", x.device().str(),
                    ": convert one of them");
  return flatten_rows(weight);
}

std::vector<int64_t> output_widths(at::TensorList weights) {
  std::vector<int64_t> rows;
  for (const Tensor& weight : weights) rows.push_back(weight.size(0));
  return rows;
}

std::tuple<Tensors, Tensor> lora_forward(const Tensor& x, at::TensorList weights, at::TensorList biases,
                                         at::TensorList downs, at::TensorList ups, at::ArrayRef<double> scales,
                                         double p, const std::optional<Tensor>& seed, const std::optional<Tensor>& h) {
  const auto weight = [&](size_t i) { return stored_weight(weights[i], x); };
  return forward(x, output_widths(weights), {weight, kMaxParts}, biases, downs, ups, scales, p, seed, h);
}

std::tuple<Tensor, Tensors, Tensors> lora_backward(at::TensorList grads, const Tensor& x, at::TensorList weights,
                                                   at::TensorList downs, at::TensorList ups, const Tensor& h,
                                                   at::ArrayRef<double> scales, double p,
                                                   const std::optional<Tensor>& seed, bool need_x, bool need_down,
                                                   bool need_up) {
  const auto weight = [&](size_t i) { return stored_weight(weights[i], x); };
  return backward(grads, x, {weight, kMaxParts}, downs, ups, h, scales, p, seed, need_x, need_down, need_up);
}

Tensor dequantize_nf4(const Tensor& packed, at::TensorList state, int64_t rows, int64_t cols, int64_t block,
                      int64_t nested_block, at::ScalarType dtype) {
  const c10::cuda::CUDAGuard guard(packed.device());
  const Nf4 weight = describe_nf4(packed, state, {rows, cols}, block, nested_block);
  Tensor out = at::empty({rows, cols}, packed.options().dtype(dtype));
  check(launch_nf4(weight, to_dtype(out), out.mutable_data_ptr(), current_stream(packed)), "launching the NF4 kernel");
  return out;
}

// Dequantizes the weights of a group; `states` are all weights' states, concatenated. After its product, a dequantized
// weight's memory returns to torch's allocator, which reuses it for the next call on this stream.
struct PackedWeights {
  at::TensorList packed, states;
  at::IntArrayRef rows;
  int64_t cols, block, nested_block;
  at::ScalarType dtype;
  // Weights of a group share a product if together they need less memory than one weight of a large model.
  size_t at_once() const {
    constexpr int64_t kMostBytes = 64 << 20;
    const int64_t all = std::accumulate(rows.begin(), rows.end(), int64_t{0}) * cols;
    return all * static_cast<int64_t>(c10::elementSize(dtype)) <= kMostBytes ? kMaxParts : 1;
  }
  Matrix operator()(size_t i) const {
    const size_t each = states.size() / packed.size();
    return flatten_rows(
        dequantize_nf4(packed[i], states.slice(i * each, each), rows[i], cols, block, nested_block, dtype));
  }
};

std::tuple<Tensors, Tensor> nf4_forward(const Tensor& x, at::TensorList packed, at::TensorList states,
                                        at::IntArrayRef rows, int64_t block, int64_t nested_block,
                                        at::TensorList biases, at::TensorList downs, at::TensorList ups,
                                        at::ArrayRef<double> scales, double p, const std::optional<Tensor>& seed,
                                        const std::optional<Tensor>& h) {
  const PackedWeights weight{packed, states, rows, x.size(-1), block, nested_block, x.scalar_type()};
  return forward(x, rows, {weight, 1}, biases, downs, ups, scales, p, seed, h);
}

std::tuple<Tensor, Tensors, Tensors> nf4_backward(at::TensorList grads, const Tensor& x, at::TensorList packed,
                                                  at::TensorList states, at::IntArrayRef rows, int64_t block,
                                                  int64_t nested_block, at::TensorList downs, at::TensorList ups,
                                                  const Tensor& h, at::ArrayRef<double> scales, double p,
                                                  const std::optional<Tensor>& seed, bool need_x, bool need_down,
                                                  bool need_up) {
  const PackedWeights weight{packed, states, rows, x.size(-1), block, nested_block, x.scalar_type()};
  return backward(grads, x, {weight, weight.at_once()}, downs, ups, h, scales, p, seed, need_x, need_down, need_up);
}

// Writes the gradients of the adapter alone to the given tensors, or adds them; h is recomputed.
void adapter_backward_(const Tensor& grad, const Tensor& x, const Tensor& down, const Tensor& up, double scale,
                       Tensor& grad_x, Tensor& grad_down, Tensor& grad_up, bool accumulate) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = current_stream(x);
  const Layout layout(at::TensorList{down});
  const Matrix rows = flatten_rows(x);
  const Adapters adapters = pack_adapters(down, up, layout, x, stream);
  const Tensor h = project(x, rows, adapters.downs, layout, {scale}, {}, stream), dh_tensor = at::empty_like(h);
  const Matrix dh = flatten_rows(dh_tensor);
  const Outer outer{flatten_rows(grad),    adapters.ups[0],          flatten_rows(h), dh,
                    flatten_rows(grad_up), static_cast<float>(scale)};
  backward_outer({outer}, accumulate, x, stream);
  adapter_gradient_of_x(flatten_rows(grad_x), dh, adapters.downs, accumulate, {}, x, stream);
  backward_inner(rows, dh, layout, {grad_down}, {}, accumulate, x, stream);
}

// Returns u = (m*z) p and g = (m*z)^T v; p is [R,D] (without v) or [D,R] (with v).
std::tuple<Tensor, Tensor> rank_pass(const Tensor& z, const std::optional<Tensor>& p, const std::optional<Tensor>& v,
                                     double dropout_p, const std::optional<Tensor>& seed) {
  const c10::cuda::CUDAGuard guard(z.device());
  std::vector<Job> jobs(1);
  Job& job = jobs[0];
  RankPass& pass = job.pass = pass_over(flatten_rows(z));
  pass.dropout = make_dropout(dropout_p, seed);
  pass.R = static_cast<int>(v.has_value() ? v->size(1) : p->size(0));
  Tensor u = at::empty({p.has_value() ? pass.T : 0, pass.R}, z.options()), g = at::empty({0, pass.D}, z.options());
  if (p.has_value()) {
    pass.p = p->const_data_ptr(), pass.ldp = p->stride(0), pass.p_by_rank = !v.has_value();
    job.u_type = to_dtype(u);
    job.u.push_back({0, pass.R, pass.dropout.keep_scale, u.mutable_data_ptr(), pass.R});
  }
  if (v.has_value()) {
    pass.g_by_rank = !p.has_value();
    g = at::empty(pass.g_by_rank ? std::vector<int64_t>{pass.R, pass.D} : std::vector<int64_t>{pass.D, pass.R},
                  z.options());
    pass.v = v->const_data_ptr(), pass.ldv = v->stride(0);
    job.g_type = to_dtype(g);
    job.g.push_back({0, pass.R, pass.dropout.keep_scale, g.mutable_data_ptr(), g.size(1)});
  }
  run_passes(jobs, z, current_stream(z));
  return {u, g};
}

// Returns y = keep * (h q^T) for q [D,R], contiguous or, as in the backward, the transpose of an [R,D].
Tensor rank_expand(const Tensor& h, const Tensor& q, double dropout_p, const std::optional<Tensor>& seed) {
  const c10::cuda::CUDAGuard guard(h.device());
  Tensor y = at::empty({h.size(0), q.size(0)}, h.options());
  const cudaStream_t stream = current_stream(h);
  const Dropout dropout = make_dropout(dropout_p, seed);
  if (q.is_contiguous())
    expand(flatten_rows(h), flatten_rows(q), false, {}, flatten_rows(y), false, dropout, h, stream);
  else adapter_gradient_of_x(flatten_rows(y), flatten_rows(h), flatten_rows(q.t()), false, dropout, h, stream);
  return y;
}

// Returns y = keep * (h q^T) + sum of x w^T + bias for tests and benchmarks: by our kernel (forced), or by the one that
// the operators choose. w is [D,K] and q [D,R]; in the backward they are transposes of [K,D] and [R,D]. The mask is
// given as Dropout::bits.
Tensor frozen_product_alone(at::TensorList x, at::TensorList w, const Tensor& h, const Tensor& q,
                            const std::optional<Tensor>& bias, const std::optional<Tensor>& bits, bool forced) {
  TORCH_CHECK_VALUE(!x.empty() && x.size() == w.size() && x.size() <= kMaxParts, text(x.size()), " x and ",
                    text(w.size()), " w: need equal counts, 1 to ", text(kMaxParts));
  TORCH_CHECK_VALUE(forced || !bits.has_value(),
                    "bits: supported only with forced=True; the operators draw the mask themselves");
  const c10::cuda::CUDAGuard guard(h.device());
  const cudaStream_t stream = current_stream(h);
  const Device& device = device_info(h);
  const bool forward = w[0].stride(1) == 1;
  const auto rows = [forward](const Tensor& matrix) { return flatten_rows(forward ? matrix : matrix.t()); };
  const auto weight = [&](size_t i) { return rows(w[i]); };
  const Tensor y = at::empty({h.size(0), w[0].size(0)}, h.options());
  const Matrix target = flatten_rows(y), left = flatten_rows(h), right = rows(q);
  std::vector<Operand> operands;
  std::vector<Outer> projections(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    operands.push_back({flatten_rows(x[i]), weight(i)});
    projections[i].grad = operands[i].x;
  }
  if (forced) {
    const uint32_t* const kept = bits.has_value() ? static_cast<const uint32_t*>(bits->const_data_ptr()) : nullptr;
    const Frozen job = frozen_job(target, operands, left, right, forward, bias.value_or(Tensor()), kept);
    TORCH_CHECK_VALUE(frozen_supported(job, device), "frozen_product of ", text(y), " in ", type_name(h),
                      ": the kernel needs compute capability 9.0, a 16-bit type and rows aligned to 16 bytes");
    run_frozen(job, device, stream);
    return y;
  }
  if (!forward) return gradient_of_x(y, projections, {weight, kMaxParts}, left, right, {}, stream);
  output(target, operands[0].x, operands[0].weight, left, right, bias.value_or(Tensor()), h, stream);
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(zerolora, CUDA, library) {
  library.impl("lora_project", lora_project);
  library.impl("lora_forward", lora_forward);
  library.impl("lora_backward", lora_backward);
  library.impl("nf4_forward", nf4_forward);
  library.impl("nf4_backward", nf4_backward);
  library.impl("dequantize_nf4", dequantize_nf4);
  library.impl("adapter_backward_", adapter_backward_);
  library.impl("rank_pass", rank_pass);
  library.impl("rank_expand", rank_expand);
  library.impl("frozen_product", frozen_product_alone);
}

}  // namespace zerolora

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.doc() = "zerolora's CUDA operators; importing registers them"; }
