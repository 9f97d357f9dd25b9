// cuda/bulk_copy.cuh for the CPU. It does not find out about missing fences.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_ep {

inline void InitBarrier(uint64_t* barrier, int arrivals) { emulator::InitBarrier(barrier, arrivals); }
inline void CopyWord(float* to, const float* from, uint64_t* barrier) { emulator::CopyWord(to, from, barrier); }
inline void Arrive(uint64_t* barrier) { emulator::Arrive(barrier); }
inline void InitDone() { emulator::MayYield(); }
inline void CopiesSeeWhatISee() { emulator::MayYield(); }
inline void CopiesSeeMyStores() { emulator::MayYield(); }

inline void StartCopy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  emulator::StartCopy(to, from, bytes, barrier);
}
inline void AwaitCopy(uint64_t* barrier, uint32_t parity) { emulator::AwaitCopy(barrier, parity); }

inline void StartCopyOut(void* to, const void* from, uint32_t bytes) { emulator::StartCopyOut(to, from, bytes); }
inline void EndGroup() { emulator::EndGroup(); }
template <int kPending>
void AwaitCopiesOut() {
  emulator::AwaitCopiesOut(kPending);
}
template <int kPending = 0>
void AwaitCopiesOutRead() {
  emulator::AwaitCopiesOut(kPending);
}

inline int4 LoadShared(const void* p) { return *static_cast<const int4*>(p); }

}  // namespace jax_ep
