// How kernels are launched. tests/cuda/emulator has this file once more, for the CPU.
#pragma once

#include <cuda_runtime.h>

#include "cuda/grid.h"

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
// By pairs as clusters of two: these get neighbouring SMs, of which a matmul whose own clusters have two would lose
// both to one block.
template <typename... Parameters>
cudaError_t LaunchTogether(void (*kernel)(Parameters...), const Grid& grid, int threads, int shared_bytes,
                           cudaStream_t stream, typename AsIs<Parameters>::Type... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = 2;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.num_sms);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = grid.in_pairs && grid.num_sms % 2 == 0 ? 2 : 1;
  void* pointers[] = {&arguments...};
  return cudaLaunchKernelExC(&config, reinterpret_cast<void*>(kernel), pointers);
}

}  // namespace jax_ep
