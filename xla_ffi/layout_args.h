// What the layout handlers of every platform take, and its check.
//   operands:   index s32[R, T, K] (sanitised, -1 for none), first_expert s32[] (the rank's lowest)
//   results:    slots s32[R, T, K], group_sizes s32[E_l], counts s32[E_l], num_dropped s32[1]
//   attributes: capacity i64, alignment i64, row_order i64 (0 expert, 1 rank)
#pragma once

#include <cstdint>
#include <limits>

#include "cuda/layout_rule.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

using S32 = xla::ffi::Buffer<xla::ffi::S32>;
using S32Result = xla::ffi::Result<S32>;

struct LayoutArgs {
  RowOrder order;
  LayoutShape shape;
};

inline xla::ffi::ErrorOr<LayoutArgs> DecodeLayout(S32 index, S32Result slots, S32Result group_sizes, S32Result counts,
                                                  S32Result num_dropped, int64_t capacity, int64_t alignment,
                                                  int64_t row_order) {
  auto refuse = [](const char* what) {
    return xla::ffi::Unexpected(xla::ffi::Error::InvalidArgument(
        std::string("jax_ep layout: ") + what + "; jax_ep's Python and its compiled module may be of two versions"));
  };
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const auto dims = index.dimensions();
  if (dims.size() != 3) return refuse("expected index [ranks, tokens, top_k]");
  if (slots->element_count() != index.element_count()) return refuse("expected slots of the index's shape");
  if (counts->element_count() != group_sizes->element_count()) return refuse("expected as many counts as group sizes");
  if (num_dropped->element_count() != 1) return refuse("expected num_dropped [1]");
  if (static_cast<int64_t>(index.element_count()) > kMax || capacity < 0 || capacity > kMax) {
    return refuse("expected fewer than 2^31 picks and rows");
  }
  if (alignment < 1 || alignment > kMax) return refuse("expected an alignment of at least 1");
  if (row_order != 0 && row_order != 1) return refuse("expected row_order 0 or 1");
  LayoutArgs args;
  args.order = static_cast<RowOrder>(row_order);
  args.shape.ranks = static_cast<int32_t>(dims[0]);
  args.shape.tokens = static_cast<int32_t>(dims[1]);
  args.shape.top_k = static_cast<int32_t>(dims[2]);
  args.shape.local_experts = static_cast<int32_t>(group_sizes->element_count());
  args.shape.capacity = static_cast<int32_t>(capacity);
  args.shape.alignment = static_cast<int32_t>(alignment);
  return args;
}

}  // namespace jax_ep
