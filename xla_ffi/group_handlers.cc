// Layout, dispatch and combine of a group, for CUDA. Each checks its buffers, finds its rank, and launches: whole on
// XLA's stream, or between a start and a done on the group's own. The whole ones keep nothing between calls, so XLA may
// record them into CUDA graphs: the epoch lives on the device.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <string>

#include "cuda/combine.h"
#include "cuda/dispatch.h"
#include "cuda/group_layout.h"
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

// Where an operation runs.
enum class Where { kCompute, kSide };

// What a handler launches with.
struct GroupCall {
  OpenRank rank;
  Call call;
  int num_sms;  // 0 if nobody says
  RowOrder order;

  // For an operation that would take these, where nobody says how many SMs.
  Grid GridOf(const Grid& wanted) const { return num_sms > 0 ? Grid{num_sms, wanted.in_pairs} : wanted; }
};

SideStream::Addresses WithoutNull(std::initializer_list<const void*> addresses) {
  SideStream::Addresses there;
  std::copy_if(addresses.begin(), addresses.end(), std::back_inserter(there),
               [](const void* a) { return a != nullptr; });
  return there;
}

// Launches by launch(stream) what writes to `result` and reads what is at these addresses, those that are not null.
template <typename Launch>
ffi::Error LaunchOn(Where where, const GroupCall& group, cudaStream_t compute, const void* result,
                    std::initializer_list<const void*> reads, Launch launch) {
  SideStream* side = group.rank.side.get();
  std::string problem;
  if (where == Where::kSide) {
    problem = side != nullptr ? side->Start(compute, result, WithoutNull(reads), launch)
                              : "expected a program compiled by this process";
  } else {
    if (side != nullptr) problem = side->Follow(compute);
    if (problem.empty()) return Launched(launch(compute));
  }
  return problem.empty() ? ffi::Error::Success() : Refuse(problem);
}

// For the rank whose device XLA has made the current one.
ffi::ErrorOr<GroupCall> Open(int64_t serial, int64_t fingerprint, int64_t tag, int64_t num_sms, int64_t row_order) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return ffi::Unexpected(Launched(error));
  OpenRank rank;
  const std::string problem = Find(serial, device, fingerprint, &rank);
  if (!problem.empty()) return ffi::Unexpected(Refuse(problem));
  if (row_order != 0 && row_order != 1) return ffi::Unexpected(Refuse("expected row_order 0 or 1"));
  return GroupCall{rank,
                   {tag, rank.timeout_ns, static_cast<int32_t>(serial)},
                   num_sms > 0 ? static_cast<int>(num_sms) : rank.num_sms,
                   static_cast<RowOrder>(row_order)};
}

// Shapes that every operation shares; slots are [ranks, tokens, top_k].
ffi::Error CheckSlots(const GroupCall& group, const S32& slots) {
  const GroupShape& shape = group.rank.peers.layout.shape;
  const auto dims = slots.dimensions();
  if (dims.size() != 3 || dims[0] != shape.ranks || dims[1] < 1 || dims[1] > shape.max_tokens || dims[2] < 1 ||
      dims[2] > shape.top_k) {
    return Refuse("expected slots [ranks, tokens, top_k] within the group's sizes");
  }
  // Kernels count the pieces of all tokens in 32 bits.
  constexpr int64_t kLeastPiece = 2048;
  if (dims[0] * dims[1] * (group.rank.peers.layout.row_bytes() / kLeastPiece + 1) > INT32_MAX / 2) {
    return Refuse("expected fewer tokens in one call, got " + std::to_string(dims[1]) + "; split them");
  }
  return ffi::Error::Success();
}

// What may be left out: an operand, in whose place is something else where an attribute says that there is none; or a
// result, which has no elements then.
struct Optional {
  const ffi::AnyBuffer& buffer;
  bool given;

  bool HasOrNone(int64_t elements) const { return !given || static_cast<int64_t>(buffer.element_count()) == elements; }
  template <typename T>
  T* OrNull() const {
    return given ? static_cast<T*>(buffer.untyped_data()) : nullptr;
  }
};

Optional OptionalResult(const ffi::AnyBuffer& buffer) { return {buffer, buffer.element_count() != 0}; }

int64_t BytesOfRow(const ffi::AnyBuffer& rows) {
  const auto dims = rows.dimensions();
  return dims.size() == 2 ? dims[1] * static_cast<int64_t>(ffi::ByteWidth(rows.element_type())) : -1;
}

ffi::Error GroupLayoutImpl(cudaStream_t stream, int64_t serial, int64_t fingerprint, int64_t tag, int64_t num_sms,
                           int64_t row_order, S32 index, S32Result slots, S32Result group_sizes, S32Result counts,
                           S32Result num_dropped, S32Result scratch, int64_t capacity, int64_t alignment) {
  const auto group = Open(serial, fingerprint, tag, num_sms, row_order);
  if (!group.has_value()) return group.error();
  const ffi::Error error = CheckSlots(*group, *slots);
  if (error.failure()) return error;
  // Slots have the shape of all ranks' indices.
  const auto args = DecodeLayout(*slots, slots, group_sizes, counts, num_dropped, capacity, alignment, row_order);
  if (!args.has_value()) return args.error();
  if (index.element_count() * group->rank.peers.layout.shape.ranks != slots->element_count() ||
      static_cast<int64_t>(scratch->element_count()) < LayoutScratchWords(args->shape.local_experts)) {
    return Refuse("expected an index [tokens, top_k] of this rank, slots of all ranks, and scratch");
  }
  return LaunchOn(Where::kCompute, *group, stream, slots->typed_data(), {}, [&](cudaStream_t on) {
    return LaunchGroupLayout(
        group->rank.peers, group->call,
        {args->order, args->shape, index.typed_data(), slots->typed_data(), group_sizes->typed_data(),
         counts->typed_data(), num_dropped->typed_data(), scratch->typed_data()},
        on);
  });
}

template <Where kWhere>
ffi::Error DispatchImpl(cudaStream_t stream, int64_t serial, int64_t fingerprint, int64_t tag, int64_t num_sms,
                        int64_t row_order, ffi::AnyBuffer x, ffi::AnyBuffer scales, ffi::AnyBuffer weights, S32 slots,
                        S32 group_sizes, S32 counts, ffi::AnyBuffer y, ffi::AnyBuffer y_weights, AnyResult rows,
                        AnyResult row_scales, AnyResult row_weights, AnyResult dots, int64_t x_element,
                        int64_t wire_element, int64_t row_element, int64_t scale_format, bool has_scales,
                        bool has_weights, bool has_y) {
  const auto group = Open(serial, fingerprint, tag, num_sms, row_order);
  if (!group.has_value()) return group.error();
  const ffi::Error error = CheckSlots(*group, slots);
  if (error.failure()) return error;
  const BufferLayout& layout = group->rank.peers.layout;
  DispatchArgs args;
  args.order = group->order;
  args.tokens = static_cast<int32_t>(slots.dimensions()[1]);
  args.top_k = static_cast<int32_t>(slots.dimensions()[2]);
  args.local_experts = static_cast<int32_t>(counts.element_count());
  args.capacity = rows->dimensions().size() != 2 ? 0 : static_cast<int32_t>(rows->dimensions()[0]);
  args.hidden = x.dimensions().size() == 2 ? static_cast<int32_t>(x.dimensions()[1]) : 0;
  args.from = static_cast<Element>(x_element);
  args.wire = static_cast<Element>(wire_element);
  args.to = static_cast<Element>(row_element);
  args.scale_format = static_cast<ScaleFormat>(scale_format);
  const int64_t hidden = args.hidden;
  if (BytesOfRow(x) != hidden * BytesOf(args.from) || BytesOfRow(*rows) != hidden * BytesOf(args.to) || hidden == 0) {
    return Refuse("expected x [tokens, hidden] and rows [capacity, hidden] of the elements that the attributes name");
  }
  for (const Element element : {args.from, args.wire, args.to}) {
    if (hidden * BytesOf(element) % 16 != 0 || hidden * BytesOf(element) > layout.row_bytes()) {
      return Refuse("expected rows of a multiple of 16 bytes, within the group's");
    }
  }
  // Scales come with FP8 tokens whose rows need them, and go with FP8 rows.
  const Optional given_scales{scales, has_scales};
  const Optional given_weights{weights, has_weights};
  const Optional kept_scales = OptionalResult(*row_scales);
  const Optional kept_weights = OptionalResult(*row_weights);
  const bool quantized = args.from == Element::kFloat8 && (kept_scales.given || args.to != Element::kFloat8);
  if (has_scales != quantized ||
      (kept_scales.given && (args.wire != Element::kFloat8 || args.to != Element::kFloat8))) {
    return Refuse("expected scales of FP8 tokens that are dequantised or keep them, and of no others");
  }
  const int64_t blocks = ScaleBlocks(args.hidden);
  const int64_t picks = int64_t{args.tokens} * args.top_k;
  const int64_t words = int64_t{args.capacity} * (args.order == RowOrder::kRank ? args.top_k : 1);
  if (x.dimensions()[0] != args.tokens || hidden > layout.shape.hidden ||
      group_sizes.element_count() != counts.element_count() || !given_scales.HasOrNone(args.tokens * blocks) ||
      !given_weights.HasOrNone(picks) || !kept_scales.HasOrNone(args.capacity * blocks) ||
      !kept_weights.HasOrNone(words) || has_weights != kept_weights.given) {
    return Refuse("expected scales, weights and counts of the tokens' and rows' sizes");
  }
  args.x = x.untyped_data();
  args.scales = given_scales.OrNull<float>();
  args.weights = given_weights.OrNull<uint32_t>();
  args.slots = slots.typed_data();
  args.group_sizes = group_sizes.typed_data();
  args.counts = counts.typed_data();
  args.rows = rows->untyped_data();
  args.row_scales = kept_scales.OrNull<float>();
  args.row_weights = kept_weights.OrNull<uint32_t>();
  args.y = Optional{y, has_y}.OrNull<void>();
  args.y_weights = Optional{y_weights, has_y}.OrNull<float>();
  args.dots = OptionalResult(*dots).OrNull<float>();
  if (args.y != nullptr &&
      (y.size_bytes() != rows->size_bytes() || static_cast<int64_t>(y_weights.element_count()) != args.capacity ||
       static_cast<int64_t>(dots->element_count()) != args.capacity * int64_t{DispatchPieces(BytesOfRow(*rows))})) {
    return Refuse("expected y of the rows' size, a weight a row, and dots");
  }
  // What is quantised on the way has to be staged: then the driver need not be asked.
  args.lends = args.from == args.wire && PeersCanRead(group->rank, {args.x, args.scales, args.weights});
  const int device_sms = group->rank.device_sms;
  const int per_copy = OnlyCopies(args) ? kBulkDispatchSmsPerCopy : kDispatchSmsPerCopy;
  Grid grid = group->GridOf(kWhere == Where::kSide ? GridBeside(args.tokens, args.capacity, per_copy, device_sms)
                                                   : Grid{DispatchSms(args, device_sms)});
  grid.in_bulk = grid.num_sms <= kFewSms;
  return LaunchOn(
      kWhere, *group, stream, args.rows,
      {args.x, args.scales, args.weights, args.slots, args.group_sizes, args.counts, args.y, args.y_weights},
      [&](cudaStream_t on) { return LaunchDispatch(group->rank.peers, group->call, args, grid, on); });
}

template <Where kWhere>
ffi::Error CombineImpl(cudaStream_t stream, int64_t serial, int64_t fingerprint, int64_t tag, int64_t num_sms,
                       int64_t row_order, ffi::AnyBuffer rows, ffi::AnyBuffer row_weights, ffi::AnyBuffer row_words,
                       S32 slots, AnyResult out, AnyResult pick_words, bool has_weights, bool has_words) {
  const auto group = Open(serial, fingerprint, tag, num_sms, row_order);
  if (!group.has_value()) return group.error();
  const ffi::Error error = CheckSlots(*group, slots);
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
  if (row_bytes % 16 != 0 || row_bytes > group->rank.peers.layout.row_bytes() || BytesOfRow(*out) != row_bytes) {
    return Refuse("expected tokens of the rows' size, a multiple of 16 bytes within the group's");
  }
  args.order = group->order;
  args.tokens = static_cast<int32_t>(slots.dimensions()[1]);
  args.top_k = static_cast<int32_t>(slots.dimensions()[2]);
  args.hidden = static_cast<int32_t>(rows.dimensions()[1]);
  const int64_t capacity = rows.dimensions()[0];
  const int64_t words = capacity * (args.order == RowOrder::kRank ? args.top_k : 1);
  const Optional given_weights{row_weights, has_weights};
  const Optional given_words{row_words, has_words};
  if (out->dimensions()[0] != args.tokens || !given_weights.HasOrNone(capacity) || !given_words.HasOrNone(words) ||
      static_cast<int64_t>(pick_words->element_count()) != int64_t{args.tokens} * args.top_k) {
    return Refuse("expected weights and words of the rows' and tokens' sizes");
  }
  args.rows = rows.untyped_data();
  args.row_weights = given_weights.OrNull<float>();
  args.row_words = given_words.OrNull<uint32_t>();
  args.slots = slots.typed_data();
  args.out = out->untyped_data();
  args.pick_words = static_cast<uint32_t*>(pick_words->untyped_data());
  const int device_sms = group->rank.device_sms;
  const Grid grid =
      group->GridOf(kWhere == Where::kSide ? GridBeside(args.tokens, capacity, kCombineSmsPerCopy, device_sms)
                                           : Grid{CombineSms(device_sms)});
  args.together = CombineTogether(args.tokens, row_bytes, grid.num_sms);
  return LaunchOn(kWhere, *group, stream, args.out, {args.rows, args.row_weights, args.row_words, args.slots},
                  [&](cudaStream_t on) { return LaunchCombine(group->rank.peers, group->call, args, grid, on); });
}

// Of what a start writes, the first `results` operands, which are the results, too; the others were its operands and
// are given so that XLA leaves them alone until now.
ffi::Error DoneImpl(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t serial,
                    int64_t fingerprint) {
  const auto group = Open(serial, fingerprint, 0, 0, 0);
  if (!group.has_value()) return group.error();
  auto result = results.get<ffi::AnyBuffer>(0);
  if (!result.has_value()) return Refuse("expected what a start writes");
  if (group->rank.side == nullptr) return Refuse("expected a start before done");
  SideStream::Addresses held;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto operand = operands.get<ffi::AnyBuffer>(i);
    if (operand.has_value()) held.push_back(operand->untyped_data());
  }
  const std::string problem = group->rank.side->Done(stream, (*result)->untyped_data(), held);
  return problem.empty() ? ffi::Error::Success() : Refuse(problem);
}

// What every handler takes first.
auto GroupBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Attr<int64_t>("serial")
      .Attr<int64_t>("fingerprint")
      .Attr<int64_t>("tag")
      .Attr<int64_t>("num_sms")
      .Attr<int64_t>("row_order");
}

auto DispatchBinding() {
  return GroupBinding()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<S32>()
      .Arg<S32>()
      .Arg<S32>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attr<int64_t>("x_element")
      .Attr<int64_t>("wire_element")
      .Attr<int64_t>("row_element")
      .Attr<int64_t>("scale_format")
      .Attr<bool>("has_scales")
      .Attr<bool>("has_weights")
      .Attr<bool>("has_y");
}

auto CombineBinding() {
  return GroupBinding()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<S32>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attr<bool>("has_weights")
      .Attr<bool>("has_words");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpGroupLayoutCuda, GroupLayoutImpl,
                              GroupBinding()
                                  .Arg<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Attr<int64_t>("capacity")
                                  .Attr<int64_t>("alignment"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpDispatchCuda, DispatchImpl<Where::kCompute>, DispatchBinding(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpCombineCuda, CombineImpl<Where::kCompute>, CombineBinding(),
                              {ffi::Traits::kCmdBufferCompatible});

// Not into CUDA graphs: a graph that ends between a start and its done would have to wait for what was started.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpDispatchStartCuda, DispatchImpl<Where::kSide>, DispatchBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpCombineStartCuda, CombineImpl<Where::kSide>, CombineBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxEpDoneCuda, DoneImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("serial")
                                  .Attr<int64_t>("fingerprint"));

}  // namespace jax_ep
