#include "xla_ffi/layout_cpu.h"

#include <algorithm>
#include <vector>

namespace jax_ep {
namespace {

// The local expert of a pick, or a value >= local_experts: none (-1) and other ranks' experts wrap around.
uint32_t LocalExpert(int32_t expert, int32_t first_expert) {
  return static_cast<uint32_t>(expert) - static_cast<uint32_t>(first_expert);
}

void PlaceByExpert(const LayoutShape& shape, const int32_t* index, int32_t first_expert, int32_t* slots,
                   int32_t* group_sizes, int32_t* counts, int32_t* num_dropped) {
  const int64_t picks = shape.picks();
  const uint32_t experts = static_cast<uint32_t>(shape.local_experts);
  std::vector<int32_t> wanted(experts, 0);
  for (int64_t i = 0; i < picks; ++i) {
    const uint32_t local = LocalExpert(index[i], first_expert);
    if (local < experts) ++wanted[local];
  }

  const int32_t budget = shape.capacity / shape.alignment;
  auto blocks_wanted = [&](uint32_t e) { return BlocksOf(wanted[e], shape.alignment); };
  auto total = [&](int32_t level) {
    int64_t sum = 0;
    for (uint32_t e = 0; e < experts; ++e) sum += Min(blocks_wanted(e), level);
    return sum;
  };
  const int32_t level = Level(budget, total);
  int32_t left = budget - static_cast<int32_t>(total(level));
  int32_t dropped = 0;
  int32_t first_row = 0;
  std::vector<int32_t> next(experts);  // the slot of an expert's next row, and where its rows end
  std::vector<int32_t> end(experts);
  for (uint32_t e = 0; e < experts; ++e) {
    int32_t blocks = Min(blocks_wanted(e), level);
    if (blocks_wanted(e) > level && left > 0) {
      ++blocks;
      --left;
    }
    group_sizes[e] = blocks * shape.alignment;
    counts[e] = Min(wanted[e], group_sizes[e]);
    dropped += wanted[e] - counts[e];
    next[e] = first_row;
    end[e] = first_row + counts[e];
    first_row += group_sizes[e];
  }
  *num_dropped = dropped;

  for (int64_t i = 0; i < picks; ++i) {
    const uint32_t local = LocalExpert(index[i], first_expert);
    slots[i] = local < experts && next[local] < end[local] ? next[local]++ : -1;
  }
}

void PlaceByRank(const LayoutShape& shape, const int32_t* index, int32_t first_expert, int32_t* slots,
                 int32_t* group_sizes, int32_t* counts, int32_t* num_dropped) {
  const uint32_t experts = static_cast<uint32_t>(shape.local_experts);
  std::fill_n(counts, experts, 0);
  int32_t row = 0;
  int32_t dropped = 0;
  for (int64_t pair = 0; pair < shape.pairs(); ++pair) {
    const int32_t* picks = index + pair * shape.top_k;
    auto is_local = [&](int32_t expert) { return LocalExpert(expert, first_expert) < experts; };
    const bool wants = std::any_of(picks, picks + shape.top_k, is_local);
    const bool keep = wants && row < shape.capacity;
    for (int32_t k = 0; k < shape.top_k; ++k) {
      const bool here = keep && is_local(picks[k]);
      slots[pair * shape.top_k + k] = here ? row : -1;
      if (here) ++counts[LocalExpert(picks[k], first_expert)];
    }
    row += keep;
    dropped += wants && !keep;
  }
  std::copy_n(counts, experts, group_sizes);
  *num_dropped = dropped;
}

}  // namespace

void PlaceRows(RowOrder order, const LayoutShape& shape, const int32_t* index, int32_t first_expert, int32_t* slots,
               int32_t* group_sizes, int32_t* counts, int32_t* num_dropped) {
  auto place = order == RowOrder::kRank ? PlaceByRank : PlaceByExpert;
  place(shape, index, first_expert, slots, group_sizes, counts, num_dropped);
}

}  // namespace jax_ep
