// A GPU on the CPU: runs the kernels' own sources. A CUDA thread is a fiber here, which runs until it waits for others;
// who runs next is drawn from a seed (JAX_EP_EMULATOR_SEED), so that a failure comes again with its seed. Each block
// has an OS thread of its own, as its shared memory is what is thread_local; but only one of them runs at a time.
//
// Time is made up: a turn of a block takes kTurnNs, whatever it does. There is no memory model: everybody sees at once
// what anybody has written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulator {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr int kSharedBytesUnasked = 48 * 1024;  // of dynamic shared memory: for more, a kernel must be told beforehand

// --- For the host

struct Stream;
Stream* MakeStream();
void DestroyStream(Stream* stream);
// Puts a launch into a stream. `body` is what each thread does.
void Enqueue(Stream* stream, int blocks, int threads, int shared_bytes, std::function<void()> body);
// Runs until all streams are empty.
void Run();

// Dynamic shared memory, as kernels declare it: see shared_array.h. `at` gives that of the OS thread that asks.
struct SharedArray {
  explicit SharedArray(char* (*at)());
};

// --- For the threads of a kernel

// Ends the program, saying where.
[[noreturn]] void Fail(const char* what);
int64_t Now();  // ns
void Sleep(int64_t ns);
// Now and then lets others run: at places where it matters in which order threads come.
void MayYield();

// Waits until all lanes of the warp are at the same operation; what they have brought, lane by lane. Good until the
// next operation of the warp.
const uint64_t* MeetWarp(unsigned mask, const char* operation, uint64_t value);
// Waits for all threads of the block; whether any has brought true.
bool MeetBlock(const char* operation, bool value);
void MeetGrid();

// Copies of bulk_copy.cuh. They take their time, in any order; until one has arrived there is NaN where it goes, and
// what it copies is read last thing.
void InitBarrier(uint64_t* barrier, int arrivals);
void CopyWord(float* to, const float* from, uint64_t* barrier);
void Arrive(uint64_t* barrier);
void StartCopy(void* to, const void* from, uint32_t bytes, uint64_t* barrier);
void AwaitCopy(uint64_t* barrier, uint32_t parity);
void StartCopyOut(void* to, const void* from, uint32_t bytes);
void EndGroup();
void AwaitCopiesOut(int pending);

}  // namespace emulator
