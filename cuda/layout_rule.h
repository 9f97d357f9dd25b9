// Which rows a rank accepts: one rule for the host and the device. docs/semantics.md, "Capacity".
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define JAX_EP_HOST_DEVICE __host__ __device__
#else
#define JAX_EP_HOST_DEVICE
#endif

namespace jax_ep {

enum class RowOrder : int32_t { kExpert = 0, kRank = 1 };

// What a rank is asked for, apart from the indices.
struct LayoutShape {
  int32_t ranks;
  int32_t tokens;
  int32_t top_k;
  int32_t local_experts;
  int32_t capacity;   // rows, a multiple of alignment in expert order
  int32_t alignment;  // 1 in rank order

  JAX_EP_HOST_DEVICE int64_t pairs() const { return int64_t{ranks} * tokens; }
  JAX_EP_HOST_DEVICE int64_t picks() const { return pairs() * top_k; }
};

JAX_EP_HOST_DEVICE inline int32_t BlocksOf(int32_t rows, int32_t alignment) {
  return rows / alignment + (rows % alignment != 0);
}

JAX_EP_HOST_DEVICE inline int32_t Min(int32_t a, int32_t b) { return a < b ? a : b; }

// The greatest level L with sum over experts of min(wanted, L) <= budget, where `total(L)` gives that sum.
// Callers on the device compute the sum with a whole block.
template <typename Total>
JAX_EP_HOST_DEVICE int32_t Level(int32_t budget, Total total) {
  int32_t level = 0;
  // L has no more bits than the budget: at L = budget some expert already fills it, or none wants more.
  for (int bit = 30; bit >= 0; --bit) {
    const int32_t step = int32_t{1} << bit;
    if (step > budget) continue;
    if (total(level + step) <= budget) level += step;
  }
  return level;
}

}  // namespace jax_ep
