// jax_ep_layout for XLA:CPU. Local work: it waits for nobody.
#include "xla_ffi/handlers.h"
#include "xla_ffi/layout_args.h"
#include "xla_ffi/layout_cpu.h"

namespace jax_ep {
namespace {

namespace ffi = xla::ffi;

ffi::Error LayoutCpuImpl(S32 index, S32 first_expert, S32Result slots, S32Result group_sizes, S32Result counts,
                         S32Result num_dropped, int64_t capacity, int64_t alignment, int64_t row_order) {
  auto args = DecodeLayout(index, slots, group_sizes, counts, num_dropped, capacity, alignment, row_order);
  if (!args.has_value()) return args.error();
  PlaceRows(args->order, args->shape, index.typed_data(), *first_expert.typed_data(), slots->typed_data(),
            group_sizes->typed_data(), counts->typed_data(), num_dropped->typed_data());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpLayoutCpu, LayoutCpuImpl,
                              ffi::Ffi::Bind()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Attr<int64_t>("capacity")
                                  .Attr<int64_t>("alignment")
                                  .Attr<int64_t>("row_order"));

}  // namespace jax_ep
