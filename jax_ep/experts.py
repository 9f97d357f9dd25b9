"""Feed-forward experts: gated networks over rows that are grouped by expert, and a shared one over all tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(rows [C, A], weights [E_l, A, B], group_sizes [E_l] int32) to [C, B]; rows past the last group count for nothing."""

Gate = Callable[[jax.Array, jax.Array], jax.Array]
"""(gate [..., F], up [..., F]) to [..., F]: the elementwise middle of a gated network."""


def clamped_swiglu(gate: jax.Array, up: jax.Array, *, alpha: float = 1.702, limit: float = 7.0) -> jax.Array:
    """(up + 1) · gate · sigmoid(alpha · gate), with gate at most `limit` and up within ±`limit`.

    Source: the gated unit of OpenAI's gpt-oss (arXiv:2508.10925), section 2.
    """
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


GATES: dict[str, Gate] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu": lambda gate, up: jax.nn.gelu(gate, approximate=False) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "relu": lambda gate, up: jax.nn.relu(gate) * up,
    "clamped_swiglu": clamped_swiglu,
}
"""What `MoEConfig.activation` may name: SwiGLU, two GEGLUs, ReGLU (Shazeer 2020, arXiv:2002.05202), and gpt-oss's."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("gate", "up", "down", "gate_bias", "up_bias", "down_bias"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class ExpertParams:
    """Weights of gated experts (a pytree). E experts, H hidden, F intermediate.

    Attributes:
      gate, up: [E, H, F].
      down: [E, F, H].
      gate_bias, up_bias: [E, F], or None.
      down_bias: [E, H], or None.
    """

    gate: jax.Array
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=("gate", "up", "down"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class SharedParams:
    """Weights of the experts that every token passes, as one network (a pytree): gate, up [H, F], down [F, H]."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array


def init_experts(
    key: jax.Array, num_experts: int, hidden: int, intermediate: int, dtype: Any = jnp.float32, *, biases: bool = False
) -> ExpertParams:
    """Random weights, normal with variance 1 / fan-in; biases, if wanted, are zeros."""
    gate, up, down = jax.random.split(key, 3)
    inner = jnp.zeros((num_experts, intermediate), dtype) if biases else None
    outer = jnp.zeros((num_experts, hidden), dtype) if biases else None
    return ExpertParams(
        _normal(gate, (num_experts, hidden, intermediate), dtype),
        _normal(up, (num_experts, hidden, intermediate), dtype),
        _normal(down, (num_experts, intermediate, hidden), dtype),
        inner,
        inner,
        outer,
    )


def init_shared(key: jax.Array, hidden: int, intermediate: int, dtype: Any = jnp.float32) -> SharedParams:
    """Random weights, normal with variance 1 / fan-in."""
    gate, up, down = jax.random.split(key, 3)
    return SharedParams(
        _normal(gate, (hidden, intermediate), dtype),
        _normal(up, (hidden, intermediate), dtype),
        _normal(down, (intermediate, hidden), dtype),
    )


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * shape[-2] ** -0.5


def apply_experts(
    params: ExpertParams,
    x: jax.Array,
    group_sizes: jax.Array,
    *,
    gate: Gate = GATES["silu"],
    matmul: GroupedMatmul = jax.lax.ragged_dot,
) -> jax.Array:
    """down(gate(x's gate, x's up)), each row by its own expert.

    Args:
      params: the local experts' weights, E_l of them; used in x's dtype.
      x: [C, H], rows in expert order.
      group_sizes: [E_l] int32, rows of each local expert, as `rows.group_sizes`.
      gate: elementwise, one of `GATES` or your own.
      matmul: the grouped matmul.

    Returns:
      [C, H] of x's dtype.

    Example:
      >>> params = init_experts(jax.random.key(0), num_experts=2, hidden=4, intermediate=8)
      >>> apply_experts(params, jnp.ones((3, 4)), jnp.array([1, 2])).shape
      (3, 4)
    """
    params = jax.tree.map(lambda weight: weight.astype(x.dtype), params)

    def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = matmul(x, weight, group_sizes)
        return y if bias is None else y + bias[_expert_of_row(group_sizes, x.shape[0])]

    inner = gate(linear(x, params.gate, params.gate_bias), linear(x, params.up, params.up_bias))
    return linear(inner, params.down, params.down_bias)


def apply_shared(params: SharedParams, x: jax.Array, *, gate: Gate = GATES["silu"]) -> jax.Array:
    """The same network for every token: [..., H] to [..., H] of x's dtype."""
    params = jax.tree.map(lambda weight: weight.astype(x.dtype), params)
    return gate(x @ params.gate, x @ params.up) @ params.down


def _expert_of_row(group_sizes: jax.Array, rows: int) -> jax.Array:
    # Rows past the last group get the last expert's number; nobody reads what they hold.
    return jnp.repeat(jnp.arange(group_sizes.shape[0]), group_sizes, total_repeat_length=rows)
