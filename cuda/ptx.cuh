// What the kernels say in PTX, apart from the copies of cuda/bulk_copy.cuh. tests/cuda/emulator has both files once
// more, for the CPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_ep {

inline __device__ int64_t LoadAcquire(const int64_t* p) {
  int64_t value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

inline __device__ uint32_t LoadAcquire(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

inline __device__ void StoreRelease(int64_t* p, int64_t value) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// Orders what this thread has seen and done before what it stores from here on, for all GPUs.
inline __device__ void ReleaseToPeers() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Orders what this thread has seen and done, for the block.
inline __device__ void FenceBlock() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// Adds one, and orders what this thread has seen and done against the other threads of the GPU that do the same.
inline __device__ uint32_t CountUp(uint32_t* p) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
  return before;
}

// Adds one to a word of a peer's memory, ordered by the fence before it.
inline __device__ void AddAtPeer(uint32_t* p) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}

inline __device__ int64_t Nanoseconds() {
  int64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// Loads of memory that peers write: never through the non-coherent cache.
inline __device__ int4 LoadPeer(const void* p) {
  int4 v;
  asm volatile("ld.relaxed.sys.global.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

}  // namespace jax_ep
