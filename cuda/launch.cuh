// How kernels are launched. tests/cuda/emulator has this file once more, for the CPU.
#pragma once

#include <cuda_runtime.h>

namespace jax_ep {

// For arguments that are converted to what the kernel takes.
template <typename T>
struct AsIs {
  using Type = T;
};

template <typename... Parameters>
cudaError_t LaunchKernel(void (*kernel)(Parameters...), int blocks, int threads, int shared_bytes, cudaStream_t stream,
                         typename AsIs<Parameters>::Type... arguments) {
  void* pointers[] = {&arguments...};
  return cudaLaunchKernel(reinterpret_cast<void*>(kernel), dim3(blocks), dim3(threads), pointers, shared_bytes, stream);
}

// Blocks wait for what other blocks of other ranks do, so all must be on the GPU at once: one an SM, launched together.
template <typename... Parameters>
cudaError_t LaunchTogether(void (*kernel)(Parameters...), int blocks, int threads, int shared_bytes,
                           cudaStream_t stream, typename AsIs<Parameters>::Type... arguments) {
  void* pointers[] = {&arguments...};
  return cudaLaunchCooperativeKernel(reinterpret_cast<void*>(kernel), dim3(blocks), dim3(threads), pointers,
                                     shared_bytes, stream);
}

}  // namespace jax_ep
