"""A grouped matmul for GPUs, where XLA computes `jax.lax.ragged_dot` for every expert on all rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

TILE = 128
"""Rows of a tile. A group with this as its alignment pads the rows of each expert to whole tiles."""


def tiled_matmul(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Each row times the weights of its own expert: tile by tile, as no tile holds rows of two.

    Every tile gets a copy of its expert's weights, so this is for experts that are small beside the rows.

    Args:
      rows: [C, A]; C a multiple of TILE.
      weights: [E_l, A, B].
      group_sizes: [E_l] int32, multiples of TILE.

    Returns:
      [C, B]; in rows past the last group what nobody reads.
    """
    tiles = rows.reshape(-1, TILE, rows.shape[1])
    ends = jnp.cumsum(group_sizes) // TILE
    expert = jnp.sum(jnp.arange(len(tiles))[:, None] >= ends, axis=1)
    # Picked by a matmul, whose gradient is one, too: adding up the tiles' gradients by index would take long.
    mine = jax.nn.one_hot(expert, weights.shape[0], dtype=weights.dtype)
    of_tile = jnp.einsum("ne,eab->nab", mine, weights, precision=jax.lax.Precision.HIGHEST)
    return jnp.einsum("nta,nab->ntb", tiles, of_tile).reshape(rows.shape[0], -1)
