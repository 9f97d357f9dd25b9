// jax_ep_layout for CUDA: as on the CPU, with one result more, which holds the kernels' scratch words.
#include "cuda/layout.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/layout_args.h"

namespace jax_ep {
namespace {

namespace ffi = xla::ffi;

ffi::Error LayoutCudaImpl(cudaStream_t stream, S32 index, S32 first_expert, S32Result slots, S32Result group_sizes,
                          S32Result counts, S32Result num_dropped, S32Result scratch, int64_t capacity,
                          int64_t alignment, int64_t row_order) {
  auto args = DecodeLayout(index, slots, group_sizes, counts, num_dropped, capacity, alignment, row_order);
  if (!args.has_value()) return args.error();
  const LayoutShape& shape = args->shape;
  if (shape.local_experts > kLayoutMaxLocalExperts) {
    return ffi::Error::InvalidArgument("jax_ep layout: expected at most " + std::to_string(kLayoutMaxLocalExperts) +
                                       " experts a rank, got " + std::to_string(shape.local_experts) +
                                       "; spread them over more ranks");
  }
  if (static_cast<int64_t>(scratch->element_count()) < LayoutScratchWords(shape.local_experts)) {
    return ffi::Error::InvalidArgument(
        "jax_ep layout: expected a larger scratch result; jax_ep's Python and its "
        "compiled module may be of two versions");
  }
  const cudaError_t error = LaunchLayout(args->order, shape, index.typed_data(), first_expert.typed_data(),
                                         slots->typed_data(), group_sizes->typed_data(), counts->typed_data(),
                                         num_dropped->typed_data(), scratch->typed_data(), stream);
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_ep layout: ") + cudaGetErrorString(error));
}

}  // namespace

// Two launches, no host work that depends on the call: XLA may record it into a CUDA graph.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpLayoutCuda, LayoutCudaImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Attr<int64_t>("capacity")
                                  .Attr<int64_t>("alignment")
                                  .Attr<int64_t>("row_order"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
