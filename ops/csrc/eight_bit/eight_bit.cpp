// CUDA implementations of the operators that ops/eight_bit.py declares.
// Legend: T tokens, I in, O out, R rank; see ops/eight_bit.py for the formulas.
#include <torch/library.h>

#include <tuple>

#include "group.h"
#include "scaled_product.h"

namespace zerolora {
namespace {

struct Quantized {
  Tensor q, scale;
};

// Quantizes the concatenated rows of all parts, each multiplied by its factors if given.
Quantized quantize_parts(const std::vector<Matrix>& parts, at::TensorList factors, at::ScalarType storage,
                         const Tensor& like, cudaStream_t stream) {
  TORCH_CHECK_VALUE(!parts.empty() && parts.size() <= kMaxGroup, text(static_cast<int64_t>(parts.size())),
                    " matrices to quantize: must be 1 to ", text(kMaxGroup));
  TORCH_CHECK_VALUE(storage == at::kByte || storage == at::kChar, "storage=", c10::toString(storage),
                    ": expected uint8 (e4m3) or int8");
  Quantize job;
  job.dtype = parts[0].type, job.fp8 = storage == at::kByte, job.T = parts[0].rows;
  for (size_t i = 0; i < parts.size(); ++i) {
    const float* const factor = factors.empty() ? nullptr : factors[i].const_data_ptr<float>();
    job.part[job.parts++] = {parts[i].data, parts[i].ld, parts[i].cols, factor};
    job.K += parts[i].cols;
  }
  Quantized result{at::empty({job.T, job.K}, like.options().dtype(storage)),
                   at::empty({job.T}, like.options().dtype(at::kFloat))};
  job.q = static_cast<uint8_t*>(result.q.mutable_data_ptr());
  job.scale = result.scale.mutable_data_ptr<float>();
  check(launch_quantize(job, device_info(like), stream), "quantizing rows");
  return result;
}

void check_weights(const Tensor& x, at::TensorList weights, at::TensorList row_scales) {
  TORCH_CHECK_VALUE(weights.size() == row_scales.size(), text(weights.size()), " 8-bit weights, ",
                    text(row_scales.size()), " row_scales: need equal counts");
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor &weight = weights[i], &scale = row_scales[i];
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) == x.size(-1) && weight.is_contiguous(), "8-bit weight ",
                      text(weight), " for x ", text(x), ": expected [O, ", text(x.size(-1)),
                      "]; under ZeRO-3 gather the parameter first");
    TORCH_CHECK_VALUE((weight.scalar_type() == at::kByte || weight.scalar_type() == at::kChar) &&
                          weight.scalar_type() == weights[0].scalar_type(),
                      "8-bit weight of type ", type_name(weight), ": expected all uint8 (e4m3) or all int8");
    TORCH_CHECK_VALUE(scale.dim() == 1 && scale.size(0) == weight.size(0) && scale.scalar_type() == at::kFloat &&
                          scale.is_contiguous() && scale.device() == x.device() && weight.device() == x.device(),
                      "row_scale ", text(scale), " of type ", type_name(scale), " on ", scale.device().str(),
                      " for weight ", text(weight), " on ", weight.device().str());
  }
}

std::vector<int64_t> output_widths(at::TensorList weights) {
  std::vector<int64_t> outs;
  for (const Tensor& weight : weights) outs.push_back(weight.size(0));
  return outs;
}

// Returns the group's weights transposed and concatenated, [I, sum of O]; they are freed after one product.
Tensor transpose_weights(at::TensorList weights, cudaStream_t stream) {
  TransposeBytes job;
  job.cols = weights[0].size(1);
  for (const Tensor& weight : weights) {
    job.part[job.parts++] = {static_cast<const uint8_t*>(weight.const_data_ptr()), weight.size(0)};
    job.ld += weight.size(0);
  }
  const Tensor transposed = at::empty({job.cols, job.ld}, weights[0].options());
  job.target = static_cast<uint8_t*>(transposed.mutable_data_ptr());
  check(launch_transpose_bytes(job, stream), "transposing 8-bit weights");
  return transposed;
}

// Computes dX = beta dX + u (g_q W_q), with (g_q, u) the quantized rows of all v dY.
void frozen_gradient(const Matrix& target, const Quantized& g, at::TensorList weights, float beta, const Tensor& like,
                     cudaStream_t stream) {
  scaled_product(target, {g.q, g.scale, transpose_weights(weights, stream), {}}, beta, like, stream);
}

std::tuple<Tensor, Tensor> quantize_rows(at::TensorList parts, at::TensorList factors, at::ScalarType storage) {
  TORCH_CHECK_VALUE(!parts.empty() && (factors.empty() || factors.size() == parts.size()), text(parts.size()),
                    " parts, ", text(factors.size()), " factors: need equal counts, or no factors");
  const c10::cuda::CUDAGuard guard(parts[0].device());
  std::vector<Matrix> rows;
  for (size_t i = 0; i < parts.size(); ++i) {
    rows.push_back(flatten_rows(parts[i]));
    TORCH_CHECK_VALUE(rows[i].rows == rows[0].rows && rows[i].type == rows[0].type, "parts ", text(parts[0]), " and ",
                      text(parts[i]), ": need the same number of rows and the same type");
    TORCH_CHECK_VALUE(factors.empty() || (factors[i].numel() == rows[i].cols && factors[i].is_contiguous() &&
                                          factors[i].scalar_type() == at::kFloat),
                      "factors: expected one float32 for each column");
  }
  const auto stream = current_stream(parts[0]);
  Quantized result = quantize_parts(rows, factors, storage, parts[0], stream);
  return {std::move(result.q), std::move(result.scale)};
}

Tensor eight_bit_product(const Tensor& q, const Tensor& scale, const Tensor& right,
                         const std::optional<Tensor>& column_scale, bool fast) {
  const c10::cuda::CUDAGuard guard(q.device());
  const Tensor y = at::empty({q.size(0), right.size(0)}, q.options().dtype(at::kBFloat16));
  scaled_product(flatten_rows(y), {q, scale, right, column_scale.value_or(Tensor()), fast}, 0.f, y, current_stream(q));
  return y;
}

Tensor eight_bit_linear(const Tensor& x, const Tensor& weight, const Tensor& row_scale,
                        const std::optional<Tensor>& bias) {
  check_weights(x, weight, row_scale);
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = current_stream(x);
  const Quantized input = quantize_parts({flatten_rows(x)}, {}, weight.scalar_type(), x, stream);
  Tensor y = at::empty(shape_like(x, weight.size(0)), x.options());
  scaled_product(flatten_rows(y), {input.q, input.scale, weight, row_scale}, 0.f, x, stream);
  if (bias.has_value()) y.add_(*bias);
  return y;
}

Tensor eight_bit_linear_backward(at::TensorList grads, at::TensorList weights, at::TensorList row_scales) {
  const Tensor& like = grads[0];
  const c10::cuda::CUDAGuard guard(like.device());
  std::vector<Matrix> rows;
  for (const Tensor& grad : grads) rows.push_back(flatten_rows(grad));
  Tensor grad_x = at::empty(shape_like(like, weights[0].size(1)), like.options());
  const auto stream = current_stream(like);
  frozen_gradient(flatten_rows(grad_x), quantize_parts(rows, row_scales, weights[0].scalar_type(), like, stream),
                  weights, 0.f, like, stream);
  return grad_x;
}

std::tuple<Tensors, Tensor> eight_bit_forward(const Tensor& x, at::TensorList weights, at::TensorList row_scales,
                                              at::TensorList biases, at::TensorList downs, at::TensorList ups,
                                              at::ArrayRef<double> scales, double p, const std::optional<Tensor>& seed,
                                              const std::optional<Tensor>& h) {
  check_weights(x, weights, row_scales);
  Quantized input;
  const auto write = [&](size_t i, const Matrix& y, const Matrix& rows, const Matrix& h_i, const Matrix& up,
                         const Tensor& bias, cudaStream_t stream) {
    if (i == 0) input = quantize_parts({rows}, {}, weights[0].scalar_type(), x, stream);  // once per group
    const Scaled frozen{input.q, input.scale, weights[i], row_scales[i]};
    write_with_adapter(y, h_i, up, bias, x, stream, [&](float beta) { scaled_product(y, frozen, beta, x, stream); });
  };
  return group_forward(x, output_widths(weights), biases, downs, ups, scales, p, seed, h, write);
}

std::tuple<Tensor, Tensors, Tensors> eight_bit_backward(at::TensorList grads, const Tensor& x, at::TensorList weights,
                                                        at::TensorList row_scales, at::TensorList downs,
                                                        at::TensorList ups, const Tensor& h,
                                                        at::ArrayRef<double> scales, double p,
                                                        const std::optional<Tensor>& seed, bool need_x, bool need_down,
                                                        bool need_up) {
  check_weights(x, weights, row_scales);
  Quantized g;
  // Runs before the other passes over dY, because the end of dY is still in L2.
  const auto quantize = [&](const std::vector<Outer>& projections, cudaStream_t stream) {
    std::vector<Matrix> rows;
    for (const Outer& projection : projections) rows.push_back(projection.grad);
    g = quantize_parts(rows, row_scales, weights[0].scalar_type(), x, stream);
  };
  const auto gradient = [&](const std::vector<Outer>&, const Matrix& dh, const Matrix& all_downs,
                            const Dropout& dropout, cudaStream_t stream) {
    Tensor grad_x = at::empty(x.sizes(), x.options());
    const Matrix target = flatten_rows(grad_x);
    const bool adapter_first = target.rows >= kFewTokens;
    if (adapter_first) adapter_gradient_of_x(target, dh, all_downs, false, dropout, x, stream);
    frozen_gradient(target, g, weights, adapter_first ? 1.f : 0.f, x, stream);
    if (!adapter_first) adapter_gradient_of_x(target, dh, all_downs, true, dropout, x, stream);
    return grad_x;
  };
  return group_backward(grads, x, downs, ups, h, scales, p, seed, need_x, need_down, need_up, gradient, quantize);
}

}  // namespace

TORCH_LIBRARY_IMPL(zerolora, CUDA, library) {
  library.impl("quantize_rows", quantize_rows);
  library.impl("eight_bit_product", eight_bit_product);
  library.impl("eight_bit_linear", eight_bit_linear);
  library.impl("eight_bit_linear_backward", eight_bit_linear_backward);
  library.impl("eight_bit_forward", eight_bit_forward);
  library.impl("eight_bit_backward", eight_bit_backward);
}

}  // namespace zerolora
