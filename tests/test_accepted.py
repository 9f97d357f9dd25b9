"""What is accepted gives right values: dtypes, options of one call, two axes, a handle that travels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cases
import jax
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_bad_input import EXPERTS, HIDDEN, RANKS, ROWS, SIZES, TOKENS, TOP_K, make_group, make_mesh

import jax_ep

CASE = cases.Case(RANKS, TOKENS, TOP_K, EXPERTS, HIDDEN, alignment=2, capacity=10)
DRAW = cases.Draw(3, "uniform", (4, 3), none=True, invalid=True, duplicates=True, special="")


def run(body, mesh: jax.sharding.Mesh, **arrays: np.ndarray) -> dict[str, np.ndarray]:
    """`body` in jit and shard_map; arrays have the rank leading, in and out."""
    spec = P(tuple(mesh.axis_names))
    inside = jax.shard_map(lambda a: body(SimpleNamespace(**a)), mesh=mesh, in_specs=spec, out_specs=spec)
    flat = {name: jax.device_put(a.reshape(-1, *a.shape[2:]), NamedSharding(mesh, spec)) for name, a in arrays.items()}
    ranks = int(np.prod(list(mesh.shape.values())))
    return {name: np.asarray(a).reshape(ranks, -1, *a.shape[1:]) for name, a in jax.jit(inside)(flat).items()}


def assert_same(actual: np.ndarray, wanted: np.ndarray) -> None:
    assert actual.dtype == wanted.dtype
    np.testing.assert_array_equal(oracle.bits(actual), oracle.bits(wanted))


def both_ways(group: jax_ep.Group, **options):
    def body(a: SimpleNamespace) -> dict[str, Any]:
        rows = jax_ep.dispatch(a.x, a.index, a.weights, group=group, **options)
        return {
            "x": rows.x,
            "weights": rows.weights,
            "slots": rows.handle.slots,
            "num_invalid": rows.handle.num_invalid,
            "out": jax_ep.combine(rows.x, rows.handle, rows.weights),
        }

    return body


def assert_oracle(out: dict[str, np.ndarray], x: np.ndarray, weights: np.ndarray, lay: oracle.Layout) -> None:
    rows, row_weights = oracle.dispatch(x, lay), oracle.dispatch_weights(weights, lay)
    assert_same(out["x"], rows)
    assert_same(out["weights"], row_weights)
    assert_same(out["slots"].reshape(lay.slots.shape), lay.slots)
    assert_same(out["num_invalid"], lay.num_invalid)
    assert_same(out["out"], oracle.combine(rows, lay, row_weights))


@pytest.mark.parametrize(
    ("dtype", "weights_dtype"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
    ],
)
def test_tokens_and_weights_of_every_float(dtype, weights_dtype):
    """In a group of the widest dtype, with the tokens' own dtype in the rows and the result."""
    given, lay = cases.inputs(CASE, DRAW)
    x = given.x.astype(cases.DTYPES[dtype])
    weights = given.weights.astype(cases.DTYPES[weights_dtype])
    with make_group(alignment=2, capacity=10) as group:
        out = run(both_ways(group), make_mesh(), x=x, index=given.index, weights=weights)
    assert_oracle(out, x, weights, lay)


@pytest.mark.parametrize("index_dtype", [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)])
def test_index_of_every_integer(index_dtype):
    """Each value that is out of range and would not be after a cast, and some that are in range."""
    case = cases.Case(RANKS, 12, TOP_K, EXPERTS, HIDDEN, index_dtype=index_dtype)
    given, _ = cases.inputs(case, cases.Draw(3, "uniform", (12, 12), False, False, False, ""))
    outside = cases.invalid_values(index_dtype, EXPERTS)
    index = np.resize(np.array([0, 5, *outside], index_dtype), given.index.shape)
    lay = oracle.layout(index, EXPERTS, case.rows)
    assert len(outside) <= lay.num_invalid.sum() < index.size
    with make_group(max_tokens=12) as group, jax.enable_x64(index_dtype.endswith("64")):
        out = run(both_ways(group), make_mesh(), x=given.x, index=index, weights=given.weights)
    assert_oracle(out, given.x, given.weights, lay)


def test_top_k_and_alignment_of_the_call():
    given, lay = cases.inputs(CASE, DRAW)
    with make_group(top_k=5, alignment=8, max_tokens=9, capacity=10) as group:
        assert group.rows_capacity(TOKENS, top_k=TOP_K, alignment=2) == CASE.rows == 10
        body = both_ways(group, top_k=TOP_K, alignment=2)
        out = run(body, make_mesh(), x=given.x, index=given.index, weights=given.weights)
    assert_oracle(out, given.x, given.weights, lay)


def test_group_over_two_axes():
    case = cases.Case(6, TOKENS, TOP_K, 12, HIDDEN)
    given, lay = cases.inputs(case, cases.Draw(4, "uniform", (4,) * 6, True, True, True, ""))
    mesh = make_mesh((2, 3), ("outer", "inner"))
    sizes = {**SIZES, "num_experts": 12}
    with jax_ep.create_group(mesh, ("outer", "inner"), **sizes, implementation="reference") as group:
        out = run(both_ways(group), mesh, x=given.x, index=given.index, weights=given.weights)
    assert_oracle(out, given.x, given.weights, lay)


def test_a_handle_may_leave_shard_map_and_come_back():
    group = make_group()
    given, _ = cases.inputs(CASE, DRAW)
    lay = oracle.layout(given.index, EXPERTS, ROWS)
    mesh = make_mesh()
    over_ranks: dict[str, Any] = {"mesh": mesh, "in_specs": P("ep"), "out_specs": P("ep")}
    flat = [jax.device_put(a.reshape(-1, a.shape[2]), NamedSharding(mesh, P("ep"))) for a in (given.x, given.index)]
    handle = jax.jit(jax.shard_map(lambda index: jax_ep.layout(index, group=group), **over_ranks))(flat[1])
    send = jax.jit(jax.shard_map(lambda x, handle: jax_ep.dispatch(x, handle=handle).x, **over_ranks))
    assert_same(np.asarray(send(flat[0], handle)).reshape(RANKS, ROWS, HIDDEN), oracle.dispatch(given.x, lay))


def test_capacities_of_groups():
    for case in cases.CASES:
        with jax_ep.create_group(
            make_mesh((case.ranks,)),
            "ep",
            max_tokens=max(case.tokens, 1),
            hidden=case.hidden,
            num_experts=case.num_experts,
            top_k=case.top_k,
            alignment=case.alignment,
            capacity=case.capacity,
            capacity_factor=case.capacity_factor,
        ) as group:
            assert group.rows_capacity(case.tokens, row_order=case.row_order) == case.rows, str(case)
