"""Custom calls of a group's kernels: layout, dispatch and combine inside an NVLink domain."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _native
from jax_ep.call import Call
from jax_ep.config import ROW_ORDERS, RowOrder
from jax_ep.ffi import layout_scratch_words, typed
from jax_ep.layout import Handle, sanitize
from jax_ep.quantize import SCALE_FORMATS, ScaleFormat, num_blocks

# In the order of cuda/element.h.
ELEMENTS = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16", "float8_e4m3fn"))
LAYOUT, DISPATCH, COMBINE = "jax_ep_group_layout", "jax_ep_dispatch", "jax_ep_combine"
DISPATCH_START, COMBINE_START, DONE = "jax_ep_dispatch_start", "jax_ep_combine_start", "jax_ep_done"


@functools.cache
def _register() -> None:
    handlers = _native.require().handlers()
    for name in (LAYOUT, DISPATCH, COMBINE, DISPATCH_START, COMBINE_START, DONE):
        jax.ffi.register_ffi_target(name, handlers[name, "cuda"], platform="CUDA")


def layout(index: jax.Array, *, group: Any, row_order: RowOrder, alignment: int, capacity: int, call: Call) -> Handle:
    """`reference.layout` by kernels."""
    _register()
    clean, invalid = sanitize(index, group.num_experts)
    # To the kernel whatever is no expert of its rank is alike, so it takes an int32 index as it comes.
    index = index if index.dtype == jnp.int32 else clean
    local = group.num_local_experts
    slots = (group.num_ranks, *index.shape)
    shapes = [slots, (local,), (local,), (1,), (layout_scratch_words(local),)]
    results = jax.ffi.ffi_call(LAYOUT, [typed(shape, jnp.int32, index) for shape in shapes])(
        index,
        **_of_call(LAYOUT, group, index.shape, row_order, call),
        capacity=np.int64(capacity),
        alignment=np.int64(1 if row_order == "rank" else alignment),
    )
    slots_of, group_sizes, counts, dropped = results[:4]
    return Handle(slots_of, group_sizes, counts, dropped, invalid, group, row_order, alignment, capacity)


def dispatch(
    handle: Handle,
    x: jax.Array,
    scales: jax.Array | None,
    weights: jax.Array | None,
    call: Call,
    scale_format: ScaleFormat | None = None,
    dtype: Any = None,
    target: str = DISPATCH,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Rows of tokens [T, H] and of their weights [T, K].

    Without a scale format tokens move bit by bit. With one they cross as FP8: quantised on the way, or as they are if
    they have scales [T, blocks]; and rows are of `dtype`, with scales if that is FP8.

    With DISPATCH_START as the target they are under way: only `done` may look at them.
    """
    wire = x.dtype if scale_format is None else jnp.dtype(jnp.float8_e4m3fn)
    dtype = jnp.dtype(dtype or x.dtype)
    scale = scale_format or "float32"
    rows, row_scales, row_weights, _ = _dispatch(
        handle, x, scales, weights, None, None, call, wire, dtype, scale, target
    )
    return (
        rows,
        row_scales if scale_format is not None and dtype == wire else None,
        None if weights is None else row_weights,
    )


def gradient(
    handle: Handle, x: jax.Array, y: jax.Array, weights: jax.Array, call: Call, target: str = DISPATCH
) -> tuple[jax.Array, jax.Array]:
    """Cotangents of rows y [C, H] and, in pieces to be summed, of weights [C] of a weighted combine, from those of its
    tokens, x [T, H]. `target` as in dispatch."""
    rows, _, _, dots = _dispatch(handle, x, None, None, y, weights, call, x.dtype, x.dtype, "float32", target)
    return rows, dots


def gradient_pieces(hidden: int, dtype: np.dtype) -> int:
    """Pieces that `gradient` gives a weight's cotangent in."""
    return _native.require().dispatch_pieces(hidden * dtype.itemsize)


def _dispatch(
    handle: Handle,
    x: jax.Array,
    scales: jax.Array | None,
    weights: jax.Array | None,
    y: jax.Array | None,
    y_weights: jax.Array | None,
    call: Call,
    wire: np.dtype,
    dtype: np.dtype,
    scale_format: ScaleFormat,
    target: str,
) -> tuple[jax.Array, ...]:
    _prepare(target, handle)
    top_k = handle.shape[2]
    hidden, capacity = x.shape[1], handle.capacity
    blocks = num_blocks(hidden) if dtype == jnp.float8_e4m3fn else 0
    width = 0 if weights is None else top_k
    pieces = 0 if y is None else gradient_pieces(hidden, x.dtype)
    whole = target == DISPATCH
    results = [
        typed((capacity, hidden), _bits(dtype) if whole else dtype, x),
        typed((capacity, blocks), jnp.float32, x),
        typed((capacity, width) if handle.row_order == "rank" else (capacity if width else 0,), jnp.float32, x),
        typed((capacity, pieces), jnp.float32, x),
    ]
    # In the place of what is not there goes something that is: no array without elements, which JAX may take out of a
    # loop and a shard_map, where XLA's Shardy (jaxlib 0.11) fails on it.
    nothing = handle.counts
    rows, *others = jax.ffi.ffi_call(target, results)(
        # As bits, that no pass of XLA takes rows for numbers. What is under way must not meet even that conversion.
        jax.lax.bitcast_convert_type(x, _bits(x.dtype)) if whole else x,
        nothing if scales is None else scales,
        nothing if weights is None else weights,
        handle.slots,
        handle.group_sizes,
        handle.counts,
        nothing if y is None else y,
        nothing if y_weights is None else y_weights,
        **_of_call(
            target,
            handle.group,
            (*handle.shape, *x.shape, x.dtype.name, wire.name, dtype.name, width, pieces),
            handle.row_order,
            call,
        ),
        x_element=np.int64(ELEMENTS.index(x.dtype)),
        wire_element=np.int64(ELEMENTS.index(wire)),
        row_element=np.int64(ELEMENTS.index(dtype)),
        scale_format=np.int64(SCALE_FORMATS.index(scale_format)),
        has_scales=np.bool_(scales is not None),
        has_weights=np.bool_(weights is not None),
        has_y=np.bool_(y is not None),
    )
    return jax.lax.bitcast_convert_type(rows, dtype) if whole else rows, *others


def _bits(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"uint{8 * dtype.itemsize}")


def combine(
    handle: Handle,
    y: jax.Array,
    weights: jax.Array | None,
    words: jax.Array | None,
    call: Call,
    target: str = COMBINE,
) -> tuple[jax.Array, jax.Array | None]:
    """Tokens from rows [C, H], each times its weight [C] if there are; and of float32 words, one a row [C] (rank order
    [C, K]), those of each pick [T, K]. With COMBINE_START as the target they are under way, as in dispatch."""
    _prepare(target, handle)
    tokens, top_k = handle.shape[1:]
    nothing = handle.counts  # as in dispatch
    out, picks = jax.ffi.ffi_call(
        target, [typed((tokens, y.shape[1]), y.dtype, y), typed((tokens, top_k), jnp.float32, y)]
    )(
        y,
        nothing if weights is None else weights,
        nothing if words is None else words,
        handle.slots,
        **_of_call(
            target,
            handle.group,
            (*handle.shape, *y.shape, y.dtype.name, weights is None, words is None),
            handle.row_order,
            call,
        ),
        has_weights=np.bool_(weights is not None),
        has_words=np.bool_(words is not None),
    )
    return out, None if words is None else picks


def done(handle: Handle, under_way: Sequence[jax.Array], operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """What a start with one of the targets above writes, once it is written.

    Args:
      under_way: all that the start gave.
      operands: all that it was given, besides the handle: XLA must leave them alone until now.
    """
    _prepare(DONE, handle)
    group = handle.group
    return jax.ffi.ffi_call(
        DONE,
        [typed(array.shape, array.dtype, array) for array in under_way],
        input_output_aliases={number: number for number in range(len(under_way))},
    )(
        *under_way,
        *operands,
        handle.slots,
        handle.group_sizes,
        handle.counts,
        serial=np.int64(group.serial),
        fingerprint=np.int64(group.fingerprint),
    )


def _prepare(target: str, handle: Handle) -> None:
    _register()
    if target in (DISPATCH_START, COMBINE_START):
        _native.require().open_sides(handle.group.serial)


def _of_call(name: str, group: Any, numbers: tuple[Any, ...], row_order: RowOrder, call: Call) -> dict[str, np.int64]:
    # The tag is made of what must be equal on all ranks that are at one call: it tells them if they are not.
    tag = zlib.crc32(repr((name, group.config, numbers, row_order, call.site)).encode())
    return {
        "serial": np.int64(group.serial),
        "fingerprint": np.int64(group.fingerprint),
        "tag": np.int64(tag),
        "num_sms": np.int64(call.num_sms),
        "row_order": np.int64(ROW_ORDERS.index(row_order)),
    }
