// Dispatch inside an NVLink domain: every rank stages its tokens, quantised on the way where asked, and pulls those of
// its experts from its peers.
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
struct DispatchArgs {
  RowOrder order;
  int32_t tokens;
  int32_t top_k;
  int32_t local_experts;
  int32_t capacity;
  int32_t hidden;              // elements; every kind of row below is a multiple of 16 bytes
  Element from;                // of x
  Element wire;                // what crosses: as x is, or kFloat8
  Element to;                  // of rows: as what crosses, or of kFloat8 dequantised to another
  ScaleFormat scale_format;    // where x is quantised
  const void* x;               // [tokens, hidden]
  const float* scales;         // [tokens, blocks] of an x that comes quantised, or null
  const uint32_t* weights;     // [tokens, top_k], or null
  const int32_t* slots;        // [ranks, tokens, top_k]
  const int32_t* group_sizes;  // [local_experts]
  const int32_t* counts;       // [local_experts]
  void* rows;                  // [capacity, hidden]
  float* row_scales;           // [capacity, blocks] where rows stay quantised, or null
  uint32_t* row_weights;       // [capacity], in rank order [capacity, top_k]; null if weights are
  // Where y is not null: the gradient of a weighted combine of rows y. Rows are then the tokens times the weights of
  // their rows, rounded, and dots, summed over the pieces of a row, the products of tokens and y. Expert order only.
  const void* y = nullptr;           // [capacity, hidden] of `from`
  const float* y_weights = nullptr;  // [capacity]
  float* dots = nullptr;             // [capacity, DispatchPieces]
  bool lends = false;  // whether peers can read x, scales and weights where they are: then nothing is staged
};

// Whether rows are tokens as they were given.
inline bool OnlyCopies(const DispatchArgs& args) {
  return args.from == args.wire && args.wire == args.to && args.y == nullptr;
}

// SMs that a dispatch takes of a device's where nobody says how many: docs/kernels.md.
int DispatchSms(const DispatchArgs& args, int device_sms);

// Pieces that a row of so many bytes is moved in.
int DispatchPieces(int64_t row_bytes);

cudaError_t LaunchDispatch(const Peers& peers, const Call& call, const DispatchArgs& args, const Grid& grid,
                           cudaStream_t stream);

// Before the first launch: loading a kernel while another one waits for its peers could hang.
cudaError_t LoadDispatchKernels();

}  // namespace jax_ep
