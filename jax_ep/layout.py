"""Layout: from the top-k indices of all ranks to the place of every row. Decided by counting, never by arrival."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.config import RowOrder

_ARRAYS = ("slots", "group_sizes", "counts", "num_dropped", "num_invalid")
HANDLE_ARRAYS = len(_ARRAYS)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=_ARRAYS,
    meta_fields=("group", "row_order", "alignment", "capacity"),
)
@dataclasses.dataclass(frozen=True)
class Handle:
    """Where every row of a call lives: what `dispatch` and `combine` share.

    A pytree of int32 arrays without any pointer, so it may be moved, saved, recomputed under remat and reused. R ranks,
    T tokens a rank, K top-k, E_l local experts.

    Attributes:
      slots: [R, T, K], the row on this rank of source rank r's token t for its k-th pick, or -1.
      group_sizes: [E_l], rows of each local expert, padding included: what `jax.lax.ragged_dot` takes.
      counts: [E_l], rows of each local expert that hold a token.
      num_dropped: [1], rows that this rank refused for want of capacity.
      num_invalid: [1], entries of this rank's own top-k index that were neither an expert nor -1.
      group: the `Group` it was made for (static).
      row_order: "expert" or "rank" (static).
      alignment: rows of an expert are padded to a multiple of this (static).
      capacity: rows C of this rank (static).
    """

    slots: jax.Array
    group_sizes: jax.Array
    counts: jax.Array
    num_dropped: jax.Array
    num_invalid: jax.Array
    group: Any
    row_order: RowOrder
    alignment: int
    capacity: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(R, T, K)."""
        r, t, k = self.slots.shape
        return r, t, k


def sanitize(index: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Top-k indices as int32 with -1 for none, and how many entries were invalid.

    The comparison is made in the index's own integer type: a cast could turn 2**32 into expert 0.

    Args:
      index: [T, K] of any integer dtype.
      num_experts: E.

    Returns:
      ([T, K] int32 in [-1, E), [1] int32).
    """
    info = jnp.iinfo(index.dtype)
    signed = info.min < 0
    valid = index >= 0 if signed else jnp.ones(index.shape, bool)
    if info.max >= num_experts:  # else every value of the type is below num_experts
        valid &= index < jnp.asarray(num_experts, index.dtype)
    none = index == jnp.asarray(-1, index.dtype) if signed else jnp.zeros(index.shape, bool)
    invalid = jnp.sum(~(valid | none), dtype=jnp.int32).reshape(1)
    return jnp.where(valid, index, 0).astype(jnp.int32) - (~valid).astype(jnp.int32), invalid


Placed = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def place_rows(
    index: jax.Array,
    first_expert: jax.Array | int,
    *,
    num_local_experts: int,
    capacity: int,
    alignment: int,
    row_order: RowOrder,
) -> Placed:
    """Slots of the rows of one rank.

    Args:
      index: [R, T, K] int32, sanitised top-k indices of all ranks.
      first_expert: this rank's lowest expert.
      num_local_experts: E_l.
      capacity: C, rows of this rank.
      alignment: A; C is a multiple of it in expert order.
      row_order: "expert" or "rank".

    Returns:
      slots [R, T, K], group_sizes [E_l], counts [E_l], num_dropped [1], all int32.
    """
    local = index - first_expert
    local = jnp.where((local >= 0) & (local < num_local_experts), local, num_local_experts)
    if row_order == "rank":
        return _place_by_rank(local, num_local_experts, capacity)
    return _place_by_expert(local, num_local_experts, capacity, alignment)


def _place_by_expert(local: jax.Array, experts: int, capacity: int, alignment: int) -> Placed:
    key = local.reshape(-1)
    wanted = _histogram(key, experts)
    # A stable sort by expert leaves (source rank, token, k) in order within each of them.
    position = jax.lax.iota(jnp.int32, key.size)
    key, origin = jax.lax.sort((key, position), num_keys=1, is_stable=True)
    blocks = accept_blocks(-(-wanted // alignment), capacity // alignment)
    group_sizes = blocks * alignment
    counts = jnp.minimum(wanted, group_sizes)
    first_row = jnp.cumsum(group_sizes) - group_sizes
    # The key of picks that live elsewhere is `experts`: a last entry that keeps none of them.
    starts, counts_here, first_here = (
        jnp.append(each, last)[key] for each, last in ((jnp.cumsum(wanted) - wanted, 0), (counts, 0), (first_row, 0))
    )
    nth = position - starts
    slot = jnp.where(nth < counts_here, first_here + nth, -1)
    slots = jnp.zeros_like(slot).at[origin].set(slot, unique_indices=True)
    dropped = jnp.sum(wanted - counts, dtype=jnp.int32).reshape(1)
    return slots.reshape(local.shape), group_sizes, counts, dropped


def accept_blocks(wanted: jax.Array, budget: int) -> jax.Array:
    """How many of its wanted blocks each expert gets, so that together they are within the budget.

    L is the greatest level with sum(min(wanted, L)) ≤ budget; what is then left goes singly to the lowest-numbered
    experts that want more.

    Args:
      wanted: [E_l] int32.
      budget: most blocks in all.

    Returns:
      [E_l] int32.

    Example: wanted [5, 1, 4] with a budget of 8 gives L = 3 ([3, 1, 3] is 7) and the block left over to expert 0:
    [4, 1, 3].
    """
    # L has no more bits than the budget: with L = budget some expert already fills it, or none wants more.
    level = jnp.zeros((), jnp.int32)
    for bit in reversed(range(budget.bit_length())):
        higher = level + (1 << bit)
        level = jnp.where(jnp.sum(jnp.minimum(wanted, higher)) <= budget, higher, level)
    given = jnp.minimum(wanted, level)
    hungry = wanted > level
    left = budget - jnp.sum(given)
    return given + (hungry & (jnp.cumsum(hungry) <= left)).astype(jnp.int32)


def _place_by_rank(local: jax.Array, experts: int, capacity: int) -> Placed:
    is_local = local < experts
    wants = jnp.any(is_local, axis=-1).reshape(-1)
    row = jnp.cumsum(wants, dtype=jnp.int32) - 1
    row = jnp.where(wants & (row < capacity), row, -1).reshape(local.shape[:-1])
    slots = jnp.where(is_local, row[..., None], -1)
    counts = _histogram(jnp.where(slots >= 0, local, experts).reshape(-1), experts)
    dropped = jnp.maximum(jnp.sum(wants, dtype=jnp.int32) - capacity, 0).reshape(1)
    return slots, counts, counts, dropped


def _histogram(key: jax.Array, experts: int) -> jax.Array:
    """How often each of 0 to experts - 1 occurs, [experts] int32; the key `experts` stands for none."""
    return jnp.zeros(experts + 1, jnp.int32).at[key].add(1)[:experts]
