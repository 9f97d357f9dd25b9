"""Dispatch and combine of many tokens, as training and prefill have them, beside XLA's own ways to move as much."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.bench.record import Result
from jax_ep.quantize import num_blocks

INPUTS = 3  # taken in turn: together more than any cache holds
CALLS = 10  # enqueued in a row for one time: the host's work hides behind the device's


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One measurement's numbers: T tokens a rank, H, E, K, and the SMs of a kernel (0: the group's)."""

    tokens: int = 4096
    hidden: int = 7168
    num_experts: int = 256
    top_k: int = 8
    num_sms: int = 0


def run(sizes: Sizes, *, implementation: str, runs: int, peers: bool) -> Iterator[Result]:
    """Times each operation on all local devices, forward, then what XLA offers instead."""
    devices = jax.devices()
    ranks = len(devices)
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, P("ep"))
    rng = np.random.default_rng(0)
    total = ranks * sizes.tokens
    index = np.argsort(rng.random((total, sizes.num_experts)), axis=-1)[:, : sizes.top_k].astype(np.int32)
    weights = rng.random((total, sizes.top_k)).astype(np.float32)
    index, weights = jax.device_put((index, weights), place)
    make = jax.jit(
        lambda seed: jax.random.normal(jax.random.key(seed), (total, sizes.hidden), jnp.bfloat16), out_shardings=place
    )
    xs = [make(seed) for seed in range(INPUTS)]
    away = _rows_away(np.asarray(index), ranks, sizes)

    def spread(function: Callable) -> Callable:
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))

    def result(
        op: str, name: str, seconds: Sequence[float], dtype: str, order: str, row_bytes: int, note: str
    ) -> Result:
        return Result.of_times(
            seconds,
            op=op,
            implementation=name,
            ranks=ranks,
            tokens=sizes.tokens,
            hidden=sizes.hidden,
            top_k=sizes.top_k,
            num_experts=sizes.num_experts,
            dtype=dtype,
            row_order=order,
            num_sms=sizes.num_sms or None,
            link_bytes=away * row_bytes,
            note=note,
        )

    group = jax_ep.create_group(
        mesh,
        "ep",
        max_tokens=sizes.tokens,
        hidden=sizes.hidden,
        num_experts=sizes.num_experts,
        top_k=sizes.top_k,
        capacity_factor=1.05,
        implementation=implementation,  # type: ignore[arg-type]
    )
    sms = sizes.num_sms or None
    with group:
        name: str = group.implementation
        row = 2 * sizes.hidden

        def full(x: Any, index: Any, weights: Any, **options: Any) -> jax_ep.Rows:
            return jax_ep.dispatch(x, index, weights, group=group, num_sms=sms, **options)

        expert = spread(full)
        seconds = _time(expert, [(x, index, weights) for x in xs], runs)
        yield result("dispatch", name, seconds, "bfloat16", "expert", row, "layout included")
        fp8 = spread(lambda *a: full(*a, wire="fp8", dequantize=False))
        seconds = _time(fp8, [(x, index, weights) for x in xs], runs)
        fp8_row = sizes.hidden + 4 * num_blocks(sizes.hidden)
        yield result("dispatch", name, seconds, "float8_e4m3fn", "expert", fp8_row, "quantisation and layout included")

        handle = spread(lambda index: jax_ep.layout(index, group=group, row_order="rank"))(index)
        ranked = spread(lambda x, handle: jax_ep.dispatch(x, handle=handle, num_sms=sms).x)
        seconds = _time(ranked, [(x, handle) for x in xs], runs)
        yield result("dispatch", name, seconds, "bfloat16", "rank", row, "with a handle at hand, without weights")

        inputs = [expert(x, index, weights) for x in xs[:2]]
        combine = spread(lambda rows: jax_ep.combine(rows.x, rows.handle, weights=rows.weights, num_sms=sms))
        seconds = _time(combine, [(rows,) for rows in inputs], runs)
        yield result("combine", name, seconds, "bfloat16", "expert", row, "weighted, of expert-order rows")
        del inputs

    if not peers:
        return
    for op, peer, note, function in _peers(ranks):
        seconds = _time(spread(function), [(x,) for x in xs], runs)
        yield result(op, peer, seconds, "bfloat16", "rank", row, note)


def _peers(ranks: int) -> Iterator[tuple[str, str, str, Callable]]:
    """XLA's collectives that move a whole token to every rank, or bring as much back."""
    yield (
        "dispatch",
        "xla all_gather",
        "every token to every rank, rows not yet selected",
        lambda x: jax.lax.all_gather(x, "ep", tiled=True),
    )
    yield (
        "dispatch",
        "xla all_to_all",
        "padded to T rows for each rank, rows not yet permuted",
        lambda x: jax.lax.all_to_all(jnp.broadcast_to(x, (ranks, *x.shape)), "ep", 0, 0),
    )
    yield (
        "combine",
        "xla psum_scatter",
        "of T rows for each rank, rows not yet summed by token",
        lambda x: jax.lax.psum_scatter(jnp.broadcast_to(x, (ranks, *x.shape)), "ep", scatter_dimension=0, tiled=True),
    )


def _rows_away(index: np.ndarray, ranks: int, sizes: Sizes) -> int:
    """Tokens that must cross the busiest rank's link in one direction, each once a rank that holds an expert of it."""
    owner = index.reshape(ranks, sizes.tokens, -1) // (sizes.num_experts // ranks)
    pairs = np.zeros((ranks, ranks), np.int64)  # tokens from, to
    for rank in range(ranks):
        pairs[:, rank] = (owner == rank).any(-1).sum(-1)
    np.fill_diagonal(pairs, 0)
    return int(max(pairs.sum(0).max(), pairs.sum(1).max()))


def _time(function: Callable, inputs: Sequence[tuple], runs: int) -> list[float]:
    """Seconds a call: CALLS of them enqueued in a row, inputs taking turns, timed until the last is done."""
    for arguments in inputs:
        jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        last = None
        for n in range(CALLS):
            last = function(*inputs[n % len(inputs)])
        jax.block_until_ready(last)
        seconds.append((time.perf_counter() - start) / CALLS)
    return seconds
