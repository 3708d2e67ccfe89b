// CUDA implementations of the operators that ops/lora.py, ops/nf4.py and ops/plain.py declare: the order of the passes
// and products.
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
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(x.get_device());
  const Layout layout(downs);
  const Adapters adapters = pack_adapters(downs, {}, layout, x, stream);
  return project(x, rows_of(x), adapters.downs, layout, scales, dropout_of(p, seed), stream);
}

std::tuple<Tensors, Tensor> forward(const Tensor& x, at::IntArrayRef outs, const Weights& weights,
                                    at::TensorList biases, at::TensorList downs, at::TensorList ups,
                                    at::ArrayRef<double> scales, double p, const std::optional<Tensor>& seed,
                                    const std::optional<Tensor>& given) {
  const auto write = [&](size_t i, const Matrix& y, const Matrix& rows, const Matrix& h, const Matrix& up,
                         const Tensor& bias,
                         cudaStream_t stream) { output(y, rows, weights.of(i), h, up, bias, x, stream); };
  return group_forward(x, outs, biases, downs, ups, scales, p, seed, given, write);
}

std::tuple<Tensor, Tensors, Tensors> backward(at::TensorList grads, const Tensor& x, const Weights& weights,
                                              at::TensorList downs, at::TensorList ups, const Tensor& h,
                                              at::ArrayRef<double> scales, double p, const std::optional<Tensor>& seed,
                                              bool need_x, bool need_down, bool need_up) {
  const auto gradient = [&](const std::vector<Outer>& siblings, const Matrix& dh, const Matrix& all_downs,
                            const Dropout& dropout, cudaStream_t stream) {
    return gradient_of_x(x, siblings, weights, dh, all_downs, dropout, stream);
  };
  return group_backward(grads, x, downs, ups, h, scales, p, seed, need_x, need_down, need_up, gradient);
}

// ---- operators
// -------------------------------------------------------------------------------------------------------

Matrix stored_weight(const Tensor& weight, const Tensor& x) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) == x.size(-1), "weight ", text(weight), " for x ", text(x),
                    ": expected [O, ", text(x.size(-1)), "]");
  TORCH_CHECK_VALUE(weight.scalar_type() == x.scalar_type() && weight.device() == x.device(), "weight is ",
                    type_name(weight), " on ", weight.device().str(), ", x is ", type_name(x), " on ", x.device().str(),
                    ": convert one of them");
  return rows_of(weight);
}

std::vector<int64_t> rows_of_each(at::TensorList weights) {
  std::vector<int64_t> rows;
  for (const Tensor& weight : weights) rows.push_back(weight.size(0));
  return rows;
}

std::tuple<Tensors, Tensor> lora_forward(const Tensor& x, at::TensorList weights, at::TensorList biases,
                                         at::TensorList downs, at::TensorList ups, at::ArrayRef<double> scales,
                                         double p, const std::optional<Tensor>& seed, const std::optional<Tensor>& h) {
  const auto weight = [&](size_t i) { return stored_weight(weights[i], x); };
  return forward(x, rows_of_each(weights), {weight, kMaxParts}, biases, downs, ups, scales, p, seed, h);
}

std::tuple<Tensor, Tensors, Tensors> lora_backward(at::TensorList grads, const Tensor& x, at::TensorList weights,
                                                   at::TensorList downs, at::TensorList ups, const Tensor& h,
                                                   at::ArrayRef<double> scales, double p,
                                                   const std::optional<Tensor>& seed, bool need_x, bool need_down,
                                                   bool need_up) {
  const auto weight = [&](size_t i) { return stored_weight(weights[i], x); };
  return backward(grads, x, {weight, kMaxParts}, downs, ups, h, scales, p, seed, need_x, need_down, need_up);
}

// state: [absmax, code] or, double-quantised, [absmax, code, nested absmax, nested code, offset].
Tensor dequantize_nf4(const Tensor& packed, at::TensorList state, int64_t rows, int64_t cols, int64_t block,
                      int64_t nested_block, at::ScalarType dtype) {
  const c10::cuda::CUDAGuard guard(packed.device());
  TORCH_CHECK_VALUE(state.size() == 2 || state.size() == 5, "NF4 state of ", text(state.size()),
                    " tensors: 2 or 5 are expected");
  const int64_t bytes = packed.numel() * packed.element_size();
  TORCH_CHECK_VALUE(bytes * 2 >= rows * cols && packed.is_contiguous(), "NF4 weight of ", text(bytes),
                    " bytes: ", text({rows, cols}), " needs ", text((rows * cols + 1) / 2),
                    " contiguous bytes; gather the parameter first");
  const bool nested = state.size() == 5;
  TORCH_CHECK_VALUE(state[0].scalar_type() == (nested ? at::kByte : at::kFloat), "NF4 absmax of dtype ",
                    type_name(state[0]));
  Tensor out = at::empty({rows, cols}, packed.options().dtype(dtype));
  Nf4 weight;
  weight.packed = static_cast<const uint8_t*>(packed.const_data_ptr());
  weight.absmax = state[0].const_data_ptr();
  weight.code = state[1].const_data_ptr<float>();
  if (nested) {
    weight.nested_absmax = state[2].const_data_ptr<float>();
    weight.nested_code = state[3].const_data_ptr<float>();
    weight.offset = state[4].const_data_ptr<float>();
  }
  weight.count = rows * cols, weight.block = static_cast<int>(block),
  weight.nested_block = static_cast<int>(nested_block);
  check(launch_nf4(weight, type_of(out), out.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream(packed.get_device())),
        "launching the NF4 kernel");
  return out;
}

// The states of the whole group, one after the other; a dequantised weight lives for one product and its block returns
// to torch's allocator, which gives the same block to the next call on this stream.
struct PackedWeights {
  at::TensorList packed, states;
  at::IntArrayRef rows;
  int64_t cols, block, nested_block;
  at::ScalarType dtype;
  // Weights of a group share a product as long as they take less memory than one weight of a large model.
  size_t at_once() const {
    constexpr int64_t kMostBytes = 64 << 20;
    const int64_t all = std::accumulate(rows.begin(), rows.end(), int64_t{0}) * cols;
    return all * static_cast<int64_t>(c10::elementSize(dtype)) <= kMostBytes ? kMaxParts : 1;
  }
  Matrix operator()(size_t i) const {
    const size_t each = states.size() / packed.size();
    return rows_of(dequantize_nf4(packed[i], states.slice(i * each, each), rows[i], cols, block, nested_block, dtype));
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

// Only the adapter, h recomputed: gradients are written into the given tensors, or added to them.
void adapter_backward_(const Tensor& grad, const Tensor& x, const Tensor& down, const Tensor& up, double scale,
                       Tensor& grad_x, Tensor& grad_down, Tensor& grad_up, bool accumulate) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(x.get_device());
  const Layout layout(at::TensorList{down});
  const Matrix rows = rows_of(x);
  const Adapters adapters = pack_adapters(down, up, layout, x, stream);
  const Tensor h = project(x, rows, adapters.downs, layout, {scale}, {}, stream), dh_tensor = at::empty_like(h);
  const Matrix dh = rows_of(dh_tensor);
  const Outer outer{rows_of(grad), adapters.ups[0], rows_of(h), dh, rows_of(grad_up), static_cast<float>(scale)};
  backward_outer({outer}, accumulate, x, stream);
  adapters_part_of_x(rows_of(grad_x), dh, adapters.downs, accumulate, {}, x, stream);
  backward_inner(rows, dh, layout, {grad_down}, {}, accumulate, x, stream);
}

// For benchmarks: only the primitive. u = (m*z) p, g = (m*z)^T v; p is [R,D] (without v) or [D,R] (with v).
std::tuple<Tensor, Tensor> rank_pass(const Tensor& z, const std::optional<Tensor>& p, const std::optional<Tensor>& v,
                                     double dropout_p, const std::optional<Tensor>& seed) {
  const c10::cuda::CUDAGuard guard(z.device());
  std::vector<Job> jobs(1);
  Job& job = jobs[0];
  RankPass& pass = job.pass = pass_over(rows_of(z));
  pass.dropout = dropout_of(dropout_p, seed);
  pass.R = static_cast<int>(v.has_value() ? v->size(1) : p->size(0));
  Tensor u = at::empty({p.has_value() ? pass.T : 0, pass.R}, z.options()), g = at::empty({0, pass.D}, z.options());
  if (p.has_value()) {
    pass.p = p->const_data_ptr(), pass.ldp = p->stride(0), pass.p_by_rank = !v.has_value();
    job.u_type = type_of(u);
    job.u.push_back({0, pass.R, pass.dropout.keep_scale, u.mutable_data_ptr(), pass.R});
  }
  if (v.has_value()) {
    pass.g_by_rank = !p.has_value();
    g = at::empty(pass.g_by_rank ? std::vector<int64_t>{pass.R, pass.D} : std::vector<int64_t>{pass.D, pass.R},
                  z.options());
    pass.v = v->const_data_ptr(), pass.ldv = v->stride(0);
    job.g_type = type_of(g);
    job.g.push_back({0, pass.R, pass.dropout.keep_scale, g.mutable_data_ptr(), g.size(1)});
  }
  run_passes(jobs, z, c10::cuda::getCurrentCUDAStream(z.get_device()));
  return {u, g};
}

// For benchmarks: only the other primitive, y = keep * (h q^T), q given as [D,R], or as in the backward as the
// transpose of an [R,D].
Tensor rank_expand(const Tensor& h, const Tensor& q, double dropout_p, const std::optional<Tensor>& seed) {
  const c10::cuda::CUDAGuard guard(h.device());
  Tensor y = at::empty({h.size(0), q.size(0)}, h.options());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(h.get_device());
  const Dropout dropout = dropout_of(dropout_p, seed);
  if (q.is_contiguous()) expand(rows_of(h), rows_of(q), false, {}, rows_of(y), false, dropout, h, stream);
  else adapters_part_of_x(rows_of(y), rows_of(h), rows_of(q.t()), false, dropout, h, stream);
  return y;
}

// For benchmarks: y = keep * (h q^T) + sum of x w^T + bias, by our kernel if it supports it (forced), or as the
// operators do it. Every w is given as [D,K] and q as [D,R]; the backward has them as transposes of [K,D] and [R,D].
// The mask comes as Dropout::bits.
Tensor frozen_product_alone(at::TensorList x, at::TensorList w, const Tensor& h, const Tensor& q,
                            const std::optional<Tensor>& bias, const std::optional<Tensor>& bits, bool forced) {
  TORCH_CHECK_VALUE(!x.empty() && x.size() == w.size() && x.size() <= kMaxParts, text(x.size()), " x and ",
                    text(w.size()), " w: as many of each, 1 to ", text(kMaxParts));
  TORCH_CHECK_VALUE(forced || !bits.has_value(), "bits without forced: the operators draw the mask themselves");
  const c10::cuda::CUDAGuard guard(h.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(h.get_device());
  const Device& device = card_of(h);
  const bool forward = w[0].stride(1) == 1;
  const auto rows = [forward](const Tensor& matrix) { return rows_of(forward ? matrix : matrix.t()); };
  const auto weight = [&](size_t i) { return rows(w[i]); };
  const Tensor y = at::empty({h.size(0), w[0].size(0)}, h.options());
  const Matrix target = rows_of(y), left = rows_of(h), right = rows(q);
  std::vector<Operand> operands;
  std::vector<Outer> siblings(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    operands.push_back({rows_of(x[i]), weight(i)});
    siblings[i].grad = operands[i].x;
  }
  if (forced) {
    const uint32_t* const kept = bits.has_value() ? static_cast<const uint32_t*>(bits->const_data_ptr()) : nullptr;
    const Frozen job = frozen_job(target, operands, left, right, forward, bias.value_or(Tensor()), kept);
    TORCH_CHECK_VALUE(frozen_supported(job, device), "frozen_product of ", text(y), " in ", type_name(h),
                      ": the kernel needs compute capability 9.0, 16 bits, rows that begin at multiples of 16 bytes");
    run_frozen(job, device, stream);
    return y;
  }
  if (!forward) return gradient_of_x(y, siblings, {weight, kMaxParts}, left, right, {}, stream);
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
