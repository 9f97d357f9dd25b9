"""An exchange beside a matmul: each alone, one after the other, and at once by start and done."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep import bootstrap
from jax_ep.bench import timeline
from jax_ep.bench.record import Result
from jax_ep.bench.timing import time_runs
from jax_ep.bench.workload import AXIS, Sizes, Workload
from jax_ep.config import ROW_ORDERS, RowOrder

IN_A_CHAIN = 8  # calls of one program, each behind the one before
PROGRAMS = 3  # one behind the other, of which one time is the mean
COPIES = 4000  # by the copy engines, beside the matmul: some three seconds of them


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
      sizes: of the exchange.
      intermediates: F of the matmul: gated experts of so many hidden units on T · K rows.
      sms: of the kernel between start and done; 0 leaves them to the group.
      row_orders: of the exchange. What XLA offers is measured once, whatever they are.
      implementation: as `create_group` takes it.
      runs: times that each median is of.
      with_timelines: whether to take a profiler's timeline, too, of the first of the sizes and of the matmuls.
    """

    sizes: Sequence[Sizes]
    intermediates: Sequence[int] = (2048,)
    sms: Sequence[int] = (0,)
    row_orders: Sequence[RowOrder] = ROW_ORDERS
    implementation: str = "auto"
    runs: int = 15
    with_timelines: bool = True


@dataclasses.dataclass(frozen=True)
class Peer:
    """A collective of XLA's."""

    name: str
    function: Callable[[jax.Array], jax.Array]
    operand: jax.Array


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One to put beside a matmul, whole and in halves.

    Attributes:
      op, group, row_order: which it is.
      operands: of a rank, spread over the devices.
      whole, start, done: what is done with them.
      peer: a collective of XLA's in the same role; None where it is measured elsewhere.
    """

    op: str
    group: jax_ep.Group
    row_order: RowOrder
    operands: tuple[Any, ...]
    whole: Callable[..., jax.Array]
    start: Callable[..., jax_ep.Pending]
    done: Callable[[jax_ep.Pending], jax.Array]
    peer: Peer | None


def measure(plan: Plan) -> tuple[list[Result], list[timeline.Timeline]]:
    """All results, and the timelines."""
    results: list[Result] = []
    timelines: list[timeline.Timeline] = []
    for sizes in plan.sizes:
        workload = Workload(sizes, 1)
        with contextlib.ExitStack() as groups:
            several = [
                exchange
                for order in plan.row_orders
                for exchange in exchanges(
                    workload,
                    groups.enter_context(workload.group(order, plan.implementation)),
                    order,
                    with_peers=order == plan.row_orders[0],
                )
            ]
            for exchange in several:
                results += measure_alone(workload, plan, exchange)
            for intermediate in plan.intermediates:
                matmul = make_matmul(workload, intermediate)
                results += measure_matmul(workload, plan, matmul)
                for exchange in several:
                    results += measure_beside(workload, plan, exchange, matmul)
                    if plan.with_timelines and (sizes, intermediate) == (plan.sizes[0], plan.intermediates[0]):
                        timelines += take_timelines(workload, plan, exchange, matmul)
    return results, timelines


def make_matmul(workload: Workload, intermediate: int) -> tuple[jax.Array, ...]:
    """Operands of `experts`: each rank's own rows, [T · K, H], and weights."""
    ranks, sizes = workload.ranks, workload.sizes
    rows = sizes.tokens * sizes.top_k
    shapes = ((rows, sizes.hidden), *((sizes.hidden, intermediate),) * 2, (intermediate, sizes.hidden))
    make = workload.spread(
        lambda seed: [jax.random.normal(jax.random.key(seed[0]), shape, jnp.bfloat16) * 0.02 for shape in shapes]
    )
    return tuple(make(jnp.arange(ranks)))


def experts(rows: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """A gated network."""
    return (jax.nn.silu(rows @ gate) * (rows @ up)) @ down


def exchanges(
    workload: Workload, group: jax_ep.Group, row_order: RowOrder, with_peers: bool = True
) -> Iterator[Exchange]:
    """Dispatch and combine by a handle at hand."""
    handle = workload.spread(functools.partial(jax_ep.layout, group=group, row_order=row_order))(workload.index)
    (x, *_) = workload.tokens
    yield Exchange(
        "dispatch",
        group,
        row_order,
        (x, handle),
        lambda x, handle, **sms: jax_ep.dispatch(x, handle=handle, **sms).x,
        lambda x, handle, **sms: jax_ep.dispatch_start(x, handle=handle, **sms),
        lambda pending: jax_ep.dispatch_done(pending).x,
        Peer("xla all_gather", lambda x: jax.lax.all_gather(x, AXIS, tiled=True), x) if with_peers else None,
    )
    rows = workload.spread(lambda x, handle: jax_ep.dispatch(x, handle=handle).x)(x, handle)
    peer = None
    if with_peers:
        sums = workload.spread(lambda x: jnp.tile(x, (workload.ranks, 1)))(x)
        peer = Peer("xla psum_scatter", lambda sums: jax.lax.psum_scatter(sums, AXIS, tiled=True), sums)
    yield Exchange(
        "combine", group, row_order, (rows, handle), jax_ep.combine, jax_ep.combine_start, jax_ep.combine_done, peer
    )


# Timing ---------------------------------------------------------------------------------------------------------------


def chained(workload: Workload, function: Callable[..., Any], calls: int = IN_A_CHAIN) -> Callable[..., Any]:
    """A jitted program of several calls of a rank's function, each behind all of the one before."""

    def chain(*operands: Any) -> list[jax.Array]:
        ends = []
        for _ in range(calls):
            # Operands and results pass together, so the next call has to wait for all of these.
            operands, out = jax.lax.optimization_barrier((operands, function(*operands)))
            ends += [leaf.reshape(-1)[:1] for leaf in jax.tree.leaves(out)]
        return ends

    return workload.spread(chain)


def time_chained(workload: Workload, function: Callable[..., Any], operands: Sequence[Any], runs: int) -> list[float]:
    """Seconds a call; one time is the mean of chains of calls, from when the first is enqueued to their end."""
    program = chained(workload, function)

    def programs(*operands: Any) -> Any:
        return [program(*operands) for _ in range(PROGRAMS)]

    return [seconds / (PROGRAMS * IN_A_CHAIN) for seconds in time_runs(programs, [tuple(operands)], runs=runs)]


def measure_alone(workload: Workload, plan: Plan, exchange: Exchange) -> Iterator[Result]:
    """An exchange whole and in halves, and XLA's collective in its place, with nothing beside."""
    timed = functools.partial(time_chained, workload, runs=plan.runs)
    result = functools.partial(workload.result, op=exchange.op, row_order=exchange.row_order)
    ours = functools.partial(result, implementation=exchange.group.implementation)
    yield ours(timed(exchange.whole, exchange.operands), note="whole, alone")
    for sms in plan.sms:
        seconds = timed(_alone(exchange, sms), exchange.operands)
        yield ours(seconds, num_sms=sms or None, note="start and done, alone")
    if peer := exchange.peer:
        seconds = timed(peer.function, (peer.operand,))
        yield result(seconds, implementation=peer.name, note="alone; not the whole operation")


def measure_matmul(workload: Workload, plan: Plan, matmul: Sequence[jax.Array]) -> Iterator[Result]:
    """The matmul alone, and while the copy engines of two devices copy both ways without a pause."""
    common = {"op": "matmul", "implementation": "xla", "row_order": "expert"}
    shapes = describe(matmul)
    yield workload.result(time_chained(workload, experts, matmul, plan.runs), **common, note=f"alone: {shapes}")
    if bootstrap.link_bandwidth(jax.devices()) is None:
        return
    with ThreadPoolExecutor(1) as pool:
        rate = pool.submit(bootstrap.link_bandwidth, jax.devices(), COPIES)
        time.sleep(0.3)  # until memory is allocated and the copies are under way
        seconds = time_chained(workload, experts, matmul, plan.runs)
        if rate.done():
            raise RuntimeError("bench overlap: expected copies that take longer than the matmuls, got shorter ones")
    note = f"while copy engines copy at {rate.result():.0f} GB/s each way: {shapes}"
    yield workload.result(seconds, **common, note=note)


def describe(matmul: Sequence[jax.Array]) -> str:
    """What it multiplies."""
    rows, gate, *_ = (each.addressable_shards[0].data.shape for each in matmul)
    return f"gated experts of {gate[1]} on {rows[0]} rows a rank"


def measure_beside(workload: Workload, plan: Plan, exchange: Exchange, matmul: Sequence[jax.Array]) -> Iterator[Result]:
    """An exchange with the matmul."""
    n, shapes = len(exchange.operands), describe(matmul)
    timed = functools.partial(time_chained, workload, runs=plan.runs)
    result = functools.partial(workload.result, op=f"{exchange.op}+matmul", row_order=exchange.row_order)

    def in_turn(*operands: Any) -> Any:
        moved, rest = jax.lax.optimization_barrier((exchange.whole(*operands[:n]), operands[n:]))
        return moved, experts(*rest)

    ours = functools.partial(result, implementation=exchange.group.implementation)
    yield ours(timed(in_turn, (*exchange.operands, *matmul)), note=f"one after the other, the exchange whole: {shapes}")
    for sms in plan.sms:
        seconds = timed(beside(exchange, sms), (*exchange.operands, *matmul))
        yield ours(seconds, num_sms=sms or None, note=f"at once, the matmul between start and done: {shapes}")

    if (peer := exchange.peer) is None:
        return

    def peer_at_once(operand: jax.Array, *rest: jax.Array) -> Any:
        return peer.function(operand), experts(*rest)

    seconds = timed(peer_at_once, (peer.operand, *matmul))
    note = f"as XLA schedules the two, which do not depend on each other; not the whole operation: {shapes}"
    yield result(seconds, implementation=peer.name, note=note)


def _alone(exchange: Exchange, sms: int) -> Callable[..., jax.Array]:
    def start_and_done(*operands: Any) -> jax.Array:
        return exchange.done(exchange.start(*operands, num_sms=sms or None))

    return start_and_done


def beside(exchange: Exchange, sms: int) -> Callable[..., Any]:
    """The matmul between the start and the done of an exchange."""
    n = len(exchange.operands)

    def at_once(*operands: Any) -> Any:
        pending = exchange.start(*operands[:n], num_sms=sms or None)
        product, pending = jax_ep.beside(pending, experts, *operands[n:])
        return exchange.done(pending), product

    return at_once


def take_timelines(
    workload: Workload, plan: Plan, exchange: Exchange, matmul: Sequence[jax.Array]
) -> Iterator[timeline.Timeline]:
    """What ran when on one device, of two calls in a chain."""
    for sms in plan.sms:
        program = chained(workload, beside(exchange, sms), calls=2)
        which = f"{exchange.op} in {exchange.row_order} order beside the matmul"
        name = f"{which}, {f'{sms} SMs' if sms else 'SMs of the formula'}"
        yield timeline.take(name, functools.partial(program, *exchange.operands, *matmul))
