// Layout on the host: one pass that counts, one that places. No XLA type, no thread of its own.
#pragma once

#include <cstdint>

#include "cuda/layout_rule.h"

namespace jax_ep {

// Slots of the rows of the rank that owns experts first_expert to first_expert + local_experts - 1.
//   index:       [ranks, tokens, top_k] sanitised, -1 for none
//   slots:       [ranks, tokens, top_k]
//   group_sizes: [local_experts]
//   counts:      [local_experts]
//   num_dropped: [1]
void PlaceRows(RowOrder order, const LayoutShape& shape, const int32_t* index, int32_t first_expert, int32_t* slots,
               int32_t* group_sizes, int32_t* counts, int32_t* num_dropped);

}  // namespace jax_ep
