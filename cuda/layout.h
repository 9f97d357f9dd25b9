// Layout on the device: the counting order of docs/semantics.md in two launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/layout_rule.h"

namespace jax_ep {

// Most blocks that a launch uses; scratch holds one count a block and local expert.
inline constexpr int kLayoutBlocks = 128;
// What fits into shared memory with enough warps to be fast.
inline constexpr int kLayoutMaxLocalExperts = 4096;

inline int64_t LayoutScratchWords(int64_t local_experts) { return kLayoutBlocks * local_experts; }

// Slots of the rows of the rank that owns experts *first_expert to *first_expert + local_experts - 1. All pointers
// are device memory; nothing needs to be cleared beforehand.
//   index:       [ranks, tokens, top_k] sanitised, -1 for none
//   slots:       [ranks, tokens, top_k]
//   group_sizes: [local_experts]
//   counts:      [local_experts]
//   num_dropped: [1]
//   scratch:     [LayoutScratchWords(local_experts)]
cudaError_t LaunchLayout(RowOrder order, const LayoutShape& shape, const int32_t* index, const int32_t* first_expert,
                         int32_t* slots, int32_t* group_sizes, int32_t* counts, int32_t* num_dropped, int32_t* scratch,
                         cudaStream_t stream);

// Before the first launch: loading a kernel while another one waits for its peers could hang.
cudaError_t LoadLayoutKernels();

}  // namespace jax_ep
