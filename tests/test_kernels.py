"""Kernels where it is hard for them: dirty memory, a thousand calls, operations in every order, ranks out of step.

Each test also runs on CPU devices with the reference, so that the test is known to be right before a GPU runs it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import in_halves
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import processes
import pytest
import world
from cases import Case, some_draws
from jax.sharding import PartitionSpec as P
from test_conformance import Program, assert_same_bits, inputs_and_expected

import jax_ep

RANKS, TOKENS = 2, 8
SIZES = {"max_tokens": TOKENS, "hidden": 16, "num_experts": 6, "top_k": 3, "dtype": "float32"}
IMPLEMENTATION = {"cpu": "reference", "gpu": "cuda"}
SPLIT = P("ep")
Arrays = tuple[np.ndarray, ...]


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def on(request) -> str:
    return request.param


@pytest.fixture(params=["whole", "in halves"])
def form(request, monkeypatch) -> None:
    """Dispatch and combine as they are, and by start and done."""
    if request.param == "in halves":
        in_halves.use(monkeypatch)


def make_group(mesh: jax.sharding.Mesh, **changes) -> jax_ep.Group:
    implementation = IMPLEMENTATION[mesh.devices.flat[0].platform]
    return jax_ep.create_group(mesh, "ep", implementation=implementation, timeout_s=20, **{**SIZES, **changes})


def sharded(mesh: jax.sharding.Mesh, body: Callable[..., Any], in_specs: Any = SPLIT, out_specs: Any = SPLIT):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def draw(group: jax_ep.Group, seed: int) -> Arrays:
    """Tokens, index and weights of all ranks; some tokens go nowhere, and some ranks have next to none."""
    rng = np.random.default_rng(seed)
    tokens = group.num_ranks * TOKENS
    index = rng.integers(-1, group.num_experts, (tokens, group.top_k), np.int32)
    index[rng.random(tokens) < rng.choice([0, 0.9], group.num_ranks).repeat(TOKENS)] = -1
    weights = rng.random(index.shape).astype(np.float32)
    return rng.standard_normal((tokens, group.hidden)).astype(group.dtype), index, weights


def exchange(group: jax_ep.Group, x, index, weights) -> tuple[jax.Array, ...]:
    """A dispatch, and the combine of what it brought."""
    rows = jax_ep.dispatch(x, index, weights, group=group)
    assert rows.weights is not None
    return rows.x, rows.weights, rows.handle.slots, jax_ep.combine(rows.x, rows.handle, rows.weights)


def expected(group: jax_ep.Group, *arrays: np.ndarray) -> Arrays:
    """What `exchange` returns of all ranks, by the oracle."""
    x, index, weights = by_rank(*arrays)
    lay = oracle.layout(index, group.num_experts, group.rows_capacity(TOKENS))
    rows, row_weights = oracle.dispatch(x, lay), oracle.dispatch_weights(weights, lay)
    return joined(rows, row_weights, lay.slots, oracle.combine(rows, lay, row_weights))


def by_rank(*arrays: np.ndarray) -> Arrays:
    return tuple(a.reshape(RANKS, -1, *a.shape[1:]) for a in arrays)


def joined(*arrays: np.ndarray) -> Arrays:
    return tuple(a.reshape(-1, *a.shape[2:]) for a in arrays)


def assert_same(got: Any, wanted: Any, what: object = "") -> None:
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == theirs.dtype
        ours = np.asarray(ours)
        np.testing.assert_array_equal(oracle.bits(ours), oracle.bits(theirs), err_msg=str(what))


# Memory that nobody cleaned, and routing at its limits.

NARROW = [  # no row is narrower than what the kernels move at once
    Case(1, 6, 4, 8, 16, alignment=4),
    Case(2, 6, 9, 18, 16),
    Case(2, 5, 11, 22, 8, "bfloat16", alignment=8, capacity=64),
    Case(2, 4, 16, 16, 32, "float16", row_order="rank"),
    Case(2, 4, 32, 64, 16, capacity_factor=1.0),
    Case(2, 5, 32, 40, 16, "bfloat16", row_order="rank", capacity=7),
    Case(2, 7, 3, 4, 128, "bfloat16", wire="fp8"),
    Case(2, 6, 9, 10, 144, row_order="rank", wire="fp8_ue8m0"),
]
BLOCKS = [2**n for n in range(8, 21) for _ in range(8)]  # bytes: what the arrays of these cases take


def soil(devices: list[jax.Device]) -> list[range]:
    """Fills memory with bytes that are NaN in every dtype and gives it back. Returns where that was."""
    arrays = [jax.device_put(np.full(size, 0xFF, np.uint8), device) for device in devices for size in BLOCKS]
    jax.block_until_ready(arrays)
    starts = [array.unsafe_buffer_pointer() for array in arrays]
    for array in arrays:
        array.delete()
    return [range(start, start + size) for start, size in zip(starts, len(devices) * BLOCKS, strict=True)]


@pytest.mark.parametrize("case", NARROW, ids=str)
def test_dirty_memory(form, on, case):
    """XLA's allocator hands out NaN, and the group's own memory is full of NaN tokens."""
    program = Program(case, IMPLEMENTATION[on])
    call, devices, reused = program.call, list(program.mesh.devices.flat), 0

    def call_on_dirty_memory(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        nonlocal reused
        dirty = soil(devices)
        out = call(arrays)
        shards = [shard.data for array in out.values() for shard in array.addressable_shards]
        reused += sum(any(shard.unsafe_buffer_pointer() in block for block in dirty) for shard in shards)
        return out

    everywhere = np.random.default_rng(0).integers(0, case.num_experts, (case.ranks, case.tokens, case.top_k))
    with program.group:
        for one in some_draws(case, 6):
            arrays, wanted = inputs_and_expected(case, one)
            nan = {name: np.full_like(a, np.nan) for name, a in arrays.items() if name != "index"}
            for _ in range(2):  # the group has two buffers of each kind, which take turns
                program(**nan, index=everywhere.astype(case.index_dtype))
            program.call = call_on_dirty_memory
            assert_same_bits(program(**arrays), wanted)
            program.call = call
    assert on == "cpu" or reused, "the test is void: no result was put where NaN had been"


# Many calls.


def replay(on: str, call: Callable[..., Any], draws: list[Any], wanted: list[Any], count: int) -> None:
    """`count` calls, each with one of `draws`, and every result looked at.

    On GPUs, calls one by one take turns with calls in flight together. CPU devices starve of threads from the latter.
    """
    order = np.random.default_rng(0).integers(len(draws), size=count).tolist()
    while order:
        for together in (1, 1, 1, 20 if on == "gpu" else 1):
            numbers, order = order[:together], order[together:]
            for number, result in [(number, call(*draws[number])) for number in numbers]:
                assert_same(result, wanted[number], f"routing {number}, {len(order)} calls before the end")


def test_a_thousand_calls(form, on):
    mesh = world.mesh(RANKS, on=on)
    with make_group(mesh) as group:
        draws = [draw(group, seed) for seed in range(10)]
        f = sharded(mesh, functools.partial(exchange, group))
        wanted = [expected(group, *arrays) for arrays in draws]
        replay(on, f, [world.put(mesh, "ep", arrays) for arrays in draws], wanted, 1000)


def test_a_hundred_in_a_scan(form, on):
    mesh = world.mesh(RANKS, on=on)
    with make_group(mesh) as group:
        draws = [draw(group, seed) for seed in range(10)]
        wanted = [expected(group, *arrays) for arrays in draws]
        order = np.random.default_rng(0).integers(len(draws), size=100)

        def body(*stacked):
            return jax.lax.scan(lambda _, one: (None, exchange(group, *one)), None, stacked)[1]

        stacked = [np.stack(arrays)[order] for arrays in zip(*draws, strict=True)]
        f = sharded(mesh, body, P(None, "ep"), P(None, "ep"))
        got = f(*(world.put(mesh, (None, "ep"), array) for array in stacked))
        assert_same(got, [np.stack(arrays)[order] for arrays in zip(*wanted, strict=True)])


def test_independent_exchanges(on):
    """Three of two groups, none of which waits for another's result: XLA may put them into one CUDA graph."""
    mesh = world.mesh(RANKS, on=on)
    with make_group(mesh) as one, make_group(mesh, hidden=32, top_k=2, dtype="bfloat16") as two:
        groups = (one, two, one)
        f = sharded(mesh, lambda *each: tuple(exchange(g, *arrays) for g, arrays in zip(groups, each, strict=True)))
        draws = [tuple(draw(g, 3 * seed + n) for n, g in enumerate(groups)) for seed in range(4)]
        wanted = [tuple(expected(g, *a) for g, a in zip(groups, each, strict=True)) for each in draws]
        replay(on, f, [world.put(mesh, "ep", each) for each in draws], wanted, 200)


ALL_CALLS = "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
GRAPHS = {"none": "--xla_gpu_enable_command_buffer=", "of all calls": ALL_CALLS}
CONCURRENT = f"{ALL_CALLS} --xla_gpu_command_buffer_scheduling_mode=CONCURRENT"


def run_with_flags(folder: Path, test: str, flags: dict[str, str]) -> dict[str, str]:
    """What a test says under each of these XLA_FLAGS, which XLA reads when it starts."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", test]
    children, logs = [], [folder / name for name in flags]
    try:
        for log, added in zip(logs, flags.values(), strict=True):
            variables = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {added}"}
            with open(log, "wb") as file:
                children.append(processes.start(command, variables, Path(__file__).parents[1], file))
        processes.wait(children, grace=100, limit=200)
    finally:
        for child in children:
            processes.stop(child)
    return {log.name: log.read_text(errors="replace") for log in logs}


def check_with_flags(folder: Path, test: str, flags: dict[str, str]) -> None:
    outputs = run_with_flags(folder, test, flags)
    failed = [f"graphs {graphs}:\n{output}" for graphs, output in outputs.items() if "1 passed" not in output]
    assert not failed, "\n".join(failed)


def independent_exchanges(on: str) -> str:
    world.mesh(RANKS, on=on)  # or skips
    return f"{__file__}::{test_independent_exchanges.__name__}[{on}]"


def test_independent_exchanges_in_cuda_graphs(on, tmp_path):
    check_with_flags(tmp_path, independent_exchanges(on), GRAPHS)


@pytest.mark.gpu
def test_graphs_that_run_operations_of_a_group_at_once_raise(tmp_path):
    """XLA can be told to; then two operations would take one epoch for theirs."""
    (output,) = run_with_flags(tmp_path, independent_exchanges("gpu"), {"concurrent": CONCURRENT}).values()
    assert "1 failed" in output and "jax_ep: group" in output, output


# Between start and done.


def several(group: jax_ep.Group, other: jax_ep.Group, *each: Any) -> tuple[Any, ...]:
    """Five exchanges there and back: two under way at once, and meanwhile whole ones of their group and of another.

    Nothing is used twice, so XLA is free to put the whole ones into CUDA graphs, alone or together.
    """
    a, b, *whole = each
    starts = [jax_ep.dispatch_start(*arrays, group=group) for arrays in (a, b)]

    def meanwhile(first, of_other):
        return exchange(group, *first), exchange(other, *of_other)

    first, starts = jax_ep.beside(starts, meanwhile, *whole[:2])
    rows = [jax_ep.dispatch_done(pending) for pending in reversed(starts)][::-1]
    starts = [jax_ep.combine_start(of.x, of.handle, of.weights) for of in rows]
    second, starts = jax_ep.beside(starts, lambda arrays: exchange(group, *arrays), whole[2])
    outs = [jax_ep.combine_done(pending) for pending in starts]
    of_starts = [(of.x, of.weights, of.handle.slots, out) for of, out in zip(rows, outs, strict=True)]
    return *of_starts, *first, second


def test_two_under_way_and_whole_ones_meanwhile(on):
    mesh = world.mesh(RANKS, on=on)
    with make_group(mesh) as group, make_group(mesh, hidden=32, top_k=2, dtype="bfloat16") as other:
        groups = (group, group, group, other, group)
        draws = [tuple(draw(g, 5 * seed + n) for n, g in enumerate(groups)) for seed in range(4)]
        wanted = [tuple(expected(g, *a) for g, a in zip(groups, each, strict=True)) for each in draws]
        f = sharded(mesh, functools.partial(several, group, other))
        replay(on, f, [world.put(mesh, "ep", each) for each in draws], wanted, 200)


def test_two_under_way_and_cuda_graphs_meanwhile(on, tmp_path):
    world.mesh(RANKS, on=on)  # or skips
    test = f"{__file__}::{test_two_under_way_and_whole_ones_meanwhile.__name__}[{on}]"
    check_with_flags(tmp_path, test, GRAPHS)


def under_way_at_once(group: jax_ep.Group, count: int, x, index, weights) -> list[jax.Array]:
    """Rows of tokens times 1, 2, 4 and so on, all of which are started before any is done."""
    pending = [jax_ep.dispatch_start(x * 2.0**n, index, weights, group=group) for n in range(count)]
    first, pending = jax_ep.beside(pending, jnp.sin, x)
    return [first, *(jax_ep.dispatch_done(each).x for each in pending)]


def test_eight_under_way_and_not_nine(on):
    """With kernels a ninth raises; then the group does all that it did before. On CPU nothing is ever under way."""
    mesh = world.mesh(RANKS, on=on)
    with make_group(mesh) as group:
        arrays = draw(group, 0)
        rows = expected(group, *arrays)[0]
        placed = world.put(mesh, "ep", arrays)
        programs = {count: sharded(mesh, functools.partial(under_way_at_once, group, count)) for count in (2, 8, 9)}

        def check(count: int) -> None:
            wanted = [rows * np.float32(2**n) for n in range(count)]
            assert_same(programs[count](*placed)[1:], wanted)

        whole = sharded(mesh, functools.partial(exchange, group))
        for _ in range(2):
            for count in [2, 8] * 5:
                check(count)
            if on == "cpu":
                check(9)
            else:
                with pytest.raises(jax.errors.JaxRuntimeError, match="at most 8 exchanges"):
                    jax.block_until_ready(programs[9](*placed))
            assert_same(whole(*placed), expected(group, *arrays))


# Operations in any order.


def after(value: jax.Array, earlier: jax.Array) -> jax.Array:
    """`value`, but not before `earlier` is there: XLA cannot know that the branch is never taken."""
    first = earlier.reshape(-1)[0]
    never = jnp.isnan(first) if jnp.issubdtype(first.dtype, jnp.floating) else first < -1
    return jnp.where(never, jnp.zeros_like(value), value)


# Layout, dispatch, combine: any three of them in a row.
ORDER = "LLLDLLCLDDLDCLCDLCCDDDCDCCCLL"


def in_order(layout, dispatch, combine, after, tokens, indices) -> list[Any]:
    """The operations of ORDER, each after the one before; a dispatch and a combine take what the last one gave."""
    indices = iter(indices)
    handle = layout(next(indices))
    rows = dispatch(tokens, handle)
    results = [rows]
    for operation in ORDER:
        if operation == "L":
            handle = layout(after(next(indices), results[-1]))
            results.append(handle.slots)
        elif operation == "D":
            rows = dispatch(after(tokens, results[-1]), handle)
            results.append(rows)
        else:
            tokens = combine(after(rows, results[-1]), handle)
            results.append(tokens)
    return results


def assert_as_the_oracle(mesh, group, row_order, run, *arrays):
    """Of run(layout, dispatch, combine, after, *arrays): that our operations give what the oracle's give."""

    def ours(*arrays):
        def layout(index):
            return jax_ep.layout(index, group=group, row_order=row_order)

        def dispatch(x, handle):
            return jax_ep.dispatch(x, handle=handle).x

        return run(layout, dispatch, jax_ep.combine, after, *arrays)

    def oracle_layout(index):
        capacity = group.rows_capacity(TOKENS, row_order=row_order)
        return oracle.layout(index, group.num_experts, capacity, row_order=row_order)

    wanted = run(oracle_layout, oracle.dispatch, oracle.combine, lambda value, _: value, *by_rank(*arrays))
    assert_same(sharded(mesh, ours)(*world.put(mesh, "ep", arrays)), joined(*wanted))


@pytest.mark.parametrize("row_order", ["expert", "rank"])
def test_every_order_of_operations(form, on, row_order):
    assert len({ORDER[n : n + 3] for n in range(len(ORDER) - 2)}) == 3**3
    mesh = world.mesh(RANKS, on=on)
    with make_group(mesh) as group:

        def run(layout, dispatch, combine, after, tokens, *indices):
            return in_order(layout, dispatch, combine, after, tokens, indices)

        indices = [draw(group, seed)[1] for seed in range(1 + ORDER.count("L"))]
        assert_as_the_oracle(mesh, group, row_order, run, draw(group, 0)[0], *indices)


@pytest.mark.parametrize("row_order", ["expert", "rank"])
def test_two_handles_in_swapped_order(form, on, row_order):
    """Made as A, B; dispatched as B, A; combined as A, B."""
    mesh = world.mesh(RANKS, on=on)
    with make_group(mesh) as group:

        def run(layout, dispatch, combine, after, x_a, x_b, index_a, index_b):
            a = layout(index_a)
            b = layout(after(index_b, a.slots))
            rows_b = dispatch(after(x_b, b.slots), b)
            rows_a = dispatch(after(x_a, rows_b), a)
            out_a = combine(rows_a, a)
            return rows_a, rows_b, out_a, combine(after(rows_b, out_a), b)

        (x_a, index_a), (x_b, index_b) = (draw(group, seed)[:2] for seed in range(2))
        assert_as_the_oracle(mesh, group, row_order, run, x_a, x_b, index_a, index_b)


# Ranks that come late.


def test_a_device_that_is_busy(on):
    """What was enqueued on one device before keeps it from the exchange, which the other has begun."""
    mesh = world.mesh(RANKS, on=on)
    elements, steps = (2**27, 1000) if on == "gpu" else (2**16, 100)  # on an H200 longer than two exchanges, by far
    work = jax.jit(lambda a: jax.lax.fori_loop(0, steps, lambda _, a: jnp.sin(a), a))
    with make_group(mesh) as group:
        draws = [draw(group, seed) for seed in range(4)]
        f = sharded(mesh, functools.partial(exchange, group))
        placed = [world.put(mesh, "ep", arrays) for arrays in draws]
        jax.block_until_ready(f(*placed[0]))
        for late in mesh.devices.flat:
            array = jnp.ones(elements, jnp.float32, device=late)
            work(array).block_until_ready()
            busy = work(array)
            results = [f(*arrays) for arrays in placed[: 4 if on == "gpu" else 1]]
            assert on == "cpu" or not busy.is_ready(), "the test is void: the device was free again"
            for arrays, result in zip(draws, results, strict=False):
                assert_same(result, expected(group, *arrays))


def test_ranks_with_unequal_work(form, on):
    """One rank is late for the dispatch, the other for the combine; and the other way round in the next call."""
    mesh = world.mesh(RANKS, on=on)
    with make_group(mesh) as group:

        def slowed(x, rank):
            """x, for which `rank` takes long."""
            work = functools.partial(jax.lax.fori_loop, 0, 20_000, lambda _, a: jnp.cos(a))
            return after(x, jax.lax.cond(jax.lax.axis_index("ep") == rank, work, lambda a: a, x[0]))

        def program(late, x, index, weights):
            rows = jax_ep.dispatch(slowed(x, late[0]), index, weights, group=group)
            y = slowed(rows.x, 1 - late[0])
            return rows.x, rows.weights, rows.handle.slots, jax_ep.combine(y, rows.handle, rows.weights)

        f = sharded(mesh, program, (P(), P("ep"), P("ep"), P("ep")))
        for late in (0, 1, 0, 1):
            arrays = draw(group, late)
            got = f(world.put(mesh, P(), np.array([late])), *world.put(mesh, "ep", arrays))
            assert_same(got, expected(group, *arrays))


# Transforms.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_through_remat_and_scan(form, on, dtype):
    """Bit for bit what the reference gives on CPU devices, layer by layer and without remat."""
    layers = 3

    def of(group: jax_ep.Group, rolled: bool, x, index, weights, cotangent):
        def layer(x, weights):
            rows = jax_ep.dispatch(x, index, weights, group=group)
            return jax_ep.combine(rows.x * 0.5, rows.handle, rows.weights)  # halving is exact

        def stack(x, weights):
            if rolled:
                return jax.lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, weights)[0]
            return functools.reduce(layer, list(weights), x)

        out, pull_back = jax.vjp(stack, x, weights)
        return out, *pull_back(cotangent)

    def run(platform: str, rolled: bool):
        mesh = world.mesh(RANKS, on=platform)
        with make_group(mesh, dtype=dtype) as group:
            x, index, _ = draw(group, 1)
            weights = np.stack([draw(group, seed)[2] for seed in range(layers)])
            specs = (P("ep"), P("ep"), P(None, "ep"), P("ep"))
            outs = (P("ep"), P("ep"), P(None, "ep"))
            f = sharded(mesh, functools.partial(of, group, rolled), specs, outs)
            given = (x, index, weights, draw(group, 2)[0])
            out = f(*(world.put(mesh, spec, array) for spec, array in zip(specs, given, strict=True)))
            return world.fetch(out), given

    (got, _), (wanted, (x, _, _, cotangent)) = run(on, rolled=True), run("cpu", rolled=False)
    assert_same(got[:2], wanted[:2])
    # The order of a weight's sum over H is free (docs/semantics.md, "Gradients"): each of two sums of 16 products may
    # be off by 15 * 2**-24 of the sum of their magnitudes. A layer halves rows, weights are below 1, and a token has 3,
    # so values and cotangents grow by 1.5 a layer at most; between them they have gone through two.
    product = 0.5 * 1.5**2 * np.prod([np.abs(array.astype(np.float32)).max() for array in (x, cotangent)])
    bound = 2 * 15 * 2.0**-24 * 16 * product
    assert bound < 1e-3 * np.abs(wanted[2]).max()
    np.testing.assert_allclose(got[2], wanted[2], rtol=0, atol=bound)


# What the kernels do not take.


@pytest.mark.gpu
def test_rows_that_need_padding():
    mesh = world.mesh(RANKS, on="gpu")
    message = "rows of 200 bytes are no multiple of 16; pad hidden from 100 to 104"
    with pytest.raises(RuntimeError, match=message):
        make_group(mesh, hidden=100, dtype="bfloat16")
    with jax_ep.create_group(mesh, "ep", **{**SIZES, "hidden": 100, "dtype": "bfloat16"}) as group:
        assert (group.implementation, group.implementation_reason) == ("reference", message)


def test_fp8_rows_that_need_padding():
    """Refused while tracing, for which a group that says that it has kernels will do."""
    mesh = world.mesh(RANKS, on="cpu")
    reference = make_group(mesh, hidden=24)
    group = dataclasses.replace(reference, implementation="cuda")

    def program(x, index, weights):
        handle = dataclasses.replace(jax_ep.layout(index, group=reference), group=group)
        return jax_ep.dispatch(x, index, weights, handle=handle, wire="fp8").x

    with pytest.raises(ValueError, match="hidden to be a multiple of 16 for FP8 rows, got 24; pad it to 32"):
        jax.eval_shape(sharded(mesh, program), *draw(reference, 0))
