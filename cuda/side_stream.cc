#include "cuda/side_stream.h"

#include <algorithm>
#include <utility>

namespace jax_ep {

std::string SideStream::Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return "";
  cudaGetLastError();  // or the next call would report it again
  return std::string(what) + ": " + cudaGetErrorString(error);
}

std::string SideStream::Create(std::unique_ptr<SideStream>* made) {
  auto side = std::make_unique<SideStream>();
  int least = 0;
  int greatest = 0;
  cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  // Its few blocks go before the many of a matmul that wait for an SM: peers wait for them.
  if (error == cudaSuccess) error = cudaStreamCreateWithPriority(&side->stream_, cudaStreamNonBlocking, greatest);
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&side->given_, cudaEventDisableTiming);
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&side->last_, cudaEventDisableTiming);
  for (Pending& pending : side->pending_) {
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&pending.finished, cudaEventDisableTiming);
  }
  *made = std::move(side);
  return Check(error, "a stream for start and done");
}

SideStream::~SideStream() {
  for (const Pending& pending : pending_) {
    if (pending.finished != nullptr) cudaEventDestroy(pending.finished);
  }
  if (given_ != nullptr) cudaEventDestroy(given_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

std::string SideStream::Begin(cudaStream_t compute, const void* result, Pending** pending) {
  for (Pending& each : pending_) {
    // One that writes to the same place cannot be under way: the program that started it has failed before its done.
    if (each.result == result) *pending = &each;
    if (*pending == nullptr && each.result == nullptr) *pending = &each;
  }
  if (*pending == nullptr) {
    return "expected at most " + std::to_string(kMaxPending) +
           " exchanges of a group between start and done, got one more (those of programs that failed in between "
           "count, "
           "too, until now); call done for one first, or run it again";
  }
  cudaError_t error = cudaEventRecord(given_, compute);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(stream_, given_, 0);
  return Check(error, "start");
}

std::string SideStream::End(Pending* pending, const void* result, const Addresses& reads) {
  cudaError_t error = cudaEventRecord(pending->finished, stream_);
  if (error == cudaSuccess) error = cudaEventRecord(last_, stream_);
  pending->result = result;
  pending->reads = reads;
  return Check(error, "start");
}

std::string SideStream::GiveUp(cudaStream_t compute, const std::string& problem) {
  cudaEventRecord(last_, stream_);
  cudaStreamWaitEvent(compute, last_, 0);
  cudaGetLastError();
  for (Pending& each : pending_) each.result = nullptr;
  return problem;
}

std::string SideStream::Done(cudaStream_t compute, const void* result, const Addresses& held) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Pending& each : pending_) {
    if (each.result != result) continue;
    for (const void* read : each.reads) {
      if (std::find(held.begin(), held.end(), read) == held.end()) {
        return GiveUp(compute, "expected what a start reads, in its place, got another buffer: XLA has copied it");
      }
    }
    each.result = nullptr;
    const std::string problem = Check(cudaStreamWaitEvent(compute, each.finished, 0), "done");
    return problem.empty() ? problem : GiveUp(compute, problem);
  }
  return GiveUp(compute,
                "expected what a start of this group writes, in its place, got another buffer: XLA has copied "
                "it, or it was done already");
}

std::string SideStream::Follow(cudaStream_t compute) {
  std::lock_guard<std::mutex> lock(mutex_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(compute, &status);
  // In a graph the wait is for what will have been recorded when the graph runs.
  const unsigned flags = status == cudaStreamCaptureStatusNone ? cudaEventWaitDefault : cudaEventWaitExternal;
  if (error == cudaSuccess) error = cudaStreamWaitEvent(compute, last_, flags);
  return Check(error, "waiting for what was started");
}

}  // namespace jax_ep
