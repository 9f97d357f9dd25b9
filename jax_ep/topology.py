"""Which devices form a group: pure functions of a mesh and its axes, tested without devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Axis = str | Sequence[str]


def axis_names(axis: Axis) -> tuple[str, ...]:
    """`axis` as a tuple of mesh axis names; one name stands for itself.

    Example: `axis_names("ep") == ("ep",)`, `axis_names(("node", "gpu")) == ("node", "gpu")`.
    """
    names = (axis,) if isinstance(axis, str) or not isinstance(axis, Sequence) else tuple(axis)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis: expected a mesh axis name or a tuple of them, got {axis!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"axis: expected distinct mesh axes, got {names}")
    return names


def count_ranks(shape: Mapping[Any, int], axes: tuple[str, ...]) -> int:
    """Ranks of a group over `axes` of a mesh of this `shape` (axis name to size)."""
    missing = [name for name in axes if name not in shape]
    if missing:
        raise ValueError(
            f"axis: expected axes of the mesh {dict(shape)}, got {axes}; {missing} are not among them: name the "
            "mesh's, or make the mesh with these"
        )
    return math.prod(shape[name] for name in axes)


def member_devices(devices: np.ndarray, mesh_axes: tuple[str, ...], axes: tuple[str, ...]) -> np.ndarray:
    """The devices of each group of a mesh, [groups, ranks], in rank order.

    Ranks count row-major over `axes` in the order given, as `jax.lax.axis_index(axes)` does. Groups are the sets of
    devices that differ in `axes` only.

    Args:
      devices: the mesh's array of devices, one dimension a mesh axis.
      mesh_axes: names of those dimensions.
      axes: the group's axes.
    """
    where = [mesh_axes.index(name) for name in axes]
    rest = [i for i in range(devices.ndim) if i not in where]
    ranks = math.prod(devices.shape[i] for i in where)
    return devices.transpose(*rest, *where).reshape(-1, ranks)
