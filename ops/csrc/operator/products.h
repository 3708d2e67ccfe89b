// Products with frozen weights W plus the adapter's terms: x W^T + h B^T forward, dY W + m*(dh A) backward.
// Hopper's kernel computes both at once (frozen.cu). Otherwise cuBLAS adds the frozen product to the adapter's term
// (beta = 1); below kFewTokens the adapter's term is added to the product.
#pragma once
#include <ATen/record_function.h>

#include "passes.h"

namespace zerolora {

// The group's weights [O, I]: stored ones, or dequantized on demand.
struct Weights {
  c10::function_ref<Matrix(size_t)> of;
  size_t at_once;  // how many may be in memory at the same time
};

// The name of frozen products in profiles.
constexpr const char* kFrozenProduct = "zerolora::frozen_product";

// Computes y = x W^T forward, dY W backward, with cuBLAS; beta = 1 adds the product to y.
inline void frozen_product(const Matrix& y, const Matrix& x, const Matrix& weight, bool forward, float beta,
                           cudaStream_t stream) {
  RECORD_FUNCTION(kFrozenProduct, c10::ArrayRef<const c10::IValue>());
  product(y, 1.f, x, false, weight, forward, beta, stream);
}

struct Operand {
  Matrix x, weight;
};

// Describes y = h q + sum of x W^T + bias forward, and y = keep * (h q) + sum of dY W backward, with q by rank.
inline Frozen frozen_job(const Matrix& y, const std::vector<Operand>& operands, const Matrix& h, const Matrix& q,
                         bool forward, const Tensor& bias, const uint32_t* bits) {
  TORCH_INTERNAL_ASSERT(operands.size() <= kMaxParts);
  Frozen job;
  job.dtype = y.type, job.forward = forward;
  for (const auto& [x, weight] : operands) job.part[job.parts++] = {x.data, x.ld, weight.data, weight.ld, x.cols};
  job.h = h.data, job.ldh = h.ld, job.q = q.data, job.ldq = q.ld, job.R = static_cast<int>(h.cols);
  job.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  job.y = y.data, job.ldy = y.ld, job.T = y.rows, job.D = y.cols;
  job.bits = bits;
  return job;
}

// Returns whether our kernel is faster than writing the adapter's term and adding cuBLAS's product to it. A round with
// few tiles costs as much as a full one, while cuBLAS uses smaller tiles; this loss grows with the depth K. The gain
// grows with the number of parts, which are not added to a stored sum. The constants are fitted to 136 results of
// tests/bench/frozen_shapes.py: cuBLAS also loses 5 %, and the gain per part corresponds to a depth of 300.
inline bool is_frozen_faster(const Frozen& job, const Device& device) {
  constexpr double kUsual = 0.95, kWorth = 300;
  constexpr int64_t kRows = kFrozenCluster * kFrozenRows;
  if (job.T < kFewTokens || job.D == 0) return false;
  const int64_t tiles = (job.T + kRows - 1) / kRows * ((job.D + kFrozenCols - 1) / kFrozenCols);
  const int64_t at_once = device.multiprocessors / kFrozenCluster, rounds = (tiles + at_once - 1) / at_once;
  int64_t K = 0;
  for (int i = 0; i < job.parts; ++i) K += job.part[i].K;
  const double filled = static_cast<double>(job.T) * job.D / (rounds * at_once * kRows * kFrozenCols);
  return (kUsual / filled - 1) * K <= kWorth * job.parts;
}

inline void run_frozen(const Frozen& job, const Device& device, cudaStream_t stream) {
  RECORD_FUNCTION(kFrozenProduct, c10::ArrayRef<const c10::IValue>());
  check(launch_frozen(job, device, stream), "launching the frozen product");
}

// Runs our kernel if it supports the job and is faster; otherwise returns false.
inline bool run_frozen_if_best(const Frozen& job, const Tensor& like, cudaStream_t stream) {
  if (!frozen_supported(job, device_info(like)) || !is_frozen_faster(job, device_info(like))) return false;
  run_frozen(job, device_info(like), stream);
  return true;
}

// Computes y = h B^T + bias + the product that `frozen(beta)` adds to y (beta = 1) or writes first (beta = 0).
template <typename FrozenTerm>
void write_with_adapter(const Matrix& y, const Matrix& h, const Matrix& up, const Tensor& bias, const Tensor& like,
                        cudaStream_t stream, const FrozenTerm& frozen) {
  const bool product_first = y.rows < kFewTokens && !bias.defined();
  if (product_first) frozen(0.f);
  if (bias.defined()) expand(h, up, false, bias, y, false, {}, like, stream);
  else if (product_first || !prefill(y, h, up, false, like, stream))
    product(y, 1.f, h, false, up, true, product_first ? 1.f : 0.f, stream);
  if (!product_first) frozen(1.f);
}

// Computes y = x W^T + h B^T + bias.
inline void output(const Matrix& y, const Matrix& x, const Matrix& weight, const Matrix& h, const Matrix& up,
                   const Tensor& bias, const Tensor& like, cudaStream_t stream) {
  if (run_frozen_if_best(frozen_job(y, {{x, weight}}, h, up, true, bias, nullptr), like, stream)) return;
  write_with_adapter(y, h, up, bias, like, stream,
                     [&](float beta) { frozen_product(y, x, weight, true, beta, stream); });
}

// Computes target = keep * (dh A), or adds it.
inline void adapter_gradient_of_x(const Matrix& target, const Matrix& dh, const Matrix& downs, bool accumulate,
                                  const Dropout& dropout, const Tensor& like, cudaStream_t stream) {
  if (dropout.seed == nullptr) {
    if (accumulate || !prefill(target, dh, downs, true, like, stream))
      product(target, 1.f, dh, false, downs, false, accumulate ? 1.f : 0.f, stream);
    return;
  }
  expand(dh, downs, true, {}, target, accumulate, dropout, like, stream);
}

// Returns dX = sum of dY W + keep * (dh A). Products share a launch for as many weights as memory allows. The first
// launch includes the adapter's part if our kernel runs it, which needs the mask's bits; otherwise that part comes
// before or after the products.
inline Tensor gradient_of_x(const Tensor& x, const std::vector<Outer>& projections, const Weights& weights,
                            const Matrix& dh, const Matrix& downs, const Dropout& dropout, cudaStream_t stream) {
  Tensor grad_x = at::empty(x.sizes(), x.options());
  const Matrix target = flatten_rows(grad_x);
  const bool adapter_first = target.rows >= kFewTokens;
  const bool mask_known = dropout.seed == nullptr || dropout.stored;
  const size_t most = std::min(weights.at_once, static_cast<size_t>(kMaxParts));
  for (size_t done = 0; done < projections.size();) {
    std::vector<Operand> together;
    while (together.size() < most && done + together.size() < projections.size()) {
      const size_t i = done + together.size();
      together.push_back({projections[i].grad, weights.of(i)});
    }
    const bool first = done == 0;
    done += together.size();
    if (first && mask_known &&
        run_frozen_if_best(frozen_job(target, together, dh, downs, false, {}, dropout.bits), x, stream))
      continue;
    if (first && adapter_first) adapter_gradient_of_x(target, dh, downs, false, dropout, x, stream);
    for (const Operand& operand : together) {
      const bool onto = adapter_first || !first || &operand != together.data();
      frozen_product(target, operand.x, operand.weight, false, onto ? 1.f : 0.f, stream);
    }
  }
  if (!adapter_first) adapter_gradient_of_x(target, dh, downs, true, dropout, x, stream);
  return grad_x;
}

}  // namespace zerolora
