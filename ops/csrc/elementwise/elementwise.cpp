// CUDA implementations of the operators that ops/elementwise.py declares: checks, launches, and derivatives in C++.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "elementwise.h"
#include "matrix.h"

namespace zerolora {
namespace {

using torch::autograd::AutogradContext;
using Pair = std::tuple<Tensor, Tensor>;

void check_like(const char* name, const Tensor& tensor, const char* other, const Tensor& like) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == like.scalar_type() && tensor.device() == like.device(), name, " is ",
                    type_name(tensor), " on ", tensor.device().str(), ", ", other, " is ", type_name(like), " on ",
                    like.device().str(), ": convert one of them");
}
void check_launchable(int64_t elements) {
  TORCH_CHECK_VALUE(elements / 256 < std::numeric_limits<int32_t>::max(), text(elements),
                    " elements: too many for a launch");
}
Rows to_rows(const Matrix& matrix) { return {matrix.data, matrix.ld}; }

RmsNorm norm_job(const Tensor& x, const Matrix& rows, const Tensor& weight, double eps, double offset) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(-1), "weight ", text(weight),
                    " for x ", text(x), ": expected one factor per element of the last dimension");
  check_like("weight", weight, "x", x);
  TORCH_CHECK_VALUE(weight.is_contiguous(), "weight of strides ", text(weight.strides()), ": make it contiguous");
  check_launchable(x.numel());
  RmsNorm job;
  job.dtype = rows.type, job.x = to_rows(rows), job.weight = weight.const_data_ptr();
  job.T = rows.rows, job.D = rows.cols, job.eps = static_cast<float>(eps), job.offset = static_cast<float>(offset);
  return job;
}

void check_norm(cudaError_t status, const Tensor& x) {
  TORCH_CHECK_VALUE(status != cudaErrorInvalidValue, "rows of ", text(x.size(-1)), " ", type_name(x),
                    ": the kernel supports at most ", text(widest_rms_norm(to_dtype(x), true)), " (",
                    text(widest_rms_norm(to_dtype(x), false)), " if rows are not aligned to 16 bytes)");
  check(status, "launching RMSNorm");
}

Pair rms_norm_forward(const Tensor& x, const Tensor& weight, double eps, double offset) {
  const c10::cuda::CUDAGuard guard(x.device());
  const Matrix rows = flatten_rows(x);
  RmsNorm job = norm_job(x, rows, weight, eps, offset);
  Tensor y = at::empty(x.sizes(), x.options()), rstd = at::empty({job.T}, x.options().dtype(at::kFloat));
  job.out = y.mutable_data_ptr(), job.rstd = rstd.mutable_data_ptr<float>();
  check_norm(launch_rms_norm(job, current_stream(x)), x);
  return {std::move(y), std::move(rstd)};
}

Tensor rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, const Tensor& rstd, double offset) {
  const c10::cuda::CUDAGuard guard(x.device());
  TORCH_CHECK_VALUE(grad.sizes() == x.sizes(), "grad ", text(grad), " for x ", text(x));
  check_like("grad", grad, "x", x);
  const Matrix rows = flatten_rows(x), grad_rows = flatten_rows(grad);
  RmsNorm job = norm_job(x, rows, weight, 0.0, offset);
  Tensor grad_x = at::empty(x.sizes(), x.options());
  job.grad = to_rows(grad_rows), job.out = grad_x.mutable_data_ptr(), job.rstd = rstd.data_ptr<float>();
  check_norm(launch_rms_norm_backward(job, current_stream(x)), x);
  return grad_x;
}

GatedMul gated_job(Activation activation, const Tensor& gate, const Matrix& gate_rows, const Tensor& up,
                   const Matrix& up_rows) {
  TORCH_CHECK_VALUE(gate.dim() >= 1 && gate.sizes() == up.sizes(), "gate ", text(gate), " and up ", text(up),
                    ": expected the same shape");
  check_like("up", up, "gate", gate);
  check_launchable(gate.numel());
  GatedMul job;
  job.dtype = gate_rows.type, job.activation = activation;
  job.gate = to_rows(gate_rows), job.up = to_rows(up_rows);
  job.T = gate_rows.rows, job.D = gate_rows.cols;
  return job;
}

template <Activation kActivation> Tensor gated_mul(const Tensor& gate, const Tensor& up) {
  const c10::cuda::CUDAGuard guard(gate.device());
  const Matrix gate_rows = flatten_rows(gate), up_rows = flatten_rows(up);
  GatedMul job = gated_job(kActivation, gate, gate_rows, up, up_rows);
  Tensor h = at::empty(gate.sizes(), gate.options());
  job.out = h.mutable_data_ptr();
  check(launch_gated_mul(job, current_stream(gate)), "launching a gated product");
  return h;
}

template <Activation kActivation>
Pair gated_mul_backward(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  const c10::cuda::CUDAGuard guard(gate.device());
  const Matrix gate_rows = flatten_rows(gate), up_rows = flatten_rows(up), grad_rows = flatten_rows(grad);
  GatedMul job = gated_job(kActivation, gate, gate_rows, up, up_rows);
  TORCH_CHECK_VALUE(grad.sizes() == gate.sizes(), "grad ", text(grad), " for gate ", text(gate));
  check_like("grad", grad, "gate", gate);
  Tensor grad_gate = at::empty(gate.sizes(), gate.options()), grad_up = at::empty(gate.sizes(), gate.options());
  job.grad = to_rows(grad_rows), job.ld_grads = job.D;
  job.grad_gate = grad_gate.mutable_data_ptr(), job.grad_up = grad_up.mutable_data_ptr();
  check(launch_gated_mul_backward(job, current_stream(gate)), "launching the derivative of a gated product");
  return {std::move(grad_gate), std::move(grad_up)};
}

// Allocates [B, heads, T, D] stored as [B, T, heads, D], so that attention and the projections' gradients read whole
// rows.
Tensor heads_like(const Tensor& x) {
  const int64_t heads = x.size(1), T = x.size(2), D = x.size(3);
  return at::empty_strided(x.sizes(), {T * heads * D, D, heads * D, 1}, x.options());
}

Heads make_heads(const Tensor& x, const Tensor& out) {
  return {x.const_data_ptr(),          x.stride(0),           x.stride(1), x.stride(2),
          static_cast<int>(x.size(1)), out.mutable_data_ptr()};
}

template <bool kTransposed>
Pair rope(const Tensor& q_in, const Tensor& k_in, const Tensor& cos_in, const Tensor& sin_in) {
  const c10::cuda::CUDAGuard guard(q_in.device());
  TORCH_CHECK_VALUE(q_in.dim() == 4 && k_in.dim() == 4 && q_in.size(0) == k_in.size(0) &&
                        q_in.size(2) == k_in.size(2) && q_in.size(3) == k_in.size(3),
                    "q ", text(q_in), " and k ", text(k_in), ": expected [B, heads, T, D] of one B, T and D");
  const int64_t B = q_in.size(0), T = q_in.size(2), D = q_in.size(3);
  TORCH_CHECK_VALUE(cos_in.dim() == 3 && cos_in.sizes() == sin_in.sizes() && cos_in.size(1) == T &&
                        (cos_in.size(0) == B || cos_in.size(0) == 1),
                    "cos ", text(cos_in), " and sin ", text(sin_in), ": expected [", text(B), " or 1, ", text(T),
                    ", R]");
  const int64_t R = cos_in.size(2);
  TORCH_CHECK_VALUE(R % 2 == 0 && D % 2 == 0 && R <= D, "rotary width ", text(R), " of ", text(D),
                    ": both must be even, and the first at most the second");
  for (const Tensor* tensor : {&k_in, &cos_in, &sin_in}) check_like("k, cos or sin", *tensor, "q", q_in);
  check_launchable(q_in.numel() + k_in.numel());
  const auto rows = [](const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); };
  const Tensor q = rows(q_in), k = rows(k_in);
  const bool same_layout = cos_in.stride(-1) == 1 && cos_in.strides() == sin_in.strides();
  const Tensor cos = same_layout ? cos_in : cos_in.contiguous();
  const Tensor sin = same_layout ? sin_in : sin_in.contiguous();
  Tensor q_out = heads_like(q), k_out = heads_like(k);
  Rope job;
  job.dtype = to_dtype(q), job.B = B, job.T = T, job.D = static_cast<int>(D), job.R = static_cast<int>(R);
  job.q = make_heads(q, q_out), job.k = make_heads(k, k_out);
  job.cos = cos.const_data_ptr(), job.sin = sin.const_data_ptr();
  job.angle_stride_b = cos.size(0) == 1 ? 0 : cos.stride(0), job.angle_stride_t = cos.stride(1);
  job.transposed = kTransposed;
  check(launch_rope(job, current_stream(q)), "launching the rotary embedding");
  return {std::move(q_out), std::move(k_out)};
}

template <typename Signature> c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

struct NormFunction : torch::autograd::Function<NormFunction> {
  static Tensors forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps, double offset) {
    static const auto op = find<decltype(rms_norm_forward)>("zerolora::rms_norm_forward");
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, rstd] = op.call(x, weight, eps, offset);
    ctx->save_for_backward({x, weight, rstd});
    ctx->saved_data["offset"] = offset;
    ctx->set_materialize_grads(false);
    ctx->mark_non_differentiable({rstd});
    return {y, rstd};
  }
  static Tensors backward(AutogradContext* ctx, const Tensors& grads) {
    static const auto op = find<decltype(rms_norm_backward)>("zerolora::rms_norm_backward");
    TORCH_CHECK_VALUE(!ctx->needs_input_grad(1),
                      "weight.requires_grad=True: the operator does not compute its gradient; freeze it");
    if (!grads[0].defined()) return {Tensor(), Tensor(), Tensor(), Tensor()};
    const Tensors saved = ctx->get_saved_variables();
    return {op.call(grads[0], saved[0], saved[1], saved[2], ctx->saved_data["offset"].toDouble()), Tensor(), Tensor(),
            Tensor()};
  }
};

template <Activation kActivation> struct GatedFunction : torch::autograd::Function<GatedFunction<kActivation>> {
  static constexpr bool kSilu = kActivation == Activation::silu;
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up) {
    static const auto op = find<decltype(gated_mul<kActivation>)>(kSilu ? "zerolora::silu_mul" : "zerolora::gelu_mul");
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({gate, up});
    return op.call(gate, up);
  }
  static Tensors backward(AutogradContext* ctx, const Tensors& grads) {
    static const auto op = find<decltype(gated_mul_backward<kActivation>)>(kSilu ? "zerolora::silu_mul_backward"
                                                                                 : "zerolora::gelu_mul_backward");
    const Tensors saved = ctx->get_saved_variables();
    auto [grad_gate, grad_up] = op.call(grads[0], saved[0], saved[1]);
    return {grad_gate, grad_up};
  }
};

struct RopeFunction : torch::autograd::Function<RopeFunction> {
  static Tensors forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
    static const auto op = find<decltype(rope<false>)>("zerolora::rope");
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({cos, sin});
    auto [q_out, k_out] = op.call(q, k, cos, sin);
    return {q_out, k_out};
  }
  static Tensors backward(AutogradContext* ctx, const Tensors& grads) {
    static const auto op = find<decltype(rope<true>)>("zerolora::rope_backward");
    TORCH_CHECK_VALUE(!ctx->needs_input_grad(2) && !ctx->needs_input_grad(3),
                      "cos or sin requires a gradient: the operator has none of the angles");
    const Tensors saved = ctx->get_saved_variables();
    auto [grad_q, grad_k] = op.call(grads[0], grads[1], saved[0], saved[1]);
    return {grad_q, grad_k, Tensor(), Tensor()};
  }
};

Pair rms_norm_autograd(const Tensor& x, const Tensor& weight, double eps, double offset) {
  const Tensors outputs = NormFunction::apply(x, weight, eps, offset);
  return {outputs[0], outputs[1]};
}
template <Activation kActivation> Tensor gated_mul_autograd(const Tensor& gate, const Tensor& up) {
  return GatedFunction<kActivation>::apply(gate, up);
}
Pair rope_autograd(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  const Tensors outputs = RopeFunction::apply(q, k, cos, sin);
  return {outputs[0], outputs[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(zerolora, CUDA, library) {
  library.impl("rms_norm_forward", rms_norm_forward);
  library.impl("rms_norm_backward", rms_norm_backward);
  library.impl("silu_mul", gated_mul<Activation::silu>);
  library.impl("silu_mul_backward", gated_mul_backward<Activation::silu>);
  library.impl("gelu_mul", gated_mul<Activation::gelu>);
  library.impl("gelu_mul_backward", gated_mul_backward<Activation::gelu>);
  library.impl("rope", rope<false>);
  library.impl("rope_backward", rope<true>);
}

// For CUDA tensors only: other devices use the formulas that Python registers.
TORCH_LIBRARY_IMPL(zerolora, AutogradCUDA, library) {
  library.impl("rms_norm_forward", rms_norm_autograd);
  library.impl("silu_mul", gated_mul_autograd<Activation::silu>);
  library.impl("gelu_mul", gated_mul_autograd<Activation::gelu>);
  library.impl("rope", rope_autograd);
  // Reject a second derivative; without this it would silently be zero.
  library.impl("rms_norm_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("silu_mul_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("gelu_mul_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("rope_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace zerolora
