"""FP8 rows for the wire: an e4m3 payload, and one scale for every 128 elements.

The same bits on every backend (docs/semantics.md, "FP8 wire").
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

BLOCK = 128
"""Elements of the last axis that share a scale."""

ScaleFormat = Literal["float32", "ue8m0"]
SCALE_FORMATS: tuple[ScaleFormat, ...] = ("float32", "ue8m0")

_WIDE_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
_E4M3_MAX = np.float32(448)
_ONE_448TH = np.float32(1) / _E4M3_MAX
_LEAST_AMAX = np.float32(2.0**-100)
_INFINITY_BITS = np.int32(0x7F800000)


def num_blocks(hidden: int) -> int:
    """Scales of a vector of `hidden` elements: one for every 128, the last block may be shorter."""
    return -(-hidden // BLOCK)


def quantize(x: ArrayLike, *, scale_format: ScaleFormat = "float32") -> tuple[jax.Array, jax.Array]:
    """Tokens or rows as FP8 with scales: what `dispatch(..., wire="fp8")` sends.

    Every block of 128 elements along the last axis is scaled so that its largest magnitude becomes 448, the
    largest e4m3 value, and rounded to nearest, ties to even. A block that holds a NaN or an infinity becomes
    NaN, payload and scale. Magnitudes below 2^-100 do not shrink the scale any further.

    Not differentiable, as a cotangent in FP8 would lose small values; `dispatch(x, ..., wire="fp8")` is.

    Args:
      x: [..., H] float16, bfloat16 or float32.
      scale_format: "float32", or "ue8m0", which rounds each scale up to a power of two: all exponent.

    Returns:
      payload: [..., H] float8_e4m3fn.
      scales: [..., ceil(H / 128)] float32; `payload * scale` is x again, nearly.

    Raises:
      TypeError: x is no float array, or a float of another width; or the result is differentiated.
      ValueError: x is a scalar, or the scale format is unknown.

    Example:
      >>> quantize(jnp.array([[224.0, -1.0, 0.3]]))  # 224 = 448 × 0.5; e4m3 has 0.5625 and 0.625 near 0.6
      ([[448, -2, 0.625]], [[0.5]])

    Source: the format and its blocks of 128 are DeepSeek-V3's (arXiv:2412.19437, section 3.3).
    """
    x = jnp.asarray(x)
    if x.dtype not in _WIDE_DTYPES:
        raise TypeError(
            f"x: expected float16, bfloat16 or float32, got {x.dtype.name}; cast it with x.astype, unless "
            "it is quantised already"
        )
    if x.ndim == 0:
        raise ValueError("x: expected [..., hidden], got a scalar; reshape it to one axis at least")
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale_format: expected one of {SCALE_FORMATS}, got {scale_format!r}")
    return _quantize(x, scale_format)


def dequantize(payload: ArrayLike, scales: ArrayLike, dtype: Any = jnp.bfloat16) -> jax.Array:
    """FP8 rows as ordinary numbers: the float32 product of payload and scale, then one cast.

    Args:
      payload: [..., H] float8_e4m3fn.
      scales: [..., ceil(H / 128)] float32, from `quantize` in either format.
      dtype: float16, bfloat16 or float32.

    Returns:
      [..., H] of `dtype`.

    Raises:
      TypeError: a dtype is not one of these.
      ValueError: scales of another shape than the payload needs.

    Example:
      >>> dequantize(*quantize(jnp.array([[224.0, -1.0, 0.3]])))
      [[224, -1, 0.3125]]
    """
    payload, scales, dtype = jnp.asarray(payload), jnp.asarray(scales), jnp.dtype(dtype)
    if payload.dtype != jnp.float8_e4m3fn:
        raise TypeError(f"payload: expected float8_e4m3fn, got {payload.dtype.name}; `quantize` makes it")
    if scales.dtype != jnp.float32:
        raise TypeError(f"scales: expected float32, got {scales.dtype.name}; cast them with scales.astype")
    if dtype not in _WIDE_DTYPES:
        raise TypeError(f"dtype: expected float16, bfloat16 or float32, got {dtype.name}; cast the result of one")
    if payload.ndim == 0:
        raise ValueError("payload: expected [..., hidden], got a scalar; reshape it to one axis at least")
    expected = (*payload.shape[:-1], num_blocks(payload.shape[-1]))
    if scales.shape != expected:
        raise ValueError(
            f"scales: expected shape {expected} for a payload of shape {payload.shape}, one scale for every "
            f"{BLOCK} elements of the last axis, got {scales.shape}; pass both arrays of one `quantize` call"
        )
    x = _merge(_split(payload.astype(jnp.float32)) * scales[..., None], payload.shape[-1])
    return (x if dtype == jnp.float32 else round_to(dtype, x)).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _quantize(x: jax.Array, scale_format: ScaleFormat) -> tuple[jax.Array, jax.Array]:
    blocks = _split(x.astype(jnp.float32))
    # Magnitudes compared as integers: a float maximum loses NaNs on CPU, and may take subnormals for zeros.
    amax_bits = jnp.max(_bits(blocks) & np.int32(0x7FFFFFFF), axis=-1)
    finite = amax_bits < _INFINITY_BITS
    amax = _float(jnp.maximum(amax_bits, _LEAST_AMAX.view(np.int32)))
    scales = amax * _ONE_448TH
    if scale_format == "ue8m0":
        scale_bits = _bits(scales)
        exponent = (scale_bits >> 23) + ((scale_bits & 0x7FFFFF) != 0)
        scales, inverse = _float(exponent << 23), _float((254 - exponent) << 23)
    else:
        inverse = _448_over(amax)
    # At most a few ulps above 448, which round to 448: nothing overflows, though XLA's cast does not saturate.
    payload = round_to(jnp.float8_e4m3fn, blocks * inverse[..., None])
    payload = jnp.where(finite[..., None], payload, jnp.nan).astype(jnp.float8_e4m3fn)
    return _merge(payload, x.shape[-1]), jnp.where(finite, scales, jnp.nan)


@_quantize.defjvp
def _quantize_jvp(scale_format: ScaleFormat, primals: Any, tangents: Any) -> NoReturn:
    raise TypeError(
        "quantize: expected x without a derivative, as a cotangent in FP8 would lose small values, got one; "
        'pass the unquantised x to dispatch(x, ..., wire="fp8"), whose dequantised rows let gradients '
        "straight through, or cut it off with quantize(jax.lax.stop_gradient(x))"
    )


def _448_over(amax: jax.Array) -> jax.Array:
    """fl(448 / amax) of normal positive float32. XLA's own division is off by up to two ulps on GPUs."""
    bits = _bits(amax)
    mantissa = (bits & 0x7FFFFF) | 0x800000
    quotient, rest = jnp.zeros_like(mantissa), jnp.full_like(mantissa, 7 << 21)
    # Long division of 7 · 2^21 (448 without its exponent) by the mantissa, seven bits a time: rest << 7 fits int32.
    for _ in range(4):
        digit = jax.lax.div(rest << 7, mantissa)
        quotient, rest = (quotient << 7) + digit, (rest << 7) - digit * mantissa
    # At least 28 bits, with the lowest standing for all that follow: the cast rounds the quotient as it should.
    rounded = (quotient | (rest != 0)).astype(jnp.float32)
    return _float(_bits(rounded) + ((107 - (bits >> 23)) << 23))


def round_to(dtype: Any, x: jax.Array) -> jax.Array:
    """float32 rounded to what `dtype` can hold, still as float32.

    Before a cast, as XLA for GPUs drops the cast, and its rounding, where the result is widened again.
    """
    if dtype == jnp.bfloat16:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    # reduce_precision would flush the subnormals of narrower exponents.
    info = jnp.finfo(dtype)
    exponent = jnp.maximum((_bits(x) >> 23) & 0xFF, 127 + info.minexp)
    step = exponent - info.nmant  # of the distance between neighbours, a power of two
    in_steps = jax.lax.round(x * _float((254 - step) << 23), jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    return in_steps * _float(step << 23)


def _split(x: jax.Array) -> jax.Array:
    """[..., H] to [..., blocks, 128], the last block filled up with zeros."""
    blocks = num_blocks(x.shape[-1])
    padding = [(0, 0)] * (x.ndim - 1) + [(0, blocks * BLOCK - x.shape[-1])]
    return jnp.pad(x, padding).reshape(*x.shape[:-1], blocks, BLOCK)


def _merge(blocks: jax.Array, hidden: int) -> jax.Array:
    """[..., blocks, 128] back to [..., H]."""
    return blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * BLOCK)[..., :hidden]


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
