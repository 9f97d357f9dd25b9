"""Meshes and arrays that mean the same in one process and in several (`pytest --processes 2`)."""

from __future__ import annotations

import collections
import itertools
import os
import pickle
from typing import Any

import jax
import numpy as np
import processes
import pytest
from jax._src import distributed  # the client of the coordination service has no public name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

PATIENCE = 200.0  # seconds for what another process is about to say: less than a test may take, more than it does
COUNT, NUMBER = int(os.environ.get(processes.COUNT, "1")), int(os.environ.get(processes.NUMBER, "0"))

platform = "cpu"  # of devices where a test asks for none: `pytest --on gpu`

_fetches: collections.Counter[str] = collections.Counter()  # of each test
_said = ""  # the key of this process's last message


def join() -> None:
    """Makes this process one of several, as the environment says. Before any backend starts."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        num_processes=COUNT,
        process_id=NUMBER,
        cluster_detection_method="deactivate",
        initialization_timeout=60,
        shutdown_timeout_seconds=20,
    )


def devices(count: int, on: str | None = None) -> list[jax.Device]:
    """`count` devices, taken from the processes in turn, so that every process has some to run on."""
    on = on or platform
    of_process = [[d for d in jax.devices(on) if d.process_index == p] for p in range(COUNT)]
    in_turn = [d for row in itertools.zip_longest(*of_process) for d in row if d is not None]
    if count < COUNT:
        pytest.skip(f"{count} devices for {COUNT} processes: some would have nothing to run")
    if count > len(in_turn):
        pytest.skip(f"needs {count} {on} devices, and there are {len(in_turn)}")
    return in_turn[:count]


def at_most(count: int) -> int:
    """The ranks of a test that likes so many and can do with one, as on a machine with one GPU."""
    return count if platform == "cpu" else min(count, len(jax.devices(platform)))


def mesh(
    shape: tuple[int, ...] | int,
    axes: tuple[str, ...] = ("ep",),
    kind: AxisType = AxisType.Auto,
    on: str | None = None,
) -> jax.sharding.Mesh:
    """A mesh of devices of this shape."""
    shape = (shape,) if isinstance(shape, int) else shape
    grid = np.array(devices(int(np.prod(shape)), on)).reshape(shape)
    return jax.sharding.Mesh(grid, axes, axis_types=(kind,) * len(axes))


def put(where: jax.sharding.Mesh, spec: Any, tree: Any) -> Any:
    """The arrays of `tree`, of which every process has the whole, laid over a mesh."""
    if not isinstance(spec, P):
        spec = P(*spec) if isinstance(spec, tuple) else P(spec)
    sharding = NamedSharding(where, spec)

    def place(array: Any) -> jax.Array:
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(place, tree)


def fetch(tree: Any) -> Any:
    """The whole of every array of `tree`, as NumPy arrays, on every process.

    Not by a collective of JAX: those of CPUs may widen a dtype, and bits are what is to be seen here.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if all(leaf.is_fully_addressable for leaf in leaves):
        return jax.tree.map(np.asarray, tree)
    mine = [
        [(shard.index, np.asarray(shard.data)) for shard in leaf.addressable_shards if shard.replica_id == 0]
        for leaf in leaves
    ]
    wholes = [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
    test = os.environ["PYTEST_CURRENT_TEST"]
    _fetches[test] += 1
    for theirs in exchange(f"{test}: arrays {_fetches[test]}", pickle.dumps(mine)):
        for whole, shards in zip(wholes, pickle.loads(theirs), strict=True):
            for index, data in shards:
                whole[index] = data
    return jax.tree.unflatten(treedef, wholes)


def disagreement(test: str, outcome: str) -> str:
    """Says how the outcome of a test differs between processes; "" where it doesn't."""
    # Who fails alone may leave the others waiting for it where they never get on: no use in waiting for them.
    seconds = PATIENCE if outcome == "passed" else 30
    try:
        outcomes = exchange(f"{test}: outcome", outcome.encode(), seconds)
    except TimeoutError as error:
        return f"{outcome} in process {NUMBER}; {error}"
    if len(set(outcomes)) == 1:
        return ""
    return ", ".join(f"{theirs.decode()} in process {process}" for process, theirs in enumerate(outcomes))


def exchange(key: str, message: bytes, seconds: float = PATIENCE) -> list[bytes]:
    """What every process passed under this key, which is used once. TimeoutError where one does not get here."""
    global _said
    client = distributed.global_state.client
    before, _said = _said, f"{key}/{NUMBER}"
    client.key_value_set_bytes(_said, message)
    messages = []
    for process in range(COUNT):
        try:
            messages.append(client.blocking_key_value_get_bytes(f"{key}/{process}", int(1000 * seconds)))
        except jax.errors.JaxRuntimeError as error:
            raise TimeoutError(f"process {process} did not get to {key!r} in {seconds:g} s") from error
    if before:
        client.key_value_delete(before)  # nobody is still about to read it: all have come on to this call
    return messages
