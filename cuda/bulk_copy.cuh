// Hopper's bulk copies between global and shared memory: one thread starts one, and the copy engine does the rest. PTX
// ISA, "cp.async.bulk" and "mbarrier".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_ep {

inline __device__ uint32_t SharedAddress(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// For one arrival, that of the thread which starts the copy. Before InitDone.
inline __device__ void InitBarrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(barrier)) : "memory");
}

// Makes initialised barriers known to the copies. By the thread that has initialised them.
inline __device__ void InitDone() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Lets the copies that this thread starts from here on see what it has seen of global memory by ordinary loads.
inline __device__ void CopiesSeeWhatISee() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Starts to bring `bytes`, a multiple of 16 at addresses of 16, to shared memory. By one thread.
inline __device__ void StartCopy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  const uint32_t at = SharedAddress(barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   SharedAddress(to)),
               "l"(from), "r"(bytes), "r"(at)
               : "memory");
}

// Waits for the copy of a round: 0 for the first that the barrier is used for, then 1, 0, ...
inline __device__ void AwaitCopy(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
  }
}

// Lets copies from shared memory see what this thread has stored there. By each thread that has, before a barrier.
inline __device__ void CopiesSeeMyStores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Starts to bring `bytes`, a multiple of 16 at addresses of 16, from shared memory to where they go. By one thread.
inline __device__ void StartCopyOut(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(SharedAddress(from)),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all copies out that this thread has started have arrived: a release that follows covers them.
inline __device__ void AwaitCopiesOut() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace jax_ep
