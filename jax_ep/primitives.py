"""Dispatch and combine as JAX operations: derivatives, vmap refusal, mesh-axis types.

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

from jax_ep import reference
from jax_ep.layout import HANDLE_ARRAYS, Handle
from jax_ep.quantize import dequantize, quantize

Weights = jax.Array | None


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
def _(y, weights, *arrays, handle):
    tokens = jax.tree.unflatten(handle, arrays).shape[1]
    return y.update(shape=(tokens, y.shape[1]))


def _weighted_combine_transpose(cotangent, y, weights, *arrays, handle):
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
        return (product.astype(y.aval.dtype), None, *none)
    product = jnp.where(has_token, rows.astype(jnp.float32) * y.astype(jnp.float32), 0)
    return (None, product.sum(axis=1), *none)


def combine_transpose(handle: Handle, tokens: jax.Array) -> jax.Array:
    """What combine's transpose gives each row: dispatch without weights."""
    return linear_call(reference.dispatch, reference.combine, handle, tokens)


def _refuse_vmap(what: str):
    def rule(args, dims, **params):
        raise NotImplementedError(
            f"jax_ep.{what}: expected to be traced without jax.vmap over its operands, got vmap dimensions {dims}; "
            "an exchange has one layout for all its tokens: reshape the mapped axis into the token axis "
            "([B, T, H] to [B * T, H], with max_tokens to match) or go over it with jax.lax.scan or jax.lax.map"
        )

    return rule


ad.defjvp(
    _weighted_combine_p,
    lambda t, y, weights, *arrays, handle: _weighted_combine_p.bind(t, weights, *arrays, handle=handle),
    lambda t, y, weights, *arrays, handle: _weighted_combine_p.bind(y, t, *arrays, handle=handle),
    *(None,) * HANDLE_ARRAYS,
)
ad.primitive_transposes[_weighted_combine_p] = _weighted_combine_transpose
mlir.register_lowering(_weighted_combine_p, mlir.lower_fun(_weighted_combine, multiple_results=False))
_weighted_combine_p.def_impl(functools.partial(jax.jit, static_argnames="handle")(_weighted_combine))
batching.primitive_batchers[_weighted_combine_p] = _refuse_vmap("combine")

# What every operand passes first: an identity on a list of arrays with two duties. It refuses vmap with the way out,
# which linear_call's own refusal does not name; and it makes all tangents real arrays as soon as one of them is, since
# linear_call cannot take the symbolic zero of an operand that is not differentiated.

_operands_p = Primitive("jax_ep_operands")
_operands_p.multiple_results = True
_operands_p.def_abstract_eval(lambda *leaves, what: list(leaves))
_operands_p.def_impl(lambda *leaves, what: list(leaves))
mlir.register_lowering(_operands_p, lambda ctx, *leaves, what: list(leaves))
batching.primitive_batchers[_operands_p] = lambda args, dims, what: _refuse_vmap(what)(args, dims)


def _operands_jvp(primals, tangents, what):
    floating = [jnp.issubdtype(p.dtype, jnp.floating) for p in primals]
    real = [ad.instantiate_zeros(t) for t, is_float in zip(tangents, floating, strict=True) if is_float]
    real = iter(_operands_p.bind(*real, what=what))
    tangents = [next(real) if is_float else t for t, is_float in zip(tangents, floating, strict=True)]
    return _operands_p.bind(*primals, what=what), tangents


ad.primitive_jvps[_operands_p] = _operands_jvp
ad.primitive_transposes[_operands_p] = lambda cotangents, *leaves, what: _operands_p.bind(
    *map(ad.instantiate_zeros, cotangents), what=what
)


def operands(what: str, group: Any, *trees: Any) -> tuple[Any, ...]:
    """`trees` made ready for an exchange: vmap refused, all typed as varying over one set of mesh axes.

    That set is the group's axes and those that any operand varies over; without check_vma nothing has such a type and
    the pcast is void.
    """
    leaves, treedef = jax.tree.flatten(trees)
    varying = {name for leaf in leaves for name in _varying(leaf)} | set(group.axis)
    leaves = _operands_p.bind(*leaves, what=what)
    missing = [tuple(sorted(varying - _varying(leaf))) for leaf in leaves]
    leaves = [
        jax.lax.pcast(leaf, names, to="varying") if names else leaf
        for leaf, names in zip(leaves, missing, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


def _varying(leaf: jax.Array) -> set[str]:
    return set(jax.typeof(leaf).manual_axis_type.varying)


# FP8: the exchange itself has no derivative; dequantised rows are straight-through.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def dispatch_fp8(
    how: tuple[str, jnp.dtype | None], handle: Handle, x: Any, weights: Weights
) -> tuple[jax.Array, jax.Array | None, Weights]:
    """Rows of tokens that cross as FP8.

    Args:
      how: (scale format, dtype to dequantise the rows to, or None for rows as they crossed).
      handle: from layout.
      x: [T, H] float, quantised on the way, or (payload [T, H] float8_e4m3fn, scales [T, blocks] float32).
      weights: [T, K] float32 or None.

    Returns:
      rows [C, H]; their scales [C, blocks], or None if dequantised; weights of rows, or None.
    """
    scale_format, dtype = how
    payload, scales = x if isinstance(x, tuple) else quantize(x, scale_format=scale_format)
    rows, row_scales = reference.dispatch(handle, payload), reference.dispatch(handle, scales)
    row_weights = None if weights is None else reference.dispatch_weights(handle, weights)
    if dtype is None:
        return rows, row_scales, row_weights
    return dequantize(rows, row_scales, dtype=dtype), None, row_weights


@dispatch_fp8.defjvp
def _(how, primals, tangents):
    handle, x, weights = primals
    _, dx, dweights = tangents
    rows, row_scales, row_weights = dispatch_fp8(how, handle, x, weights)
    if isinstance(x, tuple) or how[1] is None:  # refuse_gradient has seen to it that dx is zero
        zeros = jax.tree.map(jnp.zeros_like, (rows, row_scales))
        return (rows, row_scales, row_weights), (*zeros, dispatch(handle, None, dweights)[1])
    drows, drow_weights = dispatch(handle, dx, dweights)
    return (rows, None, row_weights), (drows.astype(rows.dtype), None, drow_weights)


@jax.custom_jvp
def refuse_gradient(x: Any) -> Any:
    """Identity that cannot be differentiated: FP8 rows would lose small cotangents without a word."""
    return x


@refuse_gradient.defjvp
def _(primals, tangents):
    raise TypeError(
        "jax_ep.dispatch: expected no differentiation with respect to tokens that arrive as quantised rows or come "
        "already quantised (an FP8 cotangent loses small values), got a tangent for them; use "
        'dispatch(x, ..., wire="fp8") with dequantize=True (straight-through), or jax.lax.stop_gradient(x)'
    )
