"""Dispatch and combine as JAX operations: what they are to grad, jvp, transpose, remat and scan.

dispatch and unweighted combine are each other's transpose, which `jax.custom_derivatives.linear_call` is told; grad,
jvp, linear_transpose, remat and scan follow. The weighted combine is bilinear in rows and weights and is a Primitive of
its own, since linear_call takes no float residual that is differentiated too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import linear_call
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_ep import ffi, kernels, reference
from jax_ep.config import RowOrder
from jax_ep.guard import refuse_vmap
from jax_ep.layout import HANDLE_ARRAYS, Handle

Weights = jax.Array | None


def layout(index: jax.Array, *, group: Any, row_order: RowOrder, alignment: int, capacity: int) -> Handle:
    """The handle of one call; without a group's kernels, slots are decided by the compiled module where it can."""
    static: dict[str, Any] = {"group": group, "row_order": row_order, "alignment": alignment, "capacity": capacity}
    in_jax = functools.partial(reference.layout, place_rows=ffi.place_rows, **static)
    return _by_kernels(group, index.size, functools.partial(kernels.layout, **static), in_jax, index)


def dispatch(
    handle: Handle, x: jax.Array | None, weights: Weights, num_sms: int = 0
) -> tuple[jax.Array | None, Weights]:
    """Rows [C, H] and their weights ([C], in rank order [C, K]) of tokens [T, H] and routing weights [T, K]; linear.

    Either may be None. num_sms: 0 for the group's.
    """
    forward, back = (functools.partial(f, num_sms=num_sms) for f in (_dispatch, _dispatch_transpose))
    return linear_call(forward, back, handle, (x, weights))


def combine(handle: Handle, y: jax.Array, num_sms: int = 0) -> jax.Array:
    """Tokens [T, H] from rows [C, H]; linear."""
    forward, back = (functools.partial(f, num_sms=num_sms) for f in (_combine, _send))
    return linear_call(forward, back, handle, y)


def send(
    handle: Handle, x: jax.Array, scales: jax.Array | None, weights: Weights, num_sms: int = 0
) -> tuple[jax.Array, jax.Array | None, Weights]:
    """Tokens, their scales and their weights to rows; without a derivative."""

    def by_kernel(handle: Handle, operands: Any) -> Any:
        x, scales, weights = operands
        return kernels.dispatch(handle, x, scales, weights, num_sms)

    def in_jax(handle: Handle, operands: Any) -> Any:
        x, scales, weights = operands
        return (
            reference.dispatch(handle, x),
            None if scales is None else reference.dispatch(handle, scales),
            None if weights is None else reference.dispatch_weights(handle, weights),
        )

    return _by_kernels(handle.group, x.size and handle.capacity, by_kernel, in_jax, handle, (x, scales, weights))


def _receive(handle: Handle, y: jax.Array, weights: Weights, words: Weights, num_sms: int) -> tuple[jax.Array, Weights]:
    """Rows to tokens, and words of rows to words of picks; without a derivative."""

    def by_kernel(handle: Handle, operands: Any) -> Any:
        y, weights, words = operands
        return kernels.combine(handle, y, weights, words, num_sms)

    def in_jax(handle: Handle, operands: Any) -> Any:
        y, weights, words = operands
        out = reference.combine(handle, y, weights)
        return out, None if words is None else reference.combine_weights(handle, words)

    return _by_kernels(handle.group, handle.slots.size and y.size, by_kernel, in_jax, handle, (y, weights, words))


def _by_kernels(group: Any, size: int, by_kernel: Callable, in_jax: Callable, *operands: Any) -> Any:
    # What has no elements has nothing to exchange, and no custom call's type fits it.
    if group.implementation == "reference" or size == 0:
        return in_jax(*operands)
    return jax.lax.platform_dependent(*operands, cuda=by_kernel, default=in_jax)


def _dispatch(handle: Handle, operands: tuple[jax.Array | None, Weights], *, num_sms: int) -> tuple[Any, Weights]:
    x, weights = operands
    if x is None:
        return None, None if weights is None else reference.dispatch_weights(handle, weights)
    rows, _, row_weights = send(handle, x, None, weights, num_sms)
    return rows, row_weights


def _dispatch_transpose(handle: Handle, cotangents: tuple[jax.Array | None, Weights], *, num_sms: int) -> Any:
    rows, weights = cotangents
    if rows is None:
        return None, None if weights is None else reference.combine_weights(handle, weights)
    return _receive(handle, rows, None, weights, num_sms)


def _combine(handle: Handle, y: jax.Array, *, num_sms: int) -> jax.Array:
    return _receive(handle, y, None, None, num_sms)[0]


def _send(handle: Handle, x: jax.Array, *, num_sms: int) -> jax.Array:
    return send(handle, x, None, None, num_sms)[0]


# Weighted combine: bilinear in (y, weights), the handle's arrays are passed along.

_weighted_combine_p = Primitive("jax_ep_weighted_combine")


def weighted_combine(handle: Handle, y: jax.Array, weights: jax.Array, num_sms: int = 0) -> jax.Array:
    """Tokens [T, H] from rows [C, H] times their weights [C] float32; bilinear."""
    arrays, treedef = jax.tree.flatten(handle)
    return _weighted_combine_p.bind(y, weights, *arrays, handle=treedef, num_sms=num_sms)


def _weighted_combine(y: jax.Array, weights: jax.Array, *arrays: jax.Array, handle: Any, num_sms: int) -> jax.Array:
    return _receive(jax.tree.unflatten(handle, arrays), y, weights, None, num_sms)[0]


@_weighted_combine_p.def_abstract_eval
def _(y: Any, weights: Any, *arrays: Any, handle: Any, num_sms: int) -> Any:
    tokens = jax.tree.unflatten(handle, arrays).shape[1]
    return y.update(shape=(tokens, y.shape[1]))


def _weighted_combine_transpose(
    cotangent: Any, y: Any, weights: Any, *arrays: Any, handle: Any, num_sms: int
) -> tuple[Any, ...]:
    none = (None,) * len(arrays)
    wants_y = ad.is_undefined_primal(y)
    if type(cotangent) is ad.Zero:
        zero = ad.Zero((y if wants_y else weights).aval.to_tangent_aval())
        return (zero, None, *none) if wants_y else (None, zero, *none)
    rows_of = jax.tree.unflatten(handle, arrays)
    rows = linear_call(
        functools.partial(_send, num_sms=num_sms), functools.partial(_combine, num_sms=num_sms), rows_of, cotangent
    )
    has_token = reference.row_has_token(rows_of)[:, None]
    if wants_y:
        # Selected, not multiplied: what a caller left in the padding, NaN included, reaches nothing.
        product = jnp.where(has_token, rows.astype(jnp.float32) * weights[:, None], 0)
        return (reference.cast(product, y.aval.dtype), None, *none)
    product = jnp.where(has_token, rows.astype(jnp.float32) * y.astype(jnp.float32), 0)
    return (None, product.sum(axis=1), *none)


ad.defjvp(
    _weighted_combine_p,
    lambda t, y, weights, *arrays, **static: _weighted_combine_p.bind(t, weights, *arrays, **static),
    lambda t, y, weights, *arrays, **static: _weighted_combine_p.bind(y, t, *arrays, **static),
    *(None,) * HANDLE_ARRAYS,
)
ad.primitive_transposes[_weighted_combine_p] = _weighted_combine_transpose
mlir.register_lowering(_weighted_combine_p, mlir.lower_fun(_weighted_combine, multiple_results=False))
_weighted_combine_p.def_impl(functools.partial(jax.jit, static_argnames=("handle", "num_sms"))(_weighted_combine))
batching.primitive_batchers[_weighted_combine_p] = lambda args, dims, **static: refuse_vmap("combine", dims)
