"""FP8 with blocks of 128, bit for bit against loops that spell e4m3 out."""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jax_ep.quantize import dequantize, quantize

E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
FORMATS = ("float32", "ue8m0")
DTYPES = (np.float16, BF16, np.float32)
NAN_CODE = 0x7F


def e4m3_magnitude(code: int) -> Fraction:
    """What the seven magnitude bits of an e4m3 number mean: 4 bits of exponent (bias 7), 3 of mantissa."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(mantissa, 8) * Fraction(1, 2**6)
    return (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


MAGNITUDES = [e4m3_magnitude(code) for code in range(127)]  # code 127 is NaN
LEVELS = np.array([float(m) for m in MAGNITUDES])  # exact, as are their midpoints


def e4m3_code(value: np.ndarray) -> np.ndarray:
    """Nearest e4m3 numbers of finite float32 within ±448, ties to the even code, as uint8."""
    magnitude = np.abs(value.astype(np.float64))
    above = np.clip(np.searchsorted(LEVELS, magnitude), 1, 126)
    middle = (LEVELS[above - 1] + LEVELS[above]) / 2
    even = np.where(above % 2 == 0, above, above - 1)
    code = np.where(magnitude < middle, above - 1, np.where(magnitude > middle, above, even))
    return (code | np.where(np.signbit(value), 0x80, 0)).astype(np.uint8)


def quantize_block(x: np.ndarray, scale_format: str) -> tuple[np.ndarray, np.ndarray]:
    """One block of many rows: [N, up to 128] to codes of the same shape and scales [N]."""
    x = x.astype(np.float32)
    bad = ~np.isfinite(x).all(axis=-1)
    x = np.where(bad[:, None], 0, x)
    largest = np.maximum(np.abs(x).max(axis=-1), np.float32(2**-100))
    scale = largest * (np.float32(1) / np.float32(448))
    inverse = np.float32(448) / largest
    if scale_format == "ue8m0":
        mantissa, exponent = np.frexp(scale)  # scale = mantissa × 2^exponent, a mantissa of 0.5 to 1
        exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
        scale, inverse = np.ldexp(np.float32(1), exponent), np.ldexp(np.float32(1), -exponent)
    code = e4m3_code(np.clip(x * inverse[:, None], np.float32(-448), np.float32(448)))
    return np.where(bad[:, None], NAN_CODE, code).astype(np.uint8), np.where(bad, np.float32(np.nan), scale)


def quantize_loop(x: np.ndarray, scale_format: str) -> tuple[np.ndarray, np.ndarray]:
    rows = x.reshape(-1, x.shape[-1])
    blocks = [quantize_block(rows[:, at : at + 128], scale_format) for at in range(0, x.shape[-1], 128)]
    codes = np.concatenate([codes for codes, _ in blocks], axis=-1)
    scales = np.stack([scales for _, scales in blocks], axis=-1)
    return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], -1)


def dequantize_loop(codes: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    out = np.zeros(codes.shape, dtype)
    values = np.append(LEVELS, np.nan).astype(np.float32)[codes & 0x7F]
    values = np.where(codes & 0x80, -values, values)
    with np.errstate(over="ignore"):
        for column in range(codes.shape[-1]):
            out[..., column] = (values[..., column] * scales[..., column // 128]).astype(dtype)
    return out


def assert_same_bits(got: jax.Array, expected: np.ndarray) -> None:
    """Equal to the last bit and sign of zero, all NaNs counted as one."""
    values = np.asarray(got)
    assert values.shape == expected.shape
    bits, wanted = (a.view(f"u{a.dtype.itemsize}") for a in (values, expected))
    wide = expected.view(E4M3) if expected.dtype == np.uint8 else expected
    nan = np.isnan(wide.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(values.astype(np.float32)), nan)
    np.testing.assert_array_equal(np.where(nan, 0, bits), np.where(nan, 0, wanted))


@functools.cache
def compiled(scale_format: Any) -> Any:
    return jax.jit(functools.partial(quantize, scale_format=scale_format))


@functools.cache
def round_trip(scale_format: Any, dtype: type) -> Any:
    """Both functions in one program, where XLA could drop the step through FP8."""
    return jax.jit(lambda x: dequantize(*quantize(x, scale_format=scale_format), dtype=dtype))


def check(x: np.ndarray, scale_format: str) -> None:
    codes, scales = quantize_loop(x, scale_format)
    payload, got_scales = compiled(scale_format)(x)
    assert payload.dtype == jnp.float8_e4m3fn and got_scales.dtype == jnp.float32
    assert_same_bits(got_scales, scales)
    assert_same_bits(payload, codes)


def test_worked_example():
    # float32: scale 3/448, so 3 becomes 448, and -1 becomes -149.33, which lies between -144 and -160.
    payload, scales = quantize(jnp.array([3.0, -1.0, 0.0]))
    np.testing.assert_array_equal(np.asarray(payload, np.float32), [448, -144, 0])
    np.testing.assert_array_equal(scales, [np.float32(3) * (np.float32(1) / np.float32(448))])
    np.testing.assert_allclose(dequantize(payload, scales, jnp.float32), [3, -27 / 28, 0], rtol=1e-7)
    # ue8m0: 3/448 lies between 2^-8 and 2^-7; over 2^-7, 3 is 384 and -1 is -128, both in e4m3.
    payload, scales = quantize(jnp.array([3.0, -1.0, 0.0]), scale_format="ue8m0")
    np.testing.assert_array_equal(np.asarray(payload, np.float32), [384, -128, 0])
    np.testing.assert_array_equal(scales, [2.0**-7])
    np.testing.assert_array_equal(dequantize(payload, scales, jnp.float32), [3, -1, 0])


def test_docstring_example():
    payload, scales = quantize(jnp.array([[224.0, -1.0, 0.3]]))
    np.testing.assert_array_equal(np.asarray(payload, np.float32), [[448, -2, 0.625]])
    np.testing.assert_array_equal(scales, [[0.5]])
    back = dequantize(payload, scales)
    assert back.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(back, np.float32), [[224, -1, 0.3125]])


def test_the_format_spelled_out_is_that_of_ml_dtypes():
    np.testing.assert_array_equal(np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float64), LEVELS)
    assert LEVELS[-1] == 448 and LEVELS[1] == 2**-9


@pytest.mark.parametrize("scale_format", FORMATS)
def test_rounds_to_nearest_even_around_every_level_and_midpoint(scale_format):
    """Subnormals of e4m3 included. A 448 in each block makes its scale 1, so that x is what is rounded."""
    points = np.concatenate([LEVELS, (LEVELS[1:] + LEVELS[:-1]) / 2]).astype(np.float32)
    # Rounding to float16 first would make ties of those that are one float32 step, or 2^12, off a midpoint.
    near = (points.view(np.int32)[:, None] + np.array([-(2**12), -2, -1, 0, 1, 2, 2**12])).ravel()
    near = near[(near >= 0) & (near <= np.float32(448).view(np.int32))]
    values = near.astype(np.int32).view(np.float32)
    values = np.concatenate([values, -values, np.zeros(-2 * len(values) % 127, np.float32)])
    x = np.concatenate([values.reshape(-1, 127), np.full((len(values) // 127, 1), 448, np.float32)], axis=1)
    for quantized in (compiled(scale_format)(x), quantize(x, scale_format=scale_format)):
        assert_same_bits(quantized[1], np.ones((len(x), 1), np.float32))
        assert_same_bits(quantized[0], e4m3_code(x))
        assert_same_bits(quantized[0], x.astype(E4M3).view(np.uint8))


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=["float16", "bfloat16"])
def test_every_16_bit_value_as_the_largest_of_its_block(dtype, scale_format):
    check(np.arange(2**16, dtype=np.uint16).view(dtype)[:, None], scale_format)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_float32_values_as_the_largest_of_their_block(scale_format):
    draws = np.random.default_rng(0)
    some = draws.integers(0, 2**32, 60_000, dtype=np.uint32).view(np.float32)
    # 448 times a power of two, and its neighbours: where a scale is, or just is not, a power of two.
    edge = np.float32(448) * np.exp2(np.arange(-112, 120)).astype(np.float32)
    edge = (edge.view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)).ravel().view(np.float32)
    special = np.array([0, -0.0, 1e-45, 2**-126, 2**-100, 2**-100 + 2**-123, 3.4028235e38, np.inf, np.nan], np.float32)
    check(np.concatenate([some, edge, special])[:, None], scale_format)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_the_inverse_of_the_scale_is_rounded_once(scale_format):
    """One ulp off in 448 / a moves these elements across a midpoint: x · (448 / a) is one, or right beside it."""
    draws = np.random.default_rng(0)
    largest = np.exp2(draws.uniform(-99, 127, 2000)).astype(np.float32)
    _, scales = quantize_loop(largest[:, None], scale_format)
    inverse = np.float32(448) / largest if scale_format == "float32" else 1 / scales[:, 0]
    middles = ((LEVELS[101:] + LEVELS[100:-1]) / 2)[-15:]
    x = (middles / inverse.astype(np.float64)[:, None]).astype(np.float32)
    x = (x.view(np.int32)[..., None] + np.arange(-3, 4, dtype=np.int32)).view(np.float32).reshape(2000, -1)
    check(np.concatenate([np.minimum(x, largest[:, None]), largest[:, None]], axis=1), scale_format)


@given(st.integers(0, 2**32 - 1), st.sampled_from(FORMATS), st.integers(0, 2), st.sampled_from(DTYPES))
def test_random_blocks(seed, scale_format, case, out):
    """Magnitudes from the least subnormals to overflow, zeros, NaNs, infinities; blocks of 44 and 100."""
    shape, dtype = [((3, 300), np.float32), ((2, 2, 128), BF16), ((5, 100), np.float16)][case]
    draws = np.random.default_rng(seed)
    wide = draws.standard_normal(shape) * np.exp2(draws.integers(-8, 8, shape))
    wide = wide * np.exp2(draws.integers(-150, 130, (*shape[:-1], 1)) * draws.integers(0, 2))
    wide[draws.random(shape) < 0.1] = 0
    wide[draws.random(shape) < 0.002] = draws.choice([np.nan, np.inf, -np.inf])
    with np.errstate(over="ignore"):
        x = wide.astype(np.float32).astype(dtype)
    check(x, scale_format)
    codes, scales = quantize_loop(x, scale_format)
    expected = dequantize_loop(codes, scales, np.dtype(out))
    assert_same_bits(round_trip(scale_format, out)(x), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16", "float32"])
def test_dequantize_every_code(dtype):
    codes = np.tile(np.arange(256, dtype=np.uint8), (9, 1))
    scales = np.outer([1, 448, 1 / 3, 2**-100 / 448, 1e-6, 1e30, 0, -2, np.nan], [1, 0.7]).astype(np.float32)
    got = jax.jit(functools.partial(dequantize, dtype=dtype))(codes.view(E4M3), scales)
    assert_same_bits(got, dequantize_loop(codes, scales, np.dtype(dtype)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_value_reaches_its_block_only(bad):
    x = np.ones((2, 300), np.float32)
    x[1, 140] = bad
    payload, scales = (np.asarray(a, np.float32) for a in quantize(x))
    block = np.zeros((2, 300), bool)
    block[1, 128:256] = True
    np.testing.assert_array_equal(np.isnan(payload), block)
    np.testing.assert_array_equal(payload[~block], 448)
    np.testing.assert_array_equal(np.isnan(scales), [[False] * 3, [False, True, False]])


@pytest.mark.parametrize(
    ("shape", "blocks"), [((0, 256), (0, 2)), ((2, 0, 5), (2, 0, 1)), ((129,), (2,)), ((3, 0), (3, 0))]
)
def test_shapes(shape, blocks):
    payload, scales = quantize(jnp.ones(shape))
    assert payload.shape == shape and scales.shape == blocks
    assert dequantize(payload, scales).shape == shape


@pytest.mark.parametrize("check_vma", [True, False])
def test_vmap_and_shard_map(cpus, check_vma):
    mesh = jax.make_mesh((8,), ("ep",), devices=cpus[:8])
    x = np.random.default_rng(0).standard_normal((16, 200)).astype(np.float32)
    codes, scales = quantize_loop(x, "ue8m0")

    def rows(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        payload, scales = jax.vmap(functools.partial(quantize, scale_format="ue8m0"))(x)
        return payload, scales, jax.vmap(dequantize)(payload, scales)

    spread = jax.jit(jax.shard_map(rows, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=check_vma))
    payload, got_scales, back = spread(jax.device_put(x, jax.NamedSharding(mesh, P("ep"))))
    assert_same_bits(payload, codes)
    assert_same_bits(got_scales, scales)
    assert_same_bits(back, dequantize_loop(codes, scales, np.dtype(BF16)))


def test_differentiation_is_refused_and_names_the_way_out():
    def loss(x: jax.Array) -> jax.Array:
        return dequantize(*quantize(x), dtype=jnp.float32).sum()

    x = jnp.ones((2, 3))
    way_out = re.escape('dispatch(x, ..., wire="fp8")') + ".*stop_gradient"
    for transform in (jax.grad(loss), jax.jit(jax.grad(loss)), lambda x: jax.jvp(loss, (x,), (x,))):
        with pytest.raises(TypeError, match=way_out):
            transform(x)
    # What the message proposes works, and so does a derivative that only passes by.
    gradient = jax.grad(lambda x, y: loss(jax.lax.stop_gradient(x)) * x.sum() + loss(y) * x.sum())(x, 2 * x)
    np.testing.assert_allclose(gradient, np.full((2, 3), 6.0 + 12.0), rtol=1e-6)


UNKNOWN: Any = "e8m0"


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: quantize(jnp.ones((2, 3), jnp.int32)), TypeError, "got int32"),
        (lambda: quantize(jnp.ones((2, 3), jnp.float8_e4m3fn)), TypeError, "got float8_e4m3fn.*already"),
        (lambda: quantize(jnp.float32(1)), ValueError, "got a scalar"),
        (lambda: quantize(jnp.ones(3), scale_format=UNKNOWN), ValueError, "ue8m0.*got 'e8m0'"),
        (
            lambda: dequantize(jnp.ones((2, 3)), jnp.ones((2, 1))),
            TypeError,
            "expected float8_e4m3fn, got float32",
        ),
        (
            lambda: dequantize(jnp.ones((2, 3), E4M3), jnp.ones((2, 1), jnp.bfloat16)),
            TypeError,
            "expected float32, got bfloat16",
        ),
        (
            lambda: dequantize(jnp.ones((2, 129), E4M3), jnp.ones((2, 1))),
            ValueError,
            r"expected shape \(2, 2\).*got \(2, 1\)",
        ),
        (
            lambda: dequantize(jnp.ones((2, 128), E4M3), jnp.ones((3, 1))),
            ValueError,
            r"expected shape \(2, 1\).*got \(3, 1\)",
        ),
        (lambda: dequantize(jnp.ones((), E4M3), jnp.ones(1)), ValueError, "got a scalar"),
        (lambda: dequantize(jnp.ones(3, E4M3), jnp.ones(1), jnp.int8), TypeError, "got int8"),
    ],
)
def test_bad_input(call, error, says):
    with pytest.raises(error, match=says):
        jax.jit(call)()
