"""The MoE layer as a Flax NNX module: the only file here that imports Flax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ep import moe
from jax_ep.experts import ExpertParams
from jax_ep.group import Group
from jax_ep.moe import MoEConfig, MoEParams, MoEStats
from jax_ep.router import update_bias


class ExpertBias(nnx.Variable):
    """Selection bias of the experts: kept by `MoE.update_bias`, not by an optimiser."""


class MoE(nnx.Module):
    """A mixture of gated-SiLU experts spread over the ranks of a group.

    Call it under jit on a whole array [batch, ..., H], split over the group's axes by its first dimension: it opens
    shard_map by itself. Inside a shard_map over these axes it takes the rank's own tokens.

    Args:
      config: what to compute.
      group: where, from `jax_ep.create_group`.
      param_dtype: dtype of the weights; they are used in the dtype of the tokens.
      batch_axes: mesh axes over which tokens differ. Default: the group's.
      rngs: `nnx.Rngs` with a "params" stream.

    Attributes:
      router: nnx.Param [H, E].
      gate, up: nnx.Param [E, H, F], sharded over the group's axes.
      down: nnx.Param [E, F, H], sharded likewise.
      bias: `ExpertBias` [E] float32 if config.use_bias, else None.

    Example:
      >>> layer = MoE(config, group, rngs=nnx.Rngs(0))                                    # doctest: +SKIP
      >>> y, stats = layer(x)                                                             # doctest: +SKIP
      >>> loss = task_loss(y) + 0.01 * stats.balance_loss + 0.001 * stats.z_loss          # doctest: +SKIP
      >>> layer.update_bias(stats.load)             # after the step, with config.use_bias  # doctest: +SKIP
    """

    def __init__(
        self,
        config: MoEConfig,
        group: Group,
        *,
        param_dtype: Any = jnp.float32,
        batch_axes: tuple[str, ...] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.config = config
        self.group = group
        self.batch_axes = batch_axes
        params = moe.init(rngs.params(), config, param_dtype)

        def sharded(weight: jax.Array) -> nnx.Param:
            return nnx.Param(weight, out_sharding=(group.axis,), mesh=group.mesh)

        self.router = nnx.Param(params.router)
        self.gate = sharded(params.experts.gate)
        self.up = sharded(params.experts.up)
        self.down = sharded(params.experts.down)
        self.bias = ExpertBias(jnp.zeros(config.num_experts, jnp.float32)) if config.use_bias else None

    def params(self) -> MoEParams:
        """The weights as the functional layer `jax_ep.moe` takes them."""
        return MoEParams(self.router[...], ExpertParams(self.gate[...], self.up[...], self.down[...]))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, MoEStats]:
        """Tokens [..., H] to [..., H] in the same dtype, and `jax_ep.moe.MoEStats`."""
        bias = None if self.bias is None else self.bias[...]
        return moe.apply(self.params(), x, bias, config=self.config, group=self.group, batch_axes=self.batch_axes)

    def update_bias(self, load: jax.Array, *, rate: float = 0.001) -> None:
        """One step of loss-free balancing by the load of the global batch (`stats.load`): see `jax_ep.update_bias`."""
        if self.bias is None:
            raise ValueError("MoE.update_bias: expected config.use_bias=True, got False; set it or leave the call out")
        self.bias[...] = update_bias(self.bias[...], load, rate=rate)
