"""Groups: static, distinct, open or closed, and able to say what they run."""

from __future__ import annotations

import dataclasses

import jax
import pytest

import jax_ep

SIZES = {"max_tokens": 8, "hidden": 4, "num_experts": 8, "top_k": 2}


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), ("dp", "ep"), devices=jax.devices("cpu")[:8])


def test_a_group_knows_its_numbers(mesh):
    group = jax_ep.create_group(mesh, "ep", **SIZES, capacity_factor=1.5, alignment=8)
    assert (group.axis, group.num_ranks, group.num_local_experts) == (("ep",), 4, 2)
    assert (group.max_tokens, group.hidden, group.num_experts, group.top_k) == (8, 4, 8, 2)
    assert (group.dtype.name, group.capacity, group.capacity_factor, group.alignment) == (
        "bfloat16",
        None,
        1.5,
        8,
    )
    assert group.rows_capacity(8) == 24
    assert jax_ep.create_group(mesh, ("dp", "ep"), **SIZES).num_ranks == 8
    assert jax_ep.create_group(mesh.abstract_mesh, "ep", **SIZES).num_ranks == 4


def test_a_group_is_frozen_hashable_and_equal_to_itself_only(mesh):
    first, second = (jax_ep.create_group(mesh, "ep", **SIZES) for _ in range(2))
    assert first == first and hash(first) == hash(first)
    assert first != second, "what was compiled for the one must not run for the other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.serial = second.serial


def test_a_group_is_closed_once_and_for_all(mesh):
    with jax_ep.create_group(mesh, "ep", **SIZES) as group:
        assert not group.closed
        other = jax_ep.create_group(mesh, "ep", **SIZES)
    assert group.closed and not other.closed
    group.close()
    assert group.closed


def test_a_group_says_what_it_runs_and_why(mesh):
    forced = jax_ep.create_group(mesh, "ep", **SIZES, implementation="reference")
    assert forced.implementation == "reference" and "asked for" in forced.implementation_reason
    chosen = jax_ep.create_group(mesh, "ep", **SIZES)
    assert chosen.implementation == "reference" and "devices are cpu" in chosen.implementation_reason
    assert chosen.bytes == 0
    with pytest.raises(RuntimeError, match='implementation="cuda".*use implementation="auto"'):
        jax_ep.create_group(mesh, "ep", **SIZES, implementation="cuda")
    with pytest.raises(ValueError, match="got 'gpu'"):
        jax_ep.create_group(mesh, "ep", **SIZES, implementation="gpu")


def test_bad_meshes_and_axes_are_refused(mesh):
    with pytest.raises(ValueError, match=r"expected axes of the mesh .*'ep': 4.*\['pp'\]"):
        jax_ep.create_group(mesh, "pp", **SIZES)
    with pytest.raises(TypeError, match=r"jax.make_mesh.*got list"):
        jax_ep.create_group(list(mesh.devices.flat), "ep", **SIZES)
