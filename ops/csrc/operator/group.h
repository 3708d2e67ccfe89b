// The passes of a group of shared-input projections, for any storage of the frozen weights.
#pragma once
#include <tuple>

#include "products.h"

namespace zerolora {

// Returns the outputs and h. `projected` is an earlier result of `lora_project` for the same arguments; if given,
// the returned h is empty. `write(i, y, x, h, B, bias)` writes the output of projection i.
template <typename Write>
std::tuple<Tensors, Tensor> group_forward(const Tensor& x, at::IntArrayRef outs, at::TensorList biases,
                                          at::TensorList downs, at::TensorList ups, at::ArrayRef<double> scales,
                                          double p, const std::optional<Tensor>& seed,
                                          const std::optional<Tensor>& projected, const Write& write) {
  check_adapters(x, outs, downs, ups, scales, p);
  check_biases(biases, outs);
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = current_stream(x);
  const Layout layout(downs);
  const Matrix rows = flatten_rows(x);
  if (projected.has_value()) check_h(*projected, x, rows, layout);
  const Adapters adapters = pack_adapters(projected.has_value() ? at::TensorList() : downs, ups, layout, x, stream);
  const Tensor h = projected.has_value()
                       ? *projected
                       : project(x, rows, adapters.downs, layout, scales, make_dropout(p, seed), stream);
  const Matrix h_rows = flatten_rows(h);
  Tensors ys;
  for (size_t i = 0; i < layout.size(); ++i) {
    const Matrix y = flatten_rows(ys.emplace_back(at::empty(shape_like(x, outs[i]), x.options())));
    const Matrix columns = h_rows.columns(layout.begin[i], layout.padded[i]);
    const Tensor bias = biases.empty() ? Tensor() : biases[i].to(x.scalar_type()).contiguous();
    write(i, y, rows, columns, adapters.ups[i], bias, stream);
  }
  return {std::move(ys), projected.has_value() ? at::empty({0, 0}, x.options()) : h};
}

struct Nothing {
  void operator()(const std::vector<Outer>&, cudaStream_t) const {}
};
// Returns dX, all dA and all dB. `gradient(projections, dh, downs, dropout)` returns dX; `first(projections)` runs
// before the passes over dY if dX is needed.
template <typename Gradient, typename First = Nothing>
std::tuple<Tensor, Tensors, Tensors> group_backward(at::TensorList grads, const Tensor& x, at::TensorList downs,
                                                    at::TensorList ups, const Tensor& h, at::ArrayRef<double> scales,
                                                    double p, const std::optional<Tensor>& seed, bool need_x,
                                                    bool need_down, bool need_up, const Gradient& gradient,
                                                    const First& first = {}) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = current_stream(x);
  const Layout layout(downs);
  Dropout dropout = make_dropout(p, seed);
  const Matrix rows = flatten_rows(x), h_rows = flatten_rows(h);
  const bool reuse_mask = need_x && need_down && dropout.seed != nullptr;
  const Tensor bits = reuse_mask ? empty_mask_bits(rows, layout.total, x) : Tensor();
  if (bits.defined()) dropout.bits = static_cast<uint32_t*>(bits.mutable_data_ptr());
  const Adapters adapters = pack_adapters(downs, ups, layout, x, stream);
  const Tensor dh_tensor = at::empty(h.sizes(), h.options());
  const Matrix dh = flatten_rows(dh_tensor);
  Tensors grad_downs, grad_ups;
  std::vector<Outer> projections;
  for (size_t i = 0; i < layout.size(); ++i) {
    TORCH_CHECK_VALUE(grads[i].size(-1) == ups[i].size(0) && grads[i].numel() == rows.rows * ups[i].size(0) &&
                          grads[i].scalar_type() == x.scalar_type(),
                      "gradient ", text(grads[i]), " of type ", type_name(grads[i]), " for x ", text(x), " of type ",
                      type_name(x), " and ", text(ups[i].size(0)), " outputs");
    const int begin = layout.begin[i], width = layout.padded[i];
    Matrix grad_up;
    if (need_up) grad_up = flatten_rows(grad_ups.emplace_back(at::empty(ups[i].sizes(), ups[i].options())));
    projections.push_back({flatten_rows(grads[i]), adapters.ups[i], h_rows.columns(begin, width),
                           dh.columns(begin, width), grad_up, static_cast<float>(scales[i]) * dropout.keep_scale});
  }
  if (need_x) first(projections, stream);
  backward_outer(projections, false, x, stream);
  if (need_down) {  // before dX, which reuses the mask drawn here
    for (const Tensor& down : downs) grad_downs.push_back(at::empty(down.sizes(), down.options()));
    backward_inner(rows, dh, layout, grad_downs, dropout, false, x, stream);
    dropout.stored = bits.defined();
  }
  Tensor grad_x = need_x ? gradient(projections, dh, adapters.downs, dropout, stream) : at::empty({0}, x.options());
  return {std::move(grad_x), std::move(grad_downs), std::move(grad_ups)};
}

}  // namespace zerolora
