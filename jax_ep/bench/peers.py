"""What XLA offers instead: exchanges made of its collectives, inside shard_map over the axis of a workload.

A whole form gives what jax_ep gives, in the same layout: dispatch takes tokens [T, H], index and weights [T, K] to rows
[C, H] and their weights [C] in expert order, layout included; combine takes rows, their weights, index and handle to
tokens. They are for calls that drop nothing: a sender does not learn of drops.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep.bench.record import Result
from jax_ep.bench.timing import time_in_a_row
from jax_ep.bench.workload import AXIS, Workload
from jax_ep.layout import Handle
from jax_ep.reference import cast

ROUNDING = 2.0**-8
"""Combined tokens may differ by this, over the largest value, for each rank and two more: sums over ranks round."""


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to exchange: which operation, its name in a record, what a reader must know, and the function."""

    op: str
    implementation: str
    note: str
    function: Callable[..., Any]


# Where rows and tokens are --------------------------------------------------------------------------------------------


def _pick_of_row(handle: Handle) -> jax.Array:
    """Flat (source rank, token, k) of each row [C], past the last one for rows without a token."""
    slots = handle.slots.reshape(-1)
    none = jnp.full(handle.capacity, slots.size, jnp.int32)
    return none.at[jnp.where(slots < 0, handle.capacity, slots)].set(jnp.arange(slots.size), mode="drop")


def _packed_position(pair: jax.Array, handle: Handle) -> tuple[jax.Array, jax.Array]:
    """Where in [R · T] the tokens (source rank, token) of `pair` are, if each rank packs those that have rows here.

    Returns:
      that, past the end for a pair past the end, and how many tokens of each source rank have rows here, [R].
    """
    tokens = handle.shape[1]
    taken = (handle.slots >= 0).any(-1)
    number = jnp.cumsum(taken, axis=1) - 1
    return pair // tokens * tokens + _take(number.reshape(-1), pair), taken.sum(1)


def _wanted(index: jax.Array, handle: Handle) -> tuple[jax.Array, jax.Array]:
    """Which tokens of this rank go to each rank, [R, T] bool, and each one's number among them."""
    owner = index // handle.group.num_local_experts
    wanted = (owner == jnp.arange(handle.group.num_ranks)[:, None, None]).any(-1)
    return wanted, jnp.cumsum(wanted, axis=1) - 1


def _take(values: jax.Array, where: jax.Array) -> jax.Array:
    """`values[where]`, 0 for what is past the end."""
    return values.at[where].get(mode="fill", fill_value=0)


# Exchanges of [R, T, H] -----------------------------------------------------------------------------------------------


def _padded(send: jax.Array, sent: jax.Array, received: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(send, AXIS, 0, 0)


def _ragged(send: jax.Array, sent: jax.Array, received: jax.Array) -> jax.Array:
    """The first `sent[r]` rows go to rank r, `received[r]` come from it; what is past them stays 0."""
    ranks, tokens, hidden = send.shape
    first = jnp.arange(ranks, dtype=jnp.int32) * tokens
    mine = jnp.full(ranks, jax.lax.axis_index(AXIS) * tokens, jnp.int32)
    empty = jax.lax.pcast(jnp.zeros((ranks * tokens, hidden), send.dtype), AXIS, to="varying")
    sizes = sent.astype(jnp.int32), mine, received.astype(jnp.int32)
    arrived = jax.lax.ragged_all_to_all(send.reshape(-1, hidden), empty, first, *sizes, axis_name=AXIS)
    return arrived.reshape(send.shape)


Exchange = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

# Whole operations -----------------------------------------------------------------------------------------------------


def _dispatch_gathered(
    x: jax.Array, index: jax.Array, weights: jax.Array, *, group: jax_ep.Group
) -> tuple[jax.Array, jax.Array]:
    handle = jax_ep.layout(index, group=group)
    pick = _pick_of_row(handle)
    everyone = jax.lax.all_gather(x, AXIS, tiled=True)
    return _take(everyone, pick // handle.shape[2]), _weights_of_rows(weights, pick)


def _dispatch_packed(
    x: jax.Array, index: jax.Array, weights: jax.Array, *, group: jax_ep.Group, exchange: Exchange
) -> tuple[jax.Array, jax.Array]:
    """Each rank packs the tokens for each rank, a token once, and the receiver brings them into expert order."""
    handle = jax_ep.layout(index, group=group)
    ranks, tokens, top_k = handle.shape
    wanted, number_there = _wanted(index, handle)
    place = jnp.where(wanted, number_there, tokens)  # one past the end: dropped
    token = jnp.broadcast_to(jnp.arange(tokens), (ranks, tokens))
    packed = jnp.full((ranks, tokens), tokens).at[jnp.arange(ranks)[:, None], place].set(token, mode="drop")
    pick = _pick_of_row(handle)
    at, taken = _packed_position(pick // top_k, handle)
    arrived = exchange(_take(x, packed), wanted.sum(1), taken).reshape(ranks * tokens, -1)
    return _take(arrived, at), _weights_of_rows(weights, pick)


def _weights_of_rows(weights: jax.Array, pick: jax.Array) -> jax.Array:
    return _take(jax.lax.all_gather(weights, AXIS, tiled=True).reshape(-1), pick)


def _combine_scattered(y: jax.Array, weights: jax.Array, index: jax.Array, handle: Handle) -> jax.Array:
    ranks, tokens, top_k = handle.shape
    sums = _sums(y, weights, _pick_of_row(handle) // top_k, ranks * tokens)
    return jax.lax.psum_scatter(sums, AXIS, scatter_dimension=0, tiled=True)


def _combine_padded(y: jax.Array, weights: jax.Array, index: jax.Array, handle: Handle) -> jax.Array:
    ranks, tokens, top_k = handle.shape
    sums = _sums(y, weights, _pick_of_row(handle) // top_k, ranks * tokens)
    arrived = jax.lax.all_to_all(sums.reshape(ranks, tokens, -1), AXIS, 0, 0)
    return cast(arrived.astype(jnp.float32).sum(0), y.dtype)


def _combine_packed(y: jax.Array, weights: jax.Array, index: jax.Array, handle: Handle) -> jax.Array:
    """The way of `_dispatch_packed` back, by a ragged exchange: only sums that some row added to travel."""
    ranks, tokens, top_k = handle.shape
    at, taken = _packed_position(_pick_of_row(handle) // top_k, handle)
    sums = _sums(y, weights, at, ranks * tokens).reshape(ranks, tokens, -1)
    wanted, number_there = _wanted(index, handle)
    arrived = _ragged(sums, taken, wanted.sum(1)).reshape(ranks * tokens, -1)
    where = jnp.where(wanted, jnp.arange(ranks)[:, None] * tokens + number_there, ranks * tokens)
    return cast(_take(arrived, where).astype(jnp.float32).sum(0), y.dtype)


def _sums(y: jax.Array, weights: jax.Array, at: jax.Array, length: int) -> jax.Array:
    """Weighted rows added up where they belong, [length, H] of y's dtype; those past the end are left out."""
    zeros = jnp.zeros((length, y.shape[1]), jnp.float32)
    return cast(zeros.at[at].add(y.astype(jnp.float32) * weights[:, None], mode="drop"), y.dtype)


_LAYOUT = "layout by a group of the reference included"
WHOLE = (
    Form("dispatch", "xla all_gather + select", f"whole, to the same rows; {_LAYOUT}", _dispatch_gathered),
    Form(
        "dispatch",
        "xla all_to_all + permute",
        f"whole, to the same rows; packed, padded to T rows for each rank; {_LAYOUT}",
        functools.partial(_dispatch_packed, exchange=_padded),
    ),
    Form("combine", "xla add + psum_scatter", "whole, weighted; of T rows for each rank", _combine_scattered),
    Form("combine", "xla add + all_to_all", "whole, weighted; padded to T rows for each rank", _combine_padded),
)
RAGGED = (
    Form(
        "dispatch",
        "xla ragged_all_to_all",
        f"whole, to the same rows; {_LAYOUT}; in a process of its own",
        functools.partial(_dispatch_packed, exchange=_ragged),
    ),
    Form("combine", "xla ragged_all_to_all", "whole, weighted; in a process of its own", _combine_packed),
)


def links(ranks: int) -> tuple[Form, ...]:
    """XLA's collectives alone, that move a whole token to every rank or bring as much back: what its links carry."""
    return (
        Form(
            "dispatch",
            "xla all_gather",
            "every token to every rank, rows not yet selected",
            lambda x: jax.lax.all_gather(x, AXIS, tiled=True),
        ),
        Form(
            "dispatch",
            "xla all_to_all",
            "padded to T rows for each rank, rows not yet permuted",
            lambda x: jax.lax.all_to_all(jnp.broadcast_to(x, (ranks, *x.shape)), AXIS, 0, 0),
        ),
        Form(
            "combine",
            "xla psum_scatter",
            "of T rows for each rank, rows not yet summed by token",
            lambda x: jax.lax.psum_scatter(
                jnp.broadcast_to(x, (ranks, *x.shape)), AXIS, scatter_dimension=0, tiled=True
            ),
        ),
    )


# Measured -------------------------------------------------------------------------------------------------------------


def measure_links(workload: Workload, runs: int) -> Iterator[Result]:
    """Times the collectives alone."""
    inputs = [(x,) for x in workload.tokens]
    for form in links(workload.ranks):
        yield _time(workload, form, form.function, inputs, runs, "rank")


def measure_whole(workload: Workload, forms: Sequence[Form], runs: int) -> Iterator[Result]:
    """Times whole operations, each after a look at whether it gives what jax_ep gives.

    Raises:
      AssertionError: it does not.
    """
    with workload.group("expert", "reference") as group:
        reference = workload.spread(functools.partial(jax_ep.dispatch, group=group))
        tokens: list[tuple] = [(x, workload.index, workload.weights) for x in workload.tokens]
        rows = [reference(*each) for each in tokens[: workload.turns(workload.rows["expert"])]]
        handle = rows[0].handle
        sums: list[tuple] = [(each.x, each.weights, workload.index, handle) for each in rows]
        combine = workload.spread(lambda y, weights, index, handle: jax_ep.combine(y, handle, weights=weights))
        wanted = {"dispatch": (rows[0].x, rows[0].weights), "combine": combine(*sums[0])}
        for form in forms:
            options, inputs = ({"group": group}, tokens) if form.op == "dispatch" else ({}, sums)
            function = functools.partial(form.function, **options)
            difference = _difference(workload.spread(function)(*inputs[0]), wanted[form.op])
            if not difference <= (0 if form.op == "dispatch" else ROUNDING * (workload.ranks + 2)):
                raise AssertionError(f"{form.implementation}, {form.op}: differs from jax_ep's by {difference:g}")
            yield _time(workload, form, function, inputs, runs, "expert")


def _time(
    workload: Workload, form: Form, function: Callable[..., Any], inputs: Sequence[tuple], runs: int, row_order: str
) -> Result:
    """Times a form's function on these inputs."""
    seconds, moved = time_in_a_row(workload.spread, function, inputs, runs=runs)
    return workload.result(
        seconds,
        op=form.op,
        implementation=form.implementation,
        row_order=row_order,
        link_bytes=workload.away * 2 * workload.sizes.hidden,
        link_moved=moved,
        note=form.note,
    )


@jax.jit
def _difference(got: Any, wanted: Any) -> jax.Array:
    """Of two trees of arrays: the greatest difference over the greatest value."""

    def of(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))

    return jnp.stack(jax.tree.leaves(jax.tree.map(of, got, wanted))).max()
