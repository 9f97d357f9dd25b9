// Layout, dispatch and combine of a group, for CUDA. Each checks its buffers, finds its rank, and launches. They keep
// nothing between calls, so XLA may record them into CUDA graphs: the epoch lives on the device.
#include <string>

#include "cuda/combine.h"
#include "cuda/dispatch.h"
#include "cuda/layout.h"
#include "cuda/symmetric_memory.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/layout_args.h"

namespace jax_ep {
namespace {

namespace ffi = xla::ffi;
using AnyResult = ffi::Result<ffi::AnyBuffer>;

ffi::Error Refuse(const std::string& what) { return ffi::Error::InvalidArgument("jax_ep: " + what); }

ffi::Error Launched(cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_ep: launch failed: ") + cudaGetErrorString(error));
}

// The rank that this call is for, and the call. XLA has made its device the current one.
ffi::Error Open(int64_t serial, int64_t fingerprint, int64_t tag, OpenRank* rank, Call* call) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return Launched(error);
  const std::string problem = Find(serial, device, fingerprint, rank);
  if (!problem.empty()) return Refuse(problem);
  call->tag = tag;
  call->timeout_ns = rank->timeout_ns;
  call->serial = static_cast<int32_t>(serial);
  return ffi::Error::Success();
}

// Shapes that every operation shares; slots are [ranks, tokens, top_k].
ffi::Error CheckSlots(const OpenRank& rank, const S32& slots) {
  const GroupShape& shape = rank.peers.layout.shape;
  const auto dims = slots.dimensions();
  if (dims.size() != 3 || dims[0] != shape.ranks || dims[1] > shape.max_tokens || dims[2] > shape.top_k) {
    return Refuse("expected slots [ranks, tokens, top_k] within the group's sizes");
  }
  return ffi::Error::Success();
}

template <typename T>
T* OrNull(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<T*>(buffer.untyped_data());
}

int64_t BytesOfRow(const ffi::AnyBuffer& rows) {
  const auto dims = rows.dimensions();
  return dims.size() == 2 ? dims[1] * static_cast<int64_t>(ffi::ByteWidth(rows.element_type())) : -1;
}

ffi::Error GroupLayoutImpl(cudaStream_t stream, S32 index, S32Result slots, S32Result group_sizes, S32Result counts,
                           S32Result num_dropped, S32Result gathered, S32Result scratch, int64_t serial,
                           int64_t fingerprint, int64_t tag, int64_t capacity, int64_t alignment, int64_t row_order) {
  OpenRank rank;
  Call call;
  ffi::Error error = Open(serial, fingerprint, tag, &rank, &call);
  if (error.failure()) return error;
  error = CheckSlots(rank, *slots);
  if (error.failure()) return error;
  auto args = DecodeLayout(*gathered, slots, group_sizes, counts, num_dropped, capacity, alignment, row_order);
  if (!args.has_value()) return args.error();
  const int64_t experts = args->shape.local_experts;
  if (index.element_count() * rank.peers.layout.shape.ranks != gathered->element_count() ||
      static_cast<int64_t>(scratch->element_count()) < LayoutScratchWords(experts) + 1) {
    return Refuse("expected gathered indices of all ranks, and scratch");
  }
  // The kernels read the rank's lowest expert from the device: it goes into the last word of scratch.
  int32_t* first_expert = scratch->typed_data() + LayoutScratchWords(experts);
  cudaError_t launched =
      LaunchGatherIndex(rank.peers, call, index.typed_data(), static_cast<int32_t>(index.element_count()),
                        gathered->typed_data(), first_expert, static_cast<int32_t>(rank.peers.rank * experts), stream);
  if (launched != cudaSuccess) return Launched(launched);
  return Launched(LaunchLayout(args->order, args->shape, gathered->typed_data(), first_expert, slots->typed_data(),
                               group_sizes->typed_data(), counts->typed_data(), num_dropped->typed_data(),
                               scratch->typed_data(), stream));
}

ffi::Error DispatchImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scales, ffi::AnyBuffer weights, S32 slots,
                        AnyResult rows, AnyResult row_scales, AnyResult row_weights, S32Result source, int64_t serial,
                        int64_t fingerprint, int64_t tag, int64_t row_order, int64_t num_sms) {
  OpenRank rank;
  Call call;
  ffi::Error error = Open(serial, fingerprint, tag, &rank, &call);
  if (error.failure()) return error;
  error = CheckSlots(rank, slots);
  if (error.failure()) return error;
  const BufferLayout& layout = rank.peers.layout;
  DispatchArgs args;
  args.order = static_cast<RowOrder>(row_order);
  args.tokens = static_cast<int32_t>(slots.dimensions()[1]);
  args.top_k = static_cast<int32_t>(slots.dimensions()[2]);
  args.capacity = static_cast<int32_t>(source->element_count());
  const int64_t row_bytes = BytesOfRow(x);
  if (row_bytes % 16 != 0 || row_bytes > layout.row_bytes() || BytesOfRow(*rows) != row_bytes) {
    return Refuse("expected rows of the tokens' size, a multiple of 16 bytes within the group's");
  }
  args.row_bytes = static_cast<int32_t>(row_bytes);
  args.scale_words = scales.element_count() == 0 ? 0 : static_cast<int32_t>(scales.dimensions()[1]);
  if (args.scale_words > layout.scale_blocks()) return Refuse("expected a scale for each block of 128");
  args.x = x.untyped_data();
  args.scales = OrNull<const uint32_t>(scales);
  args.weights = OrNull<const uint32_t>(weights);
  args.slots = slots.typed_data();
  args.rows = rows->untyped_data();
  args.row_scales = static_cast<uint32_t*>(row_scales->untyped_data());
  args.row_weights = static_cast<uint32_t*>(row_weights->untyped_data());
  args.source = source->typed_data();
  const int sms = num_sms > 0 ? static_cast<int>(num_sms) : rank.num_sms;
  return Launched(LaunchDispatch(rank.peers, call, args, sms, stream));
}

ffi::Error CombineImpl(cudaStream_t stream, ffi::AnyBuffer rows, ffi::AnyBuffer row_weights, ffi::AnyBuffer row_words,
                       S32 slots, AnyResult out, AnyResult pick_words, int64_t serial, int64_t fingerprint, int64_t tag,
                       int64_t row_order, int64_t num_sms) {
  OpenRank rank;
  Call call;
  ffi::Error error = Open(serial, fingerprint, tag, &rank, &call);
  if (error.failure()) return error;
  error = CheckSlots(rank, slots);
  if (error.failure()) return error;
  CombineArgs args;
  switch (rows.element_type()) {
    case ffi::F32:
      args.element = Element::kFloat32;
      break;
    case ffi::BF16:
      args.element = Element::kBFloat16;
      break;
    case ffi::F16:
      args.element = Element::kFloat16;
      break;
    default:
      return Refuse("expected rows of float32, bfloat16 or float16");
  }
  const int64_t row_bytes = BytesOfRow(rows);
  if (row_bytes % 16 != 0 || row_bytes > rank.peers.layout.row_bytes() || BytesOfRow(*out) != row_bytes) {
    return Refuse("expected tokens of the rows' size, a multiple of 16 bytes within the group's");
  }
  args.order = static_cast<RowOrder>(row_order);
  args.tokens = static_cast<int32_t>(slots.dimensions()[1]);
  args.top_k = static_cast<int32_t>(slots.dimensions()[2]);
  args.hidden = static_cast<int32_t>(rows.dimensions()[1]);
  args.rows = rows.untyped_data();
  args.row_weights = OrNull<const float>(row_weights);
  args.row_words = OrNull<const uint32_t>(row_words);
  args.slots = slots.typed_data();
  args.out = out->untyped_data();
  args.pick_words = static_cast<uint32_t*>(pick_words->untyped_data());
  const int sms = num_sms > 0 ? static_cast<int>(num_sms) : rank.num_sms;
  return Launched(LaunchCombine(rank.peers, call, args, sms, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpGroupLayoutCuda, GroupLayoutImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Attr<int64_t>("serial")
                                  .Attr<int64_t>("fingerprint")
                                  .Attr<int64_t>("tag")
                                  .Attr<int64_t>("capacity")
                                  .Attr<int64_t>("alignment")
                                  .Attr<int64_t>("row_order"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpDispatchCuda, DispatchImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<S32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<S32>()
                                  .Attr<int64_t>("serial")
                                  .Attr<int64_t>("fingerprint")
                                  .Attr<int64_t>("tag")
                                  .Attr<int64_t>("row_order")
                                  .Attr<int64_t>("num_sms"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpCombineCuda, CombineImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<S32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("serial")
                                  .Attr<int64_t>("fingerprint")
                                  .Attr<int64_t>("tag")
                                  .Attr<int64_t>("row_order")
                                  .Attr<int64_t>("num_sms"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep
