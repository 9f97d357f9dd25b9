"""Groups: the ranks that share one set of experts, and what was decided for them at creation."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import bootstrap
from jax_ep.config import GroupConfig, RowOrder, check_integer
from jax_ep.topology import Axis, axis_names, count_ranks

Implementation = Literal["cuda", "reference"]

_serials = itertools.count(1)
_closed: set[int] = set()


@dataclasses.dataclass(frozen=True)
class Group:
    """The ranks along some axes of a mesh that share one set of experts; made by `create_group`.

    Frozen and hashable, so that it can be a static value inside jit. Two groups are never equal, even of equal
    numbers: the creation serial takes part, because what was compiled for a closed group must not run for a new one.
    Other mesh axes are untouched: there is one such set of ranks for each position along them.

    Attributes:
      mesh: the mesh it was made for.
      axis: the mesh axes whose product is the group; rank = `jax.lax.axis_index(group.axis)`.
      config: the static numbers; each can be read from the group directly, too.
      implementation: "cuda" or "reference": what its operations run.
      implementation_reason: why, in words.
      bytes: device memory that the group holds on each rank, beyond what XLA allocates for a program.
      fingerprint: of its numbers; equal for equal groups in every process.
      serial: counts the groups of this process.
    """

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    axis: tuple[str, ...]
    config: GroupConfig
    implementation: Implementation
    implementation_reason: str
    bytes: int
    fingerprint: int
    serial: int

    @property
    def num_ranks(self) -> int:
        return self.config.num_ranks

    @property
    def max_tokens(self) -> int:
        return self.config.max_tokens

    @property
    def hidden(self) -> int:
        return self.config.hidden

    @property
    def num_experts(self) -> int:
        return self.config.num_experts

    @property
    def num_local_experts(self) -> int:
        return self.config.num_local_experts

    @property
    def top_k(self) -> int:
        return self.config.top_k

    @property
    def dtype(self) -> np.dtype:
        return self.config.dtype

    @property
    def capacity(self) -> int | None:
        return self.config.capacity

    @property
    def capacity_factor(self) -> float | None:
        return self.config.capacity_factor

    @property
    def alignment(self) -> int:
        return self.config.alignment

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.serial in _closed

    def close(self) -> None:
        """Give back what the group holds; closing twice is harmless.

        Tracing an operation of a closed group raises, and so do programs that were compiled for its kernels.
        """
        was_open = not self.closed
        _closed.add(self.serial)
        if was_open and self.implementation == "cuda":
            bootstrap.close_group(self.serial)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def rows_capacity(
        self,
        tokens: int,
        top_k: int | None = None,
        alignment: int | None = None,
        row_order: RowOrder = "expert",
    ) -> int:
        """Rows C that each rank receives in a call with `tokens` tokens a rank: see `GroupConfig.rows_capacity`."""
        return self.config.rows_capacity(tokens, top_k, alignment, row_order)


def create_group(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    axis: Axis,
    *,
    max_tokens: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    dtype: Any = jnp.bfloat16,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    alignment: int = 1,
    implementation: Literal["auto", "cuda", "reference"] = "auto",
    num_sms: int | None = None,
    timeout_s: float = 100.0,
) -> Group:
    """Make a group of the ranks along `axis` of `mesh`.

    Args:
      mesh: the mesh that shard_map will be given.
      axis: one mesh axis, or a tuple of them (their product is the group, row-major).
      max_tokens: most tokens a rank passes in one call.
      hidden: length of a token's vector (H).
      num_experts: experts of the whole group (E), a multiple of the ranks; rank r owns experts r·E_l to (r+1)·E_l - 1.
      top_k: most experts a token picks (K).
      dtype: float16, bfloat16 or float32: the widest dtype of tokens and rows.
      capacity: rows that each rank receives at most (C). Rows beyond are dropped and counted.
      capacity_factor: the same as a multiple of T·K; 1.0 is what perfectly balanced routing needs. With neither,
        C = R·T·min(K, E_l) and a little for the alignment: nothing is dropped, unless a token names an expert twice.
      alignment: rows of each expert are padded to a multiple of this (A), as some grouped matmuls want.
      implementation: "auto" takes the kernels where they can run and says why in `group.implementation_reason`;
        "reference" forces pure JAX; "cuda" forces the kernels or raises.
      num_sms: SMs that a kernel of this group takes, where a call does not say otherwise. None leaves it to jax_ep.
      timeout_s: how long a kernel waits for a peer before it ends the program with a message.

    With kernels, every process of the mesh must make its groups in the same order.

    Raises:
      ValueError, TypeError: an argument that does not fit, with what was expected.
      RuntimeError: implementation="cuda" where the kernels cannot run, or GPU memory for them cannot be had.

    Example:
      >>> mesh = jax.make_mesh((8,), ("ep",))
      >>> group = create_group(mesh, "ep", max_tokens=1024, hidden=512, num_experts=64, top_k=4)
      >>> group.num_ranks, group.num_local_experts
      (8, 8)
    """
    axes = axis_names(axis)
    if not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh (see jax.make_mesh), got {type(mesh).__name__}")
    config = GroupConfig(
        num_ranks=count_ranks(mesh.shape, axes),
        max_tokens=max_tokens,
        hidden=hidden,
        num_experts=num_experts,
        top_k=top_k,
        dtype=dtype,
        capacity=capacity,
        capacity_factor=capacity_factor,
        alignment=alignment,
    )
    if num_sms is not None:
        check_integer("num_sms", num_sms, 1)
    if not timeout_s > 0:
        raise ValueError(f"timeout_s: expected a time above 0, got {timeout_s}")
    chosen, reason = _choose_implementation(implementation, mesh, axes, config)
    serial, fingerprint = next(_serials), bootstrap.fingerprint(config, axes)
    held = 0
    if chosen == "cuda":
        assert isinstance(mesh, jax.sharding.Mesh)
        held = bootstrap.group_bytes(config)
        try:
            bootstrap.open_group(
                serial, mesh, axes, config, fingerprint=fingerprint, timeout_s=timeout_s, num_sms=num_sms
            )
        except RuntimeError:
            bootstrap.close_group(serial)
            raise
    return Group(mesh, axes, config, chosen, reason, held, fingerprint, serial)


def _choose_implementation(
    wanted: str, mesh: Any, axes: tuple[str, ...], config: GroupConfig
) -> tuple[Implementation, str]:
    if wanted == "reference":
        return "reference", 'asked for by implementation="reference"'
    if wanted not in ("auto", "cuda"):
        raise ValueError(f'implementation: expected "auto", "cuda" or "reference", got {wanted!r}')
    obstacle = bootstrap.why_not(mesh, axes, config)
    if obstacle is None:
        return "cuda", "all ranks are Hopper GPUs of one host that reach each other's memory"
    if wanted == "auto":
        return "reference", obstacle
    raise RuntimeError(
        f'implementation: expected kernels that can run, for implementation="cuda", got none: {obstacle}; '
        'use implementation="auto" or "reference"'
    )
