#include "cuda/launch.cuh"
#include "cuda/layout.cuh"
#include "cuda/layout.h"

namespace jax_ep {
namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads, 1)
    CountByExpert(LayoutShape shape, const int32_t* index, const int32_t* first_expert, int32_t* block_counts) {
  extern __shared__ int32_t histogram[];
  const uint32_t experts = shape.local_experts;
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) histogram[e] = 0;
  __syncthreads();
  const int32_t first = *first_expert;
  const Piece piece = PieceOf(shape.picks(), blockIdx.x, gridDim.x);
  for (int64_t i = piece.begin + threadIdx.x; i < piece.end; i += blockDim.x) {
    const uint32_t local = LocalExpert(index[i], first);
    if (local < experts) atomicAdd(&histogram[local], 1);
  }
  __syncthreads();
  int32_t* mine = block_counts + int64_t{blockIdx.x} * experts;
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) mine[e] = histogram[e];
}

__global__ void __launch_bounds__(kThreads, 1)
    PlaceByExpert(LayoutShape shape, const int32_t* index, const int32_t* first_expert, const int32_t* block_counts,
                  int32_t* slots, int32_t* group_sizes, int32_t* counts, int32_t* num_dropped) {
  extern __shared__ int32_t shared[];
  const uint32_t experts = shape.local_experts;
  int32_t* first_row = shared;
  int32_t* kept = first_row + experts;
  int32_t* wanted = kept + experts;
  int32_t* of_warp = wanted + experts;  // [warps, experts]
  const int warps = blockDim.x / kWarp;
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;

  int32_t dropped = 0;
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) {
    int32_t sum = 0;
    for (unsigned block = 0; block < gridDim.x; ++block) sum += block_counts[int64_t{block} * experts + e];
    wanted[e] = sum;
  }
  for (uint32_t i = threadIdx.x; i < warps * experts; i += blockDim.x) of_warp[i] = 0;
  __syncthreads();
  AcceptRows(shape, wanted, first_row, kept, blockIdx.x == 0 ? group_sizes : nullptr);
  if (blockIdx.x == 0) {
    for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) {
      counts[e] = kept[e];
      dropped += wanted[e] - kept[e];
    }
    dropped = BlockSum(dropped);
    if (threadIdx.x == 0) *num_dropped = dropped;
  }

  const int32_t first = *first_expert;
  const Piece block = PieceOf(shape.picks(), blockIdx.x, gridDim.x);
  Piece mine = PieceOf(block.end - block.begin, warp, warps);
  mine.begin += block.begin;
  mine.end += block.begin;
  for (int64_t i = mine.begin + lane; i < mine.end; i += kWarp) {
    const uint32_t local = LocalExpert(index[i], first);
    if (local < experts) atomicAdd(&of_warp[warp * experts + local], 1);
  }
  __syncthreads();
  // of_warp becomes the place, within its expert, of the warp's next row.
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) {
    int32_t nth = 0;
    for (unsigned earlier = 0; earlier < blockIdx.x; ++earlier) nth += block_counts[int64_t{earlier} * experts + e];
    for (int w = 0; w < warps; ++w) {
      const int32_t here = of_warp[w * experts + e];
      of_warp[w * experts + e] = nth;
      nth += here;
    }
  }
  __syncthreads();
  for (int64_t start = mine.begin; start < mine.end; start += kWarp) {
    const int64_t i = start + lane;
    const uint32_t local = i < mine.end ? LocalExpert(index[i], first) : experts;
    const uint32_t key = local < experts ? local : experts;
    const int32_t nth = TakePlace(key, key < experts, of_warp + warp * experts);
    if (i < mine.end) slots[i] = key < experts && nth < kept[key] ? first_row[key] + nth : -1;
  }
}

__device__ bool HasLocal(const LayoutShape& shape, const int32_t* index, int64_t pair, int32_t first) {
  bool any = false;
  for (int k = 0; k < shape.top_k; ++k) {
    any |= LocalExpert(index[pair * shape.top_k + k], first) < static_cast<uint32_t>(shape.local_experts);
  }
  return any;
}

__global__ void __launch_bounds__(kThreads, 1)
    CountByRank(LayoutShape shape, const int32_t* index, const int32_t* first_expert, int32_t* block_counts,
                int32_t* group_sizes, int32_t* counts) {
  const Piece piece = PieceOf(shape.pairs(), blockIdx.x, gridDim.x);
  int32_t rows = 0;
  for (int64_t pair = piece.begin + threadIdx.x; pair < piece.end; pair += blockDim.x) {
    rows += HasLocal(shape, index, pair, *first_expert);
  }
  rows = BlockSum(rows);
  if (threadIdx.x == 0) block_counts[blockIdx.x] = rows;
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e < shape.local_experts; e += blockDim.x) group_sizes[e] = counts[e] = 0;
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    PlaceByRank(LayoutShape shape, const int32_t* index, const int32_t* first_expert, const int32_t* block_counts,
                int32_t* slots, int32_t* group_sizes, int32_t* counts, int32_t* num_dropped) {
  const int32_t first = *first_expert;
  int32_t row = 0;
  int32_t all = 0;
  for (unsigned block = 0; block < gridDim.x; ++block) {
    if (block < blockIdx.x) row += block_counts[block];
    all += block_counts[block];
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *num_dropped = max(all - shape.capacity, 0);
  const Piece piece = PieceOf(shape.pairs(), blockIdx.x, gridDim.x);
  for (int64_t start = piece.begin; start < piece.end; start += blockDim.x) {
    const int64_t pair = start + threadIdx.x;
    const bool wants = pair < piece.end && HasLocal(shape, index, pair, first);
    int32_t here;
    const int32_t mine = row + BlockSumBefore(wants, &here);
    row += here;
    if (pair >= piece.end) continue;
    const bool keep = wants && mine < shape.capacity;
    for (int k = 0; k < shape.top_k; ++k) {
      const int64_t pick = pair * shape.top_k + k;
      const uint32_t local = LocalExpert(index[pick], first);
      const bool here = keep && local < static_cast<uint32_t>(shape.local_experts);
      slots[pick] = here ? mine : -1;
      if (here) {
        atomicAdd(&counts[local], 1);
        atomicAdd(&group_sizes[local], 1);
      }
    }
  }
}

}  // namespace

cudaError_t LaunchLayout(RowOrder order, const LayoutShape& shape, const int32_t* index, const int32_t* first_expert,
                         int32_t* slots, int32_t* group_sizes, int32_t* counts, int32_t* num_dropped, int32_t* scratch,
                         cudaStream_t stream) {
  if (shape.local_experts > kLayoutMaxLocalExperts) return cudaErrorInvalidValue;
  constexpr int64_t kPicksPerBlock = 2048;
  const int64_t wanted = (shape.picks() + kPicksPerBlock - 1) / kPicksPerBlock;
  const int blocks = static_cast<int>(wanted < 1 ? 1 : wanted > kLayoutBlocks ? kLayoutBlocks : wanted);
  if (order == RowOrder::kRank) {
    const cudaError_t error = LaunchKernel(CountByRank, blocks, kThreads, 0, stream, shape, index, first_expert,
                                           scratch, group_sizes, counts);
    if (error != cudaSuccess) return error;
    return LaunchKernel(PlaceByRank, blocks, kThreads, 0, stream, shape, index, first_expert, scratch, slots,
                        group_sizes, counts, num_dropped);
  }
  // Three words an expert, and one for each warp: fewer warps where there are many experts.
  constexpr int kSharedBytes = 192 * 1024;
  const int expert_bytes = shape.local_experts * static_cast<int>(sizeof(int32_t));
  int threads = kThreads;
  while (threads > kWarp && (3 + threads / kWarp) * expert_bytes > kSharedBytes) threads /= 2;
  const int place_bytes = (3 + threads / kWarp) * expert_bytes;
  cudaError_t error = cudaFuncSetAttribute(PlaceByExpert, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  error = LaunchKernel(CountByExpert, blocks, kThreads, expert_bytes, stream, shape, index, first_expert, scratch);
  if (error != cudaSuccess) return error;
  return LaunchKernel(PlaceByExpert, blocks, threads, place_bytes, stream, shape, index, first_expert, scratch, slots,
                      group_sizes, counts, num_dropped);
}

cudaError_t LoadLayoutKernels() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, CountByExpert);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, PlaceByExpert);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, CountByRank);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, PlaceByRank);
  return error;
}

}  // namespace jax_ep
