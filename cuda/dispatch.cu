#include "cuda/dispatch.h"
#include "cuda/exchange.cuh"

namespace jax_ep {
namespace {

struct Workers {
  int64_t thread, threads;
  int64_t warp, warps;
  int lane;
};

__device__ Workers WorkersOfGrid() {
  Workers w;
  w.thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  w.threads = int64_t{gridDim.x} * blockDim.x;
  w.warp = w.thread / kWarpSize;
  w.warps = w.threads / kWarpSize;
  w.lane = threadIdx.x % kWarpSize;
  return w;
}

template <typename Word>
__device__ void Copy(const Workers& w, const Word* from, Word* to, int64_t count) {
  for (int64_t i = w.thread; i < count; i += w.threads) to[i] = from[i];
}

// Copies one row of `vectors` 16-byte vectors to each row whose slot is set in `lanes`, by one warp. `slot` is the
// lane's own. Four loads are under way at a time.
__device__ void CopyRow(const int4* from, int4* rows, int vectors, int slot, unsigned lanes, int lane) {
  constexpr int kUnroll = 4;
  for (int v0 = 0; v0 < vectors; v0 += kWarpSize * kUnroll) {
    int4 value[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int v = v0 + u * kWarpSize + lane;
      if (v < vectors) value[u] = LoadPeer(from + v);
    }
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      int4* to = rows + int64_t{__shfl_sync(kAllLanes, slot, __ffs(left) - 1)} * vectors;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int v = v0 + u * kWarpSize + lane;
        if (v < vectors) to[v] = value[u];
      }
    }
  }
}

// Where a rank's tokens, scales and weights are read.
struct Source {
  const char* tokens;
  const uint32_t* scales;
  const uint32_t* weights;
};

// Brings the tokens of one rank, of which this rank has rows, to these rows: one warp a token.
__device__ void Pull(const Workers& w, const DispatchArgs& a, int rank, const Source& from) {
  const int vectors = a.row_bytes / 16;
  for (int64_t token = w.warp; token < a.tokens; token += w.warps) {
    const int32_t* slots = a.slots + (int64_t{rank} * a.tokens + token) * a.top_k;
    const int slot = w.lane < a.top_k ? slots[w.lane] : -1;
    const unsigned picked = __ballot_sync(kAllLanes, slot >= 0);
    if (picked == 0) continue;
    // In rank order all picks of a token have the same row.
    const unsigned lanes = a.order == RowOrder::kRank ? picked & -picked : picked;
    CopyRow(reinterpret_cast<const int4*>(from.tokens) + token * vectors, static_cast<int4*>(a.rows), vectors, slot,
            lanes, w.lane);
    for (int i = w.lane; i < a.scale_words; i += kWarpSize) {
      const uint32_t scale = LoadPeerWord(from.scales + token * a.scale_words + i);
      for (unsigned left = lanes; left != 0; left &= left - 1) {
        a.row_scales[int64_t{slots[__ffs(left) - 1]} * a.scale_words + i] = scale;
      }
    }
    if (a.weights == nullptr || w.lane >= a.top_k) continue;
    const uint32_t weight = slot >= 0 ? LoadPeerWord(from.weights + token * a.top_k + w.lane) : 0;
    if (a.order == RowOrder::kRank) {
      a.row_weights[int64_t{slots[__ffs(picked) - 1]} * a.top_k + w.lane] = weight;
    } else if (slot >= 0) {
      a.row_weights[slot] = weight;
    }
  }
}

__global__ void __launch_bounds__(kExchangeThreads, 1) Dispatch(Peers peers, Call call, DispatchArgs a) {
  const Workers w = WorkersOfGrid();
  const BufferLayout& layout = peers.layout;
  const int ranks = layout.shape.ranks;
  const int64_t epoch = BeginEpoch(peers);
  const int64_t staging = layout.staging_at(epoch);
  char* mine = peers.base[peers.rank] + staging;
  const int vectors = a.row_bytes / 16;

  if (ranks > 1) {
    Copy(w, static_cast<const int4*>(a.x), reinterpret_cast<int4*>(mine + layout.tokens_at()),
         int64_t{a.tokens} * vectors);
    Copy(w, a.scales, reinterpret_cast<uint32_t*>(mine + layout.scales_at()), int64_t{a.tokens} * a.scale_words);
    if (a.weights != nullptr) {
      Copy(w, a.weights, reinterpret_cast<uint32_t*>(mine + layout.weights_at()), int64_t{a.tokens} * a.top_k);
    }
  }
  for (int64_t row = w.thread; row < a.capacity; row += w.threads) a.source[row] = -1;
  Publish(peers, call, epoch);  // all blocks are past the loop above
  const int64_t picks = int64_t{ranks} * a.tokens * a.top_k;
  for (int64_t pick = w.thread; pick < picks; pick += w.threads) {
    if (a.slots[pick] >= 0) a.source[a.slots[pick]] = 0;
  }
  // This rank's own tokens need no staging and no signal: they go while the peers stage.
  Pull(w, a, peers.rank, {static_cast<const char*>(a.x), a.scales, a.weights});
  WaitForPeers(peers, call, epoch, "dispatch");
  for (int i = 1; i < ranks; ++i) {  // each rank starts at another peer
    const int rank = (peers.rank + i) % ranks;
    const char* theirs = peers.base[rank] + staging;
    Pull(w, a, rank,
         {theirs + layout.tokens_at(), reinterpret_cast<const uint32_t*>(theirs + layout.scales_at()),
          reinterpret_cast<const uint32_t*>(theirs + layout.weights_at())});
  }

  cooperative_groups::this_grid().sync();  // a.source is complete
  const int row_weights = a.weights == nullptr ? 0 : a.order == RowOrder::kRank ? a.top_k : 1;
  for (int64_t row = w.warp; row < a.capacity; row += w.warps) {
    if (a.source[row] == 0) continue;
    int4* to = static_cast<int4*>(a.rows) + row * vectors;
    for (int v = w.lane; v < vectors; v += kWarpSize) to[v] = int4{0, 0, 0, 0};
    for (int i = w.lane; i < a.scale_words; i += kWarpSize) a.row_scales[row * a.scale_words + i] = 0;
    for (int i = w.lane; i < row_weights; i += kWarpSize) a.row_weights[row * row_weights + i] = 0;
  }
  Finish(peers, epoch);
}

__global__ void __launch_bounds__(kExchangeThreads, 1)
    GatherIndex(Peers peers, Call call, const int32_t* index, int32_t words, int32_t* gathered, int32_t* first_expert,
                int32_t first) {
  const Workers w = WorkersOfGrid();
  if (w.thread == 0) *first_expert = first;
  const int64_t epoch = BeginEpoch(peers);
  const int64_t at = peers.layout.staging_at(epoch) + peers.layout.index_at();
  Copy(w, index, reinterpret_cast<int32_t*>(peers.base[peers.rank] + at), words);
  Publish(peers, call, epoch);
  WaitForPeers(peers, call, epoch, "layout");
  for (int64_t i = w.thread; i < int64_t{peers.layout.shape.ranks} * words; i += w.threads) {
    gathered[i] = LoadPeerWord(reinterpret_cast<const int32_t*>(peers.base[i / words] + at) + i % words);
  }
  Finish(peers, epoch);
}

}  // namespace

cudaError_t LaunchDispatch(const Peers& peers, const Call& call, const DispatchArgs& args, int num_sms,
                           cudaStream_t stream) {
  return LaunchTogether(Dispatch, num_sms, stream, peers, call, args);
}

cudaError_t LaunchGatherIndex(const Peers& peers, const Call& call, const int32_t* index, int32_t words,
                              int32_t* gathered, int32_t* first_expert, int32_t first, cudaStream_t stream) {
  constexpr int kBlocks = 8;  // the indices of a few thousand tokens
  return LaunchTogether(GatherIndex, kBlocks, stream, peers, call, index, words, gathered, first_expert, first);
}

cudaError_t LoadDispatchKernels() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, Dispatch);
  return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, GatherIndex) : error;
}

}  // namespace jax_ep
