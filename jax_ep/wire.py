"""FP8 on the wire. The exchange itself has no derivative; rows that are dequantised again are straight-through."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jax_ep import primitives
from jax_ep.call import Call
from jax_ep.layout import Handle
from jax_ep.primitives import Weights
from jax_ep.quantize import ScaleFormat


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def dispatch_fp8(
    how: tuple[ScaleFormat, Any, Call], handle: Handle, x: Any, weights: Weights
) -> tuple[jax.Array, jax.Array | None, Weights]:
    """Rows of tokens that cross as FP8.

    Args:
      how: (scale format, dtype to dequantise the rows to, or None for rows as they crossed, call).
      handle: from layout.
      x: [T, H] float, quantised on the way, or (payload [T, H] float8_e4m3fn, scales [T, blocks] float32).
      weights: [T, K] float32 or None.

    Returns:
      rows [C, H]; their scales [C, blocks], or None if dequantised; weights of rows, or None.
    """
    scale_format, dtype, call = how
    x, scales = x if isinstance(x, tuple) else (x, None)
    return primitives.send_fp8(handle, x, scales, weights, call, scale_format, dtype)


@dispatch_fp8.defjvp
def _(how: Any, primals: Any, tangents: Any) -> Any:
    handle, x, weights = primals
    _, dx, dweights = tangents
    rows, row_scales, row_weights = dispatch_fp8(how, handle, x, weights)
    if isinstance(x, tuple) or how[1] is None:  # refuse_gradient has seen to it that dx is zero
        zeros = jax.tree.map(jnp.zeros_like, (rows, row_scales))
        return (rows, row_scales, row_weights), (*zeros, primitives.dispatch(handle, None, dweights, how[2])[1])
    drows, drow_weights = primitives.dispatch(handle, dx, dweights, how[2])
    assert drows is not None
    return (rows, None, row_weights), (drows.astype(rows.dtype), None, drow_weights)


@jax.custom_jvp
def refuse_gradient(x: Any) -> Any:
    """Identity that cannot be differentiated: FP8 rows would lose small cotangents without a word."""
    return x


@refuse_gradient.defjvp
def _(primals: Any, tangents: Any) -> NoReturn:
    raise TypeError(
        "jax_ep.dispatch: expected no differentiation with respect to tokens that arrive as quantised rows or come "
        "already quantised (an FP8 cotangent loses small values), got a tangent for them; use "
        'dispatch(x, ..., wire="fp8") with dequantize=True (straight-through), or jax.lax.stop_gradient(x)'
    )
