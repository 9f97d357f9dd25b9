// Symmetric memory: the same byte layout on every rank of a group, each rank's reachable from all its peers.
//
// One registry holds every open group of this process. A group is known by its serial; a rank of it by the CUDA device
// that it runs on, of which one group has at most one in a process.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "cuda/buffer_layout.h"
#include "cuda/side_stream.h"

namespace jax_ep {

// What a rank tells the others of its memory.
struct MemoryName {
  int64_t process;     // the process that owns it, by whatever numbers the caller tells them apart
  int64_t address;     // its address there
  int32_t device;      // its CUDA device there
  std::string handle;  // CUDA IPC handle, for other processes
};

// What a handler needs to launch for a rank.
struct OpenRank {
  Peers peers;
  int64_t fingerprint;  // of the group's numbers, as the caller of Connect had them
  int64_t timeout_ns;
  int32_t num_sms;  // that the group gives each operation, 0 if that is left to it
  int32_t device_sms;
  bool one_process;                  // whether all ranks are in this process
  int32_t devices[kMaxRanks];        // then, their CUDA devices
  std::shared_ptr<SideStream> side;  // null until OpenSides
};

// All return an empty string, or what went wrong.

// Allocates and clears this rank's memory. Leaves name->process to the caller.
std::string Allocate(int64_t serial, int device, const GroupShape& shape, MemoryName* name);

// Reaches all ranks' memory, in rank order, and loads the kernels. After all ranks have allocated. `process` is this.
std::string Connect(int64_t serial, int device, int rank, int64_t process, const std::vector<MemoryName>& names,
                    int64_t fingerprint, int64_t timeout_ns, int num_sms);

// For programs that start operations and are done with them later: before such a program is compiled, so that whatever
// is recorded into CUDA graphs from then on waits for what was started.
std::string OpenSides(int64_t serial);

// Gives back what the group holds in this process, once nothing runs that uses it. Its executables fail from then on.
std::string Release(int64_t serial);

// Whether all peers of a rank can read what is at these addresses of its device, whoever has allocated it.
bool PeersCanRead(const OpenRank& rank, std::initializer_list<const void*> addresses);

// The rank of an open group on a device.
std::string Find(int64_t serial, int device, int64_t fingerprint, OpenRank* rank);

}  // namespace jax_ep
