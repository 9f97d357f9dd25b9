"""Meshes and arrays that mean the same in one process and in several (`pytest --processes 2`)."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def devices(count: int) -> list[jax.Device]:
    """`count` CPU devices, taken from the processes in turn, so that every process has some to run on."""
    of_process = [[d for d in jax.devices("cpu") if d.process_index == p] for p in range(jax.process_count())]
    in_turn = [d for row in itertools.zip_longest(*of_process) for d in row if d is not None]
    if count < jax.process_count():
        pytest.skip(f"{count} devices for {jax.process_count()} processes: some would have nothing to run")
    if count > len(in_turn):
        pytest.skip(f"needs {count} CPU devices, and there are {len(in_turn)}")
    return in_turn[:count]


def mesh(
    shape: tuple[int, ...] | int, axes: tuple[str, ...] = ("ep",), kind: AxisType = AxisType.Auto
) -> jax.sharding.Mesh:
    """A mesh of CPU devices of this shape."""
    shape = (shape,) if isinstance(shape, int) else shape
    grid = np.array(devices(int(np.prod(shape)))).reshape(shape)
    return jax.sharding.Mesh(grid, axes, axis_types=(kind,) * len(axes))


def put(where: jax.sharding.Mesh, spec: Any, tree: Any) -> Any:
    """The arrays of `tree`, of which every process has the whole, laid over a mesh."""

    def place(array: Any) -> jax.Array:
        array = np.asarray(array)
        return jax.make_array_from_callback(
            array.shape,
            NamedSharding(where, P(*spec) if isinstance(spec, tuple) else P(spec)),
            lambda i: array[i],
        )

    return jax.tree.map(place, tree)


def fetch(tree: Any) -> Any:
    """The whole of every array of `tree`, as NumPy arrays, on every process."""
    return jax.tree.map(
        lambda a: (
            np.asarray(a)
            if a.is_fully_addressable or a.is_fully_replicated
            else multihost_utils.process_allgather(a, tiled=True)
        ),
        tree,
    )
