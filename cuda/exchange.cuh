// What the kernels of a group share: beginning an epoch, telling peers what is ready, waiting for them, and saying so
// when one doesn't come.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>
#include <cstdio>

#include "cuda/buffer_layout.h"
#include "cuda/call.h"
#include "cuda/launch.cuh"
#include "cuda/layout_rule.h"
#include "cuda/ptx.cuh"

namespace jax_ep {

inline __device__ Header* HeaderOf(const Peers& peers, int rank) { return reinterpret_cast<Header*>(peers.base[rank]); }

// Of memory that peers write, as LoadPeer.
template <typename T>
__device__ T LoadPeerWord(const T* p) {
  return *reinterpret_cast<const volatile T*>(p);
}

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// The warps of a grid that do the same kind of work.
struct Crew {
  int warp;   // this one
  int warps;  // how many they are
  int lane;
};

// Of each block, the warps from `first` to `end`.
inline __device__ Crew CrewOf(int first, int end) {
  const int blocks = static_cast<int>(gridDim.x);
  const int in_block = static_cast<int>(threadIdx.x) / kWarpSize - first;
  return {in_block * blocks + static_cast<int>(blockIdx.x), (end - first) * blocks,
          static_cast<int>(threadIdx.x % kWarpSize)};
}

// Work that the warps of a grid share, item by item: whichever is free takes the next. SMs are not equally fast, as
// some are farther from memory or from the link. By a warp.
class Queue {
 public:
  __device__ explicit Queue(uint32_t* taken) : taken_(taken) { Ask(); }

  // The item that was asked for; it may be past the end of the work. Ask for the next one before doing this one.
  __device__ int Item() const { return static_cast<int>(__shfl_sync(kAllLanes, asked_, 0)); }
  __device__ void Ask() {
    if (threadIdx.x % kWarpSize == 0) asked_ = atomicAdd(taken_, 1u);
  }
  __device__ int Next() {
    const int item = Item();
    Ask();
    return item;
  }

 private:
  uint32_t* const taken_;
  uint32_t asked_ = 0;
};

// One message is enough.
inline __device__ bool IsFirstToFail(Header* mine, int64_t epoch) {
  return atomicExch(reinterpret_cast<unsigned long long*>(&mine->failed), static_cast<unsigned long long>(epoch)) == 0;
}

// For those that must not go on, while the one that prints brings the end.
inline __device__ void AwaitTheEnd() {
  while (true) __nanosleep(1000);
}

// These end the program. Not inlined: what they need must not take registers from the work.
static __device__ __noinline__ void StopWaiting(Header* mine, int rank, int64_t timeout_ns, int group, int64_t epoch,
                                                int peer, const char* operation) {
  if (!IsFirstToFail(mine, epoch)) return;
  const int64_t begun = LoadPeerWord(&mine->begun[peer]);  // whatever was waited for
  printf(
      "jax_ep: group %d, %s: rank %d waited %.1f s for rank %d, which is at epoch %lld of %lld; is it stuck, stopped, "
      "or running another program?\n",
      group, operation, rank, timeout_ns * 1e-9, peer, static_cast<long long>(begun), static_cast<long long>(epoch));
  __trap();
}

static __device__ __noinline__ void RefuseTag(Header* mine, int rank, int64_t tag, int group, int64_t epoch,
                                              int64_t seen, int peer, const char* operation) {
  if (!IsFirstToFail(mine, epoch)) AwaitTheEnd();
  printf(
      "jax_ep: group %d, %s: rank %d is at call site %llx and rank %d at %llx, both in epoch %lld; the ranks run "
      "different programs, or one program in different order\n",
      group, operation, rank, static_cast<unsigned long long>(tag), peer, static_cast<unsigned long long>(seen),
      static_cast<long long>(epoch));
  __trap();
}

static __device__ __noinline__ void RefuseOverlap(Header* mine, int rank, int group, int64_t epoch) {
  if (!IsFirstToFail(mine, epoch)) AwaitTheEnd();
  printf(
      "jax_ep: group %d: rank %d has begun an operation while another one of the group ran on the same GPU; leave "
      "xla_gpu_command_buffer_scheduling_mode as it is, or take CUSTOM_CALL out of xla_gpu_enable_command_buffer\n",
      group, rank);
  __trap();
}

// The epoch of this call: one more than the last that this rank finished. The same for all blocks until Finish. Touches
// nothing of a group that was closed: a CUDA graph may still be replayed, of which the host gets no notice.
inline __device__ int64_t EpochOf(const Peers& peers, const Call& call, const char* operation) {
  if (LoadPeerWord(peers.open) == 0) {
    if (blockIdx.x != 0 || threadIdx.x != 0) AwaitTheEnd();
    printf(
        "jax_ep: group %d, %s: the group was closed, and a program that was compiled for it still runs; make a group "
        "and compile again\n",
        call.serial, operation);
    __trap();
  }
  return LoadPeerWord(&HeaderOf(peers, peers.rank)->epoch) + 1;
}

// Tells every peer that this rank has begun `epoch`, and by which call. By one block.
inline __device__ void Begin(const Peers& peers, const Call& call, int64_t epoch) {
  Header* mine = HeaderOf(peers, peers.rank);
  if (threadIdx.x == 0 && atomicExch(&mine->busy, 1u) != 0) RefuseOverlap(mine, peers.rank, call.serial, epoch);
  for (int peer = threadIdx.x; peer < peers.layout.shape.ranks; peer += blockDim.x) {
    Header* header = HeaderOf(peers, peer);
    *reinterpret_cast<volatile int64_t*>(&header->tags[epoch & 1][peers.rank]) = call.tag;
    *reinterpret_cast<volatile uint32_t*>(&header->blocks[epoch & 1][peers.rank]) = gridDim.x;
    StoreRelease(&header->begun[peers.rank], epoch);
  }
}

// Waits until *word, which `peer` writes, has reached `epoch`. Ends the program, with a message, if that takes too
// long.
inline __device__ void Await(const Peers& peers, const Call& call, const int64_t* word, int64_t epoch, int peer,
                             const char* operation) {
  if (LoadAcquire(word) - epoch >= 0) return;
  const int64_t start = Nanoseconds();
  while (LoadAcquire(word) - epoch < 0) {
    if (Nanoseconds() - start > call.timeout_ns) {
      StopWaiting(HeaderOf(peers, peers.rank), peers.rank, call.timeout_ns, call.serial, epoch, peer, operation);
    }
    __nanosleep(64);
  }
}

// Waits until every peer has begun `epoch`; ends the program, with a message, if one has for another call. By a warp.
inline __device__ void AwaitPeers(const Peers& peers, const Call& call, int64_t epoch, const char* operation) {
  Header* mine = HeaderOf(peers, peers.rank);
  for (int peer = threadIdx.x % kWarpSize; peer < peers.layout.shape.ranks; peer += kWarpSize) {
    Await(peers, call, &mine->begun[peer], epoch, peer, operation);
    const int64_t tag = LoadPeerWord(&mine->tags[epoch & 1][peer]);
    if (tag != call.tag) RefuseTag(mine, peers.rank, call.tag, call.serial, epoch, tag, peer, operation);
  }
  __syncwarp();
}

// Chunks of `tokens` tokens: 2^shift of them each.
struct Chunks {
  int shift;
  int count;

  __device__ explicit Chunks(int tokens) : shift(5) {
    while ((tokens - 1) >> shift >= kChunks) ++shift;
    count = ((tokens - 1) >> shift) + 1;
  }
  __device__ int Of(int token) const { return token >> shift; }
};

// How many chunks of each rank's tokens are ready, the first ones; -1 until the rank has begun. One warp of a block
// watches the peers' signals and keeps this in shared memory for the others: if all looked for themselves, they would
// be in the way of the signals.
struct Progress {
  int ready[kMaxRanks];

  // By atomics, as nothing else orders the warp that writes and those that read.
  __device__ void Set(int rank, int chunks) { atomicExch(&ready[rank], chunks); }
  __device__ int Get(int rank) { return atomicOr(&ready[rank], 0); }
};

// By all threads of a block, before a __syncthreads.
inline __device__ void Clear(Progress* progress) {
  for (int i = threadIdx.x; i < kMaxRanks; i += blockDim.x) progress->ready[i] = -1;
}

// Until every chunk of every rank but `skip` is ready, after AwaitPeers. By one warp.
inline __device__ void WatchChunks(const Peers& peers, const Call& call, int64_t epoch, const Chunks& chunks, int skip,
                                   Progress* progress, const char* operation) {
  Header* mine = HeaderOf(peers, peers.rank);
  const int lane = threadIdx.x % kWarpSize;
  int64_t start = Nanoseconds();
  bool all = false;
  while (!all) {
    all = true;
    for (int peer = 0; peer < peers.layout.shape.ranks; ++peer) {
      const int known = __shfl_sync(kAllLanes, lane == 0 ? progress->Get(peer) : 0, 0);
      if (peer == skip || known == chunks.count) continue;
      const uint32_t* word = &mine->arrived[epoch & 1][peer][min(max(known, 0) + lane, chunks.count - 1)];
      const uint32_t blocks = LoadPeerWord(&mine->blocks[epoch & 1][peer]);
      const unsigned missing = __ballot_sync(kAllLanes, LoadPeerWord(word) != blocks);
      const int now = min(max(known, 0) + (missing == 0 ? kWarpSize : __ffs(missing) - 1), chunks.count);
      all &= now == chunks.count;
      if (now > known) {
        LoadAcquire(word);  // each lane its word: acquires what the peer has released
        __syncwarp();
        if (lane == 0) {
          FenceBlock();
          progress->Set(peer, now);
        }
        __syncwarp();
        start = Nanoseconds();
      } else if (lane == 0 && Nanoseconds() - start > call.timeout_ns) {
        StopWaiting(mine, peers.rank, call.timeout_ns, call.serial, epoch, peer, operation);
      }
    }
    if (!all) __nanosleep(64);
  }
}

// Whether a chunk of `rank` is ready; what is read afterwards is then as the rank has written it.
inline __device__ bool IsReady(Progress* progress, int rank, int chunk) {
  if (progress->Get(rank) <= chunk) return false;
  FenceBlock();
  return true;
}

// Waits until one is. By a warp.
inline __device__ void AwaitChunk(Progress* progress, int rank, int chunk) {
  bool ready = false;
  while (!ready) {
    if (threadIdx.x % kWarpSize == 0) ready = IsReady(progress, rank, chunk);
    ready = __shfl_sync(kAllLanes, ready, 0);
    if (!ready) __nanosleep(100);
  }
  __syncwarp();
}

// How far the warps of a block are in a queue, in shared memory: the first item that each has taken and not finished.
// One warp of the block tells the peers: it waits for the fences that this takes, and the warps that work don't.
struct Finished {
  int item[kWarpSize];

  // By atomics, as for Progress. By one lane, after a __syncwarp, for what the warp has written.
  __device__ void Set(int warp, int unfinished) {
    FenceBlock();
    atomicExch(&item[warp], unfinished);
  }
  // All items before this one are finished, as far as the warps from `first` to `end` have taken them. By a warp.
  __device__ int Reached(int first, int end) {
    const int warp = first + static_cast<int>(threadIdx.x) % kWarpSize;
    const int reached = __reduce_min_sync(kAllLanes, warp < end ? atomicOr(&item[warp], 0) : INT_MAX);
    FenceBlock();
    __syncwarp();
    return reached;
  }
};

// By all threads of a block, before a __syncthreads.
inline __device__ void Clear(Finished* finished) {
  if (threadIdx.x < kWarpSize) finished->item[threadIdx.x] = 0;
}

// Tells a peer that this block is through with its part of a chunk, after ReleaseToPeers. By one thread.
inline __device__ void Tell(const Peers& peers, int peer, int chunk, int64_t epoch) {
  AddAtPeer(&HeaderOf(peers, peer)->arrived[epoch & 1][peers.rank][chunk]);
}

// Of a queue that goes `rounds` times over all tokens, piece by piece, for the warps from `first` to `end` of all
// blocks: calls tell(round, chunk), by one lane, as soon as this block has finished its part of that chunk. By one warp
// of each block. While the fence takes its time more chunks are finished, so few fences are enough.
template <typename Function>
__device__ void AnnounceChunks(Finished* finished, int first, int end, const Chunks& chunks, int tokens, int pieces,
                               int rounds, Function tell) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t all = int64_t{rounds} * chunks.count;
  for (int64_t next = 0; next < all;) {
    const int64_t reached = finished->Reached(first, end);
    const int64_t i = next + lane;
    const int round = static_cast<int>(i / chunks.count);
    const int chunk = static_cast<int>(i % chunks.count);
    const int64_t last_token = min((chunk + 1) << chunks.shift, tokens);
    const bool done = i < all && (int64_t{round} * tokens + last_token) * pieces <= reached;
    const int now = __popc(__ballot_sync(kAllLanes, done));
    if (now == 0) {
      __nanosleep(100);
      continue;
    }
    ReleaseToPeers();
    if (done) tell(round, chunk);
    next += now;
  }
}

// Makes `epoch` the last finished, and tells the peers that this rank has read what it reads of theirs. By all threads
// of all blocks, after their last access to the epoch's buffers. What this rank `lends` its peers have read, then.
inline __device__ void Finish(const Peers& peers, const Call& call, int64_t epoch, bool lends, const char* operation) {
  __shared__ bool last;
  __syncthreads();
  Header* mine = HeaderOf(peers, peers.rank);
  if (threadIdx.x == 0) {
    if (LoadPeerWord(&mine->epoch) + 1 != epoch) RefuseOverlap(mine, peers.rank, call.serial, epoch);
    last = CountUp(&mine->blocks_done) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!last) return;
  // Nobody counts here again until this rank has begun the next epoch.
  uint32_t* arrived = mine->arrived[epoch & 1][0];
  for (int i = threadIdx.x; i < peers.layout.shape.ranks * kChunks; i += blockDim.x) arrived[i] = 0;
  if (threadIdx.x < kQueues) mine->taken[threadIdx.x] = 0;
  for (int peer = threadIdx.x; peer < peers.layout.shape.ranks; peer += blockDim.x) {
    StoreRelease(&HeaderOf(peers, peer)->read[peers.rank], epoch);
    if (lends) Await(peers, call, &mine->read[peer], epoch, peer, operation);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  mine->blocks_done = 0;
  mine->epoch = epoch;
  __threadfence();
  mine->busy = 0;
}

// The rows that one rank holds of one token, in a warp.
struct Picks {
  int slot;         // of the lane's pick, or -1
  unsigned picked;  // lanes that have a row
  unsigned rows;    // lanes whose rows are all there are: in rank order all picks of a token have the same row
};

inline __device__ Picks PicksFrom(int slot, RowOrder order) {
  Picks p;
  p.slot = slot;
  p.picked = __ballot_sync(kAllLanes, p.slot >= 0);
  p.rows = order == RowOrder::kRank ? p.picked & -p.picked : p.picked;
  return p;
}

}  // namespace jax_ep
