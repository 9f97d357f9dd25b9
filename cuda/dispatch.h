// Dispatch inside an NVLink domain: every rank stages its tokens, then pulls those of its experts from its peers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/buffer_layout.h"
#include "cuda/call.h"
#include "cuda/layout_rule.h"

namespace jax_ep {

// Device pointers. x and rows are bytes: what a token is made of is the caller's business.
struct DispatchArgs {
  RowOrder order;
  int32_t tokens;
  int32_t top_k;
  int32_t capacity;
  int32_t row_bytes;        // of a token, a multiple of 16
  int32_t scale_words;      // 32-bit words of scales that go with a token, may be 0
  const void* x;            // [tokens, row_bytes]
  const uint32_t* scales;   // [tokens, scale_words]
  const uint32_t* weights;  // [tokens, top_k], or null
  const int32_t* slots;     // [ranks, tokens, top_k]
  void* rows;               // [capacity, row_bytes]
  uint32_t* row_scales;     // [capacity, scale_words]
  uint32_t* row_weights;    // [capacity], in rank order [capacity, top_k], or null
  int32_t* source;          // [capacity] scratch
};

cudaError_t LaunchDispatch(const Peers& peers, const Call& call, const DispatchArgs& args, int num_sms,
                           cudaStream_t stream);

// All ranks' indices, [ranks, words], from each rank's own [words]. Also stores `first` to *first_expert.
cudaError_t LaunchGatherIndex(const Peers& peers, const Call& call, const int32_t* index, int32_t words,
                              int32_t* gathered, int32_t* first_expert, int32_t first, cudaStream_t stream);

}  // namespace jax_ep
