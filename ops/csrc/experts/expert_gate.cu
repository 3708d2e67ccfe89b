// Between the two products of the experts: u = u0 + h B^T + bias, a = f(gate) up, and its derivative. A warp processes
// 16 rows, 32 columns of a at a time; a lane processes 8 adjacent columns of two rows of gate and up.
#include "expert_tiles.cuh"

namespace zerolora {
namespace {

__device__ __forceinline__ float sigmoid(float v) { return __fdividef(1.f, 1.f + __expf(-v)); }

// f(gate) and f'(gate) of one element; only `clamped` changes up and the factor of its gradient.
struct Gated {
  float value, slope, up;
  bool up_inside;
};
__device__ __forceinline__ Gated gated(Gate kind, float gate, float up, float alpha, float limit) {
  if (kind == Gate::silu) {
    const float s = sigmoid(gate);
    return {gate * s, s * (1.f + gate * (1.f - s)), up, true};
  }
  if (kind == Gate::clamped) {
    const float v = fminf(gate, limit), s = sigmoid(alpha * v);
    return {v * s, gate <= limit ? s * (1.f + alpha * v * (1.f - s)) : 0.f, fminf(fmaxf(up, -limit), limit) + 1.f,
            fabsf(up) <= limit};
  }
  if (kind == Gate::gelu_tanh) {
    constexpr float kRoot = 0.7978845608028654f, kCube = 0.044715f;
    const float t = tanhf(kRoot * (gate + kCube * gate * gate * gate));
    return {0.5f * gate * (1.f + t),
            0.5f * (1.f + t) + 0.5f * gate * (1.f - t * t) * kRoot * (1.f + 3.f * kCube * gate * gate), up, true};
  }
  const float normal = 0.5f * (1.f + erff(gate * 0.7071067811865476f));
  return {gate * normal, normal + gate * 0.3989422804014327f * expf(-0.5f * gate * gate), up, true};
}

// kTiles: tiles of 8 ranks of the fused projection.
template <typename T, bool kBackward, bool kInterleaved, int kTiles>
__global__ void __launch_bounds__(kWarps * 32) gate_kernel(const ExpertGate job) {
  const Span span = find_span(job.rows, blockIdx.x);
  if (span.expert < 0) return;
  const int lane = threadIdx.x % 32;
  const int64_t row[2] = {span.row + threadIdx.x / 32 * 16 + lane / 4, span.row + threadIdx.x / 32 * 16 + lane / 4 + 8};
  const bool valid[2] = {row[0] < span.end, row[1] < span.end};
  if (__all_sync(~0u, !valid[0])) return;
  const int64_t I = job.I, width = 2 * I, e = span.expert;
  const T *const u = typed<T>(job.u), *const h = typed<T>(job.h), *const dh = typed<T>(job.dh);
  const T* const b = typed<T>(job.b) + e * width * job.R;
  const T* const a = typed<T>(job.a) + e * I * job.R_down;
  const T* const bias = typed<T>(job.bias) + e * width;
  const Mask mask(job.dropout, I);
  const bool masked = job.dropout.seed != nullptr;
  const int64_t projected_width = kBackward ? width : I;
  const T* const p = typed<T>(job.p) + (e * job.R_out + lane / 4) * projected_width;
  float sums[kTiles > 0 ? kTiles : 1][4] = {};
  int64_t pair[2] = {0, 0};
  float w[2] = {0.f, 0.f}, dw[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (valid[i] && (kBackward || masked)) pair[i] = job.rows.order[row[i]];
    if (valid[i] && kBackward) w[i] = job.w[pair[i]];
  }
  for (int64_t first = 0; first < I; first += 32) {
    const int64_t c = first + lane % 4 * 8;
    const bool inside = c < I;
    // Halves: gate at c, up at I + c. Interleaved: pairs of both in the 16 columns from 2 c.
    const int64_t base[2] = {kInterleaved ? 2 * first : first, kInterleaved ? 2 * first + 8 : I + first};
    constexpr int kStride = kInterleaved ? 16 : 8;
    float v[2][2][8], g[2][8];  // [gate or up, first or second octet][row][8]
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        unpack<T>(load16(u + row[i] * width + base[side] + lane % 4 * kStride, valid[i] && inside), v[side][i]);
    if constexpr (kBackward) {
#pragma unroll
      for (int i = 0; i < 2; ++i) unpack<T>(load16(typed<T>(job.g) + row[i] * I + c, valid[i] && inside), g[i]);
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int64_t limit = kInterleaved || side == 1 ? width : I;
      add_ranks(v[side], h + row[0] * job.R, h + row[1] * job.R, valid[0], valid[1], b, base[side], kStride, limit,
                job.R);
      if (job.bias != nullptr) {
        float added[8];
        unpack<T>(load16(bias + base[side] + lane % 4 * kStride, inside), added);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[side][0][j] += added[j], v[side][1][j] += added[j];
      }
    }
    if constexpr (kBackward) {
      float term[2][8] = {};
      add_ranks(term, dh + row[0] * job.R_down, dh + row[1] * job.R_down, valid[0], valid[1], a, first, 8, I,
                job.R_down);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (masked) drop(term[i], mask.draw(mask.counter(pair[i], c)));
#pragma unroll
        for (int j = 0; j < 8; ++j) g[i][j] += term[i][j];
      }
    }
    uint4 packed[2], gradient[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float act[8], out[2][8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int at_gate = kInterleaved ? j % 4 * 2 : j, at_up = kInterleaved ? at_gate + 1 : j;
        const int side_gate = kInterleaved ? j / 4 : 0, side_up = kInterleaved ? j / 4 : 1;
        const Gated f = gated(job.kind, v[side_gate][i][at_gate], v[side_up][i][at_up], job.alpha, job.limit);
        act[j] = f.value * f.up;
        if constexpr (kBackward) {
          dw[i] += act[j] * g[i][j];
          const float grad = w[i] * g[i][j];
          out[side_gate][at_gate] = grad * f.up * f.slope;
          out[side_up][at_up] = f.up_inside ? grad * f.value : 0.f;
        }
      }
      packed[i] = pack8<T>(act);
      if (job.act != nullptr && valid[i] && inside)
        *reinterpret_cast<uint4*>(static_cast<T*>(job.act) + row[i] * I + c) = packed[i];
      if constexpr (kBackward) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          gradient[side][i] = pack8<T>(out[side]);
          if (valid[i] && inside)
            *reinterpret_cast<uint4*>(static_cast<T*>(job.du) + row[i] * width + base[side] + lane % 4 * kStride) =
                gradient[side][i];
        }
      }
    }
    // Beyond the last column a and du are undefined, but P is zero there.
    if constexpr (kTiles > 0 && kBackward) {
#pragma unroll
      for (int side = 0; side < 2; ++side)
        project_octets<T, kTiles>(sums, gradient[side][0], gradient[side][1], p + base[side] + lane % 4 * kStride,
                                  projected_width, inside);
    } else if constexpr (kTiles > 0) {
      if (masked)
#pragma unroll
        for (int i = 0; i < 2; ++i) packed[i] = zero_dropped(packed[i], mask.draw(mask.counter(pair[i], c)));
      project_octets<T, kTiles>(sums, packed[0], packed[1], p + c, projected_width, inside);
    }
  }
  if constexpr (kTiles > 0)
    store_projected<T, kTiles>(sums, static_cast<T*>(job.projected), job.R_out, valid, row,
                               job.scale * (!kBackward && masked ? job.dropout.keep_scale : 1.f));
  if constexpr (kBackward) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      dw[i] += __shfl_xor_sync(~0u, dw[i], 1);
      dw[i] += __shfl_xor_sync(~0u, dw[i], 2);
      if (valid[i] && lane % 4 == 0) job.dw[pair[i]] = dw[i];
    }
  }
}

template <typename T, bool kBackward, bool kInterleaved> void by_ranks(const ExpertGate& job, cudaStream_t stream) {
  const unsigned tiles = static_cast<unsigned>(most_tiles(job.rows.N, job.rows.E));
  constexpr int kThreads = kWarps * 32;
  if (job.R_out == 0) gate_kernel<T, kBackward, kInterleaved, 0><<<tiles, kThreads, 0, stream>>>(job);
  else if (job.R_out == 16) gate_kernel<T, kBackward, kInterleaved, 2><<<tiles, kThreads, 0, stream>>>(job);
  else gate_kernel<T, kBackward, kInterleaved, 4><<<tiles, kThreads, 0, stream>>>(job);
}

template <typename T> void start(const ExpertGate& job, cudaStream_t stream) {
  if (job.du != nullptr) job.interleaved ? by_ranks<T, true, true>(job, stream) : by_ranks<T, true, false>(job, stream);
  else job.interleaved ? by_ranks<T, false, true>(job, stream) : by_ranks<T, false, false>(job, stream);
}

}  // namespace

cudaError_t launch_expert_gate(const ExpertGate& job, cudaStream_t stream) {
  if (job.I % 8 != 0 || job.R % 16 != 0 || job.R_down % 16 != 0 || job.R_out % 16 != 0 || job.R_out > kMostFused)
    return cudaErrorInvalidValue;
  if (job.rows.N == 0) return cudaSuccess;
  return by_half(job.dtype, [&](auto* type) { start<std::remove_pointer_t<decltype(type)>>(job, stream); });
}

}  // namespace zerolora
