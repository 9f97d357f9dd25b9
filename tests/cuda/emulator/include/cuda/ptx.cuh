// cuda/ptx.cuh for the CPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_ep {

template <typename T>
T LoadAcquire(const T* p) {
  emulator::MayYield();
  return *const_cast<const volatile T*>(p);
}

inline void StoreRelease(int64_t* p, int64_t value) {
  emulator::MayYield();
  *const_cast<volatile int64_t*>(p) = value;
  emulator::MayYield();
}

inline void FenceBlock() { emulator::MayYield(); }

inline void ReleaseToPeers() { emulator::MayYield(); }

inline uint32_t CountUp(uint32_t* p) { return atomicAdd(p, 1u); }

inline void AddAtPeer(uint32_t* p) { atomicAdd(p, 1u); }

inline int64_t Nanoseconds() { return emulator::Now(); }

inline int4 LoadPeer(const void* p) { return *static_cast<const int4*>(p); }

}  // namespace jax_ep
