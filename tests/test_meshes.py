"""Groups over every kind of mesh, several at once, closed and made again: each against the NumPy oracle."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import world
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep

pytestmark = pytest.mark.processes

TOKENS, TOP_K, HIDDEN = 4, 2, 4


def draw(tokens: int, experts: int, seed: int = 0, top_k: int = TOP_K):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, HIDDEN)).astype(np.float32)
    index = rng.integers(-1, experts, (tokens, top_k), np.int32)
    return x, index, rng.random((tokens, top_k)).astype(np.float32)


def make_group(mesh, axis, experts, **changes):
    sizes = {"max_tokens": TOKENS, "hidden": HIDDEN, "num_experts": experts, "top_k": TOP_K, "dtype": "float32"}
    return jax_ep.create_group(mesh, axis, **{**sizes, **changes})


def block(group, x, index, weights, **options):
    """Rows doubled and combined; and how many rows of each local expert there were."""
    rows = jax_ep.dispatch(x, index, weights, group=group, **options)
    return jax_ep.combine(2 * rows.x, rows.handle, weights=rows.weights), rows.counts


def expected_block(group, ranks, x, index, weights, **options):
    """By the oracle, for the tokens of one group: [R·T, ...]."""
    shape = (ranks, -1)
    picks = index.reshape(*shape, index.shape[-1])
    tokens = picks.shape[1]
    capacity = group.rows_capacity(tokens, index.shape[-1], options.get("alignment"))
    layout = oracle.layout(picks, group.num_experts, capacity, alignment=options.get("alignment", group.alignment))
    rows = oracle.dispatch(x.reshape(*shape, HIDDEN), layout)
    row_weights = oracle.dispatch_weights(weights.reshape(picks.shape), layout)
    return oracle.combine(2 * rows, layout, row_weights).reshape(-1, HIDDEN), layout.counts.reshape(-1)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("shape", "axes", "axis"),
    [
        ((1,), ("ep",), ("ep",)),
        ((3,), ("ep",), ("ep",)),
        ((6,), ("ep",), ("ep",)),
        ((8,), ("ep",), ("ep",)),
        ((24,), ("ep",), ("ep",)),  # run by test_24_ranks
        ((2, 4), ("dp", "ep"), ("ep",)),
        ((4, 2), ("ep", "tp"), ("ep",)),
        ((2, 2, 2), ("dp", "ep", "tp"), ("ep",)),
        ((2, 3), ("node", "gpu"), ("node", "gpu")),
        ((2, 3), ("node", "gpu"), ("gpu", "node")),
    ],
    ids=str,
)
def test_mesh(shape, axes, axis, kind):
    mesh = world.mesh(shape, axes, kind)
    ranks = int(np.prod([mesh.shape[name] for name in axis]))
    experts = 2 * ranks
    split = tuple(name for name in axes if name not in ("tp", *axis)) + axis  # tp: every rank has the same tokens
    groups = int(np.prod([mesh.shape[name] for name in split])) // ranks
    arrays = draw(groups * ranks * TOKENS, experts)
    with make_group(mesh, axis, experts) as group:
        f = jax.jit(jax.shard_map(functools.partial(block, group), mesh=mesh, in_specs=P(split), out_specs=P(split)))
        out, counts = world.fetch(f(*world.put(mesh, (split,), arrays)))
        for g, (x, index, weights) in enumerate(zip(*(np.split(a, groups) for a in arrays), strict=True)):
            expected, expected_counts = expected_block(group, ranks, x, index, weights)
            np.testing.assert_array_equal(np.split(out, groups)[g], expected)
            np.testing.assert_array_equal(np.split(counts, groups)[g], expected_counts)


def test_24_ranks():
    """As many devices as this process does not have."""
    if jax.process_count() > 1 or world.platform != "cpu":
        pytest.skip("starts a process of its own, with 24 CPU devices")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=24", "NPROC": "48"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::test_mesh", "-k", "24"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_other_axes_may_stay_automatic():
    """shard_map over ep alone, with tp left to the compiler."""
    mesh = world.mesh((4, 2), ("ep", "tp"))
    arrays = draw(4 * TOKENS, 8)
    with make_group(mesh, "ep", 8) as group:
        f = jax.shard_map(
            functools.partial(block, group), mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"}
        )
        out, _ = world.fetch(jax.jit(f)(*world.put(mesh, "ep", arrays)))
        np.testing.assert_array_equal(out, expected_block(group, 4, *arrays)[0])


def test_several_groups_shapes_and_top_ks_in_one_program():
    mesh = world.mesh((2, 4), ("dp", "ep"))
    first, second, third = draw(8 * TOKENS, 8), draw(8 * 2, 16, 1), draw(8 * TOKENS, 8, 2, top_k=1)
    with make_group(mesh, "ep", 8) as inner, make_group(mesh, ("dp", "ep"), 16, alignment=8) as outer:

        def program(first, second, third):
            a, _ = block(inner, *first)
            b, _ = block(outer, *second)
            c, _ = block(inner, *third, top_k=1, alignment=4)
            return a, b, c

        spec = P(("dp", "ep"))
        f = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec))
        a, b, c = world.fetch(f(*(world.put(mesh, (("dp", "ep"),), part) for part in (first, second, third))))
        for got, arrays, options in ((a, first, {}), (c, third, {"alignment": 4})):
            halves = zip(*(np.split(array, 2) for array in arrays), strict=True)
            expected = [expected_block(inner, 4, *half, **options)[0] for half in halves]
            np.testing.assert_array_equal(got, np.concatenate(expected))
        np.testing.assert_array_equal(b, expected_block(outer, 8, *second)[0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_two_handles_alive_at_once_and_used_out_of_order(ranks):
    mesh = world.mesh(ranks)
    first, second = draw(ranks * TOKENS, 8), draw(ranks * TOKENS, 8, 1)
    with make_group(mesh, "ep", 8) as group:

        def program(first, second):
            one = jax_ep.dispatch(*first, group=group)
            two = jax_ep.dispatch(*second, group=group)
            b = jax_ep.combine(2 * two.x, two.handle, weights=two.weights)
            return jax_ep.combine(2 * one.x, one.handle, weights=one.weights), b

        f = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
        got = world.fetch(f(world.put(mesh, "ep", first), world.put(mesh, "ep", second)))
        for ours, arrays in zip(got, (first, second), strict=True):
            np.testing.assert_array_equal(ours, expected_block(group, ranks, *arrays)[0])


def test_a_group_closed_and_made_again():
    mesh = world.mesh(2)
    arrays = draw(2 * TOKENS, 4)
    placed = world.put(mesh, "ep", arrays)

    @functools.partial(jax.jit, static_argnums=0)
    def run(group, x, index, weights):
        return jax.shard_map(functools.partial(block, group), mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(
            x, index, weights
        )

    traces = []
    for _ in range(2):
        group = make_group(mesh, "ep", 4)
        np.testing.assert_array_equal(world.fetch(run(group, *placed))[0], expected_block(group, 2, *arrays)[0])
        group.close()
        traces.append(run._cache_size())
    assert traces == [1, 2], "the second group must not be handed what was compiled for the first"
    with pytest.raises(RuntimeError, match="which was closed; make another"):
        jax.eval_shape(
            functools.partial(run, group), *(jnp.zeros((a.shape[0] * 2, *a.shape[1:]), a.dtype) for a in arrays)
        )
