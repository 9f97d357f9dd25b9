// cuda/launch.cuh for the CPU. All blocks of all launches are there at once.
#pragma once

#include <cuda_runtime.h>

#include "cuda/grid.h"

namespace jax_ep {

template <typename T>
struct AsIs {
  using Type = T;
};

template <typename... Parameters>
cudaError_t LaunchKernel(void (*kernel)(Parameters...), int blocks, int threads, int shared_bytes, cudaStream_t stream,
                         typename AsIs<Parameters>::Type... arguments) {
  if (blocks < 1 || threads < 1 || threads > 1024) return cudaErrorInvalidValue;
  if (shared_bytes > emulator::SharedBytesOf(reinterpret_cast<const void*>(kernel))) return cudaErrorInvalidValue;
  emulator::Enqueue(stream, blocks, threads, shared_bytes, [=] { kernel(arguments...); });
  return cudaSuccess;
}

template <typename... Parameters>
cudaError_t LaunchTogether(void (*kernel)(Parameters...), const Grid& grid, int threads, int shared_bytes,
                           cudaStream_t stream, typename AsIs<Parameters>::Type... arguments) {
  return LaunchKernel(kernel, grid.num_sms, threads, shared_bytes, stream, arguments...);
}

}  // namespace jax_ep
