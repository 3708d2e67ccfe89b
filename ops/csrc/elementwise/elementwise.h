// The torch-free interface of the element-wise kernels. Pointers are device memory; launches go to the given stream.
// Legend: T tokens (leading dimensions flattened), D width of a row. Arithmetic is fp32 for every type.
#pragma once
#include "kernels.h"

namespace zerolora {

// Rows of contiguous elements, `ld` elements apart.
struct Rows {
  const void* data = nullptr;
  int64_t ld = 0;
};

// y[t,d] = x[t,d] rstd[t] (offset + w[d]),  rstd[t] = (mean over d of x[t,d]^2 + eps)^(-1/2).
// With offset 0 the normalized value is rounded to the type before it is multiplied (Llama), otherwise not (Gemma).
struct RmsNorm {
  DType dtype = DType::f32;
  Rows x;
  const void* weight = nullptr;  // [D]
  int64_t T = 0, D = 0;
  float eps = 0.f, offset = 0.f;
  float* rstd = nullptr;  // [T], written by the forward, read by the backward
  Rows grad;              // of y; backward only
  void* out = nullptr;    // y, or the gradient of x; [T,D]
};
// Returns the widest supported row; wider ones give cudaErrorInvalidValue. `aligned`: rows and weight are aligned to 16
// bytes, and D is a multiple of a 16-byte vector.
int64_t widest_rms_norm(DType dtype, bool aligned);
cudaError_t launch_rms_norm(const RmsNorm& job, cudaStream_t stream);
cudaError_t launch_rms_norm_backward(const RmsNorm& job, cudaStream_t stream);

// h = f(gate) up with f(gate) rounded to the type before the product (as torch does it), f one of
//     silu(v) = v / (1 + exp(-v))        gelu(v) = v (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3))) / 2
// backward: grad_up = grad f(gate), grad_gate = grad up f'(gate).
enum class Activation { silu, gelu };
struct GatedMul {
  DType dtype = DType::f32;
  Activation activation = Activation::silu;
  Rows gate, up, grad;
  int64_t T = 0, D = 0;
  void* out = nullptr;  // h [T,D]
  void* grad_gate = nullptr;
  void* grad_up = nullptr;
  int64_t ld_grads = 0;
};
cudaError_t launch_gated_mul(const GatedMul& job, cudaStream_t stream);
cudaError_t launch_gated_mul_backward(const GatedMul& job, cudaStream_t stream);

// Element strides of [B, heads, T, D] with contiguous D.
struct Heads {
  const void* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_t = 0;
  int heads = 0;
  void* out = nullptr;  // contiguous [B, T, heads, D]
};

// Rotates the first R of D elements of every head; with i < R/2:
//     y[i] = x[i] cos[i] - x[i+R/2] sin[i]              y[i+R/2] = x[i+R/2] cos[i+R/2] + x[i] sin[i+R/2]
// or applies the transpose, for the backward; the other D - R are copied.
struct Rope {
  DType dtype = DType::f32;
  Heads q, k;
  int64_t B = 0, T = 0;
  int D = 0, R = 0;
  const void* cos = nullptr;  // [B or 1, T, R], strides in elements
  const void* sin = nullptr;
  int64_t angle_stride_b = 0, angle_stride_t = 0;
  bool transposed = false;
};
cudaError_t launch_rope(const Rope& job, cudaStream_t stream);

}  // namespace zerolora
