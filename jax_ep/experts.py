"""Expert networks over rows that are grouped by expert."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(rows [C, A], weights [E_l, A, B], group_sizes [E_l] int32) to [C, B]; rows past the last group count for nothing."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("gate", "up", "down"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class ExpertParams:
    """Weights of gated experts (a pytree). E experts, H hidden, F intermediate.

    Attributes:
      gate, up: [E, H, F].
      down: [E, F, H].
    """

    gate: jax.Array
    up: jax.Array
    down: jax.Array


def init_experts(
    key: jax.Array, num_experts: int, hidden: int, intermediate: int, dtype: jnp.dtype = jnp.float32
) -> ExpertParams:
    """Random weights, normal with variance 1 / fan-in."""

    def normal(key: jax.Array, fan_in: int, fan_out: int) -> jax.Array:
        return jax.random.normal(key, (num_experts, fan_in, fan_out), dtype) * fan_in**-0.5

    gate, up, down = jax.random.split(key, 3)
    return ExpertParams(
        normal(gate, hidden, intermediate),
        normal(up, hidden, intermediate),
        normal(down, intermediate, hidden),
    )


def apply_experts(
    params: ExpertParams,
    x: jax.Array,
    group_sizes: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    matmul: GroupedMatmul = jax.lax.ragged_dot,
) -> jax.Array:
    """down(activation(gate(x)) * up(x)), each row by its own expert.

    Args:
      params: the local experts' weights, E_l of them; used in x's dtype.
      x: [C, H], rows in expert order.
      group_sizes: [E_l] int32, rows of each local expert, as `rows.group_sizes`.
      activation: elementwise.
      matmul: the grouped matmul.

    Returns:
      [C, H] of x's dtype.

    Source: gated units of Shazeer 2020 (arXiv:2002.05202), as the experts of Mixtral and DeepSeek.

    Example:
      >>> params = init_experts(jax.random.key(0), num_experts=2, hidden=4, intermediate=8)
      >>> apply_experts(params, jnp.ones((3, 4)), jnp.array([1, 2])).shape
      (3, 4)
    """
    gate, up, down = (weight.astype(x.dtype) for weight in (params.gate, params.up, params.down))
    inner = activation(matmul(x, gate, group_sizes)) * matmul(x, up, group_sizes)
    return matmul(inner, down, group_sizes)
