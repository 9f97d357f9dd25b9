"""What the reference's docstring says of memory, read off what XLA compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep

RANKS, TOKENS, TOP_K, HIDDEN = 8, 256, 4, 512


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_dispatch_and_combine_hold_no_more_than_two_exchange_buffers(dtype):
    mesh = jax.make_mesh((RANKS,), ("ep",), devices=jax.devices("cpu")[:RANKS])
    group = jax_ep.create_group(
        mesh,
        "ep",
        max_tokens=TOKENS,
        hidden=HIDDEN,
        num_experts=16,
        top_k=TOP_K,
        dtype=dtype,
        capacity_factor=1.25,
    )

    def dispatch(x, index, weights):
        return jax_ep.dispatch(x, index, weights, group=group)

    def combine(y, weights, handle):
        return jax_ep.combine(y, handle, weights)

    def temporary_bytes(function, *arguments):
        sharded = jax.shard_map(function, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        return jax.jit(sharded).lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    def shape(*dims, dtype=dtype):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.NamedSharding(mesh, P("ep")))

    picks = (RANKS * TOKENS, TOP_K)
    arguments = (
        shape(RANKS * TOKENS, HIDDEN),
        shape(*picks, dtype=jnp.int32),
        shape(*picks, dtype=jnp.float32),
    )
    sharded = jax.shard_map(dispatch, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    rows = jax.eval_shape(sharded, *arguments)
    buffer = RANKS * TOKENS * HIDDEN * np.dtype(dtype).itemsize
    small = RANKS * TOKENS * TOP_K * 4 * 8  # eight words a pick
    sums = 3 * TOKENS * HIDDEN * 4  # fp32, of one source rank's tokens
    assert temporary_bytes(dispatch, *arguments) <= buffer + small
    assert temporary_bytes(combine, rows.x, rows.weights, rows.handle) <= 2 * buffer + sums + small
