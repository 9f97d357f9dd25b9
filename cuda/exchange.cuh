// What the kernels of a group share: publishing an epoch, waiting for the peers, and saying so when one doesn't come.
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

#include "cuda/buffer_layout.h"
#include "cuda/call.h"

namespace jax_ep {

inline __device__ Header* HeaderOf(const Peers& peers, int rank) { return reinterpret_cast<Header*>(peers.base[rank]); }

inline __device__ int64_t LoadAcquire(const int64_t* p) {
  int64_t value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

inline __device__ void StoreRelease(int64_t* p, int64_t value) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

inline __device__ int64_t Nanoseconds() {
  int64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// Loads and stores of memory that peers write or read: never through the non-coherent cache.
inline __device__ int4 LoadPeer(const int4* p) {
  int4 v;
  asm volatile("ld.relaxed.sys.global.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

template <typename T>
__device__ T LoadPeerWord(const T* p) {
  return *reinterpret_cast<const volatile T*>(p);
}

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kExchangeThreads = 1024;

// Blocks wait for each other, so all must be on the GPU at once: one an SM, launched together.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchTogether(void (*kernel)(Parameters...), int num_sms, cudaStream_t stream, Arguments... arguments) {
  void* pointers[] = {&arguments...};
  return cudaLaunchCooperativeKernel(reinterpret_cast<void*>(kernel), dim3(num_sms), dim3(kExchangeThreads), pointers,
                                     0, stream);
}

// The epoch of this call: one more than the last that this rank finished. The same for all blocks until Finish.
inline __device__ int64_t BeginEpoch(const Peers& peers) {
  return LoadPeerWord(&HeaderOf(peers, peers.rank)->epoch) + 1;
}

// Tells every peer that what this rank wrote for `epoch` is there. By all blocks, after their writes.
inline __device__ void Publish(const Peers& peers, const Call& call, int64_t epoch) {
  __threadfence_system();
  cooperative_groups::this_grid().sync();
  if (blockIdx.x != 0) return;
  for (int peer = threadIdx.x; peer < peers.layout.shape.ranks; peer += blockDim.x) {
    Header* header = HeaderOf(peers, peer);
    *reinterpret_cast<volatile int64_t*>(&header->tags[epoch & 1][peers.rank]) = call.tag;
    StoreRelease(&header->signals[peers.rank], epoch);
  }
}

// Waits until every peer has published `epoch`; ends the program, with a message, if one does not in time or has
// published for another call site. By all threads of a block.
inline __device__ void WaitForPeers(const Peers& peers, const Call& call, int64_t epoch, const char* operation) {
  Header* mine = HeaderOf(peers, peers.rank);
  for (int peer = threadIdx.x; peer < peers.layout.shape.ranks; peer += blockDim.x) {
    const int64_t start = Nanoseconds();
    int64_t seen;
    while ((seen = LoadAcquire(&mine->signals[peer])) - epoch < 0) {
      if (Nanoseconds() - start > call.timeout_ns) {
        printf(
            "jax_ep: group %d, %s: rank %d waited %.1f s for rank %d, which is at epoch %lld of %lld; is it stuck, "
            "stopped, or running another program?\n",
            call.serial, operation, peers.rank, call.timeout_ns * 1e-9, peer, static_cast<long long>(seen),
            static_cast<long long>(epoch));
        mine->failed = epoch;
        __trap();
      }
      __nanosleep(20);
    }
    const int64_t tag = LoadPeerWord(&mine->tags[epoch & 1][peer]);
    if (tag != call.tag) {
      printf(
          "jax_ep: group %d, %s: rank %d is at call site %llx and rank %d at %llx, both in epoch %lld; the ranks run "
          "different programs, or one program in different order\n",
          call.serial, operation, peers.rank, static_cast<unsigned long long>(call.tag), peer,
          static_cast<unsigned long long>(tag), static_cast<long long>(epoch));
      mine->failed = epoch;
      __trap();
    }
  }
  __syncthreads();
}

// Makes `epoch` the last finished. By all blocks, after their last access to the epoch's buffers.
inline __device__ void Finish(const Peers& peers, int64_t epoch) {
  cooperative_groups::this_grid().sync();
  if (blockIdx.x == 0 && threadIdx.x == 0) HeaderOf(peers, peers.rank)->epoch = epoch;
}

}  // namespace jax_ep
