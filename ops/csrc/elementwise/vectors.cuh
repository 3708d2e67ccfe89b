// Helpers for the element-wise kernels, which access 16 bytes at a time if the addresses allow it.
#pragma once
#include "common.cuh"
#include "elementwise.h"

namespace zerolora {

// W adjacent elements, loaded and stored in one instruction.
template <typename T, int W> struct alignas(sizeof(T) * W) Pack {
  static constexpr int kBytes = sizeof(T) * W;
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 16);
  using Word = std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 4, unsigned int, unsigned short>>;
  T values[W];
};
template <typename T, int W> __device__ __forceinline__ Pack<T, W> load(const T* from) {
  const auto word = *reinterpret_cast<const typename Pack<T, W>::Word*>(from);
  Pack<T, W> pack;
  memcpy(&pack, &word, sizeof(word));
  return pack;
}
template <typename T, int W> __device__ __forceinline__ void store(T* to, const Pack<T, W>& pack) {
  typename Pack<T, W>::Word word;
  memcpy(&word, &pack, sizeof(word));
  // Use the intrinsic because the compiler splits some 16-byte assignments into 4-byte stores.
  __stwb(reinterpret_cast<typename Pack<T, W>::Word*>(to), word);
}
// Elements of a 16-byte vector.
template <typename T> constexpr int kWide = 16 / static_cast<int>(sizeof(T));

inline bool on_vector(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
inline bool on_vector(const Rows& rows, int width) { return on_vector(rows.data) && rows.ld % width == 0; }
inline bool on_vector(const Heads& side, int width) {
  return on_vector(side.data) && on_vector(side.out) && side.stride_b % width == 0 && side.stride_h % width == 0 &&
         side.stride_t % width == 0;
}

}  // namespace zerolora
