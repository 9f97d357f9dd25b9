"""Dispatch and combine in two halves, with the caller's compute between them; to be called inside shard_map."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import get_opaque_trace_state

from jax_ep import guard, halves
from jax_ep.config import RowOrder
from jax_ep.group import Group
from jax_ep.layout import Handle
from jax_ep.ops import Rows, Sending, Wire, prepare_combine, prepare_dispatch
from jax_ep.tie import tie

Out = TypeVar("Out")


class Pending:
    """An exchange that was started: for `beside`, and then for its done, once.

    It is no pytree, so it cannot leave the function that started it: not as a result of jit, not as the carry of a
    loop. Nor can a loop, a branch or a checkpointed function in there take it, which would be done never, or twice.
    """

    def __init__(self, what: str, halfway: halves.Halfway, sending: Sending | None = None) -> None:
        self._what, self._halfway, self._sending = what, halfway, sending
        self._trace, self._taken = get_opaque_trace_state(), False

    def __repr__(self) -> str:
        return f"Pending({self._what}{', done' if self._taken else ''})"

    def _take(self, by: str) -> halves.Halfway:
        if self._taken:
            raise ValueError(
                f"{by}: expected a pending exchange, got one that was passed on already; done takes it once, and after "
                "beside it is the pending that beside returned that goes on"
            )
        self._taken = True
        return self._halfway


def dispatch_start(
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
) -> Pending:
    """`dispatch`, begun: what is computed until `dispatch_done` runs beside it.

    The kernel runs on a stream of the group with some of the GPU's SMs (docs/kernels.md), or with `num_sms`.
    Differentiable as `dispatch` is; in the backward pass the exchange back takes the time between the same two places.
    A group of the reference does all of it here.

    Args:
      as of `dispatch`.

    Returns:
      `Pending`, for `beside` and `dispatch_done`. At most 8 exchanges of a group may be between start and done.

    Raises:
      ValueError, TypeError, RuntimeError: at trace time, as `dispatch`.
      jax.errors.JaxRuntimeError: when it runs, for a ninth exchange between start and done.

    Example: the shared experts while tokens are on their way
      >>> pending = dispatch_start(x, routing.index, routing.weights, group=group)     # doctest: +SKIP
      >>> shared, pending = beside(pending, shared_experts, x)                         # doctest: +SKIP
      >>> rows = dispatch_done(pending)                                                # doctest: +SKIP
    """
    sending = prepare_dispatch(
        "dispatch_start", x, index, weights, group, handle, top_k, alignment, row_order, wire, dequantize, num_sms
    )
    if sending.fp8 is None:
        halfway = halves.start("dispatch", sending.handle, (sending.x, sending.weights), sending.call)
    else:
        payload, scales = sending.x if isinstance(sending.x, tuple) else (sending.x, None)
        scale_format, dtype = sending.fp8
        operands = payload, scales, sending.weights
        halfway = halves.start("fp8", sending.handle, operands, sending.call, scale_format=scale_format, dtype=dtype)
    return Pending("dispatch", halfway, sending)


def dispatch_done(pending: Pending, *, after: Any = None) -> Rows:
    """The rows of a dispatch that was started.

    Args:
      pending: of `dispatch_start`, or as `beside` returned it.
      after: arrays that must have been computed before the program waits for the rows (a pytree). They order the
        forward pass alone; `beside` orders the backward pass, too.

    Returns:
      `Rows`, bit for bit those of `dispatch`.

    Raises:
      TypeError, ValueError: at trace time, for what is no pending dispatch, or was done already.

    Example: see `dispatch_start`.
    """
    arrays, sending = _finish("dispatch_done", "dispatch", pending, after), pending._sending
    assert sending is not None
    rows, *others = arrays
    weights = None if sending.weights is None else others.pop()
    return sending.rows(rows, others.pop() if others else None, weights)


def combine_start(
    y: jax.Array,
    handle: Handle,
    weights: jax.Array | None = None,
    *,
    group: Group | None = None,
    num_sms: int | None = None,
) -> Pending:
    """`combine`, begun: what is computed until `combine_done` runs beside it.

    Args:
      as of `combine`.

    Returns:
      `Pending`, for `beside` and `combine_done`.

    Raises:
      as `dispatch_start`.

    Example: see `beside`.
    """
    y, weights, handle, call = prepare_combine("combine_start", y, handle, weights, group, num_sms)
    if weights is None:
        return Pending("combine", halves.start("combine", handle, (y, None), call))
    return Pending("combine", halves.start_weighted_combine(handle, y, weights, call))


def combine_done(pending: Pending, *, after: Any = None) -> jax.Array:
    """The tokens of a combine that was started.

    Args:
      pending, after: as of `dispatch_done`.

    Returns:
      [T, H], bit for bit those of `combine`.

    Raises:
      as `dispatch_done`.

    Example: see `beside`.
    """
    (out,) = _finish("combine_done", "combine", pending, after)
    return guard.results("combine", "jax_ep_combined", out)


def beside(pending: Pending | Sequence[Pending], function: Callable[..., Out], *operands: Any) -> tuple[Out, Any]:
    """`function(*operands)`, computed while exchanges are under way.

    XLA may place an operation anywhere among those that it does not depend on. This ties both ends: what `function`
    computes comes behind the start, and the done behind what it returns; in the backward pass likewise.

    Args:
      pending: of `dispatch_start` or `combine_start`, or as this returned it; or several of them.
      function: of arrays to arrays (pytrees).
      operands: what it is given. What it takes from elsewhere may be computed before the start.

    Returns:
      What the function returns, and the exchange, for its done or for more beside it; of several a tuple.

    Raises:
      TypeError, ValueError: at trace time, for what is no pending exchange, or was done already.

    Example: one half of the tokens by the experts while the other half is on its way back
      >>> pending = combine_start(experts(rows.x), rows.handle, rows.weights)          # doctest: +SKIP
      >>> y, pending = beside(pending, experts, others.x)                              # doctest: +SKIP
      >>> out = combine_done(pending)                                                  # doctest: +SKIP
    """
    several = tuple(pending) if isinstance(pending, (tuple, list)) else (pending,)
    several = tuple(_check("beside", None, each) for each in several)
    if not several:
        return function(*operands), ()
    halfways = [each._take("beside") for each in several]
    arrays, operands = tie(([halfway.arrays for halfway in halfways], operands))
    arrays, out = tie((arrays, function(*operands)))
    on = tuple(
        Pending(each._what, dataclasses.replace(halfway, arrays=of_it), each._sending)
        for each, halfway, of_it in zip(several, halfways, arrays, strict=True)
    )
    return out, on if isinstance(pending, (tuple, list)) else on[0]


def _finish(by: str, what: str, pending: Pending, after: Any) -> list[jax.Array]:
    halfway = _check(by, what, pending)._take(by)
    if after is not None:
        halfway = dataclasses.replace(halfway, arrays=tie(halfway.arrays, behind=after))
    return halves.done(halfway)


def _check(by: str, what: str | None, pending: Any) -> Pending:
    if not isinstance(pending, Pending):
        raise TypeError(f"{by} pending: expected what a start returned, got {type(pending).__name__}")
    if pending._trace != get_opaque_trace_state():
        raise ValueError(
            f"{by}: expected a pending exchange that was started in the same function, got one from outside of it; a "
            "loop, a branch, jax.checkpoint, jax.grad or jax.jit needs both halves inside, or both outside"
        )
    if what is not None and pending._what != what:
        raise TypeError(
            f"{by} pending: expected one of {what}_start, got one of {pending._what}_start; call {pending._what}_done"
        )
    return pending
