// CUDA implementations of the operators that ops/lora.py and ops/nf4.py declare: the order of the passes and products.
// The frozen product stays with cuBLAS and adds into what the adapter wrote (beta = 1); docs/ops.md has the
// measurement.
#include <torch/extension.h>
#include <torch/library.h>

#include <functional>
#include <tuple>

#include "passes.h"

namespace zerolora {
namespace {

using Weight = std::function<Tensor(size_t)>;  // the frozen weight [O, I] of a sibling, stored or dequantised

std::tuple<Tensors, Tensor> forward(const Tensor& x, const Weight& weight, const Tensors& biases, const Tensors& downs,
                                    const Tensors& ups, at::ArrayRef<double> scales, double p,
                                    const std::optional<Tensor>& seed) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(x.get_device());
  const Layout layout(downs);
  const Tensor rows = rows_of(x, x.size(-1));
  const Tensor h = project(rows, downs, layout, scales, dropout_of(p, seed), stream);
  Tensors ys;
  for (size_t i = 0; i < downs.size(); ++i) {
    const Tensor up = pack_up(ups[i], layout.padded[i], rows);
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = up.size(0);
    Tensor y = at::empty({rows.size(0), up.size(0)}, rows.options());
    const std::optional<Tensor> bias =
        biases.empty() ? std::nullopt : std::optional<Tensor>(biases[i].to(rows.scalar_type()).contiguous());
    const Tensor columns = h.narrow(1, layout.begin[i], layout.padded[i]);
    if (rows.size(0) < kFewTokens) {
      if (bias.has_value()) at::addmm_out(y, *bias, rows, weight(i).t());
      else at::mm_out(y, rows, weight(i).t());
      expand(columns, up, true, std::nullopt, y, true, {}, stream);
    } else {
      expand(columns, up, true, bias, y, false, {}, stream);
      y.addmm_(rows, weight(i).t());
    }
    ys.push_back(y.view(shape));
  }
  return {ys, h};
}

std::tuple<Tensor, Tensors, Tensors> backward(const Tensors& grads, const Tensor& x, const Weight& weight,
                                              const Tensors& downs, const Tensors& ups, const Tensor& h,
                                              at::ArrayRef<double> scales, double p, const std::optional<Tensor>& seed,
                                              bool need_x, bool need_down, bool need_up) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(x.get_device());
  const Layout layout(downs);
  const Dropout dropout = dropout_of(p, seed);
  const Tensor rows = rows_of(x, x.size(-1));
  Tensor dh = at::empty_like(h);
  Tensors grad_rows, grad_downs, grad_ups;
  for (size_t i = 0; i < downs.size(); ++i) {
    grad_rows.push_back(rows_of(grads[i], grads[i].size(-1)));
    grad_ups.push_back(at::empty_like(ups[i], at::MemoryFormat::Contiguous));
    Tensor columns = dh.narrow(1, layout.begin[i], layout.padded[i]);
    backward_outer(grad_rows[i], ups[i], h.narrow(1, layout.begin[i], layout.padded[i]), columns, grad_ups[i],
                   scales[i], false, stream);
  }
  Tensor grad_x = at::empty(need_x ? rows.sizes().vec() : std::vector<int64_t>{0}, rows.options());
  if (need_x) {
    const bool product_first = rows.size(0) < kFewTokens;
    if (!product_first)
      expand(dh, pack_downs(downs, layout, rows), false, std::nullopt, grad_x, false, dropout, stream);
    for (size_t i = 0; i < downs.size(); ++i) {
      if (product_first && i == 0) at::mm_out(grad_x, grad_rows[i], weight(i));
      else grad_x.addmm_(grad_rows[i], weight(i));
    }
    if (product_first) expand(dh, pack_downs(downs, layout, rows), false, std::nullopt, grad_x, true, dropout, stream);
    grad_x = grad_x.view(x.sizes());
  }
  if (need_down) {
    for (const Tensor& down : downs) grad_downs.push_back(at::empty_like(down, at::MemoryFormat::Contiguous));
    backward_inner(rows, dh, layout, grad_downs, dropout, false, stream);
  }
  if (!need_up) grad_ups.clear();
  return {grad_x, grad_downs, grad_ups};
}

// ---- operators
// -------------------------------------------------------------------------------------------------------

std::tuple<Tensors, Tensor> lora_forward(const Tensor& x, const Tensors& weights, const Tensors& biases,
                                         const Tensors& downs, const Tensors& ups, at::ArrayRef<double> scales,
                                         double p, const std::optional<Tensor>& seed) {
  return forward(x, [&](size_t i) { return weights[i]; }, biases, downs, ups, scales, p, seed);
}

std::tuple<Tensor, Tensors, Tensors> lora_backward(const Tensors& grads, const Tensor& x, const Tensors& weights,
                                                   const Tensors& downs, const Tensors& ups, const Tensor& h,
                                                   at::ArrayRef<double> scales, double p,
                                                   const std::optional<Tensor>& seed, bool need_x, bool need_down,
                                                   bool need_up) {
  return backward(
      grads, x, [&](size_t i) { return weights[i]; }, downs, ups, h, scales, p, seed, need_x, need_down, need_up);
}

// state: [absmax, code] or, double-quantised, [absmax, code, nested absmax, nested code, offset].
Tensor dequantize_nf4(const Tensor& packed, at::TensorList state, int64_t rows, int64_t cols, int64_t block,
                      int64_t nested_block, at::ScalarType dtype) {
  const c10::cuda::CUDAGuard guard(packed.device());
  TORCH_CHECK_VALUE(state.size() == 2 || state.size() == 5, "NF4 state of ", state.size(),
                    " tensors: 2 or 5 are expected");
  const int64_t bytes = packed.numel() * packed.element_size();
  TORCH_CHECK_VALUE(bytes * 2 >= rows * cols && packed.is_contiguous(), "NF4 weight of ", bytes, " bytes: [", rows,
                    ", ", cols, "] needs ", (rows * cols + 1) / 2, " contiguous bytes; gather the parameter first");
  const bool nested = state.size() == 5;
  TORCH_CHECK_VALUE(state[0].scalar_type() == (nested ? at::kByte : at::kFloat), "NF4 absmax of dtype ",
                    state[0].scalar_type());
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

// The states of all siblings one after the other; the dequantised weight lives for one product and its block goes back
// to torch's allocator, which hands the same block to the next call on this stream.
Weight nf4_weights(const Tensors& packed, const Tensors& states, at::IntArrayRef rows, int64_t cols, int64_t block,
                   int64_t nested_block, at::ScalarType dtype) {
  const size_t each = states.size() / packed.size();
  return [&packed, &states, rows, cols, block, nested_block, dtype, each](size_t i) {
    const at::TensorList state(states.data() + i * each, each);
    return dequantize_nf4(packed[i], state, rows[i], cols, block, nested_block, dtype);
  };
}

std::tuple<Tensors, Tensor> nf4_forward(const Tensor& x, const Tensors& packed, const Tensors& states,
                                        at::IntArrayRef rows, int64_t block, int64_t nested_block,
                                        const Tensors& biases, const Tensors& downs, const Tensors& ups,
                                        at::ArrayRef<double> scales, double p, const std::optional<Tensor>& seed) {
  return forward(x, nf4_weights(packed, states, rows, x.size(-1), block, nested_block, x.scalar_type()), biases, downs,
                 ups, scales, p, seed);
}

std::tuple<Tensor, Tensors, Tensors> nf4_backward(const Tensors& grads, const Tensor& x, const Tensors& packed,
                                                  const Tensors& states, at::IntArrayRef rows, int64_t block,
                                                  int64_t nested_block, const Tensors& downs, const Tensors& ups,
                                                  const Tensor& h, at::ArrayRef<double> scales, double p,
                                                  const std::optional<Tensor>& seed, bool need_x, bool need_down,
                                                  bool need_up) {
  return backward(grads, x, nf4_weights(packed, states, rows, x.size(-1), block, nested_block, x.scalar_type()), downs,
                  ups, h, scales, p, seed, need_x, need_down, need_up);
}

// The adapter alone, h recomputed: gradients are written into the given tensors, or added to what they hold.
void adapter_backward_(const Tensor& grad, const Tensor& x, const Tensor& down, const Tensor& up, double scale,
                       Tensor& grad_x, Tensor& grad_down, Tensor& grad_up, bool accumulate) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(x.get_device());
  const Layout layout({down});
  const double scales[1] = {scale};
  const Tensor rows = rows_of(x, x.size(-1)), grad_rows = rows_of(grad, grad.size(-1));
  const Tensor h = project(rows, {down}, layout, scales, {}, stream);
  Tensor dh = at::empty_like(h), grad_x_rows = grad_x.view({-1, x.size(-1)});
  Tensors grad_downs{grad_down};
  backward_outer(grad_rows, up, h, dh, grad_up, scale, accumulate, stream);
  expand(dh, pack_downs({down}, layout, rows), false, std::nullopt, grad_x_rows, accumulate, {}, stream);
  backward_inner(rows, dh, layout, grad_downs, {}, accumulate, stream);
}

// For benchmarks: the primitive alone. u = (m*z) p, g = (m*z)^T v; p is [R,D] (alone) or [D,R] (with v).
std::tuple<Tensor, Tensor> rank_pass_op(const Tensor& z, const std::optional<Tensor>& p, const std::optional<Tensor>& v,
                                        double dropout_p, const std::optional<Tensor>& seed) {
  const c10::cuda::CUDAGuard guard(z.device());
  RankPass pass = pass_over(z);
  PassOutputs out;
  pass.dropout = dropout_of(dropout_p, seed);
  pass.R = static_cast<int>(v.has_value() ? v->size(1) : p->size(0));
  Tensor u = at::empty({p.has_value() ? pass.T : 0, pass.R}, z.options()), g = at::empty({0, pass.D}, z.options());
  if (p.has_value()) {
    pass.p = p->const_data_ptr(), pass.ldp = p->stride(0), pass.p_by_rank = !v.has_value();
    out.u_type = type_of(u);
    out.u.push_back({0, pass.R, pass.dropout.keep_scale, u.mutable_data_ptr(), pass.R});
  }
  if (v.has_value()) {
    pass.g_by_rank = !p.has_value();
    g = at::empty(pass.g_by_rank ? std::vector<int64_t>{pass.R, pass.D} : std::vector<int64_t>{pass.D, pass.R},
                  z.options());
    pass.v = v->const_data_ptr(), pass.ldv = v->stride(0);
    out.g_type = type_of(g);
    out.g.push_back({0, pass.R, pass.dropout.keep_scale, g.mutable_data_ptr(), g.size(1)});
  }
  rank_pass(pass, out, z, c10::cuda::getCurrentCUDAStream(z.get_device()));
  return {u, g};
}

// For benchmarks: the other primitive alone, y = m * (h q), q given as [D,R].
Tensor rank_expand(const Tensor& h, const Tensor& q, double dropout_p, const std::optional<Tensor>& seed) {
  const c10::cuda::CUDAGuard guard(h.device());
  Tensor y = at::empty({h.size(0), q.size(0)}, h.options());
  expand(h, q, true, std::nullopt, y, false, dropout_of(dropout_p, seed),
         c10::cuda::getCurrentCUDAStream(h.get_device()));
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(zerolora, CUDA, library) {
  library.impl("lora_forward", lora_forward);
  library.impl("lora_backward", lora_backward);
  library.impl("nf4_forward", nf4_forward);
  library.impl("nf4_backward", nf4_backward);
  library.impl("dequantize_nf4", dequantize_nf4);
  library.impl("adapter_backward_", adapter_backward_);
  library.impl("rank_pass", rank_pass_op);
  library.impl("rank_expand", rank_expand);
}

}  // namespace zerolora

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.doc() = "zerolora's CUDA operators; importing registers them"; }
