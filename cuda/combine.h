// Combine inside an NVLink domain: the rank that holds a token's rows sums them and pushes the sum to the token's rank,
// which adds what comes to what it holds itself.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/buffer_layout.h"
#include "cuda/call.h"
#include "cuda/element.h"
#include "cuda/grid.h"
#include "cuda/layout_rule.h"

namespace jax_ep {

// Device pointers; those of tokens and rows are aligned to 16 bytes.
struct CombineArgs {
  RowOrder order;
  Element element;  // of rows and out; not kFloat8
  int32_t tokens;
  int32_t top_k;
  int32_t hidden;             // elements; a row is a multiple of 16 bytes
  const void* rows;           // [capacity, hidden]
  const float* row_weights;   // [capacity] to multiply rows by, or null
  const uint32_t* row_words;  // [capacity], in rank order [capacity, top_k]: a word of each pick to send, or null
  const int32_t* slots;       // [ranks, tokens, top_k]
  void* out;                  // [tokens, hidden]
  uint32_t* pick_words;       // [tokens, top_k]: the words that came, 0 for picks without a row
  int together = 1;           // pieces of a token that a warp takes at once: a divisor of CombinePieces
};

// SMs that a combine takes of a device's where nobody says how many: docs/kernels.md.
int CombineSms(int device_sms);

// In how many pieces a token is summed, and how many of them are best taken at once by so many SMs: with each taking a
// warp waits for the queue and for what it reads of the token, so on few SMs as many as leave all warps enough turns.
int CombinePieces(int64_t row_bytes);
int CombineTogether(int64_t tokens, int64_t row_bytes, int num_sms);

cudaError_t LaunchCombine(const Peers& peers, const Call& call, const CombineArgs& args, const Grid& grid,
                          cudaStream_t stream);

// Before the first launch: loading a kernel while another one waits for its peers could hang.
cudaError_t LoadCombineKernels();

}  // namespace jax_ep
