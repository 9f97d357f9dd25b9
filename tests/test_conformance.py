"""Layout, dispatch and combine against the oracle, bit for bit: every case of the table, many draws each."""

from __future__ import annotations

from typing import Any

import cases
import hypothesis
import jax
import numpy as np
import oracle
import pytest
import world
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jax_ep

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def implementation(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=cases.CASES, ids=str)
def program(request, implementation):
    program = Program(request.param, implementation)
    yield program
    program.group.close()


class Program:
    """One case, compiled once: every operation on the same inputs, in one jitted shard_map."""

    def __init__(self, case: cases.Case, implementation: Any):
        self.case = case
        element = 1 if case.wire else np.dtype(cases.DTYPES[case.dtype]).itemsize
        if implementation == "cuda" and case.hidden * element % 16:
            pytest.skip(f"the kernels refuse rows of {case.hidden * element} bytes, which are no multiple of 16")
        self.mesh = world.mesh(case.ranks, on="gpu" if implementation == "cuda" else "cpu")
        self.group = jax_ep.create_group(
            self.mesh,
            "ep",
            max_tokens=max(case.tokens, 1),
            hidden=case.hidden,
            num_experts=case.num_experts,
            top_k=case.top_k,
            dtype=cases.DTYPES[case.dtype],
            capacity=case.capacity,
            capacity_factor=case.capacity_factor,
            alignment=case.alignment,
            implementation=implementation,
        )
        self.call = jax.jit(jax.shard_map(self._of_rank, mesh=self.mesh, in_specs=P("ep"), out_specs=P("ep")))

    def __call__(self, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays with the rank leading, in and out."""
        ranks = self.case.ranks
        # jax 0.11.2 crashes on arguments of shard_map without elements: `_of_rank` cuts them out of one row.
        arrays = {name: a if a.shape[1] else np.zeros((ranks, 1, *a.shape[2:]), a.dtype) for name, a in arrays.items()}
        with jax.enable_x64(self.case.index_dtype in ("int64", "uint64")):
            flat = {name: a.reshape(ranks * a.shape[1], *a.shape[2:]) for name, a in arrays.items()}
            out = world.fetch(self.call(world.put(self.mesh, "ep", flat)))
            return {name: a.reshape(ranks, len(a) // ranks, *a.shape[1:]) for name, a in out.items()}

    def _of_rank(self, of: dict[str, jax.Array]) -> dict[str, jax.Array]:
        case = self.case
        options: dict[str, Any] = {"group": self.group, "row_order": case.row_order}
        of = {name: a[: case.rows if name in ("y", "row_weights") else case.tokens] for name, a in of.items()}
        handle = jax_ep.layout(of["index"], **options)
        rows = jax_ep.dispatch(of["x"], of["index"], of["weights"], **options)
        again = jax_ep.dispatch(of["x"], of["index"], of["weights"], handle=handle)
        out = (
            _handle_arrays("layout", handle)
            | _handle_arrays("dispatch.handle", rows.handle)
            | _rows_arrays("dispatch", rows)
            | _rows_arrays("dispatch(handle=)", again)
            | {"dispatch(x).x": jax_ep.dispatch(of["x"], of["index"], **options).x}
            | {"dispatch(x, handle=).x": jax_ep.dispatch(of["x"], handle=handle).x}
            | {"combine": jax_ep.combine(of["y"], handle)}
            | {"combine(dispatch)": jax_ep.combine(rows.x, rows.handle)}
        )
        if case.row_order == "expert":
            out["combine(weights)"] = jax_ep.combine(of["y"], handle, of["row_weights"])
            out["combine(dispatch, weights)"] = jax_ep.combine(rows.x, rows.handle, rows.weights)
        if case.wire:
            quantized = (of["payload"], of["scales"])
            wire = {**options, "wire": case.wire}
            raw = {**options, "dequantize": False}
            out |= _rows_arrays("wire", jax_ep.dispatch(of["x"], of["index"], of["weights"], **wire))
            out |= _rows_arrays("wire, raw", jax_ep.dispatch(of["x"], of["index"], **wire, dequantize=False))
            out |= _rows_arrays("quantized", jax_ep.dispatch(quantized, of["index"], of["weights"], **options))
            out |= _rows_arrays("quantized, raw", jax_ep.dispatch(quantized, of["index"], **raw))
        return out


def _handle_arrays(name: str, handle: jax_ep.Handle) -> dict[str, jax.Array]:
    fields = ("slots", "group_sizes", "counts", "num_dropped", "num_invalid")
    return {f"{name}.{field}": getattr(handle, field) for field in fields}


def _rows_arrays(name: str, rows: jax_ep.Rows) -> dict[str, jax.Array]:
    fields = ("x", "weights", "group_sizes", "counts", "index", "scales")
    arrays = {f"{name}.{field}": getattr(rows, field) for field in fields}
    return {name: array for name, array in arrays.items() if array is not None}


def expected(case: cases.Case, given: cases.Inputs, lay: oracle.Layout) -> dict[str, np.ndarray]:
    """The same names as `Program` returns, from the oracle."""
    rows = oracle.dispatch(given.x, lay)
    weights = oracle.dispatch_weights(given.weights, lay)
    common = {"group_sizes": lay.group_sizes, "counts": lay.counts}
    if case.row_order == "rank":
        common["index"] = oracle.local_index(lay)
    handle = {
        "slots": lay.slots.reshape(case.ranks, case.ranks, case.tokens, case.top_k),
        "group_sizes": lay.group_sizes,
        "counts": lay.counts,
        "num_dropped": lay.num_dropped,
        "num_invalid": lay.num_invalid,
    }
    groups = {
        "layout": handle,
        "dispatch.handle": handle,
        "dispatch": common | {"x": rows, "weights": weights},
        "dispatch(handle=)": common | {"x": rows, "weights": weights},
        "dispatch(x)": {"x": rows},
        "dispatch(x, handle=)": {"x": rows},
    }
    out = {"combine": oracle.combine(given.y, lay), "combine(dispatch)": oracle.combine(rows, lay)}
    if case.row_order == "expert":
        out["combine(weights)"] = oracle.combine(given.y, lay, given.row_weights)
        out["combine(dispatch, weights)"] = oracle.combine(rows, lay, weights)
    if case.wire:
        payload, scales = (oracle.dispatch(a, lay) for a in oracle.quantize(given.x, case.scale_format))
        groups["wire"] = groups["quantized"] = common | {
            "x": oracle.dequantize(payload, scales, given.x.dtype),
            "weights": weights,
        }
        groups["wire, raw"] = groups["quantized, raw"] = common | {"x": payload, "scales": scales}
    return out | {f"{group}.{field}": a for group, fields in groups.items() for field, a in fields.items()}


def inputs_and_expected(case: cases.Case, draw: cases.Draw) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What `Program` is given, and what it must return."""
    given, lay = cases.inputs(case, draw)
    arrays = dict(vars(given))
    if case.wire:
        arrays["payload"], arrays["scales"] = oracle.quantize(given.x, case.scale_format)
    return arrays, expected(case, given, lay)


def assert_same_bits(actual: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert actual.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_array_equal(oracle.bits(actual[name]), oracle.bits(array), err_msg=name)


@hypothesis.given(data=st.data())
def test_every_bit_is_the_oracles(program, data):
    arrays, wanted = inputs_and_expected(program.case, data.draw(cases.draws(program.case)))
    assert_same_bits(program(**arrays), wanted)


@pytest.mark.parametrize("row_order", ["expert", "rank"])
def test_nan_in_a_token_reaches_that_token_only(row_order):
    """Said without the oracle: what the other tokens get does not depend on it at all."""
    case = cases.Case(3, 8, 3, 6, alignment=4, capacity=8, row_order=row_order)
    program = Program(case, "reference")
    draw = cases.Draw(1, "uniform", (8, 8, 8), none=True, invalid=True, duplicates=True, special="")
    given, lay = cases.inputs(case, draw)
    clean = program(**vars(given))["combine(dispatch)"]
    reached = 0
    for rank, token in np.ndindex(3, 8):
        poisoned = given.x.copy()
        poisoned[rank, token] = np.nan
        out = program(**{**vars(given), "x": poisoned})["combine(dispatch)"].copy()
        has_row = bool((lay.slots[:, rank, token] >= 0).any())
        assert np.isnan(out[rank, token]).all() == has_row
        reached += has_row
        out[rank, token] = clean[rank, token]
        np.testing.assert_array_equal(oracle.bits(out), oracle.bits(clean))
    assert 0 < reached < 24  # some of them lost their rows
    program.group.close()
