// Matrices in device memory for the kernels and for cuBLAS: pointers and strides, because tensor views cost host time.
#pragma once
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cublas_v2.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kernels.h"

namespace zerolora {

using at::Tensor;
using Tensors = std::vector<Tensor>;

// Formats values in messages as Python does, without streams: where libstdc++ is linked statically, its locale is not
// torch's, and writing a number crashes.
inline std::string text(int64_t value) { return std::to_string(value); }
inline std::string text(at::IntArrayRef shape) {
  std::string line = "(";
  for (size_t i = 0; i < shape.size(); ++i) line += (i > 0 ? ", " : "") + text(shape[i]);
  return line + (shape.size() == 1 ? ",)" : ")");
}
inline std::string text(const Tensor& tensor) { return text(tensor.sizes()); }
inline const char* type_name(const Tensor& tensor) { return c10::toString(tensor.scalar_type()); }

inline cudaStream_t current_stream(const Tensor& tensor) {
  return c10::cuda::getCurrentCUDAStream(tensor.get_device());
}

inline void check(cudaError_t status, const char* what) {
  TORCH_CHECK(status == cudaSuccess, "zerolora: ", what, ": ", cudaGetErrorString(status));
}

#ifndef ZEROLORA_CAPABILITY  // set by the builder for PTX-only builds, which lack the kernels for newer GPUs
#define ZEROLORA_CAPABILITY 1000
#endif

inline const Device& device_info(const Tensor& tensor) {
  constexpr int kMaxDevices = 64;
  static std::array<Device, kMaxDevices> devices;
  static std::array<std::once_flag, kMaxDevices> known;
  const int index = tensor.get_device();
  TORCH_CHECK(index >= 0 && index < kMaxDevices, "zerolora: CUDA device index ", text(index), " is not below ",
              text(kMaxDevices));
  std::call_once(known[index], [index] {
    const auto read = [index](cudaDeviceAttr attribute) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, attribute, index), "reading a device attribute");
      return value;
    };
    const int capability = 10 * read(cudaDevAttrComputeCapabilityMajor) + read(cudaDevAttrComputeCapabilityMinor);
    devices[index] =
        Device{read(cudaDevAttrMultiProcessorCount), std::min(capability, ZEROLORA_CAPABILITY),
               read(cudaDevAttrMaxSharedMemoryPerBlockOptin), read(cudaDevAttrMaxSharedMemoryPerMultiprocessor)};
  });
  return devices[index];
}

inline DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::f32;
    case at::kHalf: return DType::f16;
    case at::kBFloat16: return DType::bf16;
    default:
      TORCH_CHECK_VALUE(false, "dtype=", c10::toString(type),
                        ": the CUDA operator takes float32, float16 and bfloat16");
  }
}
inline DType to_dtype(const Tensor& tensor) { return to_dtype(tensor.scalar_type()); }
inline int64_t element_bytes(DType type) { return type == DType::f32 ? 4 : 2; }

// Row-major with contiguous rows. `owner` keeps the memory alive if the caller does not own it.
struct Matrix {
  void* data = nullptr;
  int64_t rows = 0, cols = 0, ld = 0;
  DType type = DType::f32;
  Tensor owner;

  Matrix columns(int64_t begin, int64_t count) const {
    return {static_cast<char*>(data) + begin * element_bytes(type), rows, count, ld, type, owner};
  }
};

// Flattens the leading dimensions to [T, width]; copies only if rows are not contiguous or not evenly spaced.
inline Matrix flatten_rows(const Tensor& tensor) {
  const int64_t width = tensor.size(-1), rows = width == 0 ? 0 : tensor.numel() / width;
  if (tensor.is_contiguous()) return {tensor.data_ptr(), rows, width, width, to_dtype(tensor), tensor};
  const Tensor flat = tensor.reshape({-1, width});
  const bool strided = flat.stride(1) == 1 && (flat.stride(0) >= width || rows <= 1);
  const Tensor owner = strided ? flat : flat.contiguous();
  return {owner.data_ptr(), rows, width, rows <= 1 ? width : owner.stride(0), to_dtype(owner), owner};
}

// Describes the NF4 weights in `packed`: one matrix, or several experts [experts, rows, cols] that are quantized
// separately. state: [absmax, code] or, double-quantized, [absmax, code, nested absmax, nested code, offset].
inline Nf4 describe_nf4(const Tensor& packed, at::TensorList state, at::IntArrayRef shape, int64_t block,
                        int64_t nested_block) {
  TORCH_CHECK_VALUE(state.size() == 2 || state.size() == 5, "NF4 state of ", text(state.size()),
                    " tensors: expected 2 or 5");
  const int64_t bytes = packed.numel() * packed.element_size(), values = c10::multiply_integers(shape);
  TORCH_CHECK_VALUE(bytes * 2 >= values && packed.is_contiguous(), "NF4 weight of ", text(bytes),
                    " bytes: ", text(shape), " needs ", text((values + 1) / 2),
                    " contiguous bytes; under ZeRO-3 gather the parameter first");
  const bool nested = state.size() == 5;
  TORCH_CHECK_VALUE(state[0].scalar_type() == (nested ? at::kByte : at::kFloat), "NF4 absmax of dtype ",
                    type_name(state[0]), ": expected ", nested ? "uint8" : "float32");
  for (const Tensor& tensor : state) TORCH_CHECK_VALUE(tensor.is_contiguous(), "NF4 state: make it contiguous");
  Nf4 weight;
  weight.packed = static_cast<const uint8_t*>(packed.const_data_ptr()), weight.absmax = state[0].const_data_ptr();
  weight.code = state[1].const_data_ptr<float>();
  if (nested) {
    weight.nested_absmax = state[2].const_data_ptr<float>(), weight.nested_code = state[3].const_data_ptr<float>();
    weight.offset = state[4].const_data_ptr<float>();
  }
  weight.count = shape[shape.size() - 2] * shape.back();
  weight.block = static_cast<int>(block), weight.nested_block = static_cast<int>(nested_block);
  return weight;
}

inline std::vector<int64_t> shape_like(const Tensor& x, int64_t last) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = last;
  return shape;
}

// C = alpha op(A) op(B) + beta C with cuBLAS on torch's handle (its stream, workspace and precision settings); op
// is a transpose if `transpose_*` is set.
inline void product(const Matrix& c, float alpha, const Matrix& a, bool transpose_a, const Matrix& b, bool transpose_b,
                    float beta, cudaStream_t stream) {
  if (c.rows == 0 || c.cols == 0) return;
  const int64_t depth = transpose_a ? a.rows : a.cols;
  if (depth == 0) {
    const auto bytes = [&](int64_t count) { return static_cast<size_t>(count * element_bytes(c.type)); };
    if (beta == 0.f)
      check(cudaMemset2DAsync(c.data, bytes(c.ld), 0, bytes(c.cols), static_cast<size_t>(c.rows), stream),
            "clearing an empty product");
    return;
  }
  const auto allow = at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  const at::Context& context = at::globalContext();
  const bool exact = (c.type == DType::f16 && context.allowFP16ReductionCuBLAS() != allow) ||
                     (c.type == DType::bf16 && context.allowBF16ReductionCuBLAS() != allow);
  const cudaDataType_t type = c.type == DType::f32 ? CUDA_R_32F : c.type == DType::f16 ? CUDA_R_16F : CUDA_R_16BF;
  const cublasHandle_t handle = at::cuda::getCurrentCUDABlasHandle();
  if (exact) cublasSetMathMode(handle, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
  // cuBLAS is column-major: it computes C^T = op(B)^T op(A)^T.
  const auto size = [](int64_t count) { return static_cast<int>(count); };
  const cublasStatus_t status =
      cublasGemmEx(handle, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                   size(c.cols), size(c.rows), size(depth), &alpha, b.data, type, size(b.ld), a.data, type, size(a.ld),
                   &beta, c.data, type, size(c.ld), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT_TENSOR_OP);
  if (exact) cublasSetMathMode(handle, CUBLAS_DEFAULT_MATH);
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "zerolora: cuBLAS: ", cublasGetStatusString(status), " for ",
              text({c.rows, depth}), " x ", text({depth, c.cols}));
}

}  // namespace zerolora
