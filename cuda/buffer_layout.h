// The one owner of byte offsets in symmetric memory. Every rank of a group has the same layout:
//
//   header    epoch, tags and signals
//   staging   two of them, by the parity of the epoch: what a rank's peers read in layout and dispatch
//   receive   two of them, by the parity of the epoch: what a rank's peers write in combine
//
// Two are enough because every operation waits for every peer to begin its epoch: a peer that has begun epoch n - 1 has
// finished n - 2.
#pragma once

#include <cstdint>

#include "cuda/element.h"

#ifdef __CUDACC__
#define JAX_EP_LAYOUT_FN __host__ __device__ constexpr
#else
#define JAX_EP_LAYOUT_FN constexpr
#endif

namespace jax_ep {

inline constexpr int kMaxRanks = 72;
inline constexpr int kMaxTopK = 32;
inline constexpr int64_t kPage = 256;  // alignment of every part
// Tokens are told ready in so many chunks, so that work on the first can start while the last are on their way.
inline constexpr int kChunks = 64;

JAX_EP_LAYOUT_FN int64_t AlignUp(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Kinds of work in one operation that its warps share.
inline constexpr int kQueues = 4;

// Epochs only grow, so nothing here is ever cleared but what is counted.
struct Header {
  int64_t epoch;                      // of the last operation that this rank has finished
  int64_t failed;                     // not 0 after a wait that ran out of time
  uint32_t blocks_done;               // of the operation under way
  uint32_t busy;                      // 1 while one is
  uint32_t taken[kQueues];            // of its work, how much warps have taken
  int64_t begun[kMaxRanks];           // [peer]: the last epoch that it has begun
  int64_t tags[2][kMaxRanks];         // [epoch % 2][peer]: the call site that it has begun it for
  int64_t read[kMaxRanks];            // [peer]: the last epoch in which it has read all that it reads of this rank
  int64_t lent[2][kMaxRanks][3];      // [epoch % 2][peer]: where its tokens, scales and weights are, if not in staging
  int64_t ready[kMaxRanks][kChunks];  // [peer][share]: the last epoch with this share of its index there
  // [epoch % 2][peer]: blocks of its kernel, and, [chunk]: how many of them are through with what they do of this chunk
  // for this rank. Zero again when this rank finishes the epoch.
  uint32_t blocks[2][kMaxRanks];
  uint32_t arrived[2][kMaxRanks][kChunks];
};

// What a group is made for.
struct GroupShape {
  int32_t ranks;
  int32_t max_tokens;
  int32_t top_k;
  int32_t hidden;
  int32_t element_bytes;  // of the widest token
};

struct BufferLayout {
  GroupShape shape;

  // Staging: tokens, FP8 scales, routing weights, indices.
  JAX_EP_LAYOUT_FN int64_t row_bytes() const { return int64_t{shape.hidden} * shape.element_bytes; }
  // Rows that start on a cache line cross the link fastest.
  static JAX_EP_LAYOUT_FN int64_t StrideOf(int64_t row_bytes) { return (row_bytes + 127) / 128 * 128; }
  JAX_EP_LAYOUT_FN int64_t scale_blocks() const { return ScaleBlocks(shape.hidden); }
  JAX_EP_LAYOUT_FN int64_t picks() const { return int64_t{shape.max_tokens} * shape.top_k; }
  JAX_EP_LAYOUT_FN int64_t tokens_at() const { return 0; }
  JAX_EP_LAYOUT_FN int64_t scales_at() const { return tokens_at() + AlignUp(shape.max_tokens * StrideOf(row_bytes())); }
  JAX_EP_LAYOUT_FN int64_t weights_at() const { return scales_at() + AlignUp(shape.max_tokens * scale_blocks() * 4); }
  JAX_EP_LAYOUT_FN int64_t index_at() const { return weights_at() + AlignUp(picks() * 4); }
  JAX_EP_LAYOUT_FN int64_t staging_bytes() const { return index_at() + AlignUp(picks() * 4); }

  // Receive: for each token one partial sum from each rank that may hold rows of it, with a stamp that says of which
  // epoch and rank it is; and for each pick the cotangent of its weight, stamped likewise.
  JAX_EP_LAYOUT_FN int64_t partials() const { return shape.ranks < shape.top_k ? shape.ranks : shape.top_k; }
  JAX_EP_LAYOUT_FN int64_t sums_at() const { return 0; }
  JAX_EP_LAYOUT_FN int64_t stamps_at() const {
    return sums_at() + AlignUp(shape.max_tokens * partials() * StrideOf(row_bytes()));
  }
  JAX_EP_LAYOUT_FN int64_t pick_words_at() const { return stamps_at() + AlignUp(shape.max_tokens * partials() * 8); }
  JAX_EP_LAYOUT_FN int64_t receive_bytes() const { return pick_words_at() + AlignUp(picks() * 8); }

  JAX_EP_LAYOUT_FN int64_t header_bytes() const { return AlignUp(sizeof(Header)); }
  JAX_EP_LAYOUT_FN int64_t staging_at(int64_t epoch) const { return header_bytes() + (epoch & 1) * staging_bytes(); }
  JAX_EP_LAYOUT_FN int64_t receive_at(int64_t epoch) const {
    return header_bytes() + 2 * staging_bytes() + (epoch & 1) * receive_bytes();
  }
  JAX_EP_LAYOUT_FN int64_t total_bytes() const { return header_bytes() + 2 * (staging_bytes() + receive_bytes()); }
};

// A rank's view of its group: the base address of every rank's symmetric memory, its own included.
struct Peers {
  char* base[kMaxRanks];
  const int64_t* open;  // not 0 while the group is open; outlives the rest, for programs that do
  int32_t rank;
  BufferLayout layout;
};

}  // namespace jax_ep
