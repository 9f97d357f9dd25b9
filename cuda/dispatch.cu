#include <algorithm>
#include <type_traits>

#include "cuda/bulk_mover.cuh"
#include "cuda/dispatch.h"
#include "cuda/exchange.cuh"
#include "cuda/fp8.cuh"

namespace jax_ep {
namespace {

constexpr int kDispatchThreads = 640;
constexpr int kGradientThreads = 512;  // which leaves each the registers for two vectors a step

// Warps of a block that move tokens: all but the last two.
__host__ __device__ constexpr int WorkersOf(int threads) { return threads / kWarpSize - 2; }

// A token moves in pieces, one warp a piece: so the first tokens are ready long before the last, and the warps that
// wait for peers have something to do. A lane has kSteps vectors of 16 bytes under way.
constexpr int kSteps = 7;
constexpr int kPieceVectors = kSteps * kWarpSize;

__host__ __device__ int PiecesOf(int row_bytes) { return (row_bytes / 16 + kPieceVectors - 1) / kPieceVectors; }

// What warps share out among them.
enum : int { kStaged, kMoved, kPulled };

// Where tokens, their scales and their weights lie.
struct Tokens {
  const char* vectors;
  int64_t stride;  // bytes from token to token
  const float* scales;
  const uint32_t* weights;
};

// What this rank was given.
__device__ Tokens GivenTokens(const DispatchArgs& a) {
  return {static_cast<const char*>(a.x), int64_t{a.hidden} * BytesOf(a.from), a.scales, a.weights};
}

__device__ Tokens StagedTokens(const Peers& peers, const DispatchArgs& a, int rank, int64_t epoch) {
  const BufferLayout& layout = peers.layout;
  const char* staging = peers.base[rank] + layout.staging_at(epoch);
  return {staging + layout.tokens_at(), BufferLayout::StrideOf(int64_t{a.hidden} * BytesOf(a.wire)),
          reinterpret_cast<const float*>(staging + layout.scales_at()),
          reinterpret_cast<const uint32_t*>(staging + layout.weights_at())};
}

// Where this rank finds a peer's tokens, once the peer has begun.
__device__ Tokens TokensOfPeer(const Peers& peers, const DispatchArgs& a, int peer, int64_t epoch) {
  const int64_t* lent = HeaderOf(peers, peers.rank)->lent[epoch & 1][peer];
  const int64_t x = LoadPeerWord(lent);
  if (x == 0) return StagedTokens(peers, a, peer, epoch);
  return {reinterpret_cast<const char*>(x), int64_t{a.hidden} * BytesOf(a.wire),
          reinterpret_cast<const float*>(LoadPeerWord(lent + 1)),
          reinterpret_cast<const uint32_t*>(LoadPeerWord(lent + 2))};
}

// Whether peers read this rank's tokens where they are. What is quantised on the way has to be staged.
__host__ __device__ bool Lends(const DispatchArgs& a) { return a.lends && a.from == a.wire; }

template <typename Store>
__device__ void ForEachRow(const Picks& picks, Store store) {
  for (unsigned left = picks.rows; left != 0; left &= left - 1) {
    store(int64_t{__shfl_sync(kAllLanes, picks.slot, __ffs(left) - 1)});
  }
}

// Stages a piece of a token as it is.
struct StageBits {
  static __device__ void Stage(const DispatchArgs& a, int first, const char* from, char* to, float*) {
    const int vectors = a.hidden * BytesOf(a.from) / 16;
    int4 value[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = first + s * kWarpSize;
      if (v < vectors) value[s] = reinterpret_cast<const int4*>(from)[v];
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = first + s * kWarpSize;
      if (v < vectors) reinterpret_cast<int4*>(to)[v] = value[s];
    }
  }
};

// Quantises it.
template <typename From>
struct StageQuantized {
  static __device__ void Stage(const DispatchArgs& a, int first, const char* from, char* to, float* scales) {
    constexpr int kElements = 16 / sizeof(From);            // of a lane in a step
    constexpr int kLanesOfBlock = kScaleBlock / kElements;  // that share a scale
    constexpr int kWords = kElements / 4;
    using Payload = std::conditional_t<kWords == 2, uint2, uint32_t>;
    const int vectors = a.hidden / kElements;
    int4 bits[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = first + s * kWarpSize;
      bits[s] = v < vectors ? reinterpret_cast<const int4*>(from)[v] : int4{0, 0, 0, 0};
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = first + s * kWarpSize;
      float x[kElements];
      ToFloats<From>(bits[s], x);
      // Magnitudes as integers, which NaN does not escape.
      uint32_t amax = 0;
#pragma unroll
      for (int i = 0; i < kElements; ++i) amax = max(amax, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
      for (int lanes = kLanesOfBlock / 2; lanes > 0; lanes /= 2) {
        amax = max(amax, __shfl_xor_sync(kAllLanes, amax, lanes));
      }
      const Fp8Scale scale = ScaleOf(amax, a.scale_format);
      uint32_t payload[kWords];
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        payload[i] = QuantizePair(x[4 * i], x[4 * i + 1], scale) | QuantizePair(x[4 * i + 2], x[4 * i + 3], scale)
                                                                       << 16;
      }
      if (v >= vectors) continue;
      reinterpret_cast<Payload*>(to)[v] = *reinterpret_cast<const Payload*>(payload);
      if (threadIdx.x % kLanesOfBlock == 0) scales[v * kElements / kScaleBlock] = scale.scale;
    }
  }
};

// This rank's tokens to its staging.
template <typename Stage>
__device__ void StageTokens(const Peers& peers, const DispatchArgs& a, int64_t epoch, Finished* finished) {
  const int lane = threadIdx.x % kWarpSize;
  const int blocks = ScaleBlocks(a.hidden);
  const int64_t row_bytes = int64_t{a.hidden} * BytesOf(a.from);
  const int pieces = PiecesOf(static_cast<int>(row_bytes));
  const Tokens staged = StagedTokens(peers, a, peers.rank, epoch);
  Queue queue(&HeaderOf(peers, peers.rank)->taken[kStaged]);
  while (true) {
    const int item = queue.Item();
    if (lane == 0) finished->Set(static_cast<int>(threadIdx.x) / kWarpSize, item);  // what it took before is finished
    queue.Ask();  // after the fence, which would wait for it
    if (item >= a.tokens * pieces) return;
    const int64_t token = item / pieces;
    const int piece = item % pieces;
    float* scales = const_cast<float*>(staged.scales) + token * blocks;
    Stage::Stage(a, piece * kPieceVectors + lane, static_cast<const char*>(a.x) + token * row_bytes,
                 const_cast<char*>(staged.vectors) + token * staged.stride, scales);
    if (piece == 0) {
      for (int i = lane; a.scales != nullptr && i < blocks; i += kWarpSize) scales[i] = a.scales[token * blocks + i];
      uint32_t* weights = const_cast<uint32_t*>(staged.weights) + token * a.top_k;
      if (a.weights != nullptr && lane < a.top_k) weights[lane] = a.weights[token * a.top_k + lane];
    }
    __syncwarp();
  }
}

// Brings a piece of a token, its vectors up to `end`, to the rows of its picks, as it crosses.
struct MoveBits {
  static constexpr int kThreads = kDispatchThreads;
  static __device__ void Move(const DispatchArgs& a, const Picks& picks, int first, int end, const char* from,
                              const float*) {
    int4 value[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = first + s * kWarpSize;
      if (v < end) value[s] = LoadPeer(from + int64_t{v} * 16);
    }
    ForEachRow(picks, [&](int64_t row) {
      int4* to = static_cast<int4*>(a.rows) + row * (a.hidden * BytesOf(a.wire) / 16);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int v = first + s * kWarpSize;
        if (v < end) __stcs(to + v, value[s]);  // more than the L2 cache holds, which has better to keep
      }
    });
  }
};

// The same by bulk copies: `Mover` has them.
struct MoveInBulk {
  static constexpr int kThreads = kDispatchThreads;
};

// Dequantises it.
template <typename To>
struct MoveDequantized {
  static constexpr int kThreads = kDispatchThreads;
  static __device__ void Move(const DispatchArgs& a, const Picks& picks, int first, int end, const char* from,
                              const float* scales) {
    constexpr int kWide = static_cast<int>(sizeof(To));  // vectors that 16 elements take
    int4 value[kSteps];
    float scale[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = first + s * kWarpSize;
      if (v >= end) continue;
      value[s] = LoadPeer(from + int64_t{v} * 16);
      scale[s] = LoadPeerWord(scales + v * 16 / kScaleBlock);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = first + s * kWarpSize;
      const uint32_t* words = reinterpret_cast<const uint32_t*>(&value[s]);
      int4 wide[kWide];
#pragma unroll
      for (int i = 0; i < 4; ++i) Dequantize(words[i], scale[s], reinterpret_cast<To*>(wide) + 4 * i);
      ForEachRow(picks, [&](int64_t row) {
        if (v >= end) return;
        int4* to = reinterpret_cast<int4*>(static_cast<To*>(a.rows) + row * a.hidden) + int64_t{v} * kWide;
#pragma unroll
        for (int i = 0; i < kWide; ++i) to[i] = wide[i];
      });
    }
  }
};

// Brings its product with the weight of each row, and sums its products with y. T: of all three.
template <typename T>
struct MoveGradient {
  static constexpr int kThreads = kGradientThreads;
  static __device__ void Move(const DispatchArgs& a, const Picks& picks, int first, int end, const char* from,
                              const float*) {
    constexpr int kElements = 16 / sizeof(T);
    const int vectors = a.hidden / kElements;
    const int pieces = PiecesOf(a.hidden * static_cast<int>(sizeof(T)));
    int4 value[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = first + s * kWarpSize;
      value[s] = v < end ? LoadPeer(from + int64_t{v} * 16) : int4{0, 0, 0, 0};
    }
    ForEachRow(picks, [&](int64_t row) {
      const float weight = a.y_weights[row];
      const int4* y = static_cast<const int4*>(a.y) + row * vectors;
      int4* to = static_cast<int4*>(a.rows) + row * vectors;
      int4 factor[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int v = first + s * kWarpSize;
        factor[s] = v < end ? y[v] : int4{0, 0, 0, 0};
      }
      float dot = 0.0f;  // in an order of its own: the contract leaves it open
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int v = first + s * kWarpSize;
        float x[kElements];
        float f[kElements];
        ToFloats<T>(value[s], x);
        ToFloats<T>(factor[s], f);
        int4 product;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          reinterpret_cast<T*>(&product)[i] = RoundTo<T>(__fmul_rn(x[i], weight));
          dot = fmaf(x[i], f[i], dot);
        }
        if (v < end) to[v] = product;
      }
#pragma unroll
      for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) dot += __shfl_xor_sync(kAllLanes, dot, lanes);
      if (threadIdx.x % kWarpSize == 0) a.dots[row * pieces + first / kPieceVectors] = dot;
    });
  }
};

// The scales of a piece, those of its blocks from `first` to `end`.
__device__ void MoveScales(const DispatchArgs& a, const Picks& picks, int lane, int first, int end,
                           const float* scales) {
  const int blocks = ScaleBlocks(a.hidden);
  for (int i0 = first; i0 < end; i0 += kWarpSize) {
    const int i = i0 + lane;
    const float scale = i < end ? LoadPeerWord(scales + i) : 0.0f;
    ForEachRow(picks, [&](int64_t row) {
      if (i < end) a.row_scales[row * blocks + i] = scale;
    });
  }
}

// Of the lane's pick.
__device__ uint32_t LoadWeight(const DispatchArgs& a, int lane, const uint32_t* weights) {
  return lane < a.top_k ? LoadPeerWord(weights + lane) : 0;
}

__device__ void StoreWeight(const DispatchArgs& a, const Picks& picks, int lane, uint32_t weight) {
  if (a.order == RowOrder::kExpert) {
    if (picks.slot >= 0) a.row_weights[picks.slot] = weight;
  } else {
    ForEachRow(picks, [&](int64_t row) {
      if (lane < a.top_k) a.row_weights[row * a.top_k + lane] = picks.slot >= 0 ? weight : 0;
    });
  }
}

// A piece of a token: its vectors up to `end`.
struct Piece {
  int64_t token;
  int number;
  int first;
  int end;

  __device__ Piece(const DispatchArgs& a, int token, int piece, int piece_vectors)
      : token(token),
        number(piece),
        first(piece * piece_vectors),
        end(min(first + piece_vectors, a.hidden * BytesOf(a.wire) / 16)) {}
};

// Brings pieces of tokens to this rank's rows of them, with what belongs to them. Of a warp.
template <typename Move>
class Mover {
 public:
  static constexpr int kRingBytes = 0;  // of shared memory, of a warp

  __device__ Mover(const DispatchArgs& a, char*) : a_(a), lane_(static_cast<int>(threadIdx.x) % kWarpSize) {}

  __device__ void Bring(const Tokens& tokens, const Piece& piece, const Picks& picks) {
    const float* scales = tokens.scales + piece.token * ScaleBlocks(a_.hidden);
    Move::Move(a_, picks, piece.first + lane_, piece.end, tokens.vectors + piece.token * tokens.stride, scales);
    if (a_.row_scales != nullptr) {
      MoveScales(a_, picks, lane_, piece.first * 16 / kScaleBlock, ScaleBlocks(piece.end * 16), scales);
    }
    if (a_.weights != nullptr && piece.number == 0) {
      StoreWeight(a_, picks, lane_, LoadWeight(a_, lane_, tokens.weights + piece.token * a_.top_k));
    }
  }

  // Until all of it is there.
  __device__ void Finish() {}

 private:
  const DispatchArgs& a_;
  const int lane_;
};

template <>
class Mover<MoveInBulk> {
 public:
  static constexpr int kRingBytes = sizeof(BulkRing);

  __device__ Mover(const DispatchArgs& a, char* ring)
      : a_(a),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        bulk_(reinterpret_cast<BulkRing*>(ring), static_cast<char*>(a.rows),
              min(a.hidden * BytesOf(a.wire), BulkRing::kLargest)) {}

  __device__ void Bring(const Tokens& tokens, const Piece& piece, const Picks& picks) {
    const bool is_row = picks.rows >> lane_ & 1;
    const uint32_t vectors = a_.hidden * BytesOf(a_.wire) / 16;
    const uint32_t place = is_row ? picks.slot * vectors + piece.first : BulkMover::kNowhere;
    bulk_.Move(tokens.vectors + piece.token * tokens.stride + int64_t{piece.first} * 16, place,
               (piece.end - piece.first) * 16);
    if (a_.row_scales != nullptr) {
      const float* scales = tokens.scales + piece.token * ScaleBlocks(a_.hidden);
      MoveScales(a_, picks, lane_, piece.first * 16 / kScaleBlock, ScaleBlocks(piece.end * 16), scales);
    }
    if (a_.weights == nullptr || piece.number != 0) return;
    StoreHeld();
    weight_ = LoadWeight(a_, lane_, tokens.weights + piece.token * a_.top_k);
    held_ = picks;
  }

  __device__ void Finish() {
    StoreHeld();
    bulk_.Finish();
  }

 private:
  // The weights that were loaded for the token before: nobody has waited for them.
  __device__ void StoreHeld() {
    if (held_.picked != 0) StoreWeight(a_, held_, lane_, weight_);
    held_.picked = 0;
  }

  const DispatchArgs& a_;
  const int lane_;
  BulkMover bulk_;
  Picks held_{};
  uint32_t weight_ = 0;
};

// Pieces of the tokens of some ranks.
class Pieces {
 public:
  // From `round` 0, this rank's own, or 1, those of its peers, each rank starting at another, to `end`; so many a
  // token.
  __device__ Pieces(const Peers& peers, const DispatchArgs& a, uint32_t* taken, int pieces, int round, int end)
      : peers_(peers),
        a_(a),
        queue_(taken),
        pieces_(pieces),
        each_(a.tokens * pieces),
        round_(round),
        end_(end),
        lane_(threadIdx.x % kWarpSize) {}

  // The next one for this warp, or false: whose, token and piece, and the slot of the lane's pick.
  __device__ bool Next() {
    int item = queue_.Next() - before_;
    for (; item >= each_ && round_ < end_; ++round_) {
      item -= each_;
      before_ += each_;
    }
    if (round_ == end_) return false;
    rank = (peers_.rank + round_) % peers_.layout.shape.ranks;
    token = item / pieces_;
    piece = item % pieces_;
    slot = -1;
    if (lane_ < a_.top_k) slot = a_.slots[(int64_t{rank} * a_.tokens + token) * a_.top_k + lane_];
    return true;
  }

  int rank = -1;
  int token = 0;
  int piece = 0;
  int slot = -1;

 private:
  const Peers& peers_;
  const DispatchArgs& a_;
  Queue queue_;
  const int pieces_;
  const int each_;  // of a rank
  int before_ = 0;  // of the rounds before
  int round_;
  const int end_;
  const int lane_;
};

// This rank's own tokens to its rows, from where they were given, or, if they had to be quantised, from staging, in the
// pieces in which they were staged.
template <typename Move>
__device__ void MoveOwnTokens(const Peers& peers, const DispatchArgs& a, int64_t epoch, Progress* progress,
                              Mover<Move>* mover) {
  const bool staged = a.from != a.wire;
  Tokens tokens = staged ? StagedTokens(peers, a, peers.rank, epoch) : GivenTokens(a);
  tokens.weights = a.weights;
  const int piece_vectors = kPieceVectors * BytesOf(a.wire) / BytesOf(a.from);
  const Chunks chunks(a.tokens);
  int known = staged ? -1 : chunks.count;  // the last chunk that is known to be there
  Pieces next(peers, a, &HeaderOf(peers, peers.rank)->taken[kMoved], PiecesOf(a.hidden * BytesOf(a.from)), 0, 1);
  for (bool more = next.Next(); more;) {
    const int token = next.token;
    const int piece = next.piece;
    const Picks picks = PicksFrom(next.slot, a.order);
    more = next.Next();  // whose slot is loaded meanwhile
    if (picks.picked == 0) continue;
    if (chunks.Of(token) > known) {
      known = chunks.Of(token);
      AwaitChunk(progress, peers.rank, known);
    }
    mover->Bring(tokens, Piece(a, token, piece, piece_vectors), picks);
  }
}

// The peers' tokens to this rank's rows; each as soon as its chunk is ready.
template <typename Move>
__device__ void PullTokens(const Peers& peers, const DispatchArgs& a, int64_t epoch, Progress* progress,
                           Mover<Move>* mover) {
  const Chunks chunks(a.tokens);
  int peer = -1;   // whose tokens are known, and
  int known = -1;  // the last chunk of them that is known to be ready
  Tokens tokens{};
  Pieces next(peers, a, &HeaderOf(peers, peers.rank)->taken[kPulled], PiecesOf(a.hidden * BytesOf(a.wire)), 1,
              peers.layout.shape.ranks);
  for (bool more = next.Next(); more;) {
    const int token = next.token;
    const int piece = next.piece;
    const int rank = next.rank;
    const Picks picks = PicksFrom(next.slot, a.order);
    more = next.Next();
    if (picks.picked == 0) continue;
    if (rank != peer) {
      AwaitChunk(progress, rank, -1);
      tokens = TokensOfPeer(peers, a, rank, epoch);
      peer = rank;
      known = -1;
    }
    if (chunks.Of(token) > known) {
      known = chunks.Of(token);
      AwaitChunk(progress, peer, known);
      CopiesSeeWhatISee();
    }
    mover->Bring(tokens, Piece(a, token, piece, kPieceVectors), picks);
  }
}

// Rows that hold no token are +0. In expert order they follow the real rows of each expert, and the last expert.
struct Padding {
  const int32_t* before;     // [local_experts + 1]: how many such rows there are in front of an expert
  const int32_t* first_row;  // [local_experts + 1]: of an expert
};

// Fills the tables in shared memory; by all threads of a block.
__device__ Padding PaddingOf(const DispatchArgs& a, int32_t* tables) {
  int32_t* before = tables;
  int32_t* first_row = tables + a.local_experts + 1;
  if (threadIdx.x < kWarpSize) {
    int32_t padding = 0;
    int32_t row = 0;
    for (int e0 = 0; e0 < a.local_experts; e0 += kWarpSize) {
      const int e = e0 + threadIdx.x;
      const int32_t size = e < a.local_experts ? a.group_sizes[e] : 0;
      const int32_t empty = e < a.local_experts ? size - a.counts[e] : 0;
      int32_t size_sum = size;
      int32_t empty_sum = empty;
#pragma unroll
      for (int offset = 1; offset < kWarpSize; offset *= 2) {
        const int32_t size_below = __shfl_up_sync(kAllLanes, size_sum, offset);
        const int32_t empty_below = __shfl_up_sync(kAllLanes, empty_sum, offset);
        if (static_cast<int>(threadIdx.x) >= offset) {
          size_sum += size_below;
          empty_sum += empty_below;
        }
      }
      if (e < a.local_experts) {
        before[e] = padding + empty_sum - empty;
        first_row[e] = row + size_sum - size;
      }
      padding += __shfl_sync(kAllLanes, empty_sum, kWarpSize - 1);
      row += __shfl_sync(kAllLanes, size_sum, kWarpSize - 1);
    }
    if (threadIdx.x == 0) {
      before[a.local_experts] = padding;
      first_row[a.local_experts] = row;
    }
  }
  __syncthreads();
  return {before, first_row};
}

// In rank order the rows are those of the last token that has one, and all before. By all threads of a block.
__device__ int64_t RowsInRankOrder(const Peers& peers, const DispatchArgs& a) {
  const int64_t picks = int64_t{peers.layout.shape.ranks} * a.tokens * a.top_k;
  for (int64_t end = picks; end > 0; end -= blockDim.x) {
    const int64_t pick = end - 1 - threadIdx.x;
    const int32_t slot = pick >= 0 ? a.slots[pick] : -1;
    // The rows of tokens rise: the greatest slot is among the last picks that have one.
    const int rows = __syncthreads_or(slot >= 0);
    if (rows == 0) continue;
    __shared__ int32_t greatest;
    if (threadIdx.x == 0) greatest = -1;
    __syncthreads();
    if (slot >= 0) atomicMax(&greatest, slot);
    __syncthreads();
    return int64_t{greatest} + 1;
  }
  return 0;
}

__device__ void ClearRow(const DispatchArgs& a, int64_t row, int lane) {
  const int blocks = ScaleBlocks(a.hidden);
  const int vectors = a.hidden * BytesOf(a.to) / 16;
  const int weights = a.weights == nullptr ? 0 : a.order == RowOrder::kRank ? a.top_k : 1;
  int4* to = static_cast<int4*>(a.rows) + row * vectors;
  for (int v = lane; v < vectors; v += kWarpSize) to[v] = int4{0, 0, 0, 0};
  for (int i = lane; a.row_scales != nullptr && i < blocks; i += kWarpSize) a.row_scales[row * blocks + i] = 0.0f;
  for (int i = lane; i < weights; i += kWarpSize) a.row_weights[row * weights + i] = 0;
  const int pieces = a.dots == nullptr ? 0 : PiecesOf(a.hidden * BytesOf(a.to));
  for (int i = lane; i < pieces; i += kWarpSize) a.dots[row * pieces + i] = 0.0f;
}

__device__ void ClearExpertPadding(const DispatchArgs& a, const Padding& padding, const Crew& crew) {
  const int experts = a.local_experts;
  const int32_t within = padding.before[experts];
  const int32_t end = padding.first_row[experts];
  for (int64_t item = crew.warp; item < within + int64_t{a.capacity} - end; item += crew.warps) {
    if (item >= within) {
      ClearRow(a, end + item - within, crew.lane);
      continue;
    }
    int expert = 0;  // the last with before[expert] <= item
    for (int step = 1 << (31 - __clz(experts)); step > 0; step /= 2) {
      if (expert + step < experts && padding.before[expert + step] <= item) expert += step;
    }
    const int64_t row = int64_t{padding.first_row[expert + 1]} - (padding.before[expert + 1] - item);
    ClearRow(a, row, crew.lane);
  }
}

// Of each block, `pulling_warps` bring the tokens of the peers, the others those of this rank: to staging first, as the
// peers wait for them, then to its own rows; and then they help the first. But the last two warps tell the peers what
// is staged, and watch them.
template <typename Stage, typename Move>
__global__ void __launch_bounds__(Move::kThreads, 1)
    Dispatch(__grid_constant__ const Peers peers, __grid_constant__ const Call call,
             __grid_constant__ const DispatchArgs a, int pulling_warps) {
  extern __shared__ __align__(128) char shared[];
  constexpr int kWorkers = WorkersOf(Move::kThreads);
  auto* tables = reinterpret_cast<int32_t*>(shared + kWorkers * Mover<Move>::kRingBytes);
  __shared__ Progress progress;
  __shared__ Finished finished;
  Clear(&progress);
  Clear(&finished);
  const int64_t epoch = EpochOf(peers, call, "dispatch");
  const int ranks = peers.layout.shape.ranks;
  const bool quantizes = a.from != a.wire;
  const bool lends = Lends(a);
  const bool stages = quantizes || (ranks > 1 && !lends);
  const Chunks chunks(a.tokens);
  if (blockIdx.x == 0) {
    for (int peer = threadIdx.x; peer < ranks; peer += blockDim.x) {
      volatile int64_t* lent = HeaderOf(peers, peer)->lent[epoch & 1][peers.rank];
      lent[0] = lends ? reinterpret_cast<int64_t>(a.x) : 0;
      lent[1] = reinterpret_cast<int64_t>(a.scales);
      lent[2] = reinterpret_cast<int64_t>(a.weights);
    }
    Begin(peers, call, epoch);  // the same threads for the same peers
  }
  const bool by_rank = a.order == RowOrder::kRank;
  const int64_t rows = by_rank ? RowsInRankOrder(peers, a) : 0;
  const Padding padding = by_rank ? Padding{nullptr, nullptr} : PaddingOf(a, tables);
  __syncthreads();
  const int warp = threadIdx.x / kWarpSize;
  if (warp < kWorkers) {
    Mover<Move> mover(a, shared + warp * Mover<Move>::kRingBytes);
    if (warp >= pulling_warps) {
      const Crew crew = CrewOf(pulling_warps, kWorkers);
      if (stages) StageTokens<Stage>(peers, a, epoch, &finished);
      MoveOwnTokens<Move>(peers, a, epoch, &progress, &mover);
      if (by_rank) {
        for (int64_t row = rows + crew.warp; row < a.capacity; row += crew.warps) ClearRow(a, row, crew.lane);
      } else {
        ClearExpertPadding(a, padding, crew);
      }
    }
    PullTokens<Move>(peers, a, epoch, &progress, &mover);
    mover.Finish();
  } else if (warp == kWorkers) {
    AnnounceChunks(&finished, pulling_warps, kWorkers, chunks, a.tokens, PiecesOf(a.hidden * BytesOf(a.from)),
                   stages ? 1 : 0, [&](int, int chunk) {
                     for (int peer = 0; peer < ranks; ++peer) {
                       if (quantizes || peer != peers.rank) Tell(peers, peer, chunk, epoch);
                     }
                   });
  } else {
    AwaitPeers(peers, call, epoch, "dispatch");
    FenceBlock();
    for (int peer = threadIdx.x % kWarpSize; peer < ranks; peer += kWarpSize) {
      const bool lent = LoadPeerWord(&HeaderOf(peers, peers.rank)->lent[epoch & 1][peer][0]) != 0;
      progress.Set(peer, lent ? chunks.count : 0);
    }
    __syncwarp();
    WatchChunks(peers, call, epoch, chunks, quantizes ? -1 : peers.rank, &progress, "dispatch");
  }
  Finish(peers, call, epoch, lends, "dispatch");
}

using Kernel = void (*)(Peers, Call, DispatchArgs, int);

template <typename Stage>
Kernel KernelThat(Element to) {
  switch (to) {
    case Element::kFloat32:
      return Dispatch<Stage, MoveDequantized<float>>;
    case Element::kBFloat16:
      return Dispatch<Stage, MoveDequantized<__nv_bfloat16>>;
    case Element::kFloat16:
      return Dispatch<Stage, MoveDequantized<__half>>;
    case Element::kFloat8:
      return Dispatch<Stage, MoveBits>;
  }
  return nullptr;
}

// Null for what there is no kernel for.
Kernel GradientKernelOf(Element element) {
  switch (element) {
    case Element::kFloat32:
      return Dispatch<StageBits, MoveGradient<float>>;
    case Element::kBFloat16:
      return Dispatch<StageBits, MoveGradient<__nv_bfloat16>>;
    case Element::kFloat16:
      return Dispatch<StageBits, MoveGradient<__half>>;
    case Element::kFloat8:
      break;
  }
  return nullptr;
}

Kernel KernelOf(Element from, Element wire, Element to) {
  if (from == wire && wire == to) return Dispatch<StageBits, MoveBits>;
  if (wire != Element::kFloat8) return nullptr;
  switch (from) {
    case Element::kFloat32:
      return KernelThat<StageQuantized<float>>(to);
    case Element::kBFloat16:
      return KernelThat<StageQuantized<__nv_bfloat16>>(to);
    case Element::kFloat16:
      return KernelThat<StageQuantized<__half>>(to);
    case Element::kFloat8:
      return KernelThat<StageBits>(to);
  }
  return nullptr;
}

constexpr Kernel kBulkKernel = Dispatch<StageBits, MoveInBulk>;
constexpr int kBulkBytes = WorkersOf(kDispatchThreads) * Mover<MoveInBulk>::kRingBytes;
constexpr int kSharedBytes = 226 * 1024;  // of an SM's 227 KB: the rest is for what is declared as shared

bool BulkFits(const DispatchArgs& args, const Grid& grid, int table_bytes) {
  const int64_t places = int64_t{args.capacity} * args.hidden * BytesOf(args.to) / 16;
  return grid.in_bulk && kBulkBytes + table_bytes <= kSharedBytes && places < BulkMover::kNowhere;
}

// Warps of each block that pull from the start, of so many. Most of them, where nothing is staged. Else fewer: requests
// that wait for the link hold up those of the warps that stage, for which the peers wait.
int PullingWarps(const Peers& peers, const DispatchArgs& args, int num_sms, int workers) {
  if (peers.layout.shape.ranks == 1) return 0;
  if (Lends(args)) return workers * 2 / 3;
  const int all = args.order == RowOrder::kRank ? 500 : 1000;           // more where each writes several rows
  const int most = args.from == args.wire ? workers / 2 : workers / 3;  // quantising takes longer than staging alone
  return std::clamp(all / num_sms, 1, most);
}

}  // namespace

int DispatchSms(const DispatchArgs& args, int device_sms) {
  return std::max(1, device_sms * (OnlyCopies(args) && !args.lends ? 2 : 3) / 4);
}

int DispatchPieces(int64_t row_bytes) { return PiecesOf(static_cast<int>(row_bytes)); }

cudaError_t LaunchDispatch(const Peers& peers, const Call& call, const DispatchArgs& args, const Grid& grid,
                           cudaStream_t stream) {
  const bool plain = args.from == args.wire && args.wire == args.to;
  if (args.y != nullptr && !(plain && args.order == RowOrder::kExpert)) return cudaErrorInvalidValue;
  const int table_bytes = 2 * (args.local_experts + 1) * static_cast<int>(sizeof(int32_t));
  const bool in_bulk = OnlyCopies(args) && BulkFits(args, grid, table_bytes);
  const Kernel kernel = in_bulk             ? kBulkKernel
                        : args.y != nullptr ? GradientKernelOf(args.from)
                                            : KernelOf(args.from, args.wire, args.to);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  const int threads = args.y != nullptr ? kGradientThreads : kDispatchThreads;
  return LaunchTogether(kernel, grid, threads, (in_bulk ? kBulkBytes : 0) + table_bytes, stream, peers, call, args,
                        PullingWarps(peers, args, grid.num_sms, WorkersOf(threads)));
}

cudaError_t LoadDispatchKernels() {
  constexpr Element kAll[] = {Element::kFloat32, Element::kBFloat16, Element::kFloat16, Element::kFloat8};
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kBulkKernel);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kBulkKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  for (const Element from : kAll) {
    const Kernel gradient = GradientKernelOf(from);
    if (gradient != nullptr && error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, gradient);
    for (const Element wire : {from, Element::kFloat8}) {
      for (const Element to : kAll) {
        const Kernel kernel = KernelOf(from, wire, to);
        if (kernel != nullptr && error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
      }
    }
  }
  return error;
}

}  // namespace jax_ep
