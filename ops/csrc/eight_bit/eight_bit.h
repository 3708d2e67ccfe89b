// The torch-free interface of the kernels for 8-bit products. Legend: T tokens, K depth, N columns of a product.
#pragma once
#include "kernels.h"

namespace zerolora {

struct QuantizePart {
  const void* data = nullptr;  // [T, width]
  int64_t ld = 0, width = 0;
  const float* factor = nullptr;  // [width], null: 1
};

// q[T,K] = round(z / scale), scale[T] = max(largest of |z| / 448 (e4m3) or 127 (int8), 2^-100), for rows z that are
// the concatenated rows of all parts, each times its factors. A NaN in a row makes its scale NaN.
struct Quantize {
  DType dtype = DType::bf16;
  bool fp8 = true;
  QuantizePart part[kMaxGroup];
  int parts = 0;
  int64_t T = 0, K = 0;
  uint8_t* q = nullptr;
  float* scale = nullptr;
};
cudaError_t launch_quantize(const Quantize& job, const Device& device, cudaStream_t stream);

struct TransposePart {
  const uint8_t* source = nullptr;  // [rows, cols], contiguous
  int64_t rows = 0;
};

// target[i, j] = source[j, i] in bytes, for the concatenated rows of all parts; target rows are ld bytes apart.
struct TransposeBytes {
  TransposePart part[kMaxGroup];
  int parts = 0;
  int64_t cols = 0;
  uint8_t* target = nullptr;
  int64_t ld = 0;
};
cudaError_t launch_transpose_bytes(const TransposeBytes& job, cudaStream_t stream);

// y[T,N] (+)= row[T] sums[T,N] column[N]; sums are contiguous int32; column may be null.
struct Rescale {
  DType dtype = DType::bf16;
  const int32_t* sums = nullptr;
  int64_t T = 0, N = 0;
  const float *row = nullptr, *column = nullptr;
  void* y = nullptr;
  int64_t ldy = 0;
  bool accumulate = false;
};
cudaError_t launch_rescale(const Rescale& job, cudaStream_t stream);

}  // namespace zerolora
