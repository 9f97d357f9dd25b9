// cuda/bulk_copy.cuh for the CPU. It does not find out about missing fences.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_ep {

inline void InitBarrier(uint64_t* barrier) { emulator::InitBarrier(barrier); }
inline void InitDone() { emulator::MayYield(); }
inline void CopiesSeeWhatISee() { emulator::MayYield(); }
inline void CopiesSeeMyStores() { emulator::MayYield(); }

inline void StartCopy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  emulator::StartCopy(to, from, bytes, barrier);
}
inline void AwaitCopy(uint64_t* barrier, uint32_t parity) { emulator::AwaitCopy(barrier, parity); }

inline void StartCopyOut(void* to, const void* from, uint32_t bytes) { emulator::StartCopyOut(to, from, bytes); }
inline void AwaitCopiesOut() { emulator::AwaitCopiesOut(); }

}  // namespace jax_ep
