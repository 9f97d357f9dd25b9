#include <cstdlib>
#include <cstring>
#include <map>

#include "cuda_runtime_api.h"

namespace {

constexpr int kJunk = 0x77;  // what is in memory when it comes

// Of kernels, in bytes.
std::map<const void*, int>& SharedBytesAsked() {
  static std::map<const void*, int> asked;
  return asked;
}

}  // namespace

namespace emulator {

cudaError_t SetSharedBytes(const void* kernel, int bytes) {
  if (bytes > kMaxSharedBytes) return cudaErrorInvalidValue;
  SharedBytesAsked()[kernel] = bytes;
  return cudaSuccess;
}

int SharedBytesOf(const void* kernel) {
  const auto asked = SharedBytesAsked().find(kernel);
  return asked == SharedBytesAsked().end() ? kSharedBytesUnasked : asked->second;
}

}  // namespace emulator

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "invalid argument" : error == cudaSuccess ? "no error" : "out of memory";
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaErrorInvalidValue; }

// Of just this size, so that the sanitizer sees the first byte beside it.
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (posix_memalign(memory, 256, bytes) != 0) return cudaErrorMemoryAllocation;
  std::memset(*memory, kJunk, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  emulator::Run();
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int byte, size_t bytes) {
  std::memset(memory, byte, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = emulator::MakeStream();
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  emulator::DestroyStream(stream);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  emulator::Run();
  return cudaSuccess;
}
