#include <cooperative_groups.h>

#include <algorithm>

#include "cuda/exchange.cuh"
#include "cuda/group_layout.h"
#include "cuda/layout.cuh"
#include "cuda/layout.h"

namespace jax_ep {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
// Few enough for four ranks on one GPU, and for every block to read what all others have counted.
constexpr int kMaxBlocks = 32;
constexpr int kPicksPerBlock = 2048;
constexpr int kSharedBytes = 200 * 1024;
constexpr int kBatch = 8;  // loads that a thread has under way

static_assert(kMaxBlocks <= kWarpSize && kMaxBlocks <= kChunks && kMaxBlocks <= kLayoutBlocks);

// What is kept of a pick: its local expert.
using Key = uint16_t;
constexpr Key kElsewhere = 0xffff;
static_assert(kLayoutMaxLocalExperts < kElsewhere);

// Keys of the picks of a block: as many as there is room for in shared memory, and the others where their slots will
// be.
struct Keys {
  int64_t begin;  // the block's first pick
  int64_t room;
  Key* first;
  int32_t* slots;

  __device__ Key Load(int64_t pick) const {
    return pick - begin < room ? first[pick - begin] : static_cast<Key>(slots[pick]);
  }
  __device__ void Store(int64_t pick, Key key) const {
    if (pick - begin < room) {
      first[pick - begin] = key;
    } else {
      slots[pick] = key;
    }
  }
};

// A rank's index is staged in shares, by one block each, which tells the peers when its share is there. Block 0 has
// none if there are others: it tells them that this rank has begun, and waits for what it has told.
struct Shares {
  uint32_t words;  // of a rank's index
  uint32_t count;
  uint32_t each;  // words, a multiple of 16 bytes

  __device__ explicit Shares(const LayoutShape& shape)
      : words(static_cast<uint32_t>(shape.tokens) * shape.top_k),
        count(gridDim.x > 1 ? gridDim.x - 1 : 1),
        each(((words + count - 1) / count + 3) / 4 * 4) {}
  // Of the pick of all ranks, counted through all ranks.
  __device__ uint32_t Of(uint32_t pick) const { return pick / words * count + pick % words / each; }
};

__device__ void StageIndex(const Peers& peers, const GroupLayoutArgs& a, int64_t epoch, const Shares& shares) {
  const int ranks = peers.layout.shape.ranks;
  const int share = static_cast<int>(blockIdx.x) - (gridDim.x > 1);
  if (share < 0 || ranks == 1) return;
  const uint32_t begin = min(shares.words, share * shares.each);
  const uint32_t end = min(shares.words, begin + shares.each);
  auto* staged =
      reinterpret_cast<int32_t*>(peers.base[peers.rank] + peers.layout.staging_at(epoch) + peers.layout.index_at());
  const uint32_t thread = blockDim.x - 1 - threadIdx.x;  // the first have begun the epoch, and are late
  for (uint32_t v = begin / 4 + thread; v < end / 4; v += blockDim.x) {
    reinterpret_cast<int4*>(staged)[v] = reinterpret_cast<const int4*>(a.index)[v];
  }
  for (uint32_t i = max(begin, end / 4 * 4) + thread; i < end; i += blockDim.x) staged[i] = a.index[i];
  __syncthreads();
  for (int peer = threadIdx.x; peer < ranks; peer += blockDim.x) {
    if (peer != peers.rank) StoreRelease(&HeaderOf(peers, peer)->ready[peers.rank][share], epoch);
  }
}

// Until the indices of the block's picks are there. Block 0 also waits for all peers to begin, so that the epoch ends
// for no rank before it has begun for all, and tells if one is at another call.
__device__ void AwaitIndex(const Peers& peers, const Call& call, int64_t epoch, const Shares& shares,
                           const Piece& picks) {
  const int warp = threadIdx.x / kWarpSize;
  if (warp == 0 && picks.begin < picks.end) {
    const uint32_t last = shares.Of(picks.end - 1);
    for (uint32_t share = shares.Of(picks.begin) + threadIdx.x; share <= last; share += kWarpSize) {
      const int peer = share / shares.count;
      if (peer == peers.rank) continue;
      Await(peers, call, &HeaderOf(peers, peers.rank)->ready[peer][share % shares.count], epoch, peer, "layout");
    }
  }
  if (warp == 1 && blockIdx.x == 0) AwaitPeers(peers, call, epoch, "layout");
  __syncthreads();
}

// Reads a warp's picks of all ranks and keeps their keys; each local one is `seen`. This rank's own are not read from
// its staging.
template <typename Seen>
__device__ void ReadPicks(const Peers& peers, const GroupLayoutArgs& a, int64_t epoch, const Shares& shares,
                          const Piece& picks, const Keys& keys, Seen seen) {
  const int lane = threadIdx.x % kWarpSize;
  const int32_t first_expert = peers.rank * a.shape.local_experts;
  const int64_t at = peers.layout.staging_at(epoch) + peers.layout.index_at();
  for (int64_t start = picks.begin + lane; start < picks.end; start += kBatch * kWarpSize) {
    int32_t expert[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t pick = start + j * kWarpSize;
      if (pick >= picks.end) continue;
      const int rank = static_cast<uint32_t>(pick) / shares.words;
      const auto* staged = reinterpret_cast<const int32_t*>(peers.base[rank] + at);
      const int32_t* index = rank == peers.rank ? a.index : staged;
      expert[j] = LoadPeerWord(index + (static_cast<uint32_t>(pick) - rank * shares.words));
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t pick = start + j * kWarpSize;
      if (pick >= picks.end) continue;
      const uint32_t local = LocalExpert(expert[j], first_expert);
      const bool here = local < static_cast<uint32_t>(a.shape.local_experts);
      keys.Store(pick, here ? static_cast<Key>(local) : kElsewhere);
      if (here) seen(local);
    }
  }
}

// All blocks, and what they have written.
__device__ void SyncBlocks() {
  if (gridDim.x == 1) {
    __syncthreads();
  } else {
    cooperative_groups::this_grid().sync();
  }
}

__device__ Piece PieceOfWarp(const Piece& block, int warp, int warps) {
  if (warp >= warps) return {block.end, block.end};
  const Piece piece = PieceOf(block.end - block.begin, warp, warps);
  return {block.begin + piece.begin, block.begin + piece.end};
}

// The first `warps` warps of each block have a piece of its picks each.
__global__ void __launch_bounds__(kThreads, 1)
    LayOutByExpert(__grid_constant__ const Peers peers, __grid_constant__ const Call call,
                   __grid_constant__ const GroupLayoutArgs a, int warps, int room) {
  extern __shared__ int32_t shared[];
  const int experts = a.shape.local_experts;
  const int blocks = gridDim.x;
  const int block = blockIdx.x;
  int32_t* wanted = shared;
  int32_t* before = wanted + experts;  // by earlier blocks
  int32_t* first_row = before + experts;
  int32_t* kept = first_row + experts;
  int32_t* next =
      kept + experts;  // [warps, experts]: how many the warp has, then the place of its next among the block's
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  int32_t* next_of_warp = next + warp * experts;

  const int64_t epoch = EpochOf(peers, call, "layout");
  if (block == 0) Begin(peers, call, epoch);
  const Shares shares(a.shape);
  StageIndex(peers, a, epoch, shares);
  for (int i = threadIdx.x; i < warps * experts; i += blockDim.x) next[i] = 0;
  const Piece of_block = PieceOf(a.shape.picks(), block, blocks);
  const Piece mine = PieceOfWarp(of_block, warp, warps);
  const Keys keys{of_block.begin, room, reinterpret_cast<Key*>(next + warps * experts), a.slots};
  AwaitIndex(peers, call, epoch, shares, of_block);
  ReadPicks(peers, a, epoch, shares, mine, keys, [&](uint32_t local) { atomicAdd(&next_of_warp[local], 1); });
  __syncthreads();

  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    int32_t sum = 0;
    for (int start = 0; start < warps; start += kBatch) {
      int32_t here[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) here[j] = start + j < warps ? next[(start + j) * experts + e] : 0;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (start + j < warps) next[(start + j) * experts + e] = sum;
        sum += here[j];
      }
    }
    wanted[e] = sum;
    before[e] = 0;
    if (blocks > 1) a.scratch[block * experts + e] = sum;
  }
  SyncBlocks();

  const int parts = max(1, min(blocks, kThreads / experts));
  for (int i = threadIdx.x; blocks > 1 && i < parts * experts; i += blockDim.x) {
    const int part = i / experts;
    const int e = i - part * experts;
    int32_t others = 0;
    int32_t earlier = 0;
    for (int start = part; start < blocks; start += kBatch * parts) {
      int32_t there[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int other = start + j * parts;
        there[j] = other < blocks && other != block ? __ldcg(&a.scratch[other * experts + e]) : 0;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        others += there[j];
        if (start + j * parts < block) earlier += there[j];
      }
    }
    atomicAdd(&wanted[e], others);
    atomicAdd(&before[e], earlier);
  }
  __syncthreads();
  AcceptRows(a.shape, wanted, first_row, kept, block == 0 ? a.group_sizes : nullptr);

  for (int64_t start = mine.begin; start < mine.end; start += kWarpSize) {
    const int64_t pick = start + lane;
    const Key key = pick < mine.end ? keys.Load(pick) : kElsewhere;
    const bool here = key != kElsewhere;
    int32_t place = TakePlace(key, here, next_of_warp);
    if (here) place += before[key];
    if (pick < mine.end) a.slots[pick] = here && place < kept[key] ? first_row[key] + place : -1;
  }
  if (block == 0) {
    int32_t dropped = 0;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
      a.counts[e] = kept[e];
      dropped += wanted[e] - kept[e];
    }
    dropped = BlockSum(dropped);
    if (threadIdx.x == 0) *a.num_dropped = dropped;
  }
  Finish(peers, call, epoch, false, "layout");
}

__device__ bool HasKey(const Keys& keys, int64_t pick, int top_k) {
  bool any = false;
  for (int k = 0; k < top_k; ++k) any |= keys.Load(pick + k) != kElsewhere;
  return any;
}

__global__ void __launch_bounds__(kThreads, 1)
    LayOutByRank(__grid_constant__ const Peers peers, __grid_constant__ const Call call,
                 __grid_constant__ const GroupLayoutArgs a, int room) {
  extern __shared__ int32_t shared[];
  const int experts = a.shape.local_experts;
  const int top_k = a.shape.top_k;
  const int blocks = gridDim.x;
  const int block = blockIdx.x;
  int32_t* counts = shared;            // of the block
  int32_t* row_of = counts + experts;  // [threads]
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;

  const int64_t epoch = EpochOf(peers, call, "layout");
  if (block == 0) Begin(peers, call, epoch);
  const Shares shares(a.shape);
  StageIndex(peers, a, epoch, shares);
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    counts[e] = 0;
    if (block == 0) a.group_sizes[e] = a.counts[e] = 0;
  }
  const Piece pairs = PieceOf(a.shape.pairs(), block, blocks);
  const Piece picks{pairs.begin * top_k, pairs.end * top_k};
  const Keys keys{picks.begin, room, reinterpret_cast<Key*>(row_of + kThreads), a.slots};
  AwaitIndex(peers, call, epoch, shares, picks);
  ReadPicks(peers, a, epoch, shares, PieceOfWarp(picks, warp, kWarps), keys, [](uint32_t) {});
  __syncthreads();

  int32_t rows = 0;
  for (int64_t pair = pairs.begin + threadIdx.x; pair < pairs.end; pair += blockDim.x) {
    rows += HasKey(keys, pair * top_k, top_k);
  }
  rows = BlockSum(rows);
  if (threadIdx.x == 0) a.scratch[block] = rows;
  SyncBlocks();
  const int32_t of_lane = lane == block ? rows : lane < blocks ? __ldcg(&a.scratch[lane]) : 0;
  const int32_t all = __reduce_add_sync(kAllLanes, of_lane);
  int32_t row = __reduce_add_sync(kAllLanes, lane < block ? of_lane : 0);
  if (block == 0 && threadIdx.x == 0) *a.num_dropped = max(all - a.shape.capacity, 0);

  for (int64_t start = pairs.begin; start < pairs.end; start += blockDim.x) {
    const int64_t pair = start + threadIdx.x;
    const bool wants = pair < pairs.end && HasKey(keys, pair * top_k, top_k);
    int32_t here;
    const int32_t mine = row + BlockSumBefore(wants, &here);
    row += here;
    row_of[threadIdx.x] = wants && mine < a.shape.capacity ? mine : -1;
    __syncthreads();
    const int end = static_cast<int>(min(pairs.end - start, int64_t{blockDim.x})) * top_k;
    for (int i = threadIdx.x; i < end; i += blockDim.x) {
      const int64_t pick = start * top_k + i;
      const Key key = keys.Load(pick);
      const int32_t slot = key == kElsewhere ? -1 : row_of[i / top_k];
      a.slots[pick] = slot;
      if (slot >= 0) atomicAdd(&counts[key], 1);
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    if (counts[e] == 0) continue;
    atomicAdd(&a.counts[e], counts[e]);
    atomicAdd(&a.group_sizes[e], counts[e]);
  }
  Finish(peers, call, epoch, false, "layout");
}

// How many keys of a piece fit into shared memory besides `bytes` of it.
int RoomFor(int64_t picks, int bytes) {
  return static_cast<int>(std::min<int64_t>(picks, (kSharedBytes - bytes) / static_cast<int>(sizeof(Key))));
}

}  // namespace

cudaError_t LaunchGroupLayout(const Peers& peers, const Call& call, const GroupLayoutArgs& args, cudaStream_t stream) {
  const LayoutShape& shape = args.shape;
  if (shape.local_experts < 1 || shape.local_experts > kLayoutMaxLocalExperts) return cudaErrorInvalidValue;
  const int64_t wanted = (shape.picks() + kPicksPerBlock - 1) / kPicksPerBlock;
  const int blocks = static_cast<int>(std::clamp<int64_t>(wanted, 1, kMaxBlocks));
  constexpr int kWordBytes = sizeof(int32_t);
  if (args.order == RowOrder::kRank) {
    const int bytes = (shape.local_experts + kThreads) * kWordBytes;
    const int room = RoomFor((shape.pairs() + blocks - 1) / blocks * shape.top_k, bytes);
    return LaunchTogether(LayOutByRank, {blocks}, kThreads, bytes + room * static_cast<int>(sizeof(Key)), stream, peers,
                          call, args, room);
  }
  // Four words an expert, and one for each warp: fewer warps where there are many experts.
  int warps = kWarps;
  while (warps > 1 && (4 + warps) * shape.local_experts * kWordBytes > kSharedBytes) warps /= 2;
  const int bytes = (4 + warps) * shape.local_experts * kWordBytes;
  const int room = RoomFor((shape.picks() + blocks - 1) / blocks, bytes);
  return LaunchTogether(LayOutByExpert, {blocks}, kThreads, bytes + room * static_cast<int>(sizeof(Key)), stream, peers,
                        call, args, warps, room);
}

cudaError_t LoadGroupLayoutKernels() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, LayOutByExpert);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, LayOutByRank);
  constexpr auto kShared = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (error == cudaSuccess) error = cudaFuncSetAttribute(LayOutByExpert, kShared, kSharedBytes);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(LayOutByRank, kShared, kSharedBytes);
  return error;
}

}  // namespace jax_ep
