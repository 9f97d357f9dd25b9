"""Custom calls of a group's kernels: layout, dispatch and combine inside an NVLink domain."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _native
from jax_ep.config import ROW_ORDERS, RowOrder
from jax_ep.ffi import layout_scratch_words, typed
from jax_ep.layout import Handle, sanitize

LAYOUT, DISPATCH, COMBINE = "jax_ep_group_layout", "jax_ep_dispatch", "jax_ep_combine"


@functools.cache
def _register() -> None:
    handlers = _native.require().handlers()
    for name in (LAYOUT, DISPATCH, COMBINE):
        jax.ffi.register_ffi_target(name, handlers[name, "cuda"], platform="CUDA")


def layout(index: jax.Array, *, group: Any, row_order: RowOrder, alignment: int, capacity: int) -> Handle:
    """`reference.layout` by kernels."""
    _register()
    index, invalid = sanitize(index, group.num_experts)
    local = group.num_local_experts
    slots = (group.num_ranks, *index.shape)
    shapes = [slots, (local,), (local,), (1,), slots, (layout_scratch_words(local) + 1,)]
    results = jax.ffi.ffi_call(LAYOUT, [typed(shape, jnp.int32, index) for shape in shapes])(
        index,
        **_of_call(LAYOUT, group, index.shape, row_order),
        capacity=np.int64(capacity),
        alignment=np.int64(1 if row_order == "rank" else alignment),
    )
    slots_of, group_sizes, counts, dropped = results[:4]
    return Handle(slots_of, group_sizes, counts, dropped, invalid, group, row_order, alignment, capacity)


def dispatch(
    handle: Handle, x: jax.Array, scales: jax.Array | None, weights: jax.Array | None, num_sms: int
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Rows of tokens [T, H], of their scales [T, blocks] and of their weights [T, K], moved bit by bit."""
    _register()
    tokens, top_k = handle.shape[1:]
    capacity = handle.capacity
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    blocks = 0 if scales is None else scales.shape[1]
    width = 0 if weights is None else top_k
    row_weights = (capacity, width) if handle.row_order == "rank" else (capacity if width else 0,)
    results = [
        typed((capacity, x.shape[1]), bits.dtype, x),
        typed((capacity, blocks), jnp.float32, x),
        typed(row_weights, jnp.float32, x),
        typed((capacity,), jnp.int32, x),
    ]
    rows, row_scales, weights_of_rows, _ = jax.ffi.ffi_call(DISPATCH, results)(
        bits,
        jnp.zeros((tokens, 0), jnp.float32) if scales is None else scales,
        jnp.zeros((tokens, 0), jnp.float32) if weights is None else weights,
        handle.slots,
        **_of_call(DISPATCH, handle.group, (*x.shape, blocks, width), handle.row_order),
        num_sms=np.int64(num_sms),
    )
    return (
        jax.lax.bitcast_convert_type(rows, x.dtype),
        None if scales is None else row_scales,
        None if weights is None else weights_of_rows,
    )


def combine(
    handle: Handle, y: jax.Array, weights: jax.Array | None, words: jax.Array | None, num_sms: int
) -> tuple[jax.Array, jax.Array | None]:
    """Tokens from rows [C, H], each times its weight [C] if there are; and of float32 words, one a row [C] (rank order
    [C, K]), those of each pick [T, K]."""
    _register()
    tokens, top_k = handle.shape[1:]
    none = jnp.zeros((0,), jnp.float32)
    out, picks = jax.ffi.ffi_call(
        COMBINE, [typed((tokens, y.shape[1]), y.dtype, y), typed((tokens, top_k), jnp.float32, y)]
    )(
        y,
        none if weights is None else weights,
        none if words is None else words,
        handle.slots,
        **_of_call(COMBINE, handle.group, (*y.shape, weights is None, words is None), handle.row_order),
        num_sms=np.int64(num_sms),
    )
    return out, None if words is None else picks


def _of_call(name: str, group: Any, numbers: tuple[Any, ...], row_order: RowOrder) -> dict[str, np.int64]:
    # The tag is made of what must be equal on all ranks that are at one call: it tells them if they are not.
    tag = zlib.crc32(repr((name, group.config, numbers, row_order)).encode())
    return {
        "serial": np.int64(group.serial),
        "fingerprint": np.int64(group.fingerprint),
        "tag": np.int64(tag),
        "row_order": np.int64(ROW_ORDERS.index(row_order)),
    }
