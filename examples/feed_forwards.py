"""What --compare-dense and --compare-ffn put in the place of jax_ep.flax.MoE; both are built by the same call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_ep
import jax_ep.flax
from jax_ep.experts import apply_shared


class MaskedMoE(jax_ep.flax.MoE):
    """The same weights, router and result, without an exchange: every expert on every token, what it did not pick
    masked out. In float32; E / K times the work, and no token is ever dropped.
    """

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax_ep.MoEStats]:
        config, params, tokens = self.config, self.params(), x.astype(jnp.float32)
        highest = jax.lax.Precision.HIGHEST  # as the router's, so that both select the same experts
        logits = jnp.matmul(tokens, params.router, precision=highest)
        routing = config.route(logits, None if self.bias is None else self.bias[...])
        mask = jax.nn.one_hot(routing.index, config.num_experts)  # [batch, sequence, K, E]

        gate = jnp.einsum("bsh,ehf->bsef", tokens, params.experts.gate)
        up = jnp.einsum("bsh,ehf->bsef", tokens, params.experts.up)
        each = jnp.einsum("bsef,efh->bseh", jax.nn.silu(gate) * up, params.experts.down)
        out = jnp.einsum("bske,bsk,bseh->bsh", mask, routing.weights, each)
        if params.shared is not None:
            out = out + apply_shared(params.shared, tokens)
        none = jnp.zeros((), jnp.int32)
        return out.astype(x.dtype), jax_ep.MoEStats(
            load=mask.sum((0, 1, 2)),
            num_dropped=none,
            num_invalid=none,
            balance_loss=jax_ep.load_balance_loss(routing),
            sequence_loss=jax_ep.sequence_balance_loss(routing, factor=config.sequence_factor),
            z_loss=jax_ep.z_loss(routing.logits),
        )


class PlainFeedForward(nnx.Module):
    """A gated network as wide as the experts that a token of the MoE passes together: the same FLOPs a token.

    Every device has a copy of its weights and works on its own tokens; jit sums the gradients over the devices.
    """

    def __init__(self, config: jax_ep.MoEConfig, group: jax_ep.Group, *, rngs: nnx.Rngs) -> None:
        self.num_experts = config.num_experts
        width = config.top_k * config.intermediate + config.shared_intermediate
        options: dict[str, Any] = {"use_bias": False, "dtype": group.dtype, "rngs": rngs}
        self.gate = nnx.Linear(config.hidden, width, **options)
        self.up = nnx.Linear(config.hidden, width, **options)
        self.down = nnx.Linear(width, config.hidden, **options)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax_ep.MoEStats]:
        """[batch, sequence, hidden] to the same, and statistics of nothing: all zeros."""
        zero = jnp.zeros(())
        y = self.down(jax.nn.silu(self.gate(x)) * self.up(x))
        return y, jax_ep.MoEStats(jnp.zeros(self.num_experts), zero, zero, zero, zero, zero)

    def update_bias(self, load: jax.Array, *, rate: float) -> None:
        """There is nothing to balance."""
