"""How tokens and weights of an MoE layer lie on a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class MoESharding:
    """Mesh axes of an MoE layer, over and above those of its group.

    Attributes:
      x: how the tokens [..., H] are split, as a PartitionSpec of their leading dimensions. Default: the first
        dimension over the group's axes. Axes of the group that it leaves out hold the same tokens, as in decoding:
        each of their ranks sends its share and all get the whole result.
      fsdp: axes over which the expert weights are split once more, along H, and gathered for each use.
      tp: axes over which the experts are split along F; their partial results are summed over these axes.
    """

    x: P | None = None
    fsdp: tuple[str, ...] = ()
    tp: tuple[str, ...] = ()

    def x_spec(self, group_axes: tuple[str, ...]) -> P:
        """The spec of the tokens."""
        return P(group_axes) if self.x is None else self.x

    def x_axes(self, group_axes: tuple[str, ...]) -> tuple[str, ...]:
        """Mesh axes over which tokens differ: what losses and statistics are taken over."""
        axes: list[str] = []
        for entry in self.x_spec(group_axes):
            axes += (entry,) if isinstance(entry, str) else tuple(entry or ())
        return tuple(axes)

    def same_tokens_axes(self, group_axes: tuple[str, ...]) -> tuple[str, ...]:
        """Axes of the group whose ranks hold the same tokens."""
        return tuple(name for name in group_axes if name not in self.x_axes(group_axes))

    def check(self, mesh_axes: tuple[Any, ...], group_axes: tuple[str, ...]) -> None:
        """ValueError if an axis is unknown or has two jobs."""
        for name in ("fsdp", "tp"):
            if isinstance(getattr(self, name), str):
                raise ValueError(
                    f"moe sharding {name}: expected a tuple of mesh axes, got {getattr(self, name)!r}; write "
                    f"{name}=({getattr(self, name)!r},)"
                )
        jobs = {"the group": group_axes, "fsdp": self.fsdp, "tp": self.tp}
        for job, axes in (*jobs.items(), ("x", self.x_axes(group_axes))):
            unknown = [name for name in axes if name not in mesh_axes]
            if unknown:
                raise ValueError(f"moe sharding {job}: expected axes of the mesh {mesh_axes}, got {unknown}")
        experts = [*group_axes, *self.fsdp, *self.tp]
        if len(set(experts)) != len(experts):
            raise ValueError(f"moe sharding: expected different axes for the group, fsdp and tp, got {jobs}")
        both = set(self.tp) & set(self.x_axes(group_axes))
        if both:
            raise ValueError(
                f"moe sharding x: expected the same tokens along the tp axes {self.tp}, got tokens split over "
                f"{sorted(both)}; leave these out of x, or make them fsdp axes"
            )


def gather(weight: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """A weight split along `dim` over `axes`, whole. Its transpose sums and splits the gradient."""
    return jax.lax.all_gather(weight, axes, axis=dim, tiled=True) if axes else weight


def take_share(tree: Any, axes: tuple[str, ...], fills: Any) -> Any:
    """This rank's share of tokens [T, ...] of which every rank along `axes` has all: [ceil(T / ranks), ...].

    Args:
      tree: arrays [T, ...].
      axes: the mesh axes.
      fills: for each array, what the places past the last token hold.
    """
    ranks, rank = jax.lax.axis_size(axes), jax.lax.axis_index(axes)

    def share(array: jax.Array, fill: Any) -> jax.Array:
        each = -(-array.shape[0] // ranks)
        padding = [(0, each * ranks - array.shape[0])] + [(0, 0)] * (array.ndim - 1)
        padded = jnp.pad(array, padding, constant_values=fill)
        return jax.lax.dynamic_slice_in_dim(padded, rank * each, each)

    return jax.tree.map(share, tree, fills)


def join_shares(share: jax.Array, axes: tuple[str, ...], tokens: int) -> jax.Array:
    """The whole [T, ...] from every rank's share, the same on all ranks along `axes`, and known to be."""
    ranks, rank = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    each = share.shape[0]
    # A sum with zeros rather than an all-gather: shard_map takes its result for the same everywhere.
    whole = jnp.zeros((ranks * each, *share.shape[1:]), share.dtype)
    whole = jax.lax.dynamic_update_slice_in_dim(whole, share, rank * each, 0)
    return jax.lax.psum(whole, axes)[:tokens]
