// Layout of a group in one launch: every rank stages its index, reads those of its peers, and works out for itself
// which row each pick gets.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/buffer_layout.h"
#include "cuda/call.h"
#include "cuda/layout_rule.h"

namespace jax_ep {

// Device pointers; nothing needs to be cleared beforehand.
struct GroupLayoutArgs {
  RowOrder order;
  LayoutShape shape;
  const int32_t* index;  // [tokens, top_k] of this rank, what is no expert for none; aligned to 16 bytes
  int32_t* slots;        // [ranks, tokens, top_k]
  int32_t* group_sizes;  // [local_experts]
  int32_t* counts;       // [local_experts]
  int32_t* num_dropped;  // [1]
  int32_t* scratch;      // [LayoutScratchWords(local_experts)]
};

cudaError_t LaunchGroupLayout(const Peers& peers, const Call& call, const GroupLayoutArgs& args, cudaStream_t stream);

// Before the first launch: loading a kernel while another one waits for its peers could hang.
cudaError_t LoadGroupLayoutKernels();

}  // namespace jax_ep
