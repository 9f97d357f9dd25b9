#include "xla_ffi/group_module.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/dispatch.h"
#include "cuda/layout.h"
#include "cuda/link.h"
#include "cuda/symmetric_memory.h"

namespace nb = nanobind;

namespace jax_ep {
namespace {

GroupShape ShapeOf(int ranks, int max_tokens, int top_k, int hidden, int element_bytes) {
  return GroupShape{ranks, max_tokens, top_k, hidden, element_bytes};
}

void Require(const std::string& problem) {
  if (!problem.empty()) throw std::runtime_error(problem);
}

nb::tuple AllocateGroup(int64_t serial, int device, int ranks, int max_tokens, int top_k, int hidden,
                        int element_bytes) {
  MemoryName name;
  std::string problem;
  {
    nb::gil_scoped_release others_may_run;  // what is under way on the GPU may wait for them
    problem = Allocate(serial, device, ShapeOf(ranks, max_tokens, top_k, hidden, element_bytes), &name);
  }
  Require(problem);
  return nb::make_tuple(name.address, name.device, nb::bytes(name.handle.data(), name.handle.size()));
}

void ConnectGroup(int64_t serial, int device, int rank, int64_t process, const nb::list& names, int64_t fingerprint,
                  double timeout_s, int num_sms) {
  std::vector<MemoryName> all;
  for (nb::handle item : names) {
    const nb::tuple fields = nb::cast<nb::tuple>(item);
    const nb::bytes handle = nb::cast<nb::bytes>(fields[3]);
    all.push_back({nb::cast<int64_t>(fields[0]), nb::cast<int64_t>(fields[1]), nb::cast<int32_t>(fields[2]),
                   std::string(handle.c_str(), handle.size())});
  }
  constexpr double kLongest = 4e18;  // nanoseconds, more than a century
  const auto timeout_ns = static_cast<int64_t>(std::min(timeout_s * 1e9, kLongest));
  Require(Connect(serial, device, rank, process, all, fingerprint, timeout_ns, num_sms));
}

nb::dict DeviceFacts(int device) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  nb::dict facts;
  facts["compute_capability"] = nb::make_tuple(properties.major, properties.minor);
  return facts;
}

bool CanReach(int device, int peer) {
  if (device == peer) return true;
  int can = 0;
  for (const cudaDeviceP2PAttr what : {cudaDevP2PAttrAccessSupported, cudaDevP2PAttrNativeAtomicSupported}) {
    if (cudaDeviceGetP2PAttribute(&can, what, device, peer) != cudaSuccess || can == 0) return false;
  }
  return true;
}

double LinkBandwidth(int device, int peer, int64_t bytes, int repeats) {
  std::string problem;
  double rate = 0;
  {
    nb::gil_scoped_release others_may_run;
    rate = CopyGigabytesPerSecond(device, peer, bytes, repeats, &problem);
  }
  Require(problem);
  return rate;
}

}  // namespace

void DefineGroups(nb::module_& module) {
  module.attr("max_ranks") = kMaxRanks;
  module.attr("max_top_k") = kMaxTopK;
  module.attr("max_local_experts") = kLayoutMaxLocalExperts;
  module.def("dispatch_pieces", &DispatchPieces, nb::arg("row_bytes"), "Pieces that a row is moved in by dispatch.");
  module.def("layout_scratch_words", &LayoutScratchWords, nb::arg("local_experts"),
             "Words of scratch that the layout kernels need.");
  module.def(
      "group_bytes",
      [](int ranks, int max_tokens, int top_k, int hidden, int element_bytes) {
        return BufferLayout{ShapeOf(ranks, max_tokens, top_k, hidden, element_bytes)}.total_bytes();
      },
      nb::arg("ranks"), nb::arg("max_tokens"), nb::arg("top_k"), nb::arg("hidden"), nb::arg("element_bytes"),
      "Bytes of symmetric memory on each rank.");
  module.def("allocate_group", &AllocateGroup, "Allocates a rank's memory; returns its name for the other ranks.");
  module.def("connect_group", &ConnectGroup, "Reaches every rank's memory by its name, in rank order.");
  module.def(
      "release_group",
      [](int64_t serial) {
        std::string problem;
        {
          nb::gil_scoped_release others_may_run;
          problem = Release(serial);
        }
        Require(problem);
      },
      "Frees a group's memory in this process.");
  module.def(
      "open_sides",
      [](int64_t serial) {
        std::string problem;
        {
          nb::gil_scoped_release others_may_run;
          problem = OpenSides(serial);
        }
        Require(problem);
      },
      "Makes a group's streams for what runs between start and done, if it has none.");
  module.def("device_facts", &DeviceFacts, "What kernels must know of a CUDA device.");
  module.def("can_reach", &CanReach,
             "Whether a CUDA device of this process can reach another's memory, also by atomics, as over NVLink.");
  module.def("link_bandwidth", &LinkBandwidth, nb::arg("device"), nb::arg("peer"), nb::arg("bytes"), nb::arg("repeats"),
             "GB/s each way at once by the copy engines of two CUDA devices of this process.");
}

}  // namespace jax_ep
