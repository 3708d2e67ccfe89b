// The adapters of one call: checked against x, and converted to the kernels' layout.
// Legend: T tokens, I in, O out, R rank; the ranks of a group are concatenated, each padded to a multiple of 8.
#pragma once
#include "matrix.h"

namespace zerolora {

constexpr int kMaxRank = 256;

inline Dropout make_dropout(double p, const std::optional<Tensor>& seed) {
  Dropout dropout;
  if (p == 0.0) return dropout;
  TORCH_CHECK_VALUE(seed.has_value() && seed->scalar_type() == at::kLong && seed->is_cuda() && seed->numel() == 1,
                    "dropout=", std::to_string(p), ": seed is missing; pass one int64 on the same device as x");
  dropout.seed = seed->const_data_ptr<int64_t>();
  dropout.threshold = std::min(static_cast<uint32_t>(p * 32768.0 + 0.5), 32767u);
  dropout.keep_scale = static_cast<float>(1.0 / (1.0 - p));
  return dropout;
}

// Raises ValueError unless every A matches x; same checks as ops/lora.py.
inline void check_downs(const Tensor& x, at::TensorList downs, at::ArrayRef<double> scales, double p) {
  TORCH_CHECK_VALUE(!downs.empty() && downs.size() <= kMaxGroup && scales.size() == downs.size(), "group of ",
                    text(downs.size()), " lora_down, ", text(scales.size()), " scales: need equal counts, 1 to ",
                    text(kMaxGroup));
  TORCH_CHECK_VALUE(x.dim() >= 2, "x of shape ", text(x), ": expected at least [tokens, features]");
  TORCH_CHECK_VALUE(p >= 0.0 && p < 1.0, "dropout=", std::to_string(p), ": must lie in [0, 1)");
  for (const Tensor& down : downs) {
    TORCH_CHECK_VALUE(down.dim() == 2 && down.size(1) == x.size(-1), "x ", text(x), ", lora_down ", text(down),
                      ": expected x [..., I], lora_down [R, I]");
    TORCH_CHECK_VALUE(down.size(0) >= 1 && down.size(0) <= kMaxRank, "r=", text(down.size(0)), ": must be 1 to ",
                      text(kMaxRank));
    TORCH_CHECK_VALUE(down.device() == x.device(), "x on ", x.device().str(), ", lora_down on ", down.device().str(),
                      ": move them together");
    TORCH_CHECK_VALUE(down.scalar_type() == x.scalar_type() || down.scalar_type() == at::kFloat, "x is ", type_name(x),
                      ", lora_down ", type_name(down), ": adapters need the type of x or float32");
  }
}

// Raises ValueError unless, in addition, every B matches its A and its weight's outputs.
inline void check_adapters(const Tensor& x, at::IntArrayRef outs, at::TensorList downs, at::TensorList ups,
                           at::ArrayRef<double> scales, double p) {
  TORCH_CHECK_VALUE(downs.size() == outs.size() && ups.size() == outs.size(), "group of ", text(outs.size()),
                    " weights, ", text(downs.size()), " lora_down, ", text(ups.size()),
                    " lora_up: need equal counts, 1 to ", text(kMaxGroup));
  check_downs(x, downs, scales, p);
  for (size_t i = 0; i < outs.size(); ++i) {
    const Tensor &down = downs[i], &up = ups[i];
    TORCH_CHECK_VALUE(up.dim() == 2 && up.size(0) == outs[i] && up.size(1) == down.size(0), "lora_down ", text(down),
                      ", lora_up ", text(up), ", ", text(outs[i]),
                      " outputs: expected lora_down [R, I], lora_up [O, R]");
    TORCH_CHECK_VALUE(up.device() == down.device(), "lora_down on ", down.device().str(), ", lora_up on ",
                      up.device().str(), ": move them together");
    TORCH_CHECK_VALUE(up.scalar_type() == down.scalar_type(), "lora_down is ", type_name(down), ", lora_up ",
                      type_name(up), ": convert one of them");
  }
}

inline void check_biases(at::TensorList biases, at::IntArrayRef outs) {
  bool fit = biases.empty() || biases.size() == outs.size();
  for (size_t i = 0; fit && i < biases.size(); ++i) fit = biases[i].dim() == 1 && biases[i].size(0) == outs[i];
  TORCH_CHECK_VALUE(fit, text(biases.size()), " biases for ", text(outs.size()),
                    " weights: expected one [O] per weight, or none");
}

// The position of each projection's ranks in h and dh.
struct Layout {
  std::vector<int> begin, rank, padded;
  int total = 0;
  explicit Layout(at::TensorList downs) {
    for (const Tensor& down : downs) {
      begin.push_back(total);
      rank.push_back(static_cast<int>(down.size(0)));
      padded.push_back((rank.back() + 7) / 8 * 8);
      total += padded.back();
    }
  }
  size_t size() const { return begin.size(); }
};

// Raises ValueError unless h has the shape and type of the projection of x by these A.
inline void check_h(const Tensor& h, const Tensor& x, const Matrix& rows, const Layout& layout) {
  TORCH_CHECK_VALUE(h.dim() == 2 && h.size(0) == rows.rows && h.size(1) == layout.total &&
                        h.scalar_type() == x.scalar_type() && h.device() == x.device(),
                    "h ", text(h), " of type ", type_name(h), " on ", h.device().str(), ": expected ",
                    text({rows.rows, layout.total}), " of type ", type_name(x), " on ", x.device().str());
}

struct Adapters {
  Matrix downs;             // A of the whole group, [total, I]
  std::vector<Matrix> ups;  // B of each, [O, padded]
};

inline bool usable_as_is(const Tensor& tensor, DType type) {
  return to_dtype(tensor) == type && tensor.is_contiguous();
}

// Returns whether all A are adjacent in memory, as in a flat buffer of all adapters.
inline bool downs_adjacent(at::TensorList downs, const Layout& layout, DType type) {
  const char* next = static_cast<const char*>(downs[0].const_data_ptr());
  for (size_t i = 0; i < downs.size(); ++i) {
    if (layout.rank[i] != layout.padded[i] || !usable_as_is(downs[i], type) || downs[i].const_data_ptr() != next)
      return false;
    next += downs[i].numel() * element_bytes(type);
  }
  return true;
}

inline PackJob pack_job(const Tensor& source, DType type, void* target, int64_t rows, int64_t cols) {
  PackJob job;
  job.source = source.const_data_ptr(), job.source_dtype = to_dtype(source), job.target_dtype = type;
  job.row_stride = source.stride(0), job.col_stride = source.stride(1);
  job.rows = source.size(0), job.cols = source.size(1);
  job.target = target, job.target_rows = rows, job.target_cols = cols;
  return job;
}

// Returns the adapters padded and in the type of x. Those already in this layout are used in place; the others are
// copied in one launch. A list that is not needed may be empty.
inline Adapters pack_adapters(at::TensorList downs, at::TensorList ups, const Layout& layout, const Tensor& x,
                              cudaStream_t stream) {
  const DType type = to_dtype(x);
  const int64_t width = x.size(-1);
  Adapters packed;
  packed.downs = {nullptr, layout.total, width, width, type, {}};
  packed.ups.resize(ups.size());
  const bool copy_downs = !downs.empty() && !downs_adjacent(downs, layout, type);
  if (!downs.empty() && !copy_downs) packed.downs.data = downs[0].data_ptr();
  int64_t elements = copy_downs ? layout.total * width : 0;
  for (size_t i = 0; i < ups.size(); ++i) {
    const bool copy = layout.rank[i] != layout.padded[i] || !usable_as_is(ups[i], type);
    packed.ups[i] = {copy ? nullptr : ups[i].data_ptr(), ups[i].size(0), layout.padded[i], layout.padded[i], type, {}};
    if (copy) elements += ups[i].size(0) * layout.padded[i] + 8;  // + 8: each begins at a multiple of 16 bytes
  }
  if (elements == 0) return packed;
  packed.downs.owner = at::empty({elements + 8}, x.options());
  char* next = static_cast<char*>(packed.downs.owner.data_ptr());
  const auto take = [&next, type](int64_t count) {
    char* const here = next;
    next += (count + 7) / 8 * 8 * element_bytes(type);
    return here;
  };
  std::array<PackJob, kMaxPackJobs> jobs;
  int count = 0;
  if (copy_downs) {
    char* const all = take(layout.total * width);
    for (size_t i = 0; i < downs.size(); ++i)
      jobs[count++] =
          pack_job(downs[i], type, all + layout.begin[i] * width * element_bytes(type), layout.padded[i], width);
    packed.downs.data = all;
  }
  for (size_t i = 0; i < ups.size(); ++i) {
    if (packed.ups[i].data != nullptr) continue;
    packed.ups[i].data = take(packed.ups[i].rows * packed.ups[i].cols);
    jobs[count++] = pack_job(ups[i], type, packed.ups[i].data, packed.ups[i].rows, packed.ups[i].cols);
  }
  check(launch_pack(jobs.data(), count, stream), "packing the adapters");
  return packed;
}

}  // namespace zerolora
