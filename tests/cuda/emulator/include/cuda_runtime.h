// What kernels need of CUDA's language, for a plain C++ compiler.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_runtime_api.h"
#include "tests/cuda/emulator/machine.h"

#define __host__
#define __device__
#define __global__
#define __shared__ thread_local  // a block has an OS thread of its own
#define __grid_constant__
#define __launch_bounds__(...)
#define __noinline__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct alignas(8) uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

// Of the thread that runs; kept by machine.cc.
extern uint3 threadIdx, blockIdx, blockDim, gridDim;

// CUDA's overloads, which mix types where the standard's don't.
inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
// The compiler must not make one rounding of two: -ffp-contract=off.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

[[noreturn]] inline void __trap() { emulator::Fail("__trap"); }
inline void __nanosleep(unsigned ns) { emulator::Sleep(ns); }
inline void __threadfence_block() { emulator::MayYield(); }
inline void __threadfence() { emulator::MayYield(); }
inline void __threadfence_system() { emulator::MayYield(); }

// --- Atomics: nobody else runs in between.

template <typename T, typename F>
T AtomicOperation(T* p, F changed) {
  emulator::MayYield();
  const T before = *p;
  *p = changed(before);
  return before;
}

template <typename T>
T atomicAdd(T* p, T value) {
  return AtomicOperation(p, [=](T before) { return before + value; });
}
template <typename T>
T atomicOr(T* p, T value) {
  return AtomicOperation(p, [=](T before) { return before | value; });
}
template <typename T>
T atomicMax(T* p, T value) {
  return AtomicOperation(p, [=](T before) { return before < value ? value : before; });
}
template <typename T>
T atomicExch(T* p, T value) {
  return AtomicOperation(p, [=](T) { return value; });
}

template <typename T>
void __stcs(T* p, T value) {
  *p = value;
}
template <typename T>
T __ldcg(const T* p) {
  return *const_cast<const volatile T*>(p);
}

// --- Barriers

inline void __syncthreads() { emulator::MeetBlock("__syncthreads", false); }
inline int __syncthreads_or(int value) { return emulator::MeetBlock("__syncthreads_or", value != 0); }
inline void __syncwarp(unsigned mask = emulator::kAllLanes) { emulator::MeetWarp(mask, "__syncwarp", 0); }

// --- Operations of a warp

namespace emulator {

inline int Lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

template <typename T>
uint64_t ToWord(T value) {
  uint64_t word = 0;
  static_assert(sizeof value <= sizeof word);
  std::memcpy(&word, &value, sizeof value);
  return word;
}

template <typename T>
T FromWord(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// The value of the lane `from`, or this one's if there is no such lane.
template <typename T>
T Shuffle(unsigned mask, const char* operation, T value, int from) {
  const uint64_t* values = MeetWarp(mask, operation, ToWord(value));
  return FromWord<T>(values[from >= 0 && from < kWarpSize ? from : Lane()]);
}

template <typename T, typename F>
T Reduce(unsigned mask, const char* operation, T value, F both) {
  const uint64_t* values = MeetWarp(mask, operation, ToWord(value));
  T all = FromWord<T>(values[0]);
  for (int lane = 1; lane < kWarpSize; ++lane) all = both(all, FromWord<T>(values[lane]));
  return all;
}

}  // namespace emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulator::Shuffle(mask, "__shfl_sync", value, lane & (emulator::kWarpSize - 1));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes) {
  return emulator::Shuffle(mask, "__shfl_up_sync", value, emulator::Lane() - static_cast<int>(lanes));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return emulator::Shuffle(mask, "__shfl_xor_sync", value, emulator::Lane() ^ lanes);
}
inline unsigned __ballot_sync(unsigned mask, int value) {
  const unsigned mine = value != 0 ? 1u << emulator::Lane() : 0;
  return emulator::Reduce(mask, "__ballot_sync", mine, [](unsigned a, unsigned b) { return a | b; });
}
inline int __all_sync(unsigned mask, int value) {
  return emulator::Reduce(mask, "__all_sync", int{value != 0}, [](int a, int b) { return a & b; });
}
inline int __any_sync(unsigned mask, int value) {
  return emulator::Reduce(mask, "__any_sync", int{value != 0}, [](int a, int b) { return a | b; });
}
template <typename T>
T __reduce_add_sync(unsigned mask, T value) {
  return emulator::Reduce(mask, "__reduce_add_sync", value, [](T a, T b) { return a + b; });
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value) {
  return emulator::Reduce(mask, "__reduce_min_sync", value, [](T a, T b) { return a < b ? a : b; });
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value) {
  return emulator::Reduce(mask, "__reduce_max_sync", value, [](T a, T b) { return a > b ? a : b; });
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t* values = emulator::MeetWarp(mask, "__match_any_sync", emulator::ToWord(value));
  unsigned same = 0;
  for (int lane = 0; lane < emulator::kWarpSize; ++lane) {
    same |= static_cast<unsigned>(values[lane] == emulator::ToWord(value)) << lane;
  }
  return same;
}
