"""examples/tiled.py: a grouped matmul by tiles, which is the product of each row with its own expert's weights."""

import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import world
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))  # as Python does when it runs a script in there

import tiled  # noqa: E402

SIZES = np.array([256, 0, 128, 384], np.int32)  # of 1024 rows: the last two tiles are nobody's
OF_ROW = np.repeat(np.arange(len(SIZES)), SIZES)
BOUND = {"float32": 1e-5, "bfloat16": 1e-2}  # of the largest
WIDTHS = [(32, 64), (48, 16), (256, 512)]


def operands(dtype: str, wide: int, narrow: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows, weights and a cotangent of the product."""
    rng = np.random.default_rng(0)
    shapes = (1024, wide), (len(SIZES), wide, narrow), (1024, narrow)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)  # type: ignore[return-value]


def expected(rows: jax.Array, weights: jax.Array, cotangent: jax.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The product and its cotangents, expert by expert in float64; rows that are nobody's are zero."""
    x, w, ct = (np.asarray(array, np.float64) for array in (rows, weights, cotangent))
    product, of_rows, of_weights = np.zeros(ct.shape), np.zeros(x.shape), np.zeros(w.shape)
    for expert in range(len(SIZES)):
        mine = np.flatnonzero(OF_ROW == expert)
        product[mine] = x[mine] @ w[expert]
        of_rows[mine] = ct[mine] @ w[expert].T
        of_weights[expert] = x[mine].T @ ct[mine]
    return product, of_rows, of_weights


def assert_close(got: jax.Array, wanted: np.ndarray) -> None:
    bound = BOUND[got.dtype.name] * np.abs(wanted).max()
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=0, atol=bound)


def by_kernels(interpret: bool) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    def compute(rows: jax.Array, weights: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        sizes = jnp.asarray(SIZES)
        product = tiled.product_by_tiles(rows, weights, sizes, interpret=interpret)
        of_rows = tiled.product_by_tiles(cotangent, weights, sizes, transposed=True, interpret=interpret)
        return product, of_rows, tiled.gradient_by_tiles(rows, cotangent, sizes, interpret=interpret)

    return compute


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("widths", WIDTHS)
def test_kernels(dtype: str, widths: tuple[int, int]) -> None:
    given = operands(dtype, *widths)
    for got, wanted in zip(by_kernels(interpret=True)(*given), expected(*given), strict=True):
        assert_close(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("widths", [*WIDTHS, (2048, 256)])
def test_kernels_on_a_gpu(dtype: str, widths: tuple[int, int]) -> None:
    with jax.default_device(jax.devices("gpu")[0]):
        given = operands(dtype, *widths)
        for got, wanted in zip(jax.jit(by_kernels(interpret=False))(*given), expected(*given), strict=True):
            assert_close(got, wanted)


@pytest.mark.parametrize("dtype", BOUND)
def test_value_and_gradient(dtype: str) -> None:
    rows, weights, cotangent = operands(dtype, 32, 64)
    product, pull = jax.vjp(lambda rows, weights: tiled.tiled_matmul(rows, weights, SIZES), rows, weights)
    for got, wanted in zip((product, *pull(cotangent)), expected(rows, weights, cotangent), strict=True):
        assert_close(got, wanted)


def test_weights_that_all_ranks_share_get_the_sum_of_their_gradients() -> None:
    rows, weights, cotangent = operands("float32", 32, 64)
    mesh = world.mesh(2)

    def product(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return tiled.tiled_matmul(rows, weights, jnp.asarray(SIZES))

    sharded = jax.jit(jax.shard_map(product, mesh=mesh, in_specs=(P("ep"), P()), out_specs=P("ep")))
    twice = lambda array: jnp.concatenate([array, array])  # noqa: E731
    _, pull = jax.vjp(sharded, twice(rows), weights)
    _, of_rows, of_weights = expected(rows, weights, cotangent)
    got = pull(twice(cotangent))
    assert_close(got[0], np.concatenate([of_rows, of_rows]))
    assert_close(got[1], 2 * of_weights)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((130, 16), (4, 16, 16)), "expected C to be a multiple of 128, got 130"),
        (((128, 8), (4, 8, 16)), "expected A to be a multiple of 16, got 8"),
        (((128, 16), (4, 16, 24)), "expected B to be a multiple of 16, got 24"),
    ],
)
def test_sizes_that_do_not_fit(shapes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiled.tiled_matmul(*map(jnp.ones, shapes), SIZES)
