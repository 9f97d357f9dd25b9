"""The MoE layer as functions: router, dispatch, experts, combine, losses and statistics."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_ep import ops, pending, router
from jax_ep.experts import (
    GATES,
    ExpertParams,
    GroupedMatmul,
    SharedParams,
    apply_experts,
    apply_shared,
    init_experts,
    init_shared,
)
from jax_ep.group import Group
from jax_ep.layout import Handle
from jax_ep.sharding import MoESharding, gather, join_shares, take_share
from jax_ep.tie import tie

# A router that starts near zero gives every expert about the same chance; at full scale a tight capacity would drop a
# fifth of the rows in the first steps.
_ROUTER_SCALE = 0.1

CHECKPOINT_NAMES = ("jax_ep_handle", "jax_ep_rows", "jax_ep_combined")
"""What `MoEConfig.remat`, and any policy of jax.checkpoint, can keep."""


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """What an MoE layer computes, apart from where. `jax_ep.presets` has those of published models.

    Attributes:
      hidden: length of a token's vector (H).
      intermediate: inner width of an expert (F).
      num_experts: E.
      top_k: experts a token picks (K).
      score, num_groups, top_groups, group_score, scale, renormalize, pre_softmax: as in `jax_ep.route`.
      use_bias: whether experts are selected with a bias that `jax_ep.update_bias` keeps balancing (DeepSeek-V3).
      activation: a name in `jax_ep.experts.GATES`.
      expert_biases: whether the experts' three matmuls have biases.
      shared_intermediate: inner width of the shared experts, which every token passes; 0 for none.
      weighted: "after", routing weights multiply what the experts return; "before", what they are given.
      chunks: pieces that the tokens are cut into, each exchanged by itself, so that one may be under way while another
        is computed and buffers are smaller. Capacity counts per chunk.
      overlap: whether exchanges run beside compute, by start and done (docs/overlap.md): the first dispatch and the
        last combine beside the shared experts, and with several chunks the exchanges of each beside the experts of its
        neighbours; in the backward pass, too. The exchanges bring the same bits.
      wire: None, "fp8" or "fp8_ue8m0", as in `jax_ep.dispatch`.
      remat: None keeps all that the backward pass needs. A tuple of names keeps these alone and computes the rest
        again: "jax_ep_handle", "jax_ep_rows", "jax_ep_combined", or () for nothing.
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
    activation: str = "silu"
    expert_biases: bool = False
    shared_intermediate: int = 0
    weighted: Literal["after", "before"] = "after"
    chunks: int = 1
    overlap: bool = False
    wire: ops.Wire | None = None
    remat: tuple[str, ...] | None = None
    sequence_factor: float = 1e-4

    def __post_init__(self) -> None:
        if self.activation not in GATES:
            raise ValueError(f"MoEConfig activation: expected one of {tuple(GATES)}, got {self.activation!r}")
        if self.weighted not in ("after", "before"):
            raise ValueError(f'MoEConfig weighted: expected "after" or "before", got {self.weighted!r}')
        names: Any = () if self.remat is None else self.remat
        if isinstance(names, str) or not set(names) <= set(CHECKPOINT_NAMES):
            raise ValueError(
                f"MoEConfig remat: expected None or a tuple of names among {CHECKPOINT_NAMES}, got {self.remat!r}"
            )
        if self.chunks < 1:
            raise ValueError(f"MoEConfig chunks: expected at least 1, got {self.chunks}")

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


@functools.partial(jax.tree_util.register_dataclass, data_fields=("router", "experts", "shared"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class MoEParams:
    """Trainable weights of an MoE layer (a pytree).

    Attributes:
      router: [H, E].
      experts: `ExpertParams`, sharded over the group's axes by their first dimension.
      shared: `SharedParams`, or None.
    """

    router: jax.Array
    experts: ExpertParams
    shared: SharedParams | None = None


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
      balance_loss: [] float32, Switch-style, 1 for a perfect balance: `jax_ep.load_balance_loss`. Without a factor.
      sequence_loss: [] float32, DeepSeek-V3's, config.sequence_factor included. A sequence is the last two axes of
        x as the rank has them: of x split along the sequence, or of [T, H], each rank's piece counts as one.
      z_loss: [] float32: `jax_ep.z_loss`. Without a factor.
    """

    load: jax.Array
    num_dropped: jax.Array
    num_invalid: jax.Array
    balance_loss: jax.Array
    sequence_loss: jax.Array
    z_loss: jax.Array

    @property
    def max_over_mean(self) -> jax.Array:
        """Load of the busiest expert over the mean: 1 is perfect balance. 0 without any picks."""
        mean = self.load.mean()
        return self.load.max() / jnp.where(mean > 0, mean, 1)

    @property
    def dropped_share(self) -> jax.Array:
        """Rows refused, as a share of all picks."""
        return self.num_dropped / jnp.maximum(self.load.sum(), 1)


def init(key: jax.Array, config: MoEConfig, dtype: Any = jnp.float32) -> MoEParams:
    """Random weights, normal with variance 1 / fan-in; the router's a tenth of that, biases zero."""
    router_key, experts_key, shared_key = jax.random.split(key, 3)
    scale = _ROUTER_SCALE * config.hidden**-0.5
    width = config.shared_intermediate
    return MoEParams(
        jax.random.normal(router_key, (config.hidden, config.num_experts), dtype) * scale,
        init_experts(
            experts_key, config.num_experts, config.hidden, config.intermediate, dtype, biases=config.expert_biases
        ),
        init_shared(shared_key, config.hidden, width, dtype) if width else None,
    )


def param_specs(config: MoEConfig, group: Group, sharding: MoESharding = MoESharding()) -> MoEParams:
    """How the weights lie on the mesh, as a pytree of PartitionSpecs like that of `init`.

    Experts lie over the group's axes by number, over sharding.fsdp along H, over sharding.tp along F; the shared
    experts over fsdp and tp alike; the router everywhere.
    """
    ep, fsdp, tp = group.axis, sharding.fsdp or None, sharding.tp or None
    biases = (P(ep, tp), P(ep, tp), P(ep)) if config.expert_biases else (None, None, None)
    specs = ExpertParams(P(ep, fsdp, tp), P(ep, fsdp, tp), P(ep, tp, fsdp), *biases)  # type: ignore[arg-type]
    shared = SharedParams(P(fsdp, tp), P(fsdp, tp), P(tp, fsdp)) if config.shared_intermediate else None  # type: ignore[arg-type]
    return MoEParams(P(), specs, shared)  # type: ignore[arg-type]


def apply(
    params: MoEParams,
    x: jax.Array,
    bias: jax.Array | None = None,
    *,
    config: MoEConfig,
    group: Group,
    sharding: MoESharding = MoESharding(),
    matmul: GroupedMatmul = jax.lax.ragged_dot,
) -> tuple[jax.Array, MoEStats]:
    """The MoE layer on the tokens x.

    Inside shard_map over the group's axes, params and x are the rank's own shards; sharding.x must then name every mesh
    axis over which tokens differ, or the statistics and losses are of a part of them. Outside, they are whole arrays,
    and the layer opens shard_map on the group's mesh, with params as `param_specs` says and x as sharding.x says.

    Args:
      params: from `init`, or a pytree of that form.
      x: [..., H] tokens.
      bias: [E] float32, for selection only, or None.
      config: what to compute.
      group: where: from `create_group`.
      sharding: how tokens and weights lie on the mesh.
      matmul: the grouped matmul: takes rows [C, A], weights [E_l, A, B] and group sizes [E_l].

    Returns:
      [..., H] in x's dtype, and `MoEStats`.

    Raises:
      ValueError: x, config, group and sharding do not fit each other; at trace time.

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
    _check(params, x, bias, config, group, sharding)
    local: Callable[..., tuple[jax.Array, MoEStats]] = functools.partial(
        _apply_local, config=config, group=group, sharding=sharding, matmul=matmul
    )
    if config.remat is not None:
        local = jax.checkpoint(local, policy=jax.checkpoint_policies.save_only_these_names(*config.remat))
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    if set(group.axis) <= manual:
        return local(params, x, bias)
    x_spec = sharding.x_spec(group.axis)
    sharded = jax.shard_map(
        local,
        mesh=None if manual else group.mesh,  # within a shard_map over other axes its mesh is the one that counts
        in_specs=(param_specs(config, group, sharding), x_spec, P()),
        out_specs=(x_spec, P()),
        axis_names=set(group.mesh.axis_names) - manual,
    )
    return sharded(params, x, bias)


def _apply_local(
    params: MoEParams,
    x: jax.Array,
    bias: jax.Array | None,
    *,
    config: MoEConfig,
    group: Group,
    sharding: MoESharding,
    matmul: GroupedMatmul,
) -> tuple[jax.Array, MoEStats]:
    # The router decides in float32 whatever the tokens are: near-ties must not depend on the matmul's precision.
    logits = jnp.matmul(x.astype(jnp.float32), params.router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    routing = config.route(logits, bias)
    tokens = x.reshape(-1, config.hidden)
    index, weights = (leaf.reshape(-1, config.top_k) for leaf in (routing.index, routing.weights))
    # Cast first: what is gathered is then what is used, in half the bytes where tokens are of half the width.
    experts = _gather_experts(jax.tree.map(lambda weight: weight.astype(x.dtype), params.experts), sharding)

    same = sharding.same_tokens_axes(group.axis)
    mine = take_share((tokens, index, weights), same, (0, -1, 0)) if same else (tokens, index, weights)
    shared = None
    if params.shared is not None:
        part = jax.tree.map(lambda weight: weight.astype(x.dtype), params.shared)
        shared = SharedParams(
            gather(part.gate, sharding.fsdp, 0), gather(part.up, sharding.fsdp, 0), gather(part.down, sharding.fsdp, 1)
        )
    apply_all = functools.partial(apply_experts, experts, gate=GATES[config.activation], matmul=matmul)
    apply_shared_to = functools.partial(apply_shared, shared, gate=GATES[config.activation]) if shared else None
    exchange = _exchange_beside if config.overlap else _exchange
    out, of_shared, dropped, invalid = exchange(apply_all, apply_shared_to, mine, tokens, config, group)
    out = join_shares(out, same, tokens.shape[0]) if same else out
    out = out if of_shared is None else out + of_shared
    if sharding.tp:  # every tp rank has a part of each sum over F; in float32, as a matmul would add them
        out = jax.lax.psum(out.astype(jnp.float32), sharding.tp).astype(x.dtype)
    return out.reshape(x.shape), _stats(routing, dropped, invalid, config=config, group=group, sharding=sharding)


Exchanged = tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]


def _exchange(
    experts: Callable[..., jax.Array],
    shared: Callable[[jax.Array], jax.Array] | None,
    routed: tuple[jax.Array, jax.Array, jax.Array],
    for_shared: jax.Array,
    config: MoEConfig,
    group: Group,
) -> Exchanged:
    """Tokens through their experts and back, and others through the shared experts.

    Args:
      experts: of rows and their group sizes.
      shared: of tokens; None for none.
      routed: tokens [T, H], their top-k index [T, K] and routing weights [T, K].
      for_shared: tokens for the shared experts.

    Returns:
      the routed tokens; those for the shared experts, None without any; on this rank, rows dropped [1] and
      picks invalid [1].
    """
    outs, handles = [], []
    for chunk in _chunks(routed, config):
        rows = ops.dispatch(*chunk, group=group, wire=config.wire)
        y = experts(_weighted_before(rows, config), rows.group_sizes)
        outs.append(ops.combine(y, rows.handle, _weights_after(rows, config)))
        handles.append(rows.handle)
    of_shared = None if shared is None else shared(for_shared)
    return jnp.concatenate(outs), of_shared, *_refused(handles)


def _exchange_beside(
    experts: Callable[..., jax.Array],
    shared: Callable[[jax.Array], jax.Array] | None,
    routed: tuple[jax.Array, jax.Array, jax.Array],
    for_shared: jax.Array,
    config: MoEConfig,
    group: Group,
) -> Exchanged:
    """As `_exchange`, with exchanges beside compute: chunk n's experts while chunk n + 1 comes and n - 1 leaves.

    The first dispatch and the last combine have half of the shared experts' tokens each; without shared experts they
    are made whole, with all the SMs that they want.
    """
    chunks = _chunks(routed, config)
    # All layouts first: one that came later would wait for what is under way.
    handles = [ops.layout(index, group=group) for _, index, _ in chunks]
    sends = [
        {"x": tokens, "weights": weights, "handle": handle, "wire": config.wire}
        for (tokens, _, weights), handle in zip(chunks, handles, strict=True)
    ]
    halves = jnp.split(for_shared, [for_shared.shape[0] // 2])
    of_shared: list[jax.Array] = []
    if shared is None:
        rows = ops.dispatch(**sends[0])
    else:
        half, coming = pending.beside(pending.dispatch_start(**sends[0]), shared, halves[0])
        of_shared.append(half)
        rows = pending.dispatch_done(coming)
    outs: list[jax.Array] = []
    leaving: list[pending.Pending] = []
    for send in sends[1:]:
        # Behind the rows of the chunk before: XLA might start it first, and let those wait for it.
        send["x"] = tie(send["x"], behind=rows.x)
        under_way = [*leaving, pending.dispatch_start(**send)]
        y, (*left, came) = pending.beside(under_way, experts, _weighted_before(rows, config), rows.group_sizes)
        outs += [pending.combine_done(each) for each in left]
        leaving = [pending.combine_start(y, rows.handle, _weights_after(rows, config))]
        rows = pending.dispatch_done(came)
    y, leaving = pending.beside(leaving, experts, _weighted_before(rows, config), rows.group_sizes)
    outs += [pending.combine_done(each) for each in leaving]
    last = y, rows.handle, _weights_after(rows, config)
    if shared is None:
        outs.append(ops.combine(*last))
    else:
        half, going = pending.beside(pending.combine_start(*last), shared, halves[1])
        of_shared.append(half)
        outs.append(pending.combine_done(going))
    return jnp.concatenate(outs), jnp.concatenate(of_shared) if of_shared else None, *_refused(handles)


def _chunks(routed: tuple[jax.Array, ...], config: MoEConfig) -> list[Any]:
    tokens = routed[0].shape[0]
    if tokens % config.chunks:
        raise ValueError(
            f"moe chunks: expected a divisor of the {tokens} tokens of a rank, got {config.chunks}; pad the "
            "tokens or take another number"
        )
    return list(zip(*(jnp.split(array, config.chunks) for array in routed), strict=True))


def _weighted_before(rows: ops.Rows, config: MoEConfig) -> jax.Array:
    """What the experts are given."""
    assert rows.weights is not None
    return rows.x * rows.weights[:, None].astype(rows.x.dtype) if config.weighted == "before" else rows.x


def _weights_after(rows: ops.Rows, config: MoEConfig) -> jax.Array | None:
    """What combine multiplies by."""
    return None if config.weighted == "before" else rows.weights


def _refused(handles: list[Handle]) -> tuple[jax.Array, jax.Array]:
    dropped = sum((handle.num_dropped for handle in handles[1:]), handles[0].num_dropped)
    return dropped, sum((handle.num_invalid for handle in handles[1:]), handles[0].num_invalid)


def _gather_experts(experts: ExpertParams, sharding: MoESharding) -> ExpertParams:
    down_bias = experts.down_bias
    if down_bias is not None and sharding.tp:  # the tp ranks' results are summed: one of them adds it
        down_bias = jnp.where(jax.lax.axis_index(sharding.tp) == 0, down_bias, 0)
    return dataclasses.replace(
        experts,
        gate=gather(experts.gate, sharding.fsdp, 1),
        up=gather(experts.up, sharding.fsdp, 1),
        down=gather(experts.down, sharding.fsdp, 2),
        down_bias=down_bias,
    )


def _stats(
    routing: router.Routing,
    dropped: jax.Array,
    invalid: jax.Array,
    *,
    config: MoEConfig,
    group: Group,
    sharding: MoESharding,
) -> MoEStats:
    axes = sharding.x_axes(group.axis)
    everyone = tuple(dict.fromkeys((*axes, *group.axis)))
    sequences = routing if routing.index.ndim > 2 else jax.tree.map(lambda leaf: leaf[None], routing)
    sequence_loss = router.sequence_balance_loss(sequences, factor=config.sequence_factor)
    z_loss = router.z_loss(routing.logits)
    return MoEStats(
        load=router.expert_load(routing.index.reshape(-1, config.top_k), config.num_experts, axis=axes or None),
        num_dropped=jax.lax.psum(dropped[0], everyone),
        num_invalid=jax.lax.psum(invalid[0], everyone),
        balance_loss=router.load_balance_loss(routing, axis=axes or None),
        sequence_loss=jax.lax.pmean(sequence_loss, axes) if axes else sequence_loss,
        z_loss=jax.lax.pmean(z_loss, axes) if axes else z_loss,
    )


def _check(
    params: MoEParams, x: jax.Array, bias: jax.Array | None, config: MoEConfig, group: Group, sharding: MoESharding
) -> None:
    for name in ("hidden", "num_experts", "top_k"):
        if getattr(config, name) != getattr(group, name):
            raise ValueError(
                f"moe group: expected {name}={getattr(config, name)} as in the config, got a group with "
                f"{name}={getattr(group, name)}; create the group with the config's numbers"
            )
    if x.ndim < 2 or x.shape[-1] != config.hidden:
        raise ValueError(f"moe x: expected shape [..., tokens, hidden={config.hidden}], got {x.shape}; reshape it")
    if config.use_bias != (bias is not None):
        raise ValueError(
            f"moe bias: expected {'an array' if config.use_bias else 'None'} for use_bias={config.use_bias}, got "
            f"{'None' if bias is None else 'an array'}; make config.use_bias and the argument agree"
        )
    whole = dict(jax.tree.leaves_with_path(jax.eval_shape(lambda: init(jax.random.key(0), config))))
    given = dict(jax.tree.leaves_with_path(params))
    for path in whole.keys() & given.keys():  # what is missing is named below
        expected, got = whole[path].shape, given[path].shape
        # Inside shard_map a rank may have a part of each dimension.
        if len(got) != len(expected) or any(m == 0 or n % m for n, m in zip(expected, got, strict=True)):
            raise ValueError(
                f"moe params{jax.tree_util.keystr(path)}: expected shape {expected} or a rank's part of it, got {got}; "
                "make the weights by jax_ep.moe.init with this config"
            )
    for name, wanted, has in (
        ("expert_biases", config.expert_biases, params.experts.gate_bias is not None),
        ("shared_intermediate", bool(config.shared_intermediate), params.shared is not None),
    ):
        if wanted != has:
            raise ValueError(
                f"moe params: expected weights for {name}={getattr(config, name)}, got params "
                f"{'with' if has else 'without'} them; make them by jax_ep.moe.init with this config"
            )
    sharding.check(tuple(group.mesh.axis_names), group.axis)
