"""The MoE layer as functions: router, dispatch, experts, combine, losses and statistics."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_ep import ops, router
from jax_ep.experts import ExpertParams, apply_experts, init_experts
from jax_ep.group import Group


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """What an MoE layer computes, apart from where.

    Attributes:
      hidden: length of a token's vector (H).
      intermediate: inner width of an expert (F).
      num_experts: E.
      top_k: experts a token picks (K).
      score, num_groups, top_groups, group_score, scale, renormalize, pre_softmax: as in `jax_ep.route`.
      use_bias: whether experts are selected with a bias that `jax_ep.update_bias` keeps balancing (DeepSeek-V3).
      wire: None, "fp8" or "fp8_ue8m0", as in `jax_ep.dispatch`.
      sequence_factor: factor of the sequence-wise balance loss.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    score: router.Score = "softmax"
    num_groups: int = 1
    top_groups: int | None = None
    group_score: router.GroupScore = "top2_sum"
    scale: float = 1.0
    renormalize: bool | None = None
    pre_softmax: bool = True
    use_bias: bool = False
    wire: ops.Wire | None = None
    sequence_factor: float = 1e-4

    def route(self, logits: jax.Array, bias: jax.Array | None = None) -> router.Routing:
        """`jax_ep.route` with this layer's options."""
        return router.route(
            logits,
            bias,
            top_k=self.top_k,
            score=self.score,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_score=self.group_score,
            scale=self.scale,
            renormalize=self.renormalize,
            pre_softmax=self.pre_softmax,
        )


@functools.partial(jax.tree_util.register_dataclass, data_fields=("router", "experts"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class MoEParams:
    """Trainable weights of an MoE layer (a pytree).

    Attributes:
      router: [H, E].
      experts: `ExpertParams`, sharded over the group's axes by their first dimension.
    """

    router: jax.Array
    experts: ExpertParams


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("load", "num_dropped", "num_invalid", "balance_loss", "sequence_loss", "z_loss"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class MoEStats:
    """Losses and statistics of one call, over all ranks' tokens (a pytree; the same on every rank).

    Attributes:
      load: [E] float32, picks of each expert before any drop: what `jax_ep.update_bias` takes.
      num_dropped: [] int32, rows refused for want of capacity.
      num_invalid: [] int32, picks that named no expert.
      balance_loss: [] float32, Switch-style: `jax_ep.load_balance_loss`.
      sequence_loss: [] float32, DeepSeek-V3's, its factor included; of the last two axes of x.
      z_loss: [] float32: `jax_ep.z_loss`.
    """

    load: jax.Array
    num_dropped: jax.Array
    num_invalid: jax.Array
    balance_loss: jax.Array
    sequence_loss: jax.Array
    z_loss: jax.Array

    @property
    def max_over_mean(self) -> jax.Array:
        """Load of the busiest expert over the mean: 1 is perfect balance."""
        return self.load.max() / jnp.maximum(self.load.mean(), 1)


def init(key: jax.Array, config: MoEConfig, dtype: Any = jnp.float32) -> MoEParams:
    """Random weights, normal with variance 1 / fan-in."""
    router_key, experts_key = jax.random.split(key)
    scale = config.hidden**-0.5
    return MoEParams(
        jax.random.normal(router_key, (config.hidden, config.num_experts), dtype) * scale,
        init_experts(experts_key, config.num_experts, config.hidden, config.intermediate, dtype),
    )


def param_specs(group: Group) -> MoEParams:
    """How the weights lie on the mesh, as PartitionSpecs: experts over the group's axes, the router everywhere."""
    expert = P(group.axis)
    return MoEParams(P(), ExpertParams(expert, expert, expert))  # type: ignore[arg-type]


def apply(
    params: MoEParams,
    x: jax.Array,
    bias: jax.Array | None = None,
    *,
    config: MoEConfig,
    group: Group,
    batch_axes: tuple[str, ...] | None = None,
) -> tuple[jax.Array, MoEStats]:
    """The MoE layer on the tokens x.

    Inside shard_map over the group's axes, params.experts hold the rank's own experts and x the rank's own tokens.
    Outside, params and x are whole arrays; the layer opens shard_map on the group's mesh, with the experts as
    `param_specs` says and the first dimension of x split over `batch_axes`.

    Args:
      params: from `init`, or a pytree of that form.
      x: [..., H] tokens.
      bias: [E] float32, for selection only, or None.
      config: what to compute.
      group: where: from `create_group`.
      batch_axes: mesh axes over which tokens differ, which statistics and losses are taken over. Default: the group's.

    Returns:
      [..., H] in x's dtype, and `MoEStats`.

    Raises:
      ValueError: x, config and group do not fit each other; at trace time.

    Example:
      >>> config = MoEConfig(hidden=8, intermediate=16, num_experts=4, top_k=2)
      >>> mesh = jax.make_mesh((1,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> group = create_group(mesh, "ep", max_tokens=5, hidden=8, num_experts=4, top_k=2, dtype="float32")
      >>> y, stats = jax.jit(lambda p, x: apply(p, x, config=config, group=group))(
      ...     init(jax.random.key(0), config), jnp.ones((5, 8)))
      >>> y.shape, int(stats.load.sum())
      ((5, 8), 10)

    Source: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2; Switch (arXiv:2101.03961) for the balance loss.
    """
    _check(x, bias, config, group)
    axes = group.axis if batch_axes is None else tuple(batch_axes)
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    if set(group.axis) <= manual:
        return _apply_local(params, x, bias, config=config, group=group, axes=axes)
    specs = param_specs(group)
    local = functools.partial(_apply_local, config=config, group=group, axes=axes)
    return jax.shard_map(
        lambda params, x, bias: local(params, x, bias),
        mesh=group.mesh,
        in_specs=(specs, P(axes), P()),
        out_specs=(P(axes), P()),
    )(params, x, bias)


def _apply_local(
    params: MoEParams,
    x: jax.Array,
    bias: jax.Array | None,
    *,
    config: MoEConfig,
    group: Group,
    axes: tuple[str, ...],
) -> tuple[jax.Array, MoEStats]:
    # The router decides in float32 whatever the tokens are: near-ties must not depend on the matmul's precision.
    logits = jnp.matmul(x.astype(jnp.float32), params.router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    routing = config.route(logits, bias)
    tokens = x.reshape(-1, config.hidden)
    index, weights = (leaf.reshape(-1, config.top_k) for leaf in (routing.index, routing.weights))
    rows = ops.dispatch(tokens, index, weights, group=group, wire=config.wire)
    y = apply_experts(params.experts, rows.x, rows.group_sizes)
    out = ops.combine(y, rows.handle, weights=rows.weights).reshape(x.shape)
    sequences = routing if x.ndim > 2 else jax.tree.map(lambda leaf: leaf[None], routing)
    stats = MoEStats(
        load=router.expert_load(index, config.num_experts, axis=axes),
        num_dropped=jax.lax.psum(rows.handle.num_dropped[0], axes),
        num_invalid=jax.lax.psum(rows.handle.num_invalid[0], axes),
        balance_loss=router.load_balance_loss(routing, axis=axes),
        sequence_loss=jax.lax.pmean(router.sequence_balance_loss(sequences, factor=config.sequence_factor), axes),
        z_loss=jax.lax.pmean(router.z_loss(routing.logits), axes),
    )
    return out, stats


def _check(x: jax.Array, bias: jax.Array | None, config: MoEConfig, group: Group) -> None:
    for name in ("hidden", "num_experts", "top_k"):
        if getattr(config, name) != getattr(group, name):
            raise ValueError(
                f"moe group: expected {name}={getattr(config, name)} as in the config, got a group with "
                f"{name}={getattr(group, name)}; create the group with the config's numbers"
            )
    if x.ndim < 2 or x.shape[-1] != config.hidden:
        raise ValueError(f"moe x: expected shape [..., tokens, hidden={config.hidden}], got {x.shape}")
    if config.use_bias != (bias is not None):
        raise ValueError(
            f"moe bias: expected {'an array' if config.use_bias else 'None'} for use_bias={config.use_bias}, got "
            f"{'None' if bias is None else 'an array'}"
        )
