"""Dispatch and combine of many tokens, as training and prefill have them, beside what XLA offers instead."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import jax_ep
from jax_ep import bootstrap
from jax_ep.bench import peers, ragged
from jax_ep.bench.record import Result
from jax_ep.bench.timing import calls_in_a_row, time_enqueue, time_in_a_row
from jax_ep.bench.workload import Sizes, Workload
from jax_ep.config import ROW_ORDERS, RowOrder
from jax_ep.layout import Handle
from jax_ep.quantize import num_blocks

PHASES = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
      sizes, sms: every pair of them; 0 SMs leaves them to the group.
      implementation: as `create_group` takes it.
      phases, row_orders: of jax_ep's operations.
      with_peers: whether to measure what XLA offers, too: forward, once for each of the sizes.
      runs: times that each median is of.
      ragged_timeout_s: how long `ragged_all_to_all` may take for one of the sizes.
    """

    sizes: Sequence[Sizes]
    sms: Sequence[int] = (0,)
    implementation: str = "auto"
    phases: Sequence[str] = PHASES
    row_orders: Sequence[RowOrder] = ROW_ORDERS
    with_peers: bool = True
    runs: int = 15
    ragged_timeout_s: float = 120.0


def measure(plan: Plan) -> tuple[list[Result], float | None]:
    """All results, with their limits, and GB/s of the link each way at once, where that can be measured."""
    results: list[Result] = []
    apart: list[Result] = []
    with_peers = plan.with_peers and "forward" in plan.phases
    if with_peers:  # now, while this process has no arrays
        apart = ragged.measure(plan.sizes, runs=plan.runs, timeout_s=plan.ragged_timeout_s)
    for sizes in plan.sizes:
        workload = Workload(sizes, plan.runs * calls_in_a_row())
        for order in plan.row_orders:
            for sms in plan.sms:
                results += measure_operations(workload, order, plan, sms)
        if with_peers:
            results += peers.measure_whole(workload, peers.WHOLE, plan.runs)
            results += peers.measure_links(workload, plan.runs)
    rate = link_gigabytes_per_second()
    in_order = sorted(results + apart, key=lambda result: result.tokens)
    return [with_limit(result, rate) for result in in_order], rate


def link_gigabytes_per_second() -> float | None:
    """As `bootstrap.link_bandwidth` of all devices; where it fails, it says why and what was measured is not lost."""
    try:
        return bootstrap.link_bandwidth(jax.devices())
    except RuntimeError as error:
        print(f"link: not measured, {error}")
        return None


def with_limit(result: Result, rate: float | None) -> Result:
    """The result with the time that its bytes take at `rate` GB/s; without one where nothing crosses a link."""
    if rate is None or not result.link_bytes or result.ranks == 1:
        return result
    return dataclasses.replace(result, limit_us=round(result.link_bytes / (rate * 1e3), 4))


# The operations -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of jax_ep: what a rank does, on which operands, and what its record says."""

    op: str
    function: Callable[..., Any]
    inputs: list[tuple]
    note: str
    link_bytes: int
    dtype: str = "bfloat16"


def measure_operations(workload: Workload, row_order: RowOrder, plan: Plan, sms: int) -> Iterator[Result]:
    """Times jax_ep's operations in one row order; `sms` as in `Plan`."""
    operations = {"expert": _in_expert_order, "rank": _in_rank_order}[row_order]
    with workload.group(row_order, plan.implementation) as group:
        common = {"implementation": group.implementation, "row_order": row_order, "num_sms": sms or None}
        for operation in operations(workload, group, plan.phases, sms or None):
            seconds, moved = time_in_a_row(workload.spread, operation.function, operation.inputs, runs=plan.runs)
            what = {field: getattr(operation, field) for field in ("op", "note", "link_bytes", "dtype")}
            yield workload.result(seconds, link_moved=moved, **common, **what)
        if row_order == "expert" and "forward" in plan.phases:
            yield from _enqueue(workload, group, plan.runs, common)


def _in_expert_order(
    workload: Workload, group: jax_ep.Group, phases: Sequence[str], sms: int | None
) -> Iterator[Operation]:
    hidden, index, weights = workload.sizes.hidden, workload.index, workload.weights
    away = workload.away * 2 * hidden
    dispatch = functools.partial(jax_ep.dispatch, group=group, num_sms=sms)
    tokens = [(x, index, weights) for x in workload.tokens]
    if "forward" in phases:
        everyones = (workload.ranks - 1) * workload.sizes.tokens * workload.sizes.top_k * 4
        yield Operation(
            "layout", lambda index: jax_ep.layout(index, group=group).slots, [(index,)], "alone", everyones, "int32"
        )
        yield Operation("dispatch", _rows_of(dispatch), tokens, "layout included", away)
        away_fp8 = workload.away * (hidden + 4 * num_blocks(hidden))
        for dequantize, then in ((False, ""), (True, ", dequantised to bfloat16")):
            fp8 = functools.partial(dispatch, wire="fp8", dequantize=dequantize)
            note = f"quantisation and layout included{then}"
            yield Operation("dispatch", _rows_of(fp8), tokens, note, away_fp8, "float8_e4m3fn")

    arrive = workload.spread(dispatch)
    rows = [arrive(*each) for each in tokens[: workload.turns(workload.rows["expert"])]]
    inputs: list[tuple]
    handle = rows[0].handle
    if "forward" in phases:
        inputs = [(each.x, each.weights, handle) for each in rows]
        combine = functools.partial(weighted_combine, num_sms=sms)
        yield Operation("combine", combine, inputs, "weighted, of expert-order rows", away)
    if "backward" in phases:
        inputs = [(each.x, each.weights, x, weights, handle) for each, (x, *_) in zip(rows, tokens, strict=False)]
        note = "cotangents of rows and of their weights to those of tokens and routing weights"
        yield Operation("dispatch_backward", functools.partial(dispatch_backward, num_sms=sms), inputs, note, away)
        inputs = [(x, each.x, each.weights, handle) for each, (x, *_) in zip(rows, tokens, strict=False)]
        note = "of the weighted: cotangents of tokens to those of rows and of their weights"
        backward = functools.partial(weighted_combine_backward, num_sms=sms)
        yield Operation("combine_backward", backward, inputs, note, away)


def _in_rank_order(
    workload: Workload, group: jax_ep.Group, phases: Sequence[str], sms: int | None
) -> Iterator[Operation]:
    away = workload.away * 2 * workload.sizes.hidden
    handle = workload.spread(functools.partial(jax_ep.layout, group=group, row_order="rank"))(workload.index)

    def dispatch(x: jax.Array, handle: Handle) -> jax.Array:
        return jax_ep.dispatch(x, handle=handle, num_sms=sms).x

    def combine(y: jax.Array, handle: Handle) -> jax.Array:
        return jax_ep.combine(y, handle, num_sms=sms)

    def dispatch_back(rows: jax.Array, x: jax.Array, handle: Handle) -> Any:
        return jax.linear_transpose(lambda x: dispatch(x, handle), x)(rows)

    def combine_back(tokens: jax.Array, y: jax.Array, handle: Handle) -> Any:
        return jax.linear_transpose(lambda y: combine(y, handle), y)(tokens)

    tokens = [(x, handle) for x in workload.tokens]
    if "forward" in phases:
        yield Operation("dispatch", dispatch, tokens, "with a handle at hand, without weights", away)
    arrive = workload.spread(dispatch)
    rows = [arrive(*each) for each in tokens[: workload.turns(workload.rows["rank"])]]
    if "forward" in phases:
        yield Operation("combine", combine, [(y, handle) for y in rows], "plain, of rank-order rows", away)
    if "backward" in phases:
        inputs = [(y, x, handle) for y, (x, _) in zip(rows, tokens, strict=False)]
        yield Operation("dispatch_backward", dispatch_back, inputs, "cotangents of rows to those of tokens", away)
        inputs = [(x, y, handle) for y, (x, _) in zip(rows, tokens, strict=False)]
        note = "of the plain: cotangents of tokens to those of rows"
        yield Operation("combine_backward", combine_back, inputs, note, away)


def _rows_of(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """What a program computes with. A handle that it returned, too, would have to be copied for that."""

    def rows(*operands: jax.Array) -> Any:
        out = dispatch(*operands)
        return out.x, out.scales, out.weights, out.group_sizes

    return rows


def weighted_combine(y: jax.Array, weights: jax.Array, handle: Handle, *, num_sms: int | None = None) -> jax.Array:
    """`jax_ep.combine` of weighted rows."""
    return jax_ep.combine(y, handle, weights=weights, num_sms=num_sms)


def dispatch_backward(
    rows: jax.Array, row_weights: jax.Array, x: jax.Array, weights: jax.Array, handle: Handle, *, num_sms: int | None
) -> Any:
    """Cotangents of rows and of their weights to those of x and weights, which give shapes and nothing else."""

    def forward(x: jax.Array, weights: jax.Array) -> Any:
        rows = jax_ep.dispatch(x, weights=weights, handle=handle, num_sms=num_sms)
        return rows.x, rows.weights

    return jax.linear_transpose(forward, x, weights)((rows, row_weights))


def weighted_combine_backward(
    tokens: jax.Array, y: jax.Array, weights: jax.Array, handle: Handle, *, num_sms: int | None
) -> Any:
    """Cotangents of tokens to those of y and weights. jit leaves the forward combine out, as nothing uses it."""
    forward = functools.partial(weighted_combine, handle=handle, num_sms=num_sms)
    return jax.vjp(forward, y, weights)[1](tokens)


# The host -------------------------------------------------------------------------------------------------------------


def _enqueue(workload: Workload, group: jax_ep.Group, runs: int, common: dict[str, Any]) -> Iterator[Result]:
    """The host's time for a jitted dispatch and combine, and for a jitted function of the same arguments that does
    next to nothing: what jax_ep adds is the difference."""
    sms = common["num_sms"]

    def both(x: jax.Array, index: jax.Array, weights: jax.Array) -> jax.Array:
        rows = jax_ep.dispatch(x, index, weights, group=group, num_sms=sms)
        return jax_ep.combine(rows.x, rows.handle, weights=rows.weights, num_sms=sms)

    def empty(x: jax.Array, index: jax.Array, weights: jax.Array) -> jax.Array:
        return weights + 1

    what = "host time from call to return, device idle before"
    inputs = [(x, workload.index, workload.weights) for x in workload.tokens]
    for name, function, note in (
        (group.implementation, both, "jitted dispatch and combine, layout included"),
        ("empty jit", empty, "jitted sum of weights and 1, of the same arguments"),
    ):
        seconds = time_enqueue(workload.spread(function, keep_unused=True), inputs, runs=runs * calls_in_a_row())
        yield workload.result(seconds, op="enqueue", note=f"{note}; {what}", **(common | {"implementation": name}))
