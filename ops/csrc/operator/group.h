// The passes of a group of shared-input projections in order, for any storage of the frozen weights.
#pragma once
#include <tuple>

#include "products.h"

namespace zerolora {

// `given` is an earlier result of `lora_project` for the same arguments; the returned h is empty then.
// `write(i, y, x, h, B, bias)` writes the result of projection i.
template <typename Write>
std::tuple<Tensors, Tensor> group_forward(const Tensor& x, at::IntArrayRef outs, at::TensorList biases,
                                          at::TensorList downs, at::TensorList ups, at::ArrayRef<double> scales,
                                          double p, const std::optional<Tensor>& seed,
                                          const std::optional<Tensor>& given, const Write& write) {
  check_adapters(x, outs, downs, ups, scales, p);
  check_biases(biases, outs);
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(x.get_device());
  const Layout layout(downs);
  const Matrix rows = rows_of(x);
  if (given.has_value()) check_h(*given, x, rows, layout);
  const Adapters adapters = pack_adapters(given.has_value() ? at::TensorList() : downs, ups, layout, x, stream);
  const Tensor h =
      given.has_value() ? *given : project(x, rows, adapters.downs, layout, scales, dropout_of(p, seed), stream);
  const Matrix h_rows = rows_of(h);
  Tensors ys;
  for (size_t i = 0; i < layout.size(); ++i) {
    const Matrix y = rows_of(ys.emplace_back(at::empty(shape_like(x, outs[i]), x.options())));
    const Matrix columns = h_rows.columns(layout.begin[i], layout.padded[i]);
    const Tensor bias = biases.empty() ? Tensor() : biases[i].to(x.scalar_type()).contiguous();
    write(i, y, rows, columns, adapters.ups[i], bias, stream);
  }
  return {std::move(ys), given.has_value() ? at::empty({0, 0}, x.options()) : h};
}

struct Nothing {
  void operator()(const std::vector<Outer>&, cudaStream_t) const {}
};
// `gradient(siblings, dh, downs, dropout)` returns dX; `first(siblings)` runs before the passes over dY if dX is
// needed.
template <typename Gradient, typename First = Nothing>
std::tuple<Tensor, Tensors, Tensors> group_backward(at::TensorList grads, const Tensor& x, at::TensorList downs,
                                                    at::TensorList ups, const Tensor& h, at::ArrayRef<double> scales,
                                                    double p, const std::optional<Tensor>& seed, bool need_x,
                                                    bool need_down, bool need_up, const Gradient& gradient,
                                                    const First& first = {}) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(x.get_device());
  const Layout layout(downs);
  Dropout dropout = dropout_of(p, seed);
  const Matrix rows = rows_of(x), h_rows = rows_of(h);
  const bool for_x = need_x && need_down && dropout.seed != nullptr;
  const Tensor bits = for_x ? room_for_bits(rows, layout.total, x) : Tensor();
  if (bits.defined()) dropout.bits = static_cast<uint32_t*>(bits.mutable_data_ptr());
  const Adapters adapters = pack_adapters(downs, ups, layout, x, stream);
  const Tensor dh_tensor = at::empty(h.sizes(), h.options());
  const Matrix dh = rows_of(dh_tensor);
  Tensors grad_downs, grad_ups;
  std::vector<Outer> siblings;
  for (size_t i = 0; i < layout.size(); ++i) {
    TORCH_CHECK_VALUE(grads[i].size(-1) == ups[i].size(0) && grads[i].numel() == rows.rows * ups[i].size(0) &&
                          grads[i].scalar_type() == x.scalar_type(),
                      "gradient ", text(grads[i]), " of type ", type_name(grads[i]), " for x ", text(x), " of type ",
                      type_name(x), " and ", text(ups[i].size(0)), " outputs");
    const int begin = layout.begin[i], width = layout.padded[i];
    Matrix grad_up;
    if (need_up) grad_up = rows_of(grad_ups.emplace_back(at::empty(ups[i].sizes(), ups[i].options())));
    siblings.push_back({rows_of(grads[i]), adapters.ups[i], h_rows.columns(begin, width), dh.columns(begin, width),
                        grad_up, static_cast<float>(scales[i]) * dropout.keep_scale});
  }
  if (need_x) first(siblings, stream);
  backward_outer(siblings, false, x, stream);
  if (need_down) {  // first: it draws the mask, which dX then reuses
    for (const Tensor& down : downs) grad_downs.push_back(at::empty(down.sizes(), down.options()));
    backward_inner(rows, dh, layout, grad_downs, dropout, false, x, stream);
    dropout.stored = bits.defined();
  }
  Tensor grad_x = need_x ? gradient(siblings, dh, adapters.downs, dropout, stream) : at::empty({0}, x.options());
  return {std::move(grad_x), std::move(grad_downs), std::move(grad_ups)};
}

}  // namespace zerolora
