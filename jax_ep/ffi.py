"""Custom calls into the compiled module: which there are, and how one is typed inside shard_map."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import _native
from jax_ep.config import ROW_ORDERS, RowOrder
from jax_ep.layout import Placed
from jax_ep.layout import place_rows as place_rows_in_jax

LAYOUT = "jax_ep_layout"
_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}  # ours to jax.ffi's


@functools.cache
def layout_platforms() -> frozenset[str]:
    """Platforms ("cpu", "cuda") for which the compiled module has the layout handler; registers it at first use."""
    module = _native.load().module
    if module is None:
        return frozenset()
    handlers = module.handlers()
    found = {platform for name, platform in handlers if name == LAYOUT}
    for platform in found:
        jax.ffi.register_ffi_target(LAYOUT, handlers[LAYOUT, platform], platform=_PLATFORMS[platform])
    return frozenset(found)


def layout_scratch_words(num_local_experts: int) -> int:
    """Words that the CUDA kernels want as a result more, to work in."""
    return _native.require().layout_scratch_words(num_local_experts)


def place_rows(
    index: jax.Array,
    first_expert: jax.Array,
    *,
    num_local_experts: int,
    capacity: int,
    alignment: int,
    row_order: RowOrder,
) -> Placed:
    """`jax_ep.layout.place_rows` by the compiled module where it has a handler for the platform, else in JAX."""
    static: dict[str, Any] = {
        "num_local_experts": num_local_experts,
        "capacity": capacity,
        "alignment": alignment,
        "row_order": row_order,
    }
    branches = {platform: functools.partial(_CALLS[platform], **static) for platform in sorted(layout_platforms())}
    in_jax: Callable[..., Placed] = functools.partial(place_rows_in_jax, **static)
    if index.size == 0:  # JAX folds what has no elements into constants, whose mesh-axis types fit no custom call's
        return in_jax(index, first_expert)
    return jax.lax.platform_dependent(index, jnp.int32(first_expert), **branches, default=in_jax)


def _call_layout(
    index: jax.Array,
    first_expert: jax.Array,
    *,
    scratch: bool,
    num_local_experts: int,
    capacity: int,
    alignment: int,
    row_order: RowOrder,
) -> Placed:
    shapes: list[tuple[int, ...]] = [index.shape, (num_local_experts,), (num_local_experts,), (1,)]
    if scratch:
        shapes.append((layout_scratch_words(num_local_experts),))
    results = jax.ffi.ffi_call(LAYOUT, [typed(shape, jnp.int32, index) for shape in shapes])(
        index,
        first_expert,
        capacity=np.int64(capacity),
        alignment=np.int64(1 if row_order == "rank" else alignment),
        row_order=np.int64(ROW_ORDERS.index(row_order)),
    )
    slots, group_sizes, counts, dropped = results[:4]
    return slots, group_sizes, counts, dropped


_CALLS = {
    "cpu": functools.partial(_call_layout, scratch=False),
    "cuda": functools.partial(_call_layout, scratch=True),
}


def typed(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """A custom call's result inside shard_map, which varies over the mesh axes that `like` varies over."""
    # A plain ShapeDtypeStruct would be typed as equal on all ranks, and shard_map would believe it.
    return jax.ShapeDtypeStruct(
        shape,
        dtype,
        sharding=NamedSharding(jax.sharding.get_abstract_mesh(), P()),
        manual_axis_type=jax.typeof(like).manual_axis_type,
    )
