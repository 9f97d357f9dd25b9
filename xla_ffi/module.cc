// The Python module jax_ep._extension. Loading it registers nothing and touches no device; it says what this
// build contains. A handler is added here when it is written, and to the list of build_info with it.
#include <nanobind/nanobind.h>

#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

namespace {

nb::dict BuildInfo() {
  nb::dict info;
  info["ffi_api"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  info["cpu_handlers"] = nb::make_tuple();
  info["kernels"] = nb::make_tuple();
  return info;
}

}  // namespace

NB_MODULE(_extension, module) {
  module.def("build_info", &BuildInfo, "The parts compiled into this module, as a new dict.");
}
