"""One rank of tests/test_kernel_processes.py: python kernel_worker.py MODE PLATFORM, in the environment of a process.

What it prints is what the test reads. It ends without clearing up: after some modes the GPU's context is lost.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import in_halves
import jax
import numpy as np
import world
from cases import Case, some_draws
from jax.sharding import PartitionSpec as P
from test_conformance import Program, assert_same_bits, inputs_and_expected

import jax_ep

TIMEOUT_S = 4.0  # of kernels; XLA may take a second between two of a first call
TOKENS, HIDDEN, TOP_K = 8, 16, 2


class WithoutIndex(Program):
    """Leaves out `rows.index` in rank order, which XLA gathers by NCCL, which refuses two ranks on one GPU."""

    def _of_rank(self, of: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return without_index(super()._of_rank(of))


def without_index(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if not name.endswith(".index")}


def conformance(platform: str) -> None:
    """Both row orders, float32, bfloat16 and FP8 against the oracle, 20 draws each; each time one rank comes late."""
    ranks = world.COUNT
    for case in (
        Case(ranks, 9, 3, 4 * ranks, 16),
        Case(ranks, 7, 5, 6 * ranks, 8, "bfloat16", capacity=9, row_order="rank"),
        Case(ranks, 6, 2, 2 * ranks, 144, "bfloat16", alignment=4, wire="fp8"),
        Case(ranks, 5, 3, 3 * ranks, 32, row_order="rank", wire="fp8_ue8m0"),
    ):
        program = WithoutIndex(case, "cuda" if platform == "gpu" else "reference")
        for number, draw in enumerate(some_draws(case, 20)):
            arrays, wanted = inputs_and_expected(case, draw)
            if number % ranks == world.NUMBER:
                time.sleep(0.02)
            assert_same_bits(program(**arrays), without_index(wanted))
        program.group.close()
        say(f"{case}: right")


def halves(platform: str) -> None:
    """The same by start and done."""
    jax_ep.dispatch, jax_ep.combine = in_halves.dispatch, in_halves.combine  # for the program of the conformance tests
    conformance(platform)


def closed(platform: str) -> None:
    """Calls what was compiled for a group that is closed; by then it may have become a CUDA graph."""
    group, call = make_program(platform, lambda group, x, index: there_and_back(group, x, index))
    for _ in range(4):
        call()
    group.close()
    report(call)


def absent(platform: str) -> None:
    """The last rank stays away from the second call."""
    _, call = make_program(platform, lambda group, x, index: there_and_back(group, x, index))
    call()
    say("both called")
    if world.NUMBER != world.COUNT - 1:
        report(call)


def shapes(platform: str) -> None:
    """The last rank passes fewer tokens."""
    tokens = TOKENS - (world.NUMBER == world.COUNT - 1)
    _, call = make_program(platform, lambda group, x, index: there_and_back(group, x[:tokens], index[:tokens]))
    report(call)


def swapped(platform: str) -> None:
    """The last rank makes the same two calls, of equal shapes, in the other order."""

    def first(group, x, handle):
        return jax_ep.dispatch(x, handle=handle).x

    def second(group, x, handle):
        return jax_ep.dispatch(x, handle=handle).x

    calls = (second, first) if world.NUMBER == world.COUNT - 1 else (first, second)

    def body(group, x, index):
        handle = jax_ep.layout(index, group=group)
        for call in calls:
            x = x + call(group, x, handle)[: len(x)]
        return x

    _, call = make_program(platform, body)
    report(call)


def there_and_back(group: jax_ep.Group, x: jax.Array, index: jax.Array) -> jax.Array:
    rows = jax_ep.dispatch(x, index, group=group)
    return jax_ep.combine(rows.x, rows.handle)


def make_program(platform: str, body: Callable[..., Any]) -> tuple[jax_ep.Group, Callable[[], None]]:
    """A group, and a call of `body` on tokens of ones that is compiled in all processes when this returns."""
    mesh = world.mesh(world.COUNT, on=platform)
    group = jax_ep.create_group(
        mesh,
        "ep",
        max_tokens=TOKENS,
        hidden=HIDDEN,
        num_experts=2 * world.COUNT,
        top_k=TOP_K,
        dtype="float32",
        implementation="cuda" if platform == "gpu" else "reference",
        timeout_s=TIMEOUT_S,
    )
    index = np.random.default_rng(0).permuted(np.tile(np.arange(2 * world.COUNT), (world.COUNT * TOKENS, 1)), axis=1)
    arguments = world.put(mesh, "ep", (np.ones((len(index), HIDDEN), np.float32), index[:, :TOP_K].astype(np.int32)))
    f = jax.jit(jax.shard_map(lambda *a: body(group, *a), mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    compiled = f.lower(*arguments).compile()
    meet("compiled")

    def call() -> None:
        for shard in compiled(*arguments).addressable_shards:
            np.testing.assert_array_equal(shard.data, TOP_K)

    return group, call


def report(call: Callable[[], None]) -> None:
    try:
        call()
    except jax.errors.JaxRuntimeError as error:
        say(f"raised: {error}")
    else:
        say("returned")


def say(what: str) -> None:
    print(f"rank {world.NUMBER}: {what}", flush=True)


def meet(where: str) -> None:
    if world.COUNT > 1:
        world.exchange(where, b"", 60)


def main(mode: str, platform: str) -> None:
    os.environ["PYTEST_CURRENT_TEST"] = mode  # by which world.fetch tells the arrays of one test from another's
    if world.COUNT > 1:
        world.join()
    {f.__name__: f for f in (conformance, halves, closed, absent, shapes, swapped)}[mode](platform)
    meet("end")
    if world.COUNT > 1:
        jax.distributed.shutdown()  # who is gone first would take the others with it


if __name__ == "__main__":
    main(*sys.argv[1:])
    ctypes.CDLL(None).fflush(None)  # what kernels printed waits in C's buffer
    os._exit(0)
