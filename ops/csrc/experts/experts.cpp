// The steps of the experts' operator as torch operators, which ops/experts_kernels.py declares and composes.
#include <ATen/record_function.h>
#include <torch/library.h>

#include <tuple>

#include "experts.h"
#include "adapters.h"

namespace zerolora {
namespace {

using Pair = std::tuple<Tensor, Tensor>;

const void* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr() : nullptr;
}
// Checks the properties that the kernels, which only receive a pointer, assume of a tensor.
void check_ready(const Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " ", text(tensor), " of strides ", text(tensor.strides()),
                    ": make it contiguous");
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0, name,
                    ": its address must be a multiple of 16 bytes; clone it");
}
void check_operand(const std::optional<Tensor>& tensor, const char* name, const Tensor& like, at::IntArrayRef shape) {
  if (!tensor.has_value()) return;
  check_ready(*tensor, name);
  TORCH_CHECK_VALUE(
      tensor->sizes() == shape && tensor->scalar_type() == like.scalar_type() && tensor->device() == like.device(),
      name, " ", text(*tensor), " of ", type_name(*tensor), ": expected ", text(shape), " of ", type_name(like));
}
ExpertRows rows_from(const Tensor& order, const Tensor& ends, const Tensor& tiles, int64_t per_source) {
  ExpertRows rows;
  rows.order = order.const_data_ptr<int>(), rows.ends = ends.const_data_ptr<int>();
  rows.tiles = reinterpret_cast<const int2*>(tiles.const_data_ptr<int>());
  rows.N = order.numel(), rows.E = static_cast<int>(ends.numel()), rows.per_source = static_cast<int>(per_source);
  TORCH_CHECK_VALUE(tiles.numel() == 2 * most_tiles(rows.N, rows.E), "tiles ", text(tiles), " for ", text(rows.N),
                    " rows");
  return rows;
}
// Checks Z, which contains the rows themselves or, with gathering, one row for every per_source pairs.
void check_rows(const Tensor& z, const ExpertRows& rows) {
  check_ready(z, "z");
  TORCH_CHECK_VALUE(z.dim() == 2 && z.size(0) * std::max(rows.per_source, 1) == rows.N, "z ", text(z), " for ",
                    text(rows.N), " rows");
}

Pair expert_sort(const Tensor& index, int64_t experts) {
  const c10::cuda::CUDAGuard guard(index.device());
  check_ready(index, "index");
  TORCH_CHECK_VALUE(index.scalar_type() == at::kLong, "index of ", type_name(index), ": expected int64");
  const auto ints = index.options().dtype(at::kInt);
  Tensor order = at::empty({index.numel()}, ints), ends = at::empty({experts}, ints);
  const Tensor counts = at::empty({(index.numel() + kSortPairs - 1) / kSortPairs, experts + 1}, ints);
  ExpertSort job;
  job.index = index.const_data_ptr<int64_t>(), job.N = index.numel(), job.E = static_cast<int>(experts);
  job.counts = counts.mutable_data_ptr<int>(), job.order = order.mutable_data_ptr<int>();
  job.ends = ends.mutable_data_ptr<int>();
  check(launch_expert_sort(job, current_stream(index)), "sorting by expert");
  return {std::move(order), std::move(ends)};
}

std::tuple<Tensor, Tensor, Tensor> expert_plan(const Tensor& order, const Tensor& ends) {
  const c10::cuda::CUDAGuard guard(order.device());
  ExpertPlan job;
  job.order = order.const_data_ptr<int>(), job.ends = ends.const_data_ptr<int>();
  job.N = order.numel(), job.E = static_cast<int>(ends.numel());
  Tensor place = at::empty_like(order), tiles = at::empty({most_tiles(job.N, job.E), 2}, order.options());
  Tensor pairs = at::empty({most_pairs(job.N, job.E) + 1, 2}, order.options());
  job.place = place.mutable_data_ptr<int>(), job.tiles = reinterpret_cast<int2*>(tiles.mutable_data_ptr<int>());
  job.pairs = reinterpret_cast<int2*>(pairs.mutable_data_ptr<int>());
  check(launch_expert_plan(job, current_stream(order)), "planning the experts' tiles");
  return {std::move(place), std::move(tiles), std::move(pairs)};
}

// Returns y = h q + x w: w[E,D,K] and q[E,D,R] (forward), or w[E,K,D] and q[E,R,D].
Tensor expert_product(const Tensor& x, const Tensor& w, const std::optional<Tensor>& h, const std::optional<Tensor>& q,
                      const Tensor& ends, const Tensor& pairs, bool forward) {
  const c10::cuda::CUDAGuard on_device(x.device());
  check_ready(x, "x");
  ExpertProduct job;
  job.dtype = to_dtype(x), job.N = x.size(0), job.K = x.size(1), job.E = ends.numel(), job.forward = forward;
  job.D = w.size(forward ? 1 : 2), job.R = h.has_value() ? static_cast<int>(h->size(1)) : 0;
  const auto shape = [&](int64_t depth) {
    return forward ? std::vector<int64_t>{job.E, job.D, depth} : std::vector<int64_t>{job.E, depth, job.D};
  };
  check_operand(w, "w", x, shape(job.K));
  check_operand(q, "q", x, shape(job.R));
  check_operand(h, "h", x, {job.N, job.R});
  TORCH_CHECK_VALUE(pairs.numel() == 2 * (most_pairs(job.N, job.E) + 1), "pairs ", text(pairs), " for ", text(job.N),
                    " rows");
  Tensor y = at::empty({job.N, job.D}, x.options());
  job.x = x.const_data_ptr(), job.w = w.const_data_ptr(), job.h = data_or_null(h), job.q = data_or_null(q);
  job.y = y.mutable_data_ptr(), job.ends = ends.const_data_ptr<int>();
  job.pairs = reinterpret_cast<const int2*>(pairs.const_data_ptr<int>());
  job.pair_count = reinterpret_cast<const int*>(job.pairs + most_pairs(job.N, job.E));
  TORCH_CHECK_VALUE(expert_product_supported(job, device_info(x)), "product of the experts for ", text(x), " in ",
                    type_name(x), ": the kernel needs compute capability 9.0 and a 16-bit type");
  RECORD_FUNCTION("zerolora::frozen_product", c10::ArrayRef<const c10::IValue>());
  check(launch_expert_product(job, device_info(x), current_stream(x)), "launching the experts' frozen product");
  return y;
}

Pair expert_project(const Tensor& z, const Tensor& order, const Tensor& ends, const Tensor& tiles, int64_t per_source,
                    const std::optional<Tensor>& p, double scale, bool copy, double dropout,
                    const std::optional<Tensor>& seed) {
  const c10::cuda::CUDAGuard guard(z.device());
  ExpertProject job;
  job.rows = rows_from(order, ends, tiles, per_source);
  check_rows(z, job.rows);
  job.dtype = to_dtype(z), job.z = z.const_data_ptr(), job.D = z.size(1), job.p = data_or_null(p);
  job.R = p.has_value() ? static_cast<int>(p->size(1)) : 0, job.scale = static_cast<float>(scale);
  check_operand(p, "p", z, {job.rows.E, job.R, job.D});
  job.dropout = make_dropout(dropout, seed);
  Tensor u = at::empty({job.rows.N, job.R}, z.options()),
         copied = at::empty({copy ? job.rows.N : 0, job.D}, z.options());
  job.u = u.mutable_data_ptr(), job.copy = copy ? copied.mutable_data_ptr() : nullptr;
  if (job.R > 0 || copy) check(launch_expert_project(job, current_stream(z)), "projecting the experts' rows");
  return {std::move(u), std::move(copied)};
}

Tensor expert_gradient(const Tensor& z, const Tensor& v, const Tensor& order, const Tensor& ends, const Tensor& tiles,
                       int64_t per_source, int64_t rank, bool transposed, at::ScalarType dtype, double dropout,
                       const std::optional<Tensor>& seed) {
  const c10::cuda::CUDAGuard guard(z.device());
  ExpertGradient job;
  job.rows = rows_from(order, ends, tiles, per_source);
  check_rows(z, job.rows);
  check_operand(v, "v", z, {job.rows.N, v.size(-1)});
  job.dtype = to_dtype(z), job.out_dtype = to_dtype(dtype), job.z = z.const_data_ptr(), job.v = v.const_data_ptr();
  TORCH_CHECK_VALUE(job.out_dtype == job.dtype || job.out_dtype == DType::f32, "gradient of ", c10::toString(dtype),
                    ": expected the type of z or float32");
  job.D = z.size(1), job.ldv = static_cast<int>(v.size(1)), job.R = static_cast<int>(rank);
  job.transposed = transposed, job.dropout = make_dropout(dropout, seed);
  const int64_t E = job.rows.E;
  Tensor g = at::empty(transposed ? std::vector<int64_t>{E, job.D, rank} : std::vector<int64_t>{E, rank, job.D},
                       z.options().dtype(dtype));
  job.g = g.mutable_data_ptr();
  check(launch_expert_gradient(job, current_stream(z)), "the gradient of the experts' factors");
  return g;
}

void expert_expand(Tensor& y, const std::optional<Tensor>& h, const std::optional<Tensor>& q,
                   const std::optional<Tensor>& bias, const Tensor& order, const Tensor& ends, const Tensor& tiles,
                   double dropout, const std::optional<Tensor>& seed) {
  const c10::cuda::CUDAGuard guard(y.device());
  ExpertExpand job;
  job.rows = rows_from(order, ends, tiles, 0);
  check_rows(y, job.rows);
  job.dtype = to_dtype(y), job.y = y.mutable_data_ptr(), job.D = y.size(1);
  job.R = h.has_value() ? static_cast<int>(h->size(1)) : 0;
  check_operand(h, "h", y, {job.rows.N, job.R});
  check_operand(q, "q", y, {job.rows.E, job.D, job.R});
  check_operand(bias, "bias", y, {job.rows.E, job.D});
  job.h = data_or_null(h), job.q = data_or_null(q), job.bias = data_or_null(bias),
  job.dropout = make_dropout(dropout, seed);
  check(launch_expert_expand(job, current_stream(y)), "adding the experts' adapters");
}

Tensor expert_combine(const Tensor& rows, const Tensor& place, const Tensor& ends, const std::optional<Tensor>& w,
                      int64_t per_token) {
  const c10::cuda::CUDAGuard guard(rows.device());
  check_ready(rows, "rows");
  ExpertCombine job;
  job.dtype = to_dtype(rows), job.rows = rows.const_data_ptr(), job.K = static_cast<int>(per_token);
  job.T = rows.size(0) / std::max<int64_t>(per_token, 1), job.D = rows.size(1), job.E = static_cast<int>(ends.numel());
  TORCH_CHECK_VALUE(place.numel() == rows.size(0) && job.T * per_token == rows.size(0), "place ", text(place), " for ",
                    text(rows.size(0)), " rows, ", text(per_token), " per token");
  job.place = place.const_data_ptr<int>(), job.ends = ends.const_data_ptr<int>();
  job.w = w.has_value() ? w->const_data_ptr<float>() : nullptr;
  Tensor y = at::empty({job.T, job.D}, rows.options());
  job.y = y.mutable_data_ptr();
  check(launch_expert_combine(job, current_stream(rows)), "adding the experts' rows");
  return y;
}

ExpertGate gate_job(const Tensor& u0, const Tensor& h, const std::optional<Tensor>& b,
                    const std::optional<Tensor>& bias, const Tensor& order, const Tensor& ends, const Tensor& tiles,
                    int64_t kind, bool interleaved, double alpha, double limit) {
  ExpertGate job;
  job.rows = rows_from(order, ends, tiles, 0);
  check_rows(u0, job.rows);
  job.dtype = to_dtype(u0), job.kind = static_cast<Gate>(kind), job.interleaved = interleaved;
  job.alpha = static_cast<float>(alpha), job.limit = static_cast<float>(limit), job.I = u0.size(1) / 2;
  job.R = b.has_value() ? static_cast<int>(b->size(2)) : 0;
  check_operand(h, "h", u0, {job.rows.N, job.R});
  check_operand(b, "b", u0, {job.rows.E, 2 * job.I, job.R});
  check_operand(bias, "bias", u0, {job.rows.E, 2 * job.I});
  job.u = u0.const_data_ptr(), job.h = h.const_data_ptr(), job.b = data_or_null(b), job.bias = data_or_null(bias);
  return job;
}

// Adds the projection by p[E,R_out,width] to the job, and returns its result: empty without one.
Tensor add_projection(ExpertGate& job, const std::optional<Tensor>& p, double scale, int64_t width,
                      const Tensor& like) {
  job.R_out = p.has_value() ? static_cast<int>(p->size(1)) : 0, job.scale = static_cast<float>(scale);
  check_operand(p, "p", like, {job.rows.E, job.R_out, width});
  Tensor projected = at::empty({job.rows.N, job.R_out}, like.options());
  job.p = data_or_null(p), job.projected = projected.mutable_data_ptr();
  return projected;
}

Pair expert_gate(const Tensor& u0, const Tensor& h, const std::optional<Tensor>& b, const std::optional<Tensor>& bias,
                 const Tensor& order, const Tensor& ends, const Tensor& tiles, int64_t kind, bool interleaved,
                 double alpha, double limit, const std::optional<Tensor>& p, double scale, double dropout,
                 const std::optional<Tensor>& seed) {
  const c10::cuda::CUDAGuard guard(u0.device());
  ExpertGate job = gate_job(u0, h, b, bias, order, ends, tiles, kind, interleaved, alpha, limit);
  Tensor act = at::empty({job.rows.N, job.I}, u0.options()), projected = add_projection(job, p, scale, job.I, u0);
  job.act = act.mutable_data_ptr(), job.dropout = make_dropout(dropout, seed);
  check(launch_expert_gate(job, current_stream(u0)), "the experts' activation");
  return {std::move(act), std::move(projected)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> expert_gate_backward(
    const Tensor& g, const Tensor& u0, const Tensor& h, const std::optional<Tensor>& b,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& dh, const std::optional<Tensor>& a, const Tensor& w,
    const Tensor& order, const Tensor& ends, const Tensor& tiles, int64_t kind, bool interleaved, double alpha,
    double limit, const std::optional<Tensor>& p, double scale, double dropout, const std::optional<Tensor>& seed) {
  const c10::cuda::CUDAGuard guard(u0.device());
  ExpertGate job = gate_job(u0, h, b, bias, order, ends, tiles, kind, interleaved, alpha, limit);
  check_operand(g, "g", u0, {job.rows.N, job.I});
  job.R_down = a.has_value() ? static_cast<int>(a->size(2)) : 0;
  check_operand(dh, "dh", u0, {job.rows.N, job.R_down});
  check_operand(a, "a", u0, {job.rows.E, job.I, job.R_down});
  TORCH_CHECK_VALUE(w.numel() == job.rows.N && w.scalar_type() == at::kFloat && w.is_contiguous(), "w ", text(w),
                    " of ", type_name(w), ": expected one float32 per row");
  Tensor act = at::empty({job.rows.N, job.I}, u0.options()), du = at::empty(u0.sizes(), u0.options());
  Tensor dw = at::zeros({job.rows.N}, w.options());  // pairs without an expert keep the zero
  job.g = g.const_data_ptr(), job.dh = data_or_null(dh), job.a = data_or_null(a), job.w = w.const_data_ptr<float>();
  job.act = act.mutable_data_ptr(), job.du = du.mutable_data_ptr(), job.dw = dw.mutable_data_ptr<float>();
  job.dropout = make_dropout(dropout, seed);
  Tensor projected = add_projection(job, p, scale, 2 * job.I, u0);
  check(launch_expert_gate(job, current_stream(u0)), "the derivative of the experts' activation");
  return {std::move(act), std::move(du), std::move(dw), std::move(projected)};
}

Tensor expert_nf4(const Tensor& packed, at::TensorList state, int64_t experts, int64_t rows, int64_t cols,
                  int64_t block, int64_t nested_block, at::ScalarType dtype) {
  const c10::cuda::CUDAGuard guard(packed.device());
  check_ready(packed, "packed experts");
  ExpertNf4 job{describe_nf4(packed, state, {experts, rows, cols}, block, nested_block), experts};
  TORCH_CHECK_VALUE(state[0].numel() == experts * (job.weight.count / block), "NF4 absmax ", text(state[0]), " for ",
                    text({experts, rows, cols}), " in blocks of ", text(block));
  Tensor out = at::empty({experts, rows, cols}, packed.options().dtype(dtype));
  check(launch_expert_nf4(job, to_dtype(out), out.mutable_data_ptr(), current_stream(packed)),
        "the experts' NF4 kernel");
  return out;
}

Tensor expert_mxfp4(const Tensor& blocks, const Tensor& scales, at::ScalarType dtype) {
  const c10::cuda::CUDAGuard guard(blocks.device());
  check_ready(blocks, "MXFP4 blocks");
  TORCH_CHECK_VALUE(blocks.numel() == scales.numel() * 16 && scales.is_contiguous() &&
                        blocks.scalar_type() == at::kByte && scales.scalar_type() == at::kByte,
                    "MXFP4 blocks ", text(blocks), ", scales ", text(scales), ": expected 16 bytes per scale");
  std::vector<int64_t> shape = scales.sizes().vec();
  shape.back() *= 32;
  Tensor out = at::empty(shape, blocks.options().dtype(dtype));
  check(launch_mxfp4(blocks.const_data_ptr<uint8_t>(), scales.const_data_ptr<uint8_t>(), scales.numel(), to_dtype(out),
                     out.mutable_data_ptr(), current_stream(blocks)),
        "the MXFP4 kernel");
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(zerolora, CUDA, library) {
  library.impl("expert_sort", expert_sort);
  library.impl("expert_plan", expert_plan);
  library.impl("expert_product", expert_product);
  library.impl("expert_project", expert_project);
  library.impl("expert_gradient", expert_gradient);
  library.impl("expert_expand_", expert_expand);
  library.impl("expert_combine", expert_combine);
  library.impl("expert_gate", expert_gate);
  library.impl("expert_gate_backward", expert_gate_backward);
  library.impl("expert_nf4", expert_nf4);
  library.impl("expert_mxfp4", expert_mxfp4);
}

}  // namespace zerolora
