// Hopper's bulk copies between global and shared memory: one thread starts one, and the copy engine does the rest. PTX
// ISA, "cp.async.bulk" and "mbarrier".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_ep {

inline __device__ uint32_t SharedAddress(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// For so many arrivals a round: one of StartCopy, and of CopyWord or Arrive another one. Before InitDone.
inline __device__ void InitBarrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the copies. By the thread that has initialised them.
inline __device__ void InitDone() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Lets the copies that this thread starts from here on see what it has seen of global memory by ordinary loads.
inline __device__ void CopiesSeeWhatISee() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Starts to bring `bytes`, a multiple of 16 at addresses of 16, to shared memory: bytes that nobody reads again, so
// that the L2 cache keeps others. By one thread.
inline __device__ void StartCopy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  const uint32_t at = SharedAddress(barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
  asm volatile(
      "{\n.reg .b64 once;\n"
      "createpolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
      "once;\n}" ::"r"(SharedAddress(to)),
      "l"(from), "r"(bytes), "r"(at)
      : "memory");
}

// Starts to bring 4 bytes to shared memory, and arrives once they, and what this thread has brought like this before,
// are there.
inline __device__ void CopyWord(float* to, const float* from, uint64_t* barrier) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(SharedAddress(to)), "l"(from) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

inline __device__ void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// Waits for the copies of a round: 0 for the first that the barrier is used for, then 1, 0, ...
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
}

// Makes a group of the copies out that this thread has started since the last one. There may be none.
inline __device__ void EndGroup() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all copies out of this thread have arrived, but those of its last `kPending` groups: this thread sees
// what they wrote, and a release that follows covers it.
template <int kPending>
__device__ void AwaitCopiesOut() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until the copies out of this thread, but those of its last `kPending` groups, have read what they copy.
template <int kPending = 0>
__device__ void AwaitCopiesOutRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// 16 bytes of shared memory in one load. The compiler splits those of 16-bit elements otherwise, and then every bank
// serves four lanes.
inline __device__ int4 LoadShared(const void* p) {
  int4 v;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(SharedAddress(p))
               : "memory");
  return v;
}

}  // namespace jax_ep
