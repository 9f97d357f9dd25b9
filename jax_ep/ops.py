"""The public operations: layout, dispatch and combine, to be called inside shard_map."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_ep import guard, primitives, reference
from jax_ep import wire as fp8_wire
from jax_ep.call import Call, of_caller
from jax_ep.config import TOKEN_DTYPES, RowOrder, check_integer, check_row_order
from jax_ep.group import Group
from jax_ep.layout import Handle
from jax_ep.quantize import BLOCK, ScaleFormat, num_blocks

Wire = Literal["fp8", "fp8_ue8m0"]
_SCALE_FORMATS: dict[str, ScaleFormat] = {"fp8": "float32", "fp8_ue8m0": "ue8m0"}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("x", "weights", "group_sizes", "counts", "handle", "index", "scales"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Rows:
    """What `dispatch` brings to a rank. C rows, H hidden, K top-k, E_l local experts.

    Attributes:
      x: [C, H], the tokens, one row for each of their local experts (in rank order one for all of them); +0 in rows
        that hold no token.
      weights: [C] float32, the routing weight of each row, in rank order [C, K]; +0 where there is none. None if
        dispatch was given none.
      group_sizes: [E_l] int32, rows of each local expert, padding included: `jax.lax.ragged_dot` takes it as it is.
      counts: [E_l] int32, of these, rows that hold a token.
      handle: the `Handle`, for `combine`.
      index: rank order only: [C, K] int32, each row's local experts, -1 for none.
      scales: only for FP8 rows that were not dequantised: [C, ceil(H / 128)] float32.
    """

    x: jax.Array
    weights: jax.Array | None
    group_sizes: jax.Array
    counts: jax.Array
    handle: Handle
    index: jax.Array | None = None
    scales: jax.Array | None = None


def layout(
    index: jax.Array,
    *,
    group: Group,
    top_k: int | None = None,
    alignment: int | None = None,
    row_order: RowOrder = "expert",
) -> Handle:
    """Where each row of a call will live.

    `dispatch` does this itself; call it to dispatch several arrays by one routing.

    Args:
      index: [T, K] of any integer dtype, each token's experts; -1 for none. Anything else outside [0, E) counts as
        none, too, and is counted in `num_invalid`.
      group: from `create_group`.
      top_k: K, where it is not the group's (at most the group's).
      alignment: A, where it is not the group's.
      row_order: "expert" (local expert, source rank, token, k) or "rank" (source rank, token; one row for all local
        experts of a token).

    Returns:
      A `Handle`.

    Raises:
      ValueError, TypeError: at trace time, for shapes and dtypes that do not fit the group.
      RuntimeError: outside shard_map over the group's axes, or with a closed group.
    """
    _check_group("layout", group)
    top_k = group.top_k if top_k is None else check_integer("layout top_k", top_k, 1)
    alignment = group.alignment if alignment is None else check_integer("layout alignment", alignment, 1)
    row_order = check_row_order(row_order)
    index = _as_array("layout index", index, "routing.index")
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"layout index: expected an integer dtype, got {index.dtype.name}; pass routing.index")
    if index.ndim != 2:
        raise ValueError(
            f"layout index: expected shape [tokens, top_k], got {index.shape}; reshape leading axes into one of tokens"
        )
    if top_k > group.top_k:
        raise ValueError(
            f"layout top_k: expected at most the group's top_k={group.top_k}, got {top_k}; "
            f"create the group with top_k={top_k}"
        )
    if index.shape[1] != top_k:
        raise ValueError(
            f"layout index: expected top_k={top_k} experts a token, got shape {index.shape}; pass "
            f"top_k={index.shape[1]} to this call or to create_group"
        )
    if index.shape[0] > group.max_tokens:
        raise ValueError(
            f"layout index: expected at most max_tokens={group.max_tokens} tokens a rank, got {index.shape[0]}; create "
            f"the group with max_tokens={index.shape[0]}, or pass fewer tokens a call"
        )
    capacity = group.rows_capacity(index.shape[0], top_k, alignment, row_order)
    (index,) = guard.operands("layout", group, index)
    handle = primitives.layout(
        index, group=group, row_order=row_order, alignment=alignment, capacity=capacity, call=of_caller()
    )
    return guard.results("layout", "jax_ep_handle", handle)


def dispatch(
    x: Any,
    index: jax.Array | None = None,
    weights: jax.Array | None = None,
    *,
    group: Group | None = None,
    handle: Handle | None = None,
    top_k: int | None = None,
    alignment: int | None = None,
    row_order: RowOrder | None = None,
    wire: Wire | None = None,
    dequantize: bool = True,
    num_sms: int | None = None,
) -> Rows:
    """Send each token to the ranks of its experts.

    Linear in x and in weights; differentiable in both, any number of times, in forward and reverse mode. The gradient
    of a pick that got no row is exactly zero.

    Args:
      x: [T, H] float16, bfloat16 or float32, this rank's tokens; or (payload [T, H] float8_e4m3fn, scales
        [T, ceil(H / 128)] float32) from `quantize`.
      index: [T, K] of any integer dtype, experts of each token, -1 for none. With `handle` it is needed only in rank
        order, to fill `rows.index`.
      weights: [T, K] floating, routing weights (used as float32); they travel with the rows. Optional.
      group: from `create_group`. Either this and index, or a handle.
      handle: of an earlier `layout` or `dispatch`, to send other tokens the same ways.
      top_k, alignment, row_order: as in `layout`; with a handle they must be the handle's.
      wire: None sends x as it is. "fp8" quantises it on the way (e4m3, float32 scales a block of 128); "fp8_ue8m0" the
        same with power-of-two scales. Input that comes quantised crosses as it is.
      dequantize: whether FP8 rows are brought back to x's dtype (the group's, for input that came quantised).
        Differentiating quantised rows raises; dequantised ones are straight-through.
      num_sms: SMs that the kernel takes, forward and backward, where it is not what the group says. The reference
        takes no notice.

    Returns:
      `Rows`.

    Raises:
      ValueError, TypeError: at trace time, for shapes, dtypes or options that do not fit, with what to do.
      RuntimeError: outside shard_map over the group's axes, or with a closed group.

    Example: inside `jax.shard_map` over the group's axis
      >>> rows = dispatch(x, routing.index, routing.weights, group=group)        # doctest: +SKIP
      >>> y = jax.lax.ragged_dot(rows.x, expert_weights, rows.group_sizes)       # doctest: +SKIP
      >>> out = combine(y, rows.handle, weights=rows.weights)                    # doctest: +SKIP

    Source: the two moves of Shazeer et al. 2017 (arXiv:1701.06538) and DeepSeek-V3 (arXiv:2412.19437), section 3.2.
    """
    sending = prepare_dispatch(
        "dispatch", x, index, weights, group, handle, top_k, alignment, row_order, wire, dequantize, num_sms
    )
    scales = None
    if sending.fp8 is None:
        rows, row_weights = primitives.dispatch(sending.handle, sending.x, sending.weights, sending.call)
    else:
        how = (*sending.fp8, sending.call)
        rows, scales, row_weights = fp8_wire.dispatch_fp8(how, sending.handle, sending.x, sending.weights)
    return sending.rows(rows, scales, row_weights)


def combine(
    y: jax.Array,
    handle: Handle,
    weights: jax.Array | None = None,
    *,
    group: Group | None = None,
    num_sms: int | None = None,
) -> jax.Array:
    """Bring rows back and add up those of each token.

    Linear in y, and with weights bilinear; differentiable in both. Sums are in float32, rows of a rank with k
    ascending, rounded to y's dtype once a rank, then ranks ascending. Rows without a token are never read.

    Args:
      y: [C, H] float16, bfloat16 or float32, the experts' results, in the order of `rows.x`. In rank order each row is
        already the weighted sum over the row's experts.
      handle: `rows.handle`.
      weights: `rows.weights`, [C], to multiply the rows by (expert order only); None adds them as they are.
      group: optional: checked against the handle's.
      num_sms: as in `dispatch`.

    Returns:
      [T, H] of y's dtype; zeros for a token without rows.

    Raises:
      ValueError, TypeError: at trace time, for shapes and dtypes that do not fit, or weights in rank order.
      RuntimeError: outside shard_map over the group's axes, or with a closed group.

    Example: see `dispatch`.
    """
    y, weights, handle, call = prepare_combine("combine", y, handle, weights, group, num_sms)
    if weights is None:
        out = primitives.combine(handle, y, call)
    else:
        out = primitives.weighted_combine(handle, y, weights, call)
    return guard.results("combine", "jax_ep_combined", out)


# What is checked of them ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sending:
    """A dispatch whose arguments are checked and ready for an exchange.

    Attributes:
      handle: of the rows.
      x: [T, H], or a payload and its scales.
      weights: [T, K] float32, or None.
      local_index: what `Rows.index` will be.
      fp8: None for tokens that cross as they are, else the format of the scales and the dtype to dequantise to.
      call: what its kernels are told.
    """

    handle: Handle
    x: Any
    weights: jax.Array | None
    local_index: jax.Array | None
    fp8: tuple[ScaleFormat, Any] | None
    call: Call

    def rows(self, rows: jax.Array, scales: jax.Array | None, weights: jax.Array | None) -> Rows:
        """What the exchange brought, for the user."""
        brought = guard.results("dispatch", "jax_ep_rows", (rows, weights, self.local_index, scales))
        rows, weights, local_index, scales = brought
        return Rows(rows, weights, self.handle.group_sizes, self.handle.counts, self.handle, local_index, scales)


def prepare_dispatch(
    what: str,
    x: Any,
    index: jax.Array | None,
    weights: jax.Array | None,
    group: Group | None,
    handle: Handle | None,
    top_k: int | None,
    alignment: int | None,
    row_order: RowOrder | None,
    wire: Wire | None,
    dequantize: bool,
    num_sms: int | None,
) -> Sending:
    """The arguments of `dispatch`, checked; `what` names it in messages."""
    group = _group_of(what, group, handle)
    quantized, tokens = _check_tokens(what, x, group, wire, dequantize)
    if handle is None:
        if index is None:
            raise ValueError(
                f"{what}: expected index and group, or a handle, got neither; pass routing.index and group=..., or "
                "handle=rows.handle"
            )
        handle = layout(index, group=group, top_k=top_k, alignment=alignment, row_order=row_order or "expert")
    else:
        _check_handle_options(what, handle, top_k, alignment, row_order)
    if handle.shape[1] != tokens:
        raise ValueError(
            f"{what} x: expected {handle.shape[1]} tokens as in the top-k index or handle, got {tokens}; index and "
            "tokens must be of the same call"
        )
    shape = handle.shape[1:]
    if index is not None and index.shape != shape:
        raise ValueError(
            f"{what} index: expected shape {shape} as in the handle, got {index.shape}; pass the index that the "
            "handle was made from"
        )
    if weights is not None:
        weights = jnp.asarray(weights)
        if weights.shape != shape:
            raise ValueError(
                f"{what} weights: expected shape [tokens, top_k] = {shape}, as the index, got {weights.shape}; pass "
                "routing.weights"
            )
        if not jnp.issubdtype(weights.dtype, jnp.floating):
            raise TypeError(
                f"{what} weights: expected a floating dtype, got {weights.dtype.name}; cast them to float32"
            )
        weights = weights.astype(jnp.float32)
    if quantized or not dequantize:
        x = fp8_wire.refuse_gradient(x)
    x, weights, ready = guard.operands(what, group, x, weights, handle)

    fp8 = None
    if wire is not None or quantized:
        if group.implementation == "cuda" and group.hidden % 16:
            raise ValueError(
                f"{what} wire: expected hidden to be a multiple of 16 for FP8 rows, got {group.hidden}; pad it to "
                f"{-(-group.hidden // 16) * 16}, or send the tokens as they are"
            )
        fp8 = _SCALE_FORMATS[wire or "fp8"], (group.dtype if quantized else x.dtype) if dequantize else None
    local_index = None
    if handle.row_order == "rank" and index is not None:
        (index,) = guard.operands(what, group, index)
        local_index = reference.local_index(index, ready)
    call = of_caller(0 if num_sms is None else check_integer(f"{what} num_sms", num_sms, 1))
    return Sending(ready, x, weights, local_index, fp8, call)


def prepare_combine(
    what: str, y: jax.Array, handle: Handle, weights: jax.Array | None, group: Group | None, num_sms: int | None
) -> tuple[jax.Array, jax.Array | None, Handle, Call]:
    """The arguments of `combine`, checked and ready for an exchange; `what` names it in messages."""
    group = _group_of(what, group, handle)
    y = _as_array(f"{what} y", y, "the experts' results, an array like rows.x")
    _check_token_dtype(f"{what} y", y.dtype, group)
    if y.shape != (handle.capacity, group.hidden):
        raise ValueError(
            f"{what} y: expected shape [rows, hidden] = {(handle.capacity, group.hidden)}, as rows.x, got {y.shape}; "
            "keep the rows of one dispatch and its handle together"
        )
    if weights is not None:
        if handle.row_order == "rank":
            raise ValueError(
                f'{what} weights: expected None for a handle of row_order="rank", whose rows are already weighted '
                "sums, got weights; weight the rows by rows.weights and rows.index first, or dispatch with "
                'row_order="expert"'
            )
        weights = jnp.asarray(weights)
        if weights.shape != (handle.capacity,):
            raise ValueError(
                f"{what} weights: expected shape [rows] = {(handle.capacity,)}, got {weights.shape}; pass rows.weights"
            )
        if not jnp.issubdtype(weights.dtype, jnp.floating):
            raise TypeError(f"{what} weights: expected a floating dtype, got {weights.dtype.name}; pass rows.weights")
        weights = weights.astype(jnp.float32)
    y, weights, handle = guard.operands(what, group, y, weights, handle)
    call = of_caller(0 if num_sms is None else check_integer(f"{what} num_sms", num_sms, 1))
    return y, weights, handle, call


def _group_of(what: str, group: Group | None, handle: Handle | None) -> Group:
    if handle is not None and not isinstance(handle, Handle):
        raise TypeError(f"{what} handle: expected rows.handle, got {type(handle).__name__}")
    if group is None:
        if handle is None:
            raise ValueError(f"{what} group: expected a group from create_group, got None; pass group=...")
        group = handle.group
    elif handle is not None and handle.group != group:
        raise ValueError(
            f"{what} handle: expected a handle of group {group.serial}, got one of group {handle.group.serial}; pass "
            "the handle that this group's dispatch or layout returned"
        )
    _check_group(what, group)
    return group


def _check_group(what: str, group: Group) -> None:
    if not isinstance(group, Group):
        raise TypeError(f"{what} group: expected a Group from create_group, got {type(group).__name__}")
    if group.closed:
        raise RuntimeError(
            f"{what} group: expected an open group, got group {group.serial}, which was closed; make another with "
            "create_group"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if not set(group.axis) <= set(mesh.manual_axes):
        got = f"manual axes {tuple(mesh.manual_axes)}" if mesh.manual_axes else "none"
        raise RuntimeError(
            f"{what}: expected to be inside jax.shard_map over mesh axes {group.axis}, got {got}; wrap the call in "
            "jax.shard_map(..., mesh=mesh) with these axes among its axis_names"
        )
    sizes = {name: mesh.shape[name] for name in group.axis}
    wanted = {name: group.mesh.shape[name] for name in group.axis}
    if sizes != wanted:
        raise RuntimeError(
            f"{what}: expected mesh axes of sizes {wanted}, for which the group was made, got {sizes}; create the "
            "group with the mesh that shard_map uses"
        )


def _as_array(what: str, value: Any, expected: str) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"{what}: expected an array, got {type(value).__name__}; pass {expected}") from None


def _check_token_dtype(what: str, dtype: Any, group: Group) -> None:
    dtype = jnp.dtype(dtype)
    if dtype not in TOKEN_DTYPES:
        names = ", ".join(d.name for d in TOKEN_DTYPES)
        remedy = "cast it, or dequantize FP8 rows first"
        if what.startswith("dispatch"):
            remedy = "cast it, or pass (payload, scales) from jax_ep.quantize for tokens that are quantised already"
        raise TypeError(f"{what}: expected one of {names}, got {dtype.name}; {remedy}")
    if dtype.itemsize > group.dtype.itemsize:
        raise TypeError(
            f"{what}: expected at most {group.dtype.itemsize} bytes an element (the group's dtype {group.dtype.name}), "
            f"got {dtype.name}; create the group with dtype={dtype.name}, or cast"
        )


def _check_tokens(what: str, x: Any, group: Group, wire: str | None, dequantize: bool) -> tuple[bool, int]:
    """Whether x came quantised, and how many tokens it has."""
    if wire is not None and wire not in _SCALE_FORMATS:
        raise ValueError(f"{what} wire: expected None or one of {tuple(_SCALE_FORMATS)}, got {wire!r}")
    quantized = isinstance(x, (tuple, list))
    if quantized:
        if len(x) != 2:
            raise TypeError(f"{what} x: expected tokens or (payload, scales), got a sequence of {len(x)}")
        payload, scales = (_as_array(f"{what} x", part, "what jax_ep.quantize returned") for part in x)
        if payload.dtype != jnp.float8_e4m3fn or scales.dtype != jnp.float32:
            raise TypeError(
                f"{what} x: expected (payload float8_e4m3fn, scales float32), got ({payload.dtype.name}, "
                f"{scales.dtype.name}); use jax_ep.quantize"
            )
    else:
        if wire is None and not dequantize:
            raise ValueError(
                f'{what} dequantize: expected True where nothing is quantised (wire=None), got False; pass wire="fp8"'
            )
        payload = _as_array(f"{what} x", x, "tokens [T, H], or (payload, scales) from jax_ep.quantize")
        _check_token_dtype(f"{what} x", payload.dtype, group)
    if payload.ndim != 2 or payload.shape[1] != group.hidden:
        raise ValueError(
            f"{what} x: expected shape [tokens, hidden={group.hidden}], got {payload.shape}; reshape it, or create the "
            f"group with hidden={payload.shape[-1] if payload.ndim else 1}"
        )
    blocks = num_blocks(group.hidden)
    if quantized and scales.shape != (payload.shape[0], blocks):
        raise ValueError(
            f"{what} x: expected scales of shape {(payload.shape[0], blocks)}, one a block of {BLOCK}, got "
            f"{scales.shape}; use jax_ep.quantize"
        )
    if payload.shape[0] > group.max_tokens:
        raise ValueError(
            f"{what} x: expected at most max_tokens={group.max_tokens} tokens a rank, got {payload.shape[0]}; create "
            f"the group with max_tokens={payload.shape[0]}, or pass fewer tokens a call"
        )
    return quantized, payload.shape[0]


def _check_handle_options(
    what: str, handle: Handle, top_k: int | None, alignment: int | None, row_order: str | None
) -> None:
    for name, wanted, has in (
        ("top_k", top_k, handle.shape[2]),
        ("alignment", alignment, handle.alignment),
        ("row_order", row_order, handle.row_order),
    ):
        if wanted is not None and wanted != has:
            raise ValueError(
                f"{what} handle: expected a handle with {name}={wanted!r}, got one with {name}={has!r}; leave {name} "
                "out, or make another layout"
            )
