"""Dispatch and combine as JAX operations: what they are to grad, jvp, transpose, remat and scan.

dispatch and unweighted combine are each other's transpose, which `jax.custom_derivatives.linear_call` is told; grad,
jvp, linear_transpose, remat and scan follow. The weighted combine is bilinear in rows and weights and is a Primitive of
its own, since linear_call takes no float residual that is differentiated too.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import linear_call
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_ep import ffi, reference
from jax_ep.config import RowOrder
from jax_ep.guard import refuse_vmap
from jax_ep.layout import HANDLE_ARRAYS, Handle

Weights = jax.Array | None


def layout(index: jax.Array, *, group: Any, row_order: RowOrder, alignment: int, capacity: int) -> Handle:
    """The handle of one call; its slots are decided by the compiled module where that has a handler."""
    return reference.layout(
        index,
        group=group,
        row_order=row_order,
        alignment=alignment,
        capacity=capacity,
        place_rows=ffi.place_rows,
    )


def dispatch(handle: Handle, x: jax.Array | None, weights: Weights) -> tuple[jax.Array | None, Weights]:
    """Rows [C, H] and their weights ([C], in rank order [C, K]) of tokens [T, H] and routing weights [T, K]; linear.

    Either may be None.
    """
    return linear_call(_dispatch, _dispatch_transpose, handle, (x, weights))


def combine(handle: Handle, y: jax.Array) -> jax.Array:
    """Tokens [T, H] from rows [C, H]; linear."""
    return linear_call(reference.combine, reference.dispatch, handle, y)


def _dispatch(handle: Handle, operands: tuple[jax.Array | None, Weights]) -> tuple[jax.Array | None, Weights]:
    x, weights = operands
    rows = None if x is None else reference.dispatch(handle, x)
    return rows, None if weights is None else reference.dispatch_weights(handle, weights)


def _dispatch_transpose(handle: Handle, cotangents: tuple[jax.Array | None, Weights]) -> tuple[Any, Weights]:
    rows, weights = cotangents
    x = None if rows is None else reference.combine(handle, rows)
    return x, None if weights is None else reference.combine_weights(handle, weights)


# Weighted combine: bilinear in (y, weights), the handle's arrays are passed along.

_weighted_combine_p = Primitive("jax_ep_weighted_combine")


def weighted_combine(handle: Handle, y: jax.Array, weights: jax.Array) -> jax.Array:
    """Tokens [T, H] from rows [C, H] times their weights [C] float32; bilinear."""
    arrays, treedef = jax.tree.flatten(handle)
    return _weighted_combine_p.bind(y, weights, *arrays, handle=treedef)


def _weighted_combine(y: jax.Array, weights: jax.Array, *arrays: jax.Array, handle: Any) -> jax.Array:
    return reference.combine(jax.tree.unflatten(handle, arrays), y, weights)


@_weighted_combine_p.def_abstract_eval
def _(y: Any, weights: Any, *arrays: Any, handle: Any) -> Any:
    tokens = jax.tree.unflatten(handle, arrays).shape[1]
    return y.update(shape=(tokens, y.shape[1]))


def _weighted_combine_transpose(cotangent: Any, y: Any, weights: Any, *arrays: Any, handle: Any) -> tuple[Any, ...]:
    none = (None,) * len(arrays)
    wants_y = ad.is_undefined_primal(y)
    if type(cotangent) is ad.Zero:
        zero = ad.Zero((y if wants_y else weights).aval.to_tangent_aval())
        return (zero, None, *none) if wants_y else (None, zero, *none)
    rows_of = jax.tree.unflatten(handle, arrays)
    rows = combine_transpose(rows_of, cotangent)
    has_token = reference.row_has_token(rows_of)[:, None]
    if wants_y:
        # Selected, not multiplied: what a caller left in the padding, NaN included, reaches nothing.
        product = jnp.where(has_token, rows.astype(jnp.float32) * weights[:, None], 0)
        return (reference.cast(product, y.aval.dtype), None, *none)
    product = jnp.where(has_token, rows.astype(jnp.float32) * y.astype(jnp.float32), 0)
    return (None, product.sum(axis=1), *none)


def combine_transpose(handle: Handle, tokens: jax.Array) -> jax.Array:
    """What combine's transpose gives each row: dispatch without weights."""
    return linear_call(reference.dispatch, reference.combine, handle, tokens)


ad.defjvp(
    _weighted_combine_p,
    lambda t, y, weights, *arrays, handle: _weighted_combine_p.bind(t, weights, *arrays, handle=handle),
    lambda t, y, weights, *arrays, handle: _weighted_combine_p.bind(y, t, *arrays, handle=handle),
    *(None,) * HANDLE_ARRAYS,
)
ad.primitive_transposes[_weighted_combine_p] = _weighted_combine_transpose
mlir.register_lowering(_weighted_combine_p, mlir.lower_fun(_weighted_combine, multiple_results=False))
_weighted_combine_p.def_impl(functools.partial(jax.jit, static_argnames="handle")(_weighted_combine))
batching.primitive_batchers[_weighted_combine_p] = lambda args, dims, handle: refuse_vmap("combine", dims)
