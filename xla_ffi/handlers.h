// Every handler of this module, by its C++ symbol.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_ep {

extern "C" {
XLA_FFI_Error* JaxEpLayoutCpu(XLA_FFI_CallFrame* call_frame);
#ifdef JAX_EP_WITH_CUDA
XLA_FFI_Error* JaxEpLayoutCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxEpGroupLayoutCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxEpDispatchCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxEpCombineCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxEpDispatchStartCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxEpCombineStartCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxEpDoneCuda(XLA_FFI_CallFrame* call_frame);
#endif
}

}  // namespace jax_ep
