// The Python module jax_ep._extension. Loading it registers nothing and touches no device; it says what this
// build contains, and hands out its handlers for jax.ffi to register. A new handler is added to Handlers().
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"
#include "xla_ffi/handlers.h"
#ifdef JAX_EP_WITH_CUDA
#include "xla_ffi/group_module.h"
#endif

namespace nb = nanobind;

namespace jax_ep {
namespace {

struct Handler {
  const char* name;
  const char* platform;  // "cpu" or "cuda"
  XLA_FFI_Handler* call;
};

const std::vector<Handler>& Handlers() {
  static const std::vector<Handler> handlers = {
      {"jax_ep_layout", "cpu", JaxEpLayoutCpu},
#ifdef JAX_EP_WITH_CUDA
      {"jax_ep_layout", "cuda", JaxEpLayoutCuda},
      {"jax_ep_group_layout", "cuda", JaxEpGroupLayoutCuda},
      {"jax_ep_dispatch", "cuda", JaxEpDispatchCuda},
      {"jax_ep_combine", "cuda", JaxEpCombineCuda},
      {"jax_ep_dispatch_start", "cuda", JaxEpDispatchStartCuda},
      {"jax_ep_combine_start", "cuda", JaxEpCombineStartCuda},
      {"jax_ep_done", "cuda", JaxEpDoneCuda},
#endif
  };
  return handlers;
}

nb::tuple NamesOn(const std::string& platform) {
  nb::list names;
  for (const Handler& handler : Handlers()) {
    if (handler.platform == platform) names.append(handler.name);
  }
  return nb::tuple(names);
}

nb::dict BuildInfo() {
  nb::dict info;
  info["ffi_api"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  info["cpu_handlers"] = NamesOn("cpu");
  info["kernels"] = NamesOn("cuda");
#ifdef JAX_EP_WITH_CUDA
  info["cuda"] = JAX_EP_WITH_CUDA;
#else
  info["cuda"] = nb::none();
#endif
  return info;
}

nb::dict HandlerCapsules() {
  nb::dict capsules;
  for (const Handler& handler : Handlers()) {
    capsules[nb::make_tuple(handler.name, handler.platform)] = nb::capsule(reinterpret_cast<void*>(handler.call));
  }
  return capsules;
}

}  // namespace
}  // namespace jax_ep

NB_MODULE(_extension, module) {
  using namespace jax_ep;
  module.def("build_info", &BuildInfo, "The parts compiled into this module, as a new dict.");
  module.def("handlers", &HandlerCapsules, "A dict of (target name, platform) to the capsule that jax.ffi registers.");
#ifdef JAX_EP_WITH_CUDA
  DefineGroups(module);
#endif
}
