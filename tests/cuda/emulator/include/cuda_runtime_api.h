// What the host's code needs of CUDA's runtime. Streams run when the host waits for them, and not before.
#pragma once

#include <cstdint>

#include "tests/cuda/emulator/machine.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaFuncAttributes {};
using cudaStream_t = emulator::Stream*;
constexpr unsigned cudaStreamNonBlocking = 1;

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceEnablePeerAccess(int device, unsigned flags);
cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMemset(void* memory, int byte, size_t bytes);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize();

namespace emulator {

cudaError_t SetSharedBytes(const void* kernel, int bytes);
int SharedBytesOf(const void* kernel);

}  // namespace emulator

template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel*) {
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  return emulator::SetSharedBytes(reinterpret_cast<const void*>(kernel), bytes);
}
