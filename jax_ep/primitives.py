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
from jax_ep.call import Call
from jax_ep.config import RowOrder
from jax_ep.guard import refuse_vmap
from jax_ep.layout import HANDLE_ARRAYS, Handle
from jax_ep.quantize import ScaleFormat, dequantize, quantize

Weights = jax.Array | None


def layout(index: jax.Array, *, group: Any, row_order: RowOrder, alignment: int, capacity: int, call: Call) -> Handle:
    """The handle of one call; without a group's kernels, slots are decided by the compiled module where it can."""
    static: dict[str, Any] = {"group": group, "row_order": row_order, "alignment": alignment, "capacity": capacity}
    in_jax = functools.partial(reference.layout, place_rows=ffi.place_rows, **static)
    return _by_kernels(group, index.size, functools.partial(kernels.layout, call=call, **static), in_jax, index)


def dispatch(handle: Handle, x: jax.Array | None, weights: Weights, call: Call) -> tuple[Any, Weights]:
    """Rows [C, H] and their weights ([C], in rank order [C, K]) of tokens [T, H] and routing weights [T, K]; linear.

    Either may be None.
    """
    forward, back = (functools.partial(f, call=call) for f in (_dispatch, _dispatch_transpose))
    return linear_call(forward, back, handle, (x, weights))


def combine(handle: Handle, y: jax.Array, call: Call) -> jax.Array:
    """Tokens [T, H] from rows [C, H]; linear."""
    forward, back = (functools.partial(f, call=call) for f in (_combine, _combine_transpose))
    return linear_call(forward, back, handle, y)


def send_fp8(
    handle: Handle,
    x: jax.Array,
    scales: jax.Array | None,
    weights: Weights,
    call: Call,
    scale_format: ScaleFormat,
    dtype: Any,
) -> tuple[jax.Array, jax.Array | None, Weights]:
    """Tokens, which cross as FP8, and their weights to rows; without a derivative.

    Args:
      x, scales: tokens and None, to be quantised to `scale_format`, or a payload and its scales.
      dtype: of rows, which are dequantised to it; None leaves them as they cross, with their scales.
    """

    def by_kernel(handle: Handle, operands: Any) -> Any:
        x, scales, weights = operands
        return kernels.dispatch(handle, x, scales, weights, call, scale_format, dtype or jnp.float8_e4m3fn)

    def in_jax(handle: Handle, operands: Any) -> Any:
        x, scales, weights = operands
        payload, scales = quantize(x, scale_format=scale_format) if scales is None else (x, scales)
        rows, row_scales = (reference.dispatch(handle, a) for a in (payload, scales))
        row_weights = None if weights is None else reference.dispatch_weights(handle, weights)
        if dtype is None:
            return rows, row_scales, row_weights
        return dequantize(rows, row_scales, dtype=dtype), None, row_weights

    return _by_kernels(handle.group, x.size and handle.capacity, by_kernel, in_jax, handle, (x, scales, weights))


def send(handle: Handle, x: jax.Array, weights: Weights, call: Call) -> tuple[jax.Array, Weights]:
    """Tokens and their weights to rows; without a derivative."""

    def by_kernel(handle: Handle, operands: Any) -> Any:
        x, weights = operands
        rows, _, row_weights = kernels.dispatch(handle, x, None, weights, call)
        return rows, row_weights

    def in_jax(handle: Handle, operands: Any) -> Any:
        x, weights = operands
        return reference.dispatch(handle, x), None if weights is None else reference.dispatch_weights(handle, weights)

    return _by_kernels(handle.group, x.size and handle.capacity, by_kernel, in_jax, handle, (x, weights))


def receive(handle: Handle, y: jax.Array, weights: Weights, words: Weights, call: Call) -> tuple[jax.Array, Weights]:
    """Rows to tokens, and words of rows to words of picks; without a derivative."""

    def by_kernel(handle: Handle, operands: Any) -> Any:
        y, weights, words = operands
        return kernels.combine(handle, y, weights, words, call)

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


def _dispatch(handle: Handle, operands: tuple[jax.Array | None, Weights], *, call: Call) -> tuple[Any, Weights]:
    x, weights = operands
    if x is None:
        return None, None if weights is None else reference.dispatch_weights(handle, weights)
    return send(handle, x, weights, call)


def _dispatch_transpose(handle: Handle, cotangents: tuple[jax.Array | None, Weights], *, call: Call) -> Any:
    rows, weights = cotangents
    if rows is None:
        return None, None if weights is None else reference.combine_weights(handle, weights)
    return receive(handle, rows, None, weights, call)


def _combine(handle: Handle, y: jax.Array, *, call: Call) -> jax.Array:
    return receive(handle, y, None, None, call)[0]


def _combine_transpose(handle: Handle, x: jax.Array, *, call: Call) -> jax.Array:
    return send(handle, x, None, call)[0]


# Weighted combine: bilinear in (y, weights), the handle's arrays are passed along. Where both have a tangent, these go
# into one primitive, whose transpose brings the cotangents of both by one exchange.

_weighted_combine_p = Primitive("jax_ep_weighted_combine")
_tangent_p = Primitive("jax_ep_weighted_combine_tangent")


def weighted_combine(handle: Handle, y: jax.Array, weights: jax.Array, call: Call) -> jax.Array:
    """Tokens [T, H] from rows [C, H] times their weights [C] float32; bilinear."""
    arrays, treedef = jax.tree.flatten(handle)
    return _weighted_combine_p.bind(y, weights, *arrays, handle=treedef, call=call)


def weighted_combine_tangent(
    handle: Handle, ty: jax.Array, tweights: jax.Array, y: jax.Array, weights: jax.Array, call: Call
) -> jax.Array:
    """Its tangent, from those of y and of the weights."""
    arrays, treedef = jax.tree.flatten(handle)
    return _tangent(ty, tweights, y, weights, *arrays, handle=treedef, call=call)


def _weighted_combine(y: jax.Array, weights: jax.Array, *arrays: jax.Array, handle: Any, call: Call) -> jax.Array:
    return receive(jax.tree.unflatten(handle, arrays), y, weights, None, call)[0]


def _tangent(
    ty: jax.Array, tweights: jax.Array, y: jax.Array, weights: jax.Array, *arrays: jax.Array, **static: Any
) -> jax.Array:
    """The tangent of a weighted combine; linear in ty and tweights."""
    combine = functools.partial(_weighted_combine_p.bind, **static)
    return combine(ty, weights, *arrays) + combine(y, tweights, *arrays)


def _type_of_tokens(y: Any, *others: Any, handle: Any, call: Call) -> Any:
    arrays = others[-HANDLE_ARRAYS:]
    return y.update(shape=(jax.tree.unflatten(handle, arrays).shape[1], y.shape[1]), weak_type=False)


def _weighted_combine_jvp(primals: Any, tangents: Any, **static: Any) -> Any:
    y, weights, *arrays = primals
    ty, tweights = tangents[:2]
    out = _weighted_combine_p.bind(*primals, **static)
    if type(ty) is ad.Zero and type(tweights) is ad.Zero:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    if type(tweights) is ad.Zero:
        return out, _weighted_combine_p.bind(ty, weights, *arrays, **static)
    if type(ty) is ad.Zero:
        return out, _weighted_combine_p.bind(y, tweights, *arrays, **static)
    return out, _tangent_p.bind(ty, tweights, y, weights, *arrays, **static)


def _tangent_jvp(primals: Any, tangents: Any, **static: Any) -> Any:
    floats, arrays = primals[:4], primals[4:]
    return jax.jvp(
        lambda *floats: _tangent(*floats, *arrays, **static), floats, tuple(map(ad.instantiate_zeros, tangents[:4]))
    )


def _weighted_combine_transpose(
    cotangent: Any, y: Any, weights: Any, *arrays: Any, handle: Any, call: Call
) -> tuple[Any, ...]:
    none = (None,) * len(arrays)
    wants_y = ad.is_undefined_primal(y)
    if type(cotangent) is ad.Zero:
        zero = ad.Zero((y if wants_y else weights).aval.to_tangent_aval())
        return (zero, None, *none) if wants_y else (None, zero, *none)
    rows_of = jax.tree.unflatten(handle, arrays)
    if wants_y:
        return (_cotangent_of_y(rows_of, cotangent, weights, y.aval.dtype, call), None, *none)
    return (None, _cotangent_of_weights(rows_of, cotangent, y, call), *none)


def _tangent_transpose(
    cotangent: Any, ty: Any, tweights: Any, y: Any, weights: Any, *arrays: Any, handle: Any, call: Call
) -> tuple[Any, ...]:
    none = (None,) * (2 + len(arrays))
    if type(cotangent) is ad.Zero:
        zeros = (ad.Zero(t.aval.to_tangent_aval()) if ad.is_undefined_primal(t) else None for t in (ty, tweights))
        return (*zeros, *none)
    cotangents = weighted_combine_cotangents(call, jax.tree.unflatten(handle, arrays), cotangent, y, weights)
    wanted = (ct if ad.is_undefined_primal(t) else None for ct, t in zip(cotangents, (ty, tweights), strict=True))
    return (*wanted, *none)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def weighted_combine_cotangents(
    call: Call, handle: Handle, cotangent: jax.Array, y: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cotangents of rows y [C, H] and their weights [C] from those of tokens [T, H]."""

    def by_kernel(handle: Handle, operands: Any) -> Any:
        cotangent, y, weights = operands
        rows, dots = kernels.gradient(handle, cotangent, y, weights, call)
        return rows, dots.sum(axis=1)

    def in_jax(handle: Handle, operands: Any) -> Any:
        cotangent, y, weights = operands
        rows = reference.dispatch(handle, cotangent)
        return (
            reference.cast(_where_token(handle, rows, weights[:, None]), y.dtype),
            _where_token(handle, rows, y).sum(axis=1),
        )

    size = cotangent.size and handle.capacity
    return _by_kernels(handle.group, size, by_kernel, in_jax, handle, (cotangent, y, weights))


@weighted_combine_cotangents.defjvp
def _(call: Call, primals: Any, tangents: Any) -> Any:
    handle, *floats = primals

    def apart(cotangent: jax.Array, y: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (
            _cotangent_of_y(handle, cotangent, weights, y.dtype, call),
            _cotangent_of_weights(handle, cotangent, y, call),
        )

    return weighted_combine_cotangents(call, *primals), jax.jvp(apart, tuple(floats), tuple(tangents[1:]))[1]


def _cotangent_of_y(handle: Handle, cotangent: jax.Array, weights: jax.Array, dtype: Any, call: Call) -> jax.Array:
    rows = _rows_of_cotangent(handle, cotangent, call)
    return reference.cast(_where_token(handle, rows, weights[:, None]), dtype)


def _cotangent_of_weights(handle: Handle, cotangent: jax.Array, y: jax.Array, call: Call) -> jax.Array:
    return _where_token(handle, _rows_of_cotangent(handle, cotangent, call), y).sum(axis=1)


def _rows_of_cotangent(handle: Handle, cotangent: jax.Array, call: Call) -> jax.Array:
    """Of tokens [T, H], to rows [C, H]; linear."""
    forward, back = (functools.partial(f, call=call) for f in (_combine_transpose, _combine))
    return linear_call(forward, back, handle, cotangent)


def _where_token(handle: Handle, rows: jax.Array, factor: jax.Array) -> jax.Array:
    """Their float32 product, +0 in rows without a token: selected, since a caller may have left NaN there."""
    product = rows.astype(jnp.float32) * factor.astype(jnp.float32)
    return jnp.where(reference.row_has_token(handle)[:, None], product, 0)


ad.primitive_jvps[_weighted_combine_p] = _weighted_combine_jvp
ad.primitive_jvps[_tangent_p] = _tangent_jvp
ad.primitive_transposes[_weighted_combine_p] = _weighted_combine_transpose
ad.primitive_transposes[_tangent_p] = _tangent_transpose
for _primitive, _function in ((_weighted_combine_p, _weighted_combine), (_tangent_p, _tangent)):
    _primitive.def_abstract_eval(_type_of_tokens)
    mlir.register_lowering(_primitive, mlir.lower_fun(_function, multiple_results=False))
    _primitive.def_impl(functools.partial(jax.jit, static_argnames=("handle", "call"))(_function))
    batching.primitive_batchers[_primitive] = lambda args, dims, **static: refuse_vmap("combine", dims)
