"""The meaning of layout, dispatch and combine in pure JAX: what every kernel equals bit for bit.

Runs wherever `jax.lax` collectives do, inside shard_map. Nothing here is differentiated: `primitives.py` gives these
functions their derivatives. docs/semantics.md says the same in words.

Peak memory of dispatch, beyond its operands and results: one buffer of R·T·H elements (the tokens of every rank). Of
combine: two such buffers (partial sums sent and received). Besides these only arrays of T·H elements and of a few words
a pick. tests/test_reference_memory.py holds both to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.config import RowOrder
from jax_ep.layout import Handle, Placed, place_rows, sanitize
from jax_ep.quantize import round_to


def layout(
    index: jax.Array,
    *,
    group: Any,
    row_order: RowOrder,
    alignment: int,
    capacity: int,
    place_rows: Callable[..., Placed] = place_rows,
) -> Handle:
    """The handle of one call.

    Args:
      index: [T, K], any integer dtype, this rank's top-k index.
      group, row_order, alignment, capacity: as `Handle` keeps them.
      place_rows: what decides the slots; the default is the meaning, others equal it bit for bit.
    """
    index, invalid = sanitize(index, group.num_experts)
    slots, group_sizes, counts, dropped = place_rows(
        jax.lax.all_gather(index, group.axis),
        jax.lax.axis_index(group.axis) * group.num_local_experts,
        num_local_experts=group.num_local_experts,
        capacity=capacity,
        alignment=alignment,
        row_order=row_order,
    )
    return Handle(slots, group_sizes, counts, dropped, invalid, group, row_order, alignment, capacity)


def local_index(index: jax.Array, handle: Handle) -> jax.Array:
    """Local experts of rank-order rows, [C, K] int32, -1 for none."""
    group = handle.group
    index, _ = sanitize(index, group.num_experts)
    everyone = jax.lax.all_gather(index, group.axis)
    local = everyone - jax.lax.axis_index(group.axis) * group.num_local_experts
    pairs = _pair_of_row(handle)
    rows = _take(jnp.where(handle.slots >= 0, local, -1).reshape(-1, handle.shape[2]), pairs)
    return jnp.where((pairs >= 0)[:, None], rows, -1)


def dispatch(handle: Handle, x: jax.Array) -> jax.Array:
    """Every token's vector copied to its rows; +0 in rows that hold no token.

    Args:
      handle: from `layout`.
      x: [T, ...] of any dtype.

    Returns:
      [C, ...].
    """
    everyone = jax.lax.all_gather(_bits(x), handle.group.axis)
    rows = _take(everyone.reshape(-1, *x.shape[1:]), _pair_of_row(handle))
    return jax.lax.bitcast_convert_type(rows, x.dtype)


def dispatch_weights(handle: Handle, weights: jax.Array) -> jax.Array:
    """Every pick's weight at its row: [T, K] to [C], in rank order to [C, K]; +0 where there is none."""
    everyone = jax.lax.all_gather(weights, handle.group.axis)
    everyone = jnp.where(handle.slots >= 0, everyone, 0)
    if handle.row_order == "rank":
        return _take(everyone.reshape(-1, handle.shape[2]), _pair_of_row(handle))
    return _take(everyone.reshape(-1), _pick_of_row(handle))


def combine(handle: Handle, y: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """The sum of each token's rows, back at its rank.

    Rows of one rank are added in fp32 with k ascending, rounded once; ranks are added in fp32, ascending, and rounded.

    Args:
      handle: from `layout`.
      y: [C, H] float.
      weights: [C] float32 to multiply the rows by, or None.

    Returns:
      [T, H] of y's dtype.
    """
    ranks, tokens, _ = handle.shape
    partial = _bits(_partial_sums(handle, y, weights))
    arrived = jax.lax.all_to_all(partial, handle.group.axis, 0, 0, tiled=True)
    arrived = jax.lax.bitcast_convert_type(arrived, y.dtype)
    total = jnp.zeros((tokens, y.shape[1]), jnp.float32)
    for rank in range(ranks):
        total = total + arrived[rank].astype(jnp.float32)
    return cast(total, y.dtype)


def combine_weights(handle: Handle, weights: jax.Array) -> jax.Array:
    """Transpose of `dispatch_weights`: [C] or [C, K] to [T, K]; exactly +0 for picks without a row."""
    slots = handle.slots
    if handle.row_order == "rank":
        picked = _take(weights, slots.max(-1).reshape(-1)).reshape(slots.shape)
        picked = jnp.where(slots >= 0, picked, 0)
    else:
        picked = _take(weights, slots.reshape(-1)).reshape(slots.shape)
    arrived = jax.lax.all_to_all(picked, handle.group.axis, 0, 0, tiled=True)
    # A pick lives on one rank at the most: the others add +0.
    return arrived.sum(axis=0, dtype=weights.dtype)


def _partial_sums(handle: Handle, y: jax.Array, weights: jax.Array | None) -> jax.Array:
    """What this rank's rows add to each token of each rank, [R, T, H], rounded to y's dtype."""
    if y.shape[0] == 0:  # XLA's Shardy can crash on arrays without elements in a loop (jaxlib 0.11)
        nothing = jnp.zeros((*handle.slots.shape[:2], *y.shape[1:]), y.dtype)
        return _varying_like(nothing, (handle.slots, y, weights))

    def of_rank(slots: jax.Array) -> jax.Array:
        """The sums for one source rank's tokens, by their slots [T, K]: so the fp32 sums take only T·H."""
        has_row = slots >= 0
        nth_row = jnp.cumsum(has_row, axis=-1) - 1

        def add(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            n, total = state
            slot = jnp.max(jnp.where(has_row & (nth_row == n), slots, -1), axis=-1)
            term = _take(y, slot).astype(jnp.float32)
            if weights is not None:
                term = term * _take(weights, slot)[:, None]
                # Keeps XLA from fusing this multiply with the add below into one rounding; the value stays as it was.
                term = jnp.where(term == term, term, jnp.nan)
            return n + 1, total + term

        # Most tokens have few rows on one rank: go round as often as the busiest of them needs, not top_k times.
        rounds = jnp.max(jnp.sum(has_row, axis=-1), initial=0)
        start = jnp.zeros((), rounds.dtype), jnp.zeros((slots.shape[0], y.shape[1]), jnp.float32)
        start = jax.tree.map(lambda zero: _varying_like(zero, (slots, y, weights)), start)
        _, total = jax.lax.while_loop(lambda state: state[0] < rounds, add, start)
        return cast(total, y.dtype)

    # A rank-order row stands for all its picks at once.
    slots = handle.slots.max(-1, keepdims=True) if handle.row_order == "rank" else handle.slots
    return jax.lax.map(of_rank, slots)


def _pick_of_row(handle: Handle) -> jax.Array:
    """Flat (rank, token, k) of each expert-order row, [C] int32, -1 for rows without a token."""
    return _invert(handle.slots.reshape(-1), handle.capacity)


def _pair_of_row(handle: Handle) -> jax.Array:
    """Flat (rank, token) of each row, [C] int32, -1 for rows without a token."""
    if handle.row_order == "rank":
        return _invert(handle.slots.max(-1).reshape(-1), handle.capacity)
    pick = _pick_of_row(handle)
    return jnp.where(pick >= 0, pick // handle.shape[2], -1)


def _invert(slots: jax.Array, capacity: int) -> jax.Array:
    target = jnp.where(slots >= 0, slots, capacity)  # one past the end: dropped
    empty = jnp.full(capacity, -1, jnp.int32)
    return empty.at[target].set(jax.lax.iota(jnp.int32, slots.size), mode="drop", unique_indices=False)


def _take(values: jax.Array, where: jax.Array) -> jax.Array:
    """`values[where]` along the first axis, +0 where `where` is -1 (selected, so that NaN cannot leak)."""
    if values.shape[0] == 0:
        return _varying_like(jnp.zeros(where.shape + values.shape[1:], values.dtype), (values, where))
    picked = jnp.take(values, jnp.maximum(where, 0), axis=0, mode="clip")
    return jnp.where((where >= 0).reshape(where.shape + (1,) * (values.ndim - 1)), picked, jnp.zeros((), values.dtype))


def _bits(x: jax.Array) -> jax.Array:
    """`x` as unsigned integers. Rows move as what they are: XLA:CPU would widen bf16, some collectives refuse FP8."""
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def cast(total: jax.Array, dtype: Any) -> jax.Array:
    """float32 sums rounded once to `dtype`; the rounding stays where XLA would drop a cast that is widened again."""
    return total if dtype == jnp.float32 else round_to(dtype, total).astype(dtype)


def _varying_like(value: jax.Array, like: object) -> jax.Array:
    """`value` typed as varying over every mesh axis that `like` varies over, as a loop's carry must be."""
    names: set[str] = set()
    for leaf in jax.tree.leaves(like):
        names |= jax.typeof(leaf).manual_axis_type.varying
    return jax.lax.pcast(value, tuple(sorted(names)), to="varying") if names else value


def row_has_token(handle: Handle) -> jax.Array:
    """Which rows hold a token, [C] bool."""
    return _pair_of_row(handle) >= 0
