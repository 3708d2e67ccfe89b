// The derivative of `lora_forward`, `nf4_forward` and `eight_bit_forward` for CUDA tensors: the formulas of
// ops/lora.py, ops/nf4.py and ops/eight_bit.py without Python in the forward or the backward pass.
//
// Saved for the backward: x, h, the seed, and the weights and adapters exactly as passed, because ZeRO-3 frees a
// Parameter after the forward and gathers the same tensor before the backward. They are saved before the outputs are
// computed: a recomputed checkpoint region stops at the last tensor its backward needs (torch's early
// stop), so the outputs of a linear layer at its end (a down projection) are not computed twice.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace zerolora {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;
using Scales = at::ArrayRef<double>;
using torch::autograd::AutogradContext;

using Outputs = std::tuple<Tensors, Tensor>;             // ys, h
using Gradients = std::tuple<Tensor, Tensors, Tensors>;  // of x, of A, of B
using Project = Tensor(const Tensor&, at::TensorList, Scales, double, const MaybeTensor&);
using LoraForward = Outputs(const Tensor&, at::TensorList, at::TensorList, at::TensorList, at::TensorList, Scales,
                            double, const MaybeTensor&, const MaybeTensor&);
using LoraBackward = Gradients(at::TensorList, const Tensor&, at::TensorList, at::TensorList, at::TensorList,
                               const Tensor&, Scales, double, const MaybeTensor&, bool, bool, bool);
using Nf4Forward = Outputs(const Tensor&, at::TensorList, at::TensorList, at::IntArrayRef, int64_t, int64_t,
                           at::TensorList, at::TensorList, at::TensorList, Scales, double, const MaybeTensor&,
                           const MaybeTensor&);
using Nf4Backward = Gradients(at::TensorList, const Tensor&, at::TensorList, at::TensorList, at::IntArrayRef, int64_t,
                              int64_t, at::TensorList, at::TensorList, const Tensor&, Scales, double,
                              const MaybeTensor&, bool, bool, bool);

using EightBitForward = Outputs(const Tensor&, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                                at::TensorList, Scales, double, const MaybeTensor&, const MaybeTensor&);
using EightBitBackward = Gradients(at::TensorList, const Tensor&, at::TensorList, at::TensorList, at::TensorList,
                                   at::TensorList, const Tensor&, Scales, double, const MaybeTensor&, bool, bool, bool);

template <typename Signature> c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// The frozen weights: in the type of x (no states), in 8 bits (`states` are the scales of their rows), or packed to
// 4 bits (with a block size).
struct Base {
  at::TensorList weights, states;
  at::IntArrayRef rows;
  int64_t block = 0, nested_block = 0;
  bool eight_bit() const { return !states.empty() && block == 0; }
};

Tensor call_project(const Tensor& x, at::TensorList downs, Scales scales, double p, const MaybeTensor& seed) {
  static const auto project = find<Project>("zerolora::lora_project");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return project.call(x, downs, scales, p, seed);
}

Outputs call_forward(const Tensor& x, const Base& base, at::TensorList biases, at::TensorList downs, at::TensorList ups,
                     Scales scales, double p, const MaybeTensor& seed, const MaybeTensor& h) {
  static const auto lora = find<LoraForward>("zerolora::lora_forward");
  static const auto nf4 = find<Nf4Forward>("zerolora::nf4_forward");
  const at::AutoDispatchBelowADInplaceOrView guard;
  static const auto eight_bit = find<EightBitForward>("zerolora::eight_bit_forward");
  if (base.states.empty()) return lora.call(x, base.weights, biases, downs, ups, scales, p, seed, h);
  if (base.eight_bit()) return eight_bit.call(x, base.weights, base.states, biases, downs, ups, scales, p, seed, h);
  return nf4.call(x, base.weights, base.states, base.rows, base.block, base.nested_block, biases, downs, ups, scales, p,
                  seed, h);
}

Gradients call_backward(at::TensorList grads, const Tensor& x, const Base& base, at::TensorList downs,
                        at::TensorList ups, const Tensor& h, Scales scales, double p, const MaybeTensor& seed,
                        bool need_x, bool need_down, bool need_up) {
  static const auto lora = find<LoraBackward>("zerolora::lora_backward");
  static const auto nf4 = find<Nf4Backward>("zerolora::nf4_backward");
  // With create_graph the dispatcher must see the call, so that it can reject a second derivative.
  std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
  if (!at::GradMode::is_enabled()) guard.emplace();
  if (base.states.empty())
    return lora.call(grads, x, base.weights, downs, ups, h, scales, p, seed, need_x, need_down, need_up);
  static const auto eight_bit = find<EightBitBackward>("zerolora::eight_bit_backward");
  if (base.eight_bit())
    return eight_bit.call(grads, x, base.weights, base.states, downs, ups, h, scales, p, seed, need_x, need_down,
                          need_up);
  return nf4.call(grads, x, base.weights, base.states, base.rows, base.block, base.nested_block, downs, ups, h, scales,
                  p, seed, need_x, need_down, need_up);
}

// Saved tensors, because a context stores its own only after `forward` has returned.
struct Saved : torch::CustomClassHolder {
  std::vector<torch::autograd::SavedVariable> variables;
};

// Saves variables in the order of the arguments below: x, weights, states, biases, downs, ups, then the seed.
struct Group : torch::autograd::Function<Group> {
  static Tensors forward(AutogradContext* ctx, const Tensor& x, const at::TensorList& weights,
                         const at::TensorList& states, const at::TensorList& biases, const at::TensorList& downs,
                         const at::TensorList& ups, at::IntArrayRef rows, int64_t block, int64_t nested_block,
                         Scales scales, double p, const MaybeTensor& seed) {
    const Base base{weights, states, rows, block, nested_block};
    const Tensor h = call_project(x, downs, scales, p, seed);
    const auto tensors = c10::make_intrusive<Saved>();
    tensors->variables.reserve(3 + 3 * weights.size() + states.size());
    for (const Tensor& tensor : {x, h, seed.value_or(Tensor())}) tensors->variables.emplace_back(tensor, false);
    for (const at::TensorList& list : {weights, downs, ups, states})
      for (const Tensor& tensor : list) tensors->variables.emplace_back(tensor, false);
    ctx->saved_data["tensors"] = c10::IValue::make_capsule(tensors);
    Tensors outputs = std::get<0>(call_forward(x, base, biases, downs, ups, scales, p, seed, h));
    ctx->saved_data["counts"] =
        std::vector<int64_t>{static_cast<int64_t>(weights.size()), static_cast<int64_t>(states.size()),
                             static_cast<int64_t>(biases.size()), block, nested_block};
    ctx->saved_data["rows"] = rows.vec();
    ctx->saved_data["scales"] = scales.vec();
    ctx->saved_data["p"] = p;
    ctx->set_materialize_grads(false);  // otherwise zeros would be allocated for h, which has no gradient
    outputs.push_back(h);
    ctx->mark_non_differentiable({outputs.back()});
    return outputs;
  }

  static Tensors backward(AutogradContext* ctx, Tensors grads) {
    const std::vector<int64_t> counts = ctx->saved_data["counts"].toIntVector();
    const size_t n = counts[0], states = counts[1], biases = counts[2];
    const Tensors saved = take_saved(ctx);
    const at::TensorList all(saved);
    const Tensor& x = all[0];
    const at::TensorList weights = all.slice(3, n), downs = all.slice(3 + n, n), ups = all.slice(3 + 2 * n, n);
    const size_t first_bias = 1 + n + states, first_down = first_bias + biases, first_up = first_down + n;
    const auto any_needed = [&](size_t first) {
      bool any = false;
      for (size_t i = first; i < first + n; ++i) any = any || ctx->needs_input_grad(i);
      return any;
    };
    TORCH_CHECK_VALUE(!any_needed(1),
                      "weight.requires_grad=True: the fused operator does not compute its gradient; freeze it");
    grads.pop_back();  // h's
    for (size_t i = 0; i < n; ++i) {
      if (grads[i].defined()) continue;  // a projection with an unused output
      std::vector<c10::SymInt> shape = x.sym_sizes().vec();
      shape.back() = ups[i].sym_size(0);
      grads[i] = at::zeros_symint(shape, x.options());
    }
    const std::vector<int64_t> rows = ctx->saved_data["rows"].toIntVector();
    const std::vector<double> scales = ctx->saved_data["scales"].toDoubleVector();
    const Base base{weights, all.slice(3 + 3 * n, states), rows, counts[3], counts[4]};
    const MaybeTensor seed = all[2].defined() ? MaybeTensor(all[2]) : std::nullopt;
    const auto [grad_x, grad_downs, grad_ups] =
        call_backward(grads, x, base, downs, ups, all[1], scales, ctx->saved_data["p"].toDouble(), seed,
                      ctx->needs_input_grad(0), any_needed(first_down), any_needed(first_up));
    Tensors results(first_up + n + 6);  // undefined: no gradient; 6 arguments follow the lists
    if (ctx->needs_input_grad(0)) results[0] = grad_x;
    for (size_t i = 0; i < biases; ++i) {
      if (!ctx->needs_input_grad(first_bias + i)) continue;
      std::vector<int64_t> leading(grads[i].dim() - 1);
      for (size_t d = 0; d < leading.size(); ++d) leading[d] = static_cast<int64_t>(d);
      results[first_bias + i] = grads[i].sum(leading);
    }
    std::copy(grad_downs.begin(), grad_downs.end(), results.begin() + static_cast<int64_t>(first_down));
    std::copy(grad_ups.begin(), grad_ups.end(), results.begin() + static_cast<int64_t>(first_up));
    return results;
  }

  // Returns the saved tensors and frees them unless the graph is retained, as the engine does with a context's list.
  static Tensors take_saved(AutogradContext* ctx) {
    ctx->get_saved_variables();  // empty, but raises on a second backward through a freed graph
    const auto capsule = ctx->saved_data["tensors"].toCapsule();
    auto& variables = static_cast<Saved*>(capsule.get())->variables;
    Tensors tensors;
    tensors.reserve(variables.size());
    for (const auto& variable : variables) tensors.push_back(variable.unpack());
    if (!torch::autograd::get_current_graph_task_keep_graph()) variables.clear();
    return tensors;
  }
};

// Records the derivative if one will be needed; otherwise nothing is saved.
Outputs forward(const Tensor& x, const Base& base, at::TensorList biases, at::TensorList downs, at::TensorList ups,
                Scales scales, double p, const MaybeTensor& seed, const MaybeTensor& h) {
  if (!torch::autograd::compute_requires_grad(x, base.weights, biases, downs, ups))
    return call_forward(x, base, biases, downs, ups, scales, p, seed, h);
  TORCH_CHECK_VALUE(!h.has_value(), "h: only the whole forward pass, without h, has a derivative");
  Tensors outputs = Group::apply(x, base.weights, base.states, biases, downs, ups, base.rows, base.block,
                                 base.nested_block, scales, p, seed);
  Tensor projected = std::move(outputs.back());
  outputs.pop_back();
  return {std::move(outputs), std::move(projected)};
}

Outputs lora_forward(const Tensor& x, at::TensorList weights, at::TensorList biases, at::TensorList downs,
                     at::TensorList ups, Scales scales, double p, const MaybeTensor& seed, const MaybeTensor& h) {
  return forward(x, {weights, {}, {}}, biases, downs, ups, scales, p, seed, h);
}

Outputs eight_bit_forward(const Tensor& x, at::TensorList weights, at::TensorList row_scales, at::TensorList biases,
                          at::TensorList downs, at::TensorList ups, Scales scales, double p, const MaybeTensor& seed,
                          const MaybeTensor& h) {
  return forward(x, {weights, row_scales, {}}, biases, downs, ups, scales, p, seed, h);
}

Outputs nf4_forward(const Tensor& x, at::TensorList packed, at::TensorList states, at::IntArrayRef rows, int64_t block,
                    int64_t nested_block, at::TensorList biases, at::TensorList downs, at::TensorList ups,
                    Scales scales, double p, const MaybeTensor& seed, const MaybeTensor& h) {
  return forward(x, {packed, states, rows, block, nested_block}, biases, downs, ups, scales, p, seed, h);
}

}  // namespace

// For CUDA tensors only: other devices use the formula that Python registers. The tests build this file for the CPU.
#ifndef ZEROLORA_AUTOGRAD
#define ZEROLORA_AUTOGRAD AutogradCUDA
#endif
TORCH_LIBRARY_IMPL(zerolora, ZEROLORA_AUTOGRAD, library) {
  library.impl("lora_forward", lora_forward);
  library.impl("nf4_forward", nf4_forward);
  library.impl("eight_bit_forward", eight_bit_forward);
  // Reject a second derivative; without this it would silently be zero.
  library.impl("lora_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("nf4_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("eight_bit_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace zerolora
