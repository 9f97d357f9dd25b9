"""The MoE layer as a Flax NNX module: the only file here that imports Flax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import moe
from jax_ep.experts import GroupedMatmul
from jax_ep.group import Group
from jax_ep.moe import MoEConfig, MoEParams, MoEStats
from jax_ep.router import update_bias
from jax_ep.sharding import MoESharding


def _lay(array: jax.Array, spec: P, group: Group) -> jax.Array:
    # Flax takes a spec that names no axis for none at all, and would leave the array on one device.
    return jax.device_put(array, NamedSharding(group.mesh, spec))


class ExpertBias(nnx.Variable):
    """Selection bias of the experts: kept by `MoE.update_bias`, not by an optimiser."""


class MoE(nnx.Module):
    """A mixture of gated experts spread over the ranks of a group.

    Call it under jit on a whole array [batch, ..., H], split over the mesh as `sharding` says: it opens shard_map by
    itself. Inside a shard_map over the group's axes it takes the rank's own tokens.

    Args:
      config: what to compute.
      group: where, from `jax_ep.create_group`.
      sharding: how tokens and weights lie on the mesh, beyond the group. Default: tokens over the group's axes.
      param_dtype: dtype of the weights; they are used in the dtype of the tokens.
      matmul: the grouped matmul.
      rngs: `nnx.Rngs` with a "params" stream.

    Attributes:
      router: nnx.Param [H, E].
      experts_gate, experts_up: nnx.Param [E, H, F]; experts_down: nnx.Param [E, F, H]; laid over the mesh as
        `jax_ep.moe.param_specs` says. With biases experts_gate_bias and so on, with shared experts shared_gate ...
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
        sharding: MoESharding = MoESharding(),
        param_dtype: Any = jnp.float32,
        matmul: GroupedMatmul = jax.lax.ragged_dot,
        rngs: nnx.Rngs,
    ) -> None:
        self.config = config
        self.group = group
        self.sharding = sharding
        self.matmul = matmul
        params = moe.init(rngs.params(), config, param_dtype)
        specs = moe.param_specs(config, group, sharding)

        leaves, self._treedef = jax.tree.flatten(params)
        paths = [path for path, _ in jax.tree.leaves_with_path(params)]
        self._names = tuple(jax.tree_util.keystr(path, simple=True, separator="_") for path in paths)
        for name, leaf, spec in zip(self._names, leaves, jax.tree.leaves(specs), strict=True):
            setattr(self, name, nnx.Param(_lay(leaf, spec, group), out_sharding=tuple(spec), mesh=group.mesh))
        zeros = _lay(jnp.zeros(config.num_experts, jnp.float32), P(), group)
        self.bias = ExpertBias(zeros, out_sharding=(), mesh=group.mesh) if config.use_bias else None

    def params(self) -> MoEParams:
        """The weights as the functional layer `jax_ep.moe` takes them."""
        return jax.tree.unflatten(self._treedef, [getattr(self, name)[...] for name in self._names])

    def __call__(self, x: jax.Array) -> tuple[jax.Array, MoEStats]:
        """Tokens [..., H] to [..., H] in the same dtype, and `jax_ep.moe.MoEStats`."""
        bias = None if self.bias is None else self.bias[...]
        return moe.apply(
            self.params(),
            x,
            bias,
            config=self.config,
            group=self.group,
            sharding=self.sharding,
            matmul=self.matmul,
        )

    def update_bias(self, load: jax.Array, *, rate: float = 0.001) -> None:
        """One step of loss-free balancing by the load of the global batch (`stats.load`): see `jax_ep.update_bias`."""
        if self.bias is None:
            raise ValueError("MoE.update_bias: expected config.use_bias=True, got False; set it or leave the call out")
        self.bias[...] = update_bias(self.bias[...], load, rate=rate)
