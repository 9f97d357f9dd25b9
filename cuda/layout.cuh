// What the kernels that lay out rows share: pieces of the work, sums over a block, and what each expert may keep.
#pragma once

#include <cstdint>

#include "cuda/layout_rule.h"

namespace jax_ep {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

// Rows and picks of a block: a contiguous piece, so that blocks, warps and lanes stay in (rank, token, k) order.
struct Piece {
  int64_t begin;
  int64_t end;
};

// `total` is less than 2^31, as all numbers of picks are: so a division of 32 bits will do.
inline __device__ Piece PieceOf(int64_t total, int part, int parts) {
  const int64_t each = (static_cast<uint32_t>(total) + parts - 1) / static_cast<uint32_t>(parts);
  const int64_t begin = min(total, each * part);
  return {begin, min(total, begin + each)};
}

// The local expert of a pick, or a value >= local_experts: none (-1) and other ranks' experts wrap around.
inline __device__ uint32_t LocalExpert(int32_t expert, int32_t first_expert) {
  return static_cast<uint32_t>(expert) - static_cast<uint32_t>(first_expert);
}

// The sum of `value` over the block, for all its threads. No sum of picks or rows leaves 32 bits.
inline __device__ int32_t BlockSum(int32_t value) {
  __shared__ int32_t of_warp[kWarp];
  const int lane = threadIdx.x % kWarp;
  const int32_t sum = __reduce_add_sync(kAll, value);
  __syncthreads();  // of_warp may still be read from the call before
  if (lane == 0) of_warp[threadIdx.x / kWarp] = sum;
  __syncthreads();
  return __reduce_add_sync(kAll, lane < static_cast<int>(blockDim.x) / kWarp ? of_warp[lane] : 0);
}

inline __device__ int32_t WarpInclusiveSum(int32_t value) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int32_t below = __shfl_up_sync(kAll, value, offset);
    if (lane >= offset) value += below;
  }
  return value;
}

// The sum of `value` over the threads of the block before this one; *all is that over the block.
inline __device__ int32_t BlockSumBefore(int32_t value, int32_t* all) {
  __shared__ int32_t of_warp[kWarp];
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int32_t through = WarpInclusiveSum(value);
  __syncthreads();  // of_warp may still be read from the call before
  if (lane == kWarp - 1) of_warp[warp] = through;
  __syncthreads();
  const int32_t of_warps = WarpInclusiveSum(lane < static_cast<int>(blockDim.x) / kWarp ? of_warp[lane] : 0);
  *all = __shfl_sync(kAll, of_warps, kWarp - 1);
  const int32_t below = __shfl_sync(kAll, of_warps, max(warp - 1, 0));
  return (warp == 0 ? 0 : below) + through - value;
}

// What each expert may keep, worked out by every block for itself. `wanted` [experts] in, `first_row` and `kept` out,
// all in shared memory.
inline __device__ void AcceptRows(const LayoutShape& shape, const int32_t* wanted, int32_t* first_row, int32_t* kept,
                                  int32_t* group_sizes) {
  const int experts = shape.local_experts;
  const int32_t alignment = shape.alignment;
  const int32_t budget = shape.capacity / alignment;
  // As a rule everything fits, and the sums that give the first rows tell.
  int32_t all = 0;
  for (int start = 0; start < experts; start += blockDim.x) {
    const int e = start + threadIdx.x;
    int32_t here;
    const int32_t before = BlockSumBefore(e < experts ? BlocksOf(wanted[e], alignment) : 0, &here);
    if (e < experts) first_row[e] = all + before;
    all += here;
  }
  if (all <= budget) {
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
      first_row[e] *= alignment;
      kept[e] = wanted[e];
      if (group_sizes != nullptr) group_sizes[e] = BlocksOf(wanted[e], alignment) * alignment;
    }
    __syncthreads();
    return;
  }
  auto total = [&](int32_t level) {
    int32_t sum = 0;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) sum += Min(BlocksOf(wanted[e], alignment), level);
    return BlockSum(sum);
  };
  const int32_t level = Level(budget, total);
  const int32_t left = budget - total(level);
  if (threadIdx.x < kWarp) {
    int32_t row = 0;
    int32_t hungry_before = 0;
    for (int start = 0; start < experts; start += kWarp) {
      const int e = start + threadIdx.x;
      const int32_t blocks = e < experts ? BlocksOf(wanted[e], alignment) : 0;
      const unsigned hungry = __ballot_sync(kAll, blocks > level);
      const int32_t before = hungry_before + __popc(hungry & ((1u << threadIdx.x) - 1));
      const int32_t size = (Min(blocks, level) + (blocks > level && before < left)) * alignment;
      const int32_t through = WarpInclusiveSum(size);
      if (e < experts) {
        first_row[e] = row + through - size;
        kept[e] = Min(wanted[e], size);
        if (group_sizes != nullptr) group_sizes[e] = size;
      }
      row += __shfl_sync(kAll, through, kWarp - 1);
      hungry_before += __popc(hungry);
    }
  }
  __syncthreads();
}

// The place of this lane's pick among those of its expert, after what next[key] counts and the lanes below; counts them
// all. A key that is not `counted` is none. By a warp, which has `next` for itself.
inline __device__ int32_t TakePlace(uint32_t key, bool counted, int32_t* next) {
  const int lane = threadIdx.x % kWarp;
  const unsigned same = __match_any_sync(kAll, key);
  const int32_t place = counted ? next[key] + __popc(same & ((1u << lane) - 1)) : 0;
  __syncwarp();
  if (counted && lane == __ffs(same) - 1) next[key] += __popc(same);
  __syncwarp();
  return place;
}

}  // namespace jax_ep
