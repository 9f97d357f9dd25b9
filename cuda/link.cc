#include "cuda/link.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

namespace jax_ep {
namespace {

constexpr int kWarmUp = 3;

// Keeps the first error of a sequence of calls.
class Calls {
 public:
  bool Do(const char* what, cudaError_t error) {
    if (error == cudaSuccess) return problem_.empty();
    cudaGetLastError();  // or the next call would report it again
    if (problem_.empty()) problem_ = std::string(what) + ": " + cudaGetErrorString(error);
    return false;
  }
  const std::string& problem() const { return problem_; }

 private:
  std::string problem_;
};

// One end of the link: what it sends and receives, and the stream of its copy engine.
struct End {
  int device;
  void* sent = nullptr;
  void* received = nullptr;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
};

void Open(End& at, int peer, int64_t bytes, Calls& calls) {
  calls.Do("cudaSetDevice", cudaSetDevice(at.device));
  const cudaError_t access = cudaDeviceEnablePeerAccess(peer, 0);
  if (access == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
  } else {
    calls.Do("peer access", access);
  }
  calls.Do("memory to send from", cudaMalloc(&at.sent, bytes));
  calls.Do("memory to receive in", cudaMalloc(&at.received, bytes));
  calls.Do("stream", cudaStreamCreateWithFlags(&at.stream, cudaStreamNonBlocking));
  calls.Do("event", cudaEventCreate(&at.begin));
  calls.Do("event", cudaEventCreate(&at.end));
}

void Close(End& at) {
  cudaSetDevice(at.device);
  if (at.stream != nullptr) cudaStreamDestroy(at.stream);
  if (at.begin != nullptr) cudaEventDestroy(at.begin);
  if (at.end != nullptr) cudaEventDestroy(at.end);
  cudaFree(at.sent);
  cudaFree(at.received);
  cudaGetLastError();
}

// Milliseconds from when both directions may begin until both are done.
float CopyBothWays(End& a, End& b, int64_t bytes, Calls& calls) {
  calls.Do("cudaSetDevice", cudaSetDevice(a.device));
  calls.Do("begin", cudaEventRecord(a.begin, a.stream));
  calls.Do("wait", cudaStreamWaitEvent(b.stream, a.begin, 0));
  calls.Do("copy", cudaMemcpyPeerAsync(b.received, b.device, a.sent, a.device, bytes, a.stream));
  calls.Do("cudaSetDevice", cudaSetDevice(b.device));
  calls.Do("copy", cudaMemcpyPeerAsync(a.received, a.device, b.sent, b.device, bytes, b.stream));
  calls.Do("end", cudaEventRecord(b.end, b.stream));
  calls.Do("cudaSetDevice", cudaSetDevice(a.device));
  calls.Do("wait", cudaStreamWaitEvent(a.stream, b.end, 0));
  calls.Do("end", cudaEventRecord(a.end, a.stream));
  calls.Do("copies", cudaEventSynchronize(a.end));
  float milliseconds = 0;
  calls.Do("time", cudaEventElapsedTime(&milliseconds, a.begin, a.end));
  return milliseconds;
}

}  // namespace

double CopyGigabytesPerSecond(int device, int peer, int64_t bytes, int repeats, std::string* problem) {
  if (device == peer || bytes < 1 || repeats < 1) {
    *problem = "expected two devices, and at least one byte and one repeat";
    return 0;
  }
  int before = 0;
  cudaGetDevice(&before);
  Calls calls;
  End a{device};
  End b{peer};
  Open(a, peer, bytes, calls);
  Open(b, device, bytes, calls);
  std::vector<float> milliseconds;
  for (int i = 0; i < kWarmUp + repeats && calls.problem().empty(); ++i) {
    const float time = CopyBothWays(a, b, bytes, calls);
    if (i >= kWarmUp) milliseconds.push_back(time);
  }
  Close(a);
  Close(b);
  cudaSetDevice(before);
  *problem = calls.problem();
  if (!problem->empty()) return 0;
  std::nth_element(milliseconds.begin(), milliseconds.begin() + repeats / 2, milliseconds.end());
  return static_cast<double>(bytes) / (milliseconds[repeats / 2] * 1e6);
}

}  // namespace jax_ep
