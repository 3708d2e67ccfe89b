// Y[T,N] = beta Y + t (q right^T) v of e4m3 or int8 values: by cuBLAS with row scales on Hopper, by torch's products
// elsewhere, and in float32 for cases that neither supports.
// Legend: T tokens, K depth, N columns; q[T,K], right[N,K], t[T], v[N].
#pragma once
#include <ATen/record_function.h>
#include <cublasLt.h>

#include <algorithm>

#include "eight_bit.h"
#include "products.h"

namespace zerolora {

struct Scaled {
  Tensor q, t, right, v;  // v undefined: 1
  bool fast = true;       // sum only in the tensor cores, not also in float32 every 128 terms

  int64_t depth() const { return q.size(1); }
  bool fp8() const { return right.scalar_type() == at::kByte; }
};

inline Tensor view_values(const Tensor& bytes) {
  return bytes.scalar_type() == at::kByte ? bytes.view(at::kFloat8_e4m3fn) : bytes;
}

inline Tensor make_ones(int64_t count, const Tensor& like) {
  return at::ones({count}, like.options().dtype(at::kFloat));
}

#if CUBLAS_VERSION >= 120900
constexpr size_t kLtWorkspace = size_t{32} << 20;

// Descriptors of one call; cuBLAS itself caches the algorithm for a shape.
struct LtCall {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  ~LtCall() {
    if (preference != nullptr) cublasLtMatmulPreferenceDestroy(preference);
    for (const auto layout : {a, b, c})
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
    if (operation != nullptr) cublasLtMatmulDescDestroy(operation);
  }
  template <typename Value> bool set(cublasLtMatmulDescAttributes_t what, Value value) {
    return cublasLtMatmulDescSetAttribute(operation, what, &value, sizeof(value)) == CUBLAS_STATUS_SUCCESS;
  }
  template <typename Value> bool prefer(cublasLtMatmulPreferenceAttributes_t what, Value value) {
    return cublasLtMatmulPreferenceSetAttribute(preference, what, &value, sizeof(value)) == CUBLAS_STATUS_SUCCESS;
  }
  static uint32_t alignment(const void* data) {
    uint32_t bytes = 256;
    while (reinterpret_cast<uintptr_t>(data) % bytes != 0) bytes /= 2;
    return bytes;
  }
  // cuBLAS is column-major: it computes Y^T[N,T] = right q^T, right transposed.
  bool describe(const Matrix& y, const Scaled& of, const float* row, const float* column) {
    const auto size = [](int64_t count) { return static_cast<uint64_t>(count); };
    const auto succeeded = [](cublasStatus_t status) { return status == CUBLAS_STATUS_SUCCESS; };
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const int scaling = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    return succeeded(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F)) &&
           set(CUBLASLT_MATMUL_DESC_TRANSA, transposed) && set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scaling) &&
           set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scaling) && set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, column) &&
           set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, row) &&
           set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(of.fast)) &&
           succeeded(cublasLtMatrixLayoutCreate(&a, CUDA_R_8F_E4M3, size(of.depth()), size(y.cols), of.depth())) &&
           succeeded(cublasLtMatrixLayoutCreate(&b, CUDA_R_8F_E4M3, size(of.depth()), size(y.rows), of.depth())) &&
           succeeded(cublasLtMatrixLayoutCreate(&c, CUDA_R_16BF, size(y.cols), size(y.rows), y.ld)) &&
           succeeded(cublasLtMatmulPreferenceCreate(&preference)) &&
           prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kLtWorkspace) &&
           prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(of.right.const_data_ptr())) &&
           prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(of.q.const_data_ptr())) &&
           prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(y.data)) &&
           prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(y.data));
  }
};

// Multiplies with cuBLAS and a scale for each row of both operands; returns false if cuBLAS does not support the case.
inline bool outer_scaled_product(const Matrix& y, const Scaled& of, float beta, cudaStream_t stream) {
  if (!of.fp8() || y.type != DType::bf16 || device_info(of.q).capability != 90 || of.depth() % 16 != 0 ||
      y.cols % 16 != 0 || !aligned(y.data, y.ld) || !aligned(of.right.const_data_ptr(), 0))
    return false;
  const Tensor column = of.v.defined() ? of.v : make_ones(y.cols, of.q);
  LtCall call;
  if (!call.describe(y, of, of.t.const_data_ptr<float>(), column.const_data_ptr<float>())) return false;
  const cublasLtHandle_t handle = at::cuda::getCurrentCUDABlasLtHandle();
  cublasLtMatmulHeuristicResult_t best;
  int found = 0;
  if (cublasLtMatmulAlgoGetHeuristic(handle, call.operation, call.a, call.b, call.c, call.c, call.preference, 1, &best,
                                     &found) != CUBLAS_STATUS_SUCCESS ||
      found == 0)
    return false;
  const Tensor workspace = at::empty({static_cast<int64_t>(best.workspaceSize)}, of.q.options().dtype(at::kByte));
  const float alpha = 1.f;
  const cublasStatus_t status = cublasLtMatmul(handle, call.operation, &alpha, of.right.const_data_ptr(), call.a,
                                               of.q.const_data_ptr(), call.b, &beta, y.data, call.c, y.data, call.c,
                                               &best.algo, workspace.mutable_data_ptr(), best.workspaceSize, stream);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return false;
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "zerolora: cuBLAS: ", cublasGetStatusString(status), " for 8 bits, ",
              text({y.rows, of.depth()}), " x ", text({of.depth(), y.cols}));
  return true;
}
#else
inline bool outer_scaled_product(const Matrix&, const Scaled&, float, cudaStream_t) { return false; }
#endif

// Multiplies int8 with torch's product, some rows at a time to limit the memory of its int32 sums.
inline void int8_product(const Matrix& y, const Scaled& of, float beta, cudaStream_t stream) {
  constexpr int64_t kRowsAtOnce = 4096, kFewest = 17;  // _int_mm needs more than 16
  const Tensor transposed = of.right.t();
  for (int64_t begin = 0; begin < y.rows; begin += kRowsAtOnce) {
    const int64_t rows = std::min(kRowsAtOnce, y.rows - begin);
    Tensor q = of.q.narrow(0, begin, rows);
    if (rows < kFewest) q = at::pad(q, {0, 0, 0, 32 - rows});
    const Tensor sums = at::_int_mm(q, transposed);
    Rescale job;
    job.dtype = y.type, job.sums = sums.const_data_ptr<int32_t>(), job.T = rows, job.N = y.cols;
    job.row = of.t.const_data_ptr<float>() + begin;
    job.column = of.v.defined() ? of.v.const_data_ptr<float>() : nullptr;
    job.y = static_cast<char*>(y.data) + begin * y.ld * element_bytes(y.type), job.ldy = y.ld,
    job.accumulate = beta != 0.f;
    check(launch_rescale(job, stream), "scaling an int8 product");
  }
}

inline Tensor torch_product(const Matrix& y, const Scaled& of) {
  const bool by_16 = of.depth() % 16 == 0 && y.cols % 16 == 0;
  if (of.fp8() && by_16 && y.type == DType::bf16 && device_info(of.q).capability >= 89 &&
      aligned(of.right.const_data_ptr(), 0)) {
    const Tensor column = of.v.defined() ? of.v : make_ones(y.cols, of.q);
    return at::_scaled_mm(view_values(of.q), view_values(of.right).t(), of.t.unsqueeze(1), column.unsqueeze(0), {}, {},
                          at::kBFloat16, of.fast);
  }
  const Tensor wide = at::matmul(view_values(of.q).to(at::kFloat), view_values(of.right).to(at::kFloat).t());
  const Tensor scaled = wide.mul_(of.t.unsqueeze(1));
  return of.v.defined() ? scaled.mul_(of.v) : scaled;
}

// beta is 0 or 1.
inline void scaled_product(const Matrix& y, const Scaled& of, float beta, const Tensor& like, cudaStream_t stream) {
  RECORD_FUNCTION(kFrozenProduct, c10::ArrayRef<const c10::IValue>());
  if (y.rows == 0 || y.cols == 0) return;
  if (outer_scaled_product(y, of, beta, stream)) return;
  if (!of.fp8() && of.depth() % 8 == 0 && y.cols % 8 == 0 && aligned(of.right.const_data_ptr(), 0))
    return int8_product(y, of, beta, stream);
  const Tensor found = torch_product(y, of);
  const Tensor target = at::from_blob(y.data, {y.rows, y.cols}, {y.ld, 1}, like.options());
  if (beta == 0.f) target.copy_(found);
  else target.add_(found);
}

}  // namespace zerolora
