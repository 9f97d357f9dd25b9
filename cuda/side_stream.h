// A stream beside XLA's for one rank of a group: what runs there is under way between the start of an operation and its
// done. Operations of a group run one after the other on it and on XLA's stream, in the order in which they were
// enqueued, so that every rank makes them in the same order.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace jax_ep {

class SideStream {
 public:
  // Exchanges of one group between their start and their done.
  static constexpr int kMaxPending = 8;
  using Addresses = std::vector<const void*>;

  // Of the current device. All return an empty string, or what went wrong. Where something did, `compute` waits for all
  // that was started, as XLA gives back what it writes to and reads.
  static std::string Create(std::unique_ptr<SideStream>* made);
  ~SideStream();

  // Enqueues what `launch(stream)` launches, behind all that `compute` has been given so far, and beside what it is
  // given from here on. The exchange is known by the first address that it writes to.
  template <typename Launch>
  std::string Start(cudaStream_t compute, const void* result, const Addresses& reads, Launch launch) {
    std::lock_guard<std::mutex> lock(mutex_);
    Pending* pending = nullptr;
    std::string problem = Begin(compute, result, &pending);
    if (problem.empty()) problem = Check(launch(stream_), "launch");
    if (problem.empty()) problem = End(pending, result, reads);
    return problem.empty() ? problem : GiveUp(compute, problem);
  }

  // Lets `compute` wait for the exchange that writes there. What it reads must be among what is `held` until now.
  std::string Done(cudaStream_t compute, const void* result, const Addresses& held);

  // Lets `compute`, which may be recorded into a CUDA graph, wait for all that was started.
  std::string Follow(cudaStream_t compute);

 private:
  struct Pending {
    const void* result = nullptr;  // null: free
    Addresses reads;
    cudaEvent_t finished = nullptr;
  };

  static std::string Check(cudaError_t error, const char* what);
  std::string Begin(cudaStream_t compute, const void* result, Pending** pending);
  std::string End(Pending* pending, const void* result, const Addresses& reads);
  // Returns the problem.
  std::string GiveUp(cudaStream_t compute, const std::string& problem);

  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t given_ = nullptr;  // what the compute stream had been given before the last start
  cudaEvent_t last_ =
      nullptr;  // the end of the last exchange that was started; never freed: recorded graphs wait for it
  std::array<Pending, kMaxPending> pending_;
};

}  // namespace jax_ep
