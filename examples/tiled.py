"""A grouped matmul for GPUs, where XLA computes `jax.lax.ragged_dot` for every expert on all rows.

Kernels of Pallas (Triton). Each block computes one tile of the result, and the GPU gives out blocks as SMs get free: so
an exchange that runs beside takes its SMs' share of the time, and no more. Kernels that keep to every SM from start to
end, as faster ones do, would wait for the exchange's.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

TILE = 128
"""Rows of a tile. A group with this as its alignment pads the rows of each expert to whole tiles."""

WIDEST = 256
"""Columns of a tile of the result, at most."""

STEP_BYTES = 128
"""Of each row of a tile that a step of the sum reads."""

NARROWEST = 16


def tiled_matmul(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Each row times the weights of its own expert, as `jax.lax.ragged_dot` has it, which computes it where no GPU is.

    Args:
      rows: [C, A]; C a multiple of TILE.
      weights: [E_l, A, B] of the same dtype; A and B multiples of 16.
      group_sizes: [E_l] int32, multiples of TILE.

    Returns:
      [C, B]; zero in rows past the last group.

    Raises:
      ValueError: C, A or B is no such multiple.

    Example:
      >>> tiled_matmul(jnp.ones((256, 16)), jnp.ones((2, 16, 32)), jnp.array([128, 0], jnp.int32)).sum(0)[0].item()
      2048.0
    """
    for name, size, multiple in zip("CAB", (len(rows), *weights.shape[1:]), (TILE, NARROWEST, NARROWEST), strict=True):
        if size % multiple:
            raise ValueError(
                f"tiled_matmul: expected {name} to be a multiple of {multiple}, got {size} in rows {rows.shape} and "
                f"weights {weights.shape}; take another size, or jax.lax.ragged_dot"
            )
    return _product(*_varying_alike(rows, weights, group_sizes))


@jax.custom_vjp
def _product(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(rows, weights, group_sizes, cuda=product_by_tiles, default=jax.lax.ragged_dot)


def _forward(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _product(rows, weights, group_sizes), (rows, weights, group_sizes)


def _backward(
    kept: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, np.ndarray]:
    rows, weights, group_sizes = kept
    of_rows = jax.lax.platform_dependent(
        cotangent,
        weights,
        group_sizes,
        cuda=functools.partial(product_by_tiles, transposed=True),
        default=lambda cotangent, weights, sizes: jax.lax.ragged_dot(cotangent, weights.swapaxes(1, 2), sizes),
    )
    of_weights = jax.lax.platform_dependent(
        rows, cotangent, group_sizes, cuda=gradient_by_tiles, default=_gradient_by_xla
    )
    return of_rows, of_weights, np.zeros(group_sizes.shape, jax.dtypes.float0)


_product.defvjp(_forward, _backward)


def product_by_tiles(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """[C, B] of `tiled_matmul` by a kernel. `transposed`: the weights are [E_l, B, A]. `interpret`: without a GPU."""
    wide = rows.shape[1]
    narrow = weights.shape[1 if transposed else 2]
    columns = math.gcd(narrow, WIDEST)
    step = math.gcd(wide, STEP_BYTES // rows.dtype.itemsize)
    tiles = len(rows) // TILE
    ends = jnp.cumsum(group_sizes)
    expert = jnp.sum(jnp.arange(tiles)[:, None] * TILE >= ends, axis=1, dtype=jnp.int32)  # past the last group: E_l
    steps = jnp.where(expert < len(group_sizes), wide // step, 0).astype(jnp.int32)

    def tile(expert: jax.Array, steps: jax.Array, rows: jax.Array, weights: jax.Array, out: jax.Array) -> None:
        row, column = pl.program_id(1), pl.program_id(0)
        of_rows, of_columns = pl.ds(row * TILE, TILE), pl.ds(column * columns, columns)
        mine = expert[row]

        def add(number: jax.Array, total: jax.Array) -> jax.Array:
            along = pl.ds(number * step, step)
            factor = weights[mine, of_columns, along].T if transposed else weights[mine, along, of_columns]
            return total + _dot(rows[of_rows, along], factor)

        total = jax.lax.fori_loop(0, steps[row], add, jnp.zeros((TILE, columns), jnp.float32))
        out[of_rows, of_columns] = total.astype(out.dtype)

    return pl.pallas_call(
        tile,
        grid=(narrow // columns, tiles),  # the tiles of one row after the other: it is read once
        out_shape=_like(rows, (len(rows), narrow)),
        compiler_params=_warps(columns),
        interpret=interpret,
        name="grouped_matmul",
    )(expert, steps, rows, weights)


def gradient_by_tiles(
    rows: jax.Array, cotangent: jax.Array, group_sizes: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """[E_l, A, B]: what `tiled_matmul`'s weights get of a cotangent [C, B], by a kernel. `interpret`: without a GPU."""
    wide, narrow = rows.shape[1], cotangent.shape[1]
    height, columns = math.gcd(wide, TILE), math.gcd(narrow, TILE)
    step = STEP_BYTES // rows.dtype.itemsize
    ends = jnp.cumsum(group_sizes) // step
    starts = ends - group_sizes // step

    def tile(starts: jax.Array, ends: jax.Array, rows: jax.Array, cotangent: jax.Array, out: jax.Array) -> None:
        column, row, mine = (pl.program_id(axis) for axis in range(3))
        of_rows, of_columns = pl.ds(row * height, height), pl.ds(column * columns, columns)

        def add(number: jax.Array, total: jax.Array) -> jax.Array:
            along = pl.ds(number * step, step)
            return total + _dot(rows[along, of_rows].T, cotangent[along, of_columns])

        total = jax.lax.fori_loop(starts[mine], ends[mine], add, jnp.zeros((height, columns), jnp.float32))
        out[mine, of_rows, of_columns] = total.astype(out.dtype)

    return pl.pallas_call(
        tile,
        grid=(narrow // columns, wide // height, len(group_sizes)),
        out_shape=_like(rows, (len(group_sizes), wide, narrow)),
        compiler_params=_warps(columns),
        interpret=interpret,
        name="grouped_matmul_gradient",
    )(starts, ends, rows, cotangent)


def _gradient_by_xla(rows: jax.Array, cotangent: jax.Array, group_sizes: jax.Array) -> jax.Array:
    numbers = jax.lax.RaggedDotDimensionNumbers(
        (((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(rows, cotangent, group_sizes, numbers)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """In float32, also of float32: TF32 would be three digits."""
    return jax.lax.dot(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _varying_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Typed as varying over the mesh axes that any of them varies over: the derivatives add up over the others."""
    varying = [set(jax.typeof(array).manual_axis_type.varying) for array in arrays]
    missing = [tuple(sorted(set().union(*varying) - own)) for own in varying]
    return [
        jax.lax.pcast(array, names, to="varying") if names else array
        for array, names in zip(arrays, missing, strict=True)
    ]


def _like(array: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, array.dtype, manual_axis_type=jax.typeof(array).manual_axis_type)


def _warps(columns: int) -> triton.CompilerParams:
    return triton.CompilerParams(num_warps=8 if columns == WIDEST else 4, num_stages=3)
