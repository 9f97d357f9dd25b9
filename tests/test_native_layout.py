"""The compiled layout: bit for bit the reference's, used where it is present, and lowered as it should be for CUDA."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import world
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import ffi
from jax_ep.layout import place_rows

needs_extension = pytest.mark.skipif(
    "cpu" not in ffi.layout_platforms(), reason=f"no compiled layout: {jax_ep.build_info()['reason']}"
)
# ranks, tokens, top_k, local experts, capacity, alignment, row order
SHAPES = [
    (2, 50, 3, 4, 40, 1, "expert"),
    (2, 50, 3, 4, 40, 8, "expert"),
    (3, 7, 2, 5, 0, 1, "expert"),
    (1, 0, 2, 5, 8, 8, "expert"),
    (2, 40, 16, 48, 640, 128, "expert"),
    (1, 64, 4, 300, 256, 1, "expert"),
    (4, 30, 4, 3, 17, 1, "rank"),
    (2, 70, 2, 2, 140, 1, "rank"),
]


@functools.cache
def compiled(shape, place):
    _, _, _, local_experts, capacity, alignment, row_order = shape
    return jax.jit(
        functools.partial(
            place,
            num_local_experts=local_experts,
            capacity=capacity,
            alignment=alignment,
            row_order=row_order,
        )
    )


@needs_extension
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), lean=st.sampled_from([0, 1, 4]), none=st.sampled_from([0, 0.2, 1]))
def test_equals_the_reference_and_the_numpy_loop(shape, seed, lean, none):
    ranks, tokens, top_k, local_experts, capacity, alignment, row_order = shape
    rng = np.random.default_rng(seed)
    experts = ranks * local_experts
    index = (experts * rng.random((ranks, tokens, top_k)) ** (1 + lean)).astype(np.int32)
    index[rng.random(index.shape) < none] = -1
    expected = oracle.layout(index, experts, capacity, alignment=alignment, row_order=row_order)
    for rank in range(ranks):
        first = jnp.int32(rank * local_experts)
        native = compiled(shape, ffi.place_rows)(index, first)
        reference = compiled(shape, place_rows)(index, first)
        loop = expected.slots, expected.group_sizes, expected.counts, expected.num_dropped
        for ours, theirs, looped in zip(native, reference, loop, strict=True):
            np.testing.assert_array_equal(ours, theirs)
            np.testing.assert_array_equal(ours, looped[rank])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_the_numpy_loop(shape):
    if "cuda" not in ffi.layout_platforms():
        pytest.skip("this build has no CUDA kernels")
    ranks, tokens, top_k, local_experts, capacity, alignment, row_order = shape
    experts = ranks * local_experts
    gpu = jax.devices("gpu")[0]
    for seed in range(10):
        rng = np.random.default_rng(seed)
        index = rng.integers(-1, experts, (ranks, tokens, top_k), np.int32)
        if seed % 2:
            index = np.minimum(index, local_experts)
        expected = oracle.layout(index, experts, capacity, alignment=alignment, row_order=row_order)
        for rank in range(ranks):
            arguments = jax.device_put((index, np.int32(rank * local_experts)), gpu)
            slots, sizes, counts, dropped = compiled(shape, ffi.place_rows)(*arguments)
            np.testing.assert_array_equal(slots, expected.slots[rank])
            np.testing.assert_array_equal(sizes, expected.group_sizes[rank])
            np.testing.assert_array_equal(counts, expected.counts[rank])
            np.testing.assert_array_equal(dropped, expected.num_dropped[rank])


def make_group(**changes):
    mesh = world.mesh(2, on="cpu")
    sizes = {"max_tokens": 8, "hidden": 4, "num_experts": 6, "top_k": 2, "dtype": "float32"}
    return mesh, jax_ep.create_group(mesh, "ep", **{**sizes, **changes})


def layout_on(mesh, group, **options):
    return jax.jit(
        jax.shard_map(
            lambda index: jax_ep.layout(index, group=group, **options), mesh=mesh, in_specs=P("ep"), out_specs=P("ep")
        )
    )


@needs_extension
def test_the_public_layout_calls_it():
    mesh, group = make_group()
    index = jnp.zeros((16, 2), jnp.int32)
    assert ffi.LAYOUT in layout_on(mesh, group).lower(index).as_text()


def test_without_the_extension_the_reference_decides(monkeypatch):
    monkeypatch.setattr(ffi, "layout_platforms", lambda: frozenset())
    mesh, group = make_group()
    index = jnp.asarray(np.random.default_rng(0).integers(0, 6, (16, 2)), jnp.int32)
    assert ffi.LAYOUT not in layout_on(mesh, group).lower(index).as_text()
    expected = oracle.layout(np.asarray(index).reshape(2, 8, 2), 6, 32)
    np.testing.assert_array_equal(layout_on(mesh, group)(index).slots, expected.slots.reshape(4, 8, 2))


@pytest.mark.parametrize("row_order", ["expert", "rank"])
def test_lowering_for_cuda(monkeypatch, row_order):
    """Target, attributes, operands; one gather of the indices and no large constant. No GPU is needed to look."""
    monkeypatch.setattr(ffi, "layout_platforms", lambda: frozenset({"cuda"}))
    monkeypatch.setattr(ffi, "layout_scratch_words", lambda local_experts: 128 * local_experts)
    mesh, group = make_group(capacity=20, alignment=8)
    exported = jax.export.export(
        layout_on(mesh, group, row_order=row_order),
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(ffi.LAYOUT)],
    )(jax.ShapeDtypeStruct((16, 2), jnp.int32))
    text = exported.mlir_module()
    (call,) = re.findall(rf"custom_call @{ffi.LAYOUT}\(.*", text)
    assert call.count("%") >= 2 and "(tensor<2x8x2xi32>, tensor<i32>)" in call
    results = ["tensor<2x8x2xi32>", "tensor<3xi32>", "tensor<3xi32>", "tensor<1xi32>", "tensor<384xi32>"]
    assert ", ".join(results) in call
    capacity, alignment, order = (20, 1, 1) if row_order == "rank" else (24, 8, 0)
    for attribute in (f"capacity = {capacity} : i64", f"alignment = {alignment} : i64", f"row_order = {order} : i64"):
        assert attribute in call, attribute
    assert "has_side_effect = true" not in call
    assert text.count('"stablehlo.all_gather"') == 1 and "all_to_all" not in text
    constants = [re.findall(r"\d+(?=x)", shape) for shape in re.findall(r"constant dense<.*> : tensor<([\dx]*)", text)]
    assert all(np.prod([int(n) for n in dims]) <= 8 for dims in constants if dims)
