// What the kernels of a group share: beginning an epoch, telling peers what is ready, waiting for them, and saying so
// when one doesn't come.
#pragma once

#include <cuda_runtime.h>

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
  const int each = end - first;
  return {static_cast<int>(blockIdx.x) * each + static_cast<int>(threadIdx.x) / kWarpSize - first,
          static_cast<int>(gridDim.x) * each, static_cast<int>(threadIdx.x % kWarpSize)};
}

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
                                                int64_t seen, int peer, const char* operation) {
  if (!IsFirstToFail(mine, epoch)) return;
  printf(
      "jax_ep: group %d, %s: rank %d waited %.1f s for rank %d, which is at epoch %lld of %lld; is it stuck, stopped, "
      "or running another program?\n",
      group, operation, rank, timeout_ns * 1e-9, peer, static_cast<long long>(seen), static_cast<long long>(epoch));
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
    StoreRelease(&header->begun[peers.rank], epoch);
  }
}

// Waits until *word, which `peer` writes, has reached `epoch`. Ends the program, with a message, if that takes too
// long.
inline __device__ void Await(const Peers& peers, const Call& call, const int64_t* word, int64_t epoch, int peer,
                             const char* operation) {
  int64_t seen = LoadAcquire(word);
  if (seen - epoch >= 0) return;
  const int64_t start = Nanoseconds();
  while ((seen = LoadAcquire(word)) - epoch < 0) {
    if (Nanoseconds() - start > call.timeout_ns) {
      StopWaiting(HeaderOf(peers, peers.rank), peers.rank, call.timeout_ns, call.serial, epoch, seen, peer, operation);
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
  __device__ int Tokens(int chunk, int tokens) const { return min(1 << shift, tokens - (chunk << shift)); }
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
      const int64_t* word = &mine->ready[peer][min(max(known, 0) + lane, chunks.count - 1)];
      const int64_t seen = LoadPeerWord(word);
      const unsigned missing = __ballot_sync(kAllLanes, seen - epoch < 0);
      const int now = min(max(known, 0) + (missing == 0 ? kWarpSize : __ffs(missing) - 1), chunks.count);
      all &= now == chunks.count;
      if (now > known) {
        LoadAcquire(word);  // each lane its word: acquires what the peer has released
        __syncwarp();
        if (lane == 0) {
          __threadfence_block();
          progress->Set(peer, now);
        }
        __syncwarp();
        start = Nanoseconds();
      } else if (lane == 0 && Nanoseconds() - start > call.timeout_ns) {
        StopWaiting(mine, peers.rank, call.timeout_ns, call.serial, epoch, seen, peer, operation);
      }
    }
    if (!all) __nanosleep(64);
  }
}

// Whether a chunk of `rank` is ready; what is read afterwards is then as the rank has written it.
inline __device__ bool IsReady(Progress* progress, int rank, int chunk) {
  if (progress->Get(rank) <= chunk) return false;
  __threadfence_block();
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

// Counts one finished item of a chunk for `peer`; true in the warp that finishes the last of `items`. By a warp.
inline __device__ bool IsLastItem(const Peers& peers, int peer, int chunk, int items) {
  __syncwarp();  // lane 0 counts for what all lanes have written
  bool last = false;
  if (threadIdx.x % kWarpSize == 0) {
    uint32_t* done = &HeaderOf(peers, peers.rank)->items_done[peer][chunk];
    last = CountUp(done) + 1 == static_cast<uint32_t>(items);
    if (last) *done = 0;
  }
  last = __shfl_sync(kAllLanes, last, 0);
  __syncwarp();
  return last;
}

// Items of work, a piece of a token each, in turn to the warps of a crew. Steps without dividing.
struct Item {
  int token;
  int piece;
  int pieces;
  int token_step;
  int piece_step;

  __device__ Item(const Crew& crew, int pieces)
      : token(crew.warp / pieces),
        piece(crew.warp % pieces),
        pieces(pieces),
        token_step(crew.warps / pieces),
        piece_step(crew.warps % pieces) {}
  __device__ void Step() {
    token += token_step;
    piece += piece_step;
    if (piece >= pieces) {
      piece -= pieces;
      ++token;
    }
  }
};

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

inline __device__ Picks PicksOf(const int32_t* slots, int top_k, RowOrder order, int lane) {
  return PicksFrom(lane < top_k ? slots[lane] : -1, order);
}

}  // namespace jax_ep
