// As much of CUDA's runtime as cuda/side_stream.cc needs, which writes down what it is asked for.
#pragma once

#include <string>

using cudaError_t = int;
using cudaStream_t = const std::string*;
using cudaEvent_t = const std::string*;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
inline constexpr int cudaSuccess = 0, cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2;
inline constexpr unsigned cudaEventWaitDefault = 0, cudaEventWaitExternal = 1;

// What streams were given, in order: "stream: record event", "stream: wait event".
inline std::string said;
inline int events = 0, destroyed = 0;
inline bool capturing = false;

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, int, int priority) {
  *stream = new std::string(priority == -5 ? "urgent" : "patient");
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, int) {
  *event = new std::string("e" + std::to_string(events++));
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  ++destroyed;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  said += *stream + ": record " + *event + "\n";
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  said += *stream + ": wait " + *event + (flags == cudaEventWaitExternal ? " external\n" : "\n");
  return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
