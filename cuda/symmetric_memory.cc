#include "cuda/symmetric_memory.h"

#include <cuda.h>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "cuda/combine.h"
#include "cuda/dispatch.h"
#include "cuda/group_layout.h"
#include "cuda/layout.h"

namespace jax_ep {

namespace {

struct RankMemory {
  OpenRank open{};
  char* own = nullptr;
  int64_t* open_word = nullptr;  // never freed: recorded graphs look there
  std::vector<void*> imported;   // by IPC, to be closed
  bool connected = false;
};

std::mutex mutex;
std::map<std::pair<int64_t, int>, RankMemory>& Registry() {
  static auto* registry = new std::map<std::pair<int64_t, int>, RankMemory>();  // outlives every thread that may use it
  return *registry;
}

// The calling thread's device, as it was, when this goes.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    error = cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  cudaError_t error;

 private:
  int before_ = 0;
};

std::string Describe(const char* what, cudaError_t error) {
  cudaGetLastError();  // or the next call would report it again
  return std::string(what) + ": " + cudaGetErrorString(error);
}

}  // namespace

std::string Allocate(int64_t serial, int device, const GroupShape& shape, MemoryName* name) {
  OnDevice on(device);
  if (on.error != cudaSuccess) return Describe("cudaSetDevice", on.error);
  RankMemory memory;
  memory.open.peers.layout.shape = shape;
  const int64_t bytes = memory.open.peers.layout.total_bytes();
  cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&memory.own), bytes);
  if (error != cudaSuccess) {
    size_t free_bytes = 0;
    size_t all_bytes = 0;
    cudaGetLastError();
    cudaMemGetInfo(&free_bytes, &all_bytes);
    return "expected " + std::to_string(bytes) + " bytes of GPU memory for the group, got " +
           cudaGetErrorString(error) + " with " + std::to_string(free_bytes) +
           " bytes free; lower max_tokens, or leave XLA less (XLA_PYTHON_CLIENT_MEM_FRACTION)";
  }
  // No epoch, stamp or signal of an operation is 0.
  error = cudaMemset(memory.own, 0, bytes);
  if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void**>(&memory.open_word), sizeof(int64_t));
  if (error == cudaSuccess) error = cudaMemset(memory.open_word, 1, sizeof(int64_t));
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  memory.open.peers.open = memory.open_word;
  cudaIpcMemHandle_t handle{};
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(&handle, memory.own);
  if (error != cudaSuccess) {
    cudaFree(memory.own);
    return Describe("group memory", error);
  }
  name->address = reinterpret_cast<int64_t>(memory.own);
  name->device = device;
  name->handle.assign(reinterpret_cast<const char*>(&handle), sizeof(handle));
  std::lock_guard<std::mutex> lock(mutex);
  Registry()[{serial, device}] = std::move(memory);
  return "";
}

std::string Connect(int64_t serial, int device, int rank, int64_t process, const std::vector<MemoryName>& names,
                    int64_t fingerprint, int64_t timeout_ns, int num_sms) {
  OnDevice on(device);
  if (on.error != cudaSuccess) return Describe("cudaSetDevice", on.error);
  std::lock_guard<std::mutex> lock(mutex);
  auto found = Registry().find({serial, device});
  if (found == Registry().end()) return "expected memory allocated for the group on this device, got none";
  RankMemory& memory = found->second;
  if (static_cast<int>(names.size()) != memory.open.peers.layout.shape.ranks) return "expected a name for every rank";
  memory.open.one_process = true;
  for (size_t peer = 0; peer < names.size(); ++peer) {
    const MemoryName& name = names[peer];
    memory.open.devices[peer] = name.device;
    memory.open.one_process &= name.process == process;
    void* base = nullptr;
    if (name.process == process) {
      base = reinterpret_cast<void*>(name.address);
      if (name.device != device) {
        const cudaError_t error = cudaDeviceEnablePeerAccess(name.device, 0);
        if (error != cudaSuccess && error != cudaErrorPeerAccessAlreadyEnabled) {
          return Describe("peer access", error);
        }
        cudaGetLastError();
      }
    } else {
      cudaIpcMemHandle_t handle{};
      if (name.handle.size() != sizeof(handle)) return "expected a CUDA IPC handle, got another size";
      std::memcpy(&handle, name.handle.data(), sizeof(handle));
      const cudaError_t error = cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess);
      if (error != cudaSuccess) return Describe("memory of a peer process", error);
      memory.imported.push_back(base);
      // Within a process the caller has asked; of another process's device only its memory tells which it is.
      cudaPointerAttributes attributes{};
      int atomics = 1;
      if (cudaPointerGetAttributes(&attributes, base) == cudaSuccess && attributes.device != device) {
        cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, attributes.device);
      }
      cudaGetLastError();
      if (atomics == 0) {
        return "expected atomics between the GPUs of ranks " + std::to_string(rank) + " and " + std::to_string(peer) +
               ", as over NVLink, got none; use implementation=\"reference\"";
      }
    }
    memory.open.peers.base[peer] = static_cast<char*>(base);
  }
  memory.open.peers.rank = rank;
  memory.open.fingerprint = fingerprint;
  memory.open.timeout_ns = timeout_ns;
  memory.open.num_sms = num_sms;
  cudaError_t error = cudaDeviceGetAttribute(&memory.open.device_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return Describe("cudaDeviceGetAttribute", error);
  // Loaded now: loading one lazily while another waits for its peers could hang.
  error = LoadDispatchKernels();
  if (error == cudaSuccess) error = LoadCombineKernels();
  if (error == cudaSuccess) error = LoadLayoutKernels();
  if (error == cudaSuccess) error = LoadGroupLayoutKernels();
  if (error != cudaSuccess) return Describe("loading the kernels", error);
  memory.connected = true;
  return "";
}

namespace {

// Whether all peers have read what they read of a rank in the operations that it has finished. They need not have when
// it finishes, and what they read must not go before.
bool PeersHaveRead(const RankMemory& memory) {
  Header header;
  for (int tries = 0; tries < 1000; ++tries) {
    if (cudaMemcpy(&header, memory.own, sizeof(header), cudaMemcpyDeviceToHost) != cudaSuccess) return false;
    bool all = true;
    for (int peer = 0; peer < memory.open.peers.layout.shape.ranks; ++peer) all &= header.read[peer] >= header.epoch;
    if (all) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

cudaError_t SyncAll(const std::vector<int>& devices) {
  cudaError_t error = cudaSuccess;
  for (const int device : devices) {
    OnDevice on(device);
    const cudaError_t here = cudaDeviceSynchronize();
    if (error == cudaSuccess) error = here;
  }
  return error;
}

}  // namespace

std::string OpenSides(int64_t serial) {
  std::vector<int> devices;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [name, memory] : Registry()) {
      if (name.first == serial && memory.open.side == nullptr) devices.push_back(name.second);
    }
  }
  for (const int device : devices) {
    OnDevice on(device);
    std::unique_ptr<SideStream> side;
    const std::string problem = SideStream::Create(&side);  // not with the lock, as in Release
    if (!problem.empty()) return problem;
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = Registry().find({serial, device});
    if (found != Registry().end() && found->second.open.side == nullptr) found->second.open.side = std::move(side);
  }
  return "";
}

std::string Release(int64_t serial) {
  std::vector<int> devices;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& entry : Registry()) {
      if (entry.first.first == serial) devices.push_back(entry.first.second);
    }
  }
  // Never with the lock: what runs may wait for a launch on another device, which takes it.
  cudaError_t error = SyncAll(devices);
  std::vector<RankMemory> held;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (const int device : devices) {
      const auto found = Registry().find({serial, device});
      if (found == Registry().end()) continue;
      held.push_back(std::move(found->second));
      Registry().erase(found);
      OnDevice on(device);
      const cudaError_t here = cudaMemset(held.back().open_word, 0, sizeof(int64_t));
      if (error == cudaSuccess) error = here;
    }
  }
  const cudaError_t again = SyncAll(devices);
  if (error == cudaSuccess) error = again;
  std::string problem;
  for (size_t i = 0; i < held.size(); ++i) {
    OnDevice on(devices[i]);
    held[i].open.side.reset();
    // Kept for good rather than taken from under a peer that still runs, or after a fault.
    if (error != cudaSuccess || (held[i].connected && !PeersHaveRead(held[i]))) continue;
    for (void* base : held[i].imported) cudaIpcCloseMemHandle(base);
    const cudaError_t here = cudaFree(held[i].own);
    if (here != cudaSuccess) problem = Describe("releasing the group", here);
  }
  return error == cudaSuccess ? problem : Describe("releasing the group", error);
}

bool PeersCanRead(const OpenRank& rank, std::initializer_list<const void*> addresses) {
  if (!rank.one_process) return false;
  // Of the driver, which is not linked: a machine without it loads the module all the same.
  using GetAccess = CUresult (*)(unsigned long long*, const CUmemLocation*, CUdeviceptr);
  static const GetAccess get_access = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuMemGetAccess", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<GetAccess>(function)
                                                                        : nullptr;
  }();
  if (get_access == nullptr) return false;
  for (const void* address : addresses) {
    if (address == nullptr) continue;
    for (int peer = 0; peer < rank.peers.layout.shape.ranks; ++peer) {
      // Only memory that was mapped for a device, as XLA's is, answers this question: the rest is staged.
      const CUmemLocation where{CU_MEM_LOCATION_TYPE_DEVICE, {rank.devices[peer]}};
      unsigned long long access = 0;
      if (get_access(&access, &where, reinterpret_cast<CUdeviceptr>(address)) != CUDA_SUCCESS) return false;
      if ((access & CU_MEM_ACCESS_FLAGS_PROT_READ) == 0) return false;
    }
  }
  return true;
}

std::string Find(int64_t serial, int device, int64_t fingerprint, OpenRank* rank) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = Registry().find({serial, device});
  const std::string group = "group " + std::to_string(serial);
  if (found == Registry().end() || !found->second.connected) {
    return "expected an open " + group + " on device " + std::to_string(device) +
           ", got none; it was closed, or this program is from another process: make a group and compile again";
  }
  if (found->second.open.fingerprint != fingerprint) {
    return "expected a program compiled for " + group + " of this process, got one for other numbers; compile again";
  }
  *rank = found->second.open;
  return "";
}

}  // namespace jax_ep
