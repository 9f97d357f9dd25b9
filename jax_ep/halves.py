"""Start and done: the two halves of an exchange as JAX operations.

start gives what it was given and, under way, what the exchange writes; done takes both and gives what was written. Both
are linear where the whole exchange is. The transpose of done is the start of the exchange back: it puts what it writes
in the place of the cotangent of what start was given, and what must stay alive for it in the place of the cotangent of
what start wrote. The transpose of start is then its done. So whatever lies between the two in the program lies between
the two in the backward pass, too; and what start gives must reach one done and nothing else.

| kind | operands | others | results | its mirror |
| --- | --- | --- | --- | --- |
| dispatch | x [T, H], weights [T, K] or none | | rows [C, H], weights of rows or none | combine |
| fp8 | x, its scales or none, weights or none | | rows, their scales or none, weights or none | of its tangent |
| combine | rows [C, H], words of rows or none | | tokens [T, H], words of picks or none | dispatch |
| weighted | rows y, weights [C, P] | y, weights [C] | tokens | of its tangent |
| tangent | tangents of y and of weights [C, P] | y, weights [C] | tangent of tokens | gradient |
| gradient | cotangent of tokens | y, weights [C] | cotangents of y and of weights [C, P] | |

A weight is repeated P times, as the kernel gives its cotangent in P parts that are summed outside: repeating has that
sum for its transpose.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import PartitionSpec as P

from jax_ep import kernels, primitives
from jax_ep.call import Call
from jax_ep.guard import refuse_vmap
from jax_ep.layout import HANDLE_ARRAYS, Handle
from jax_ep.quantize import ScaleFormat, num_blocks
from jax_ep.tie import recompute

Kind = Literal["dispatch", "fp8", "combine", "weighted", "tangent", "gradient"]
Arrays = Sequence[jax.Array]
_MIRROR: dict[Kind, Kind] = {"dispatch": "combine", "combine": "dispatch", "tangent": "gradient"}


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What a pair of start and done does (static).

    Attributes:
      kind: see the table above.
      handle: the tree of its handle.
      call: what its kernels are told.
      has: which of the kind's operands there are.
      scale_format, dtype: of fp8: as `primitives.send_fp8` takes them.
      eager: whether start does it all: outside of jit each of the two is a program of its own, which nothing can be
        under way between.
    """

    kind: Kind
    handle: Any
    call: Call
    has: tuple[bool, ...]
    scale_format: ScaleFormat = "float32"
    dtype: Any = None
    eager: bool = False

    @property
    def num_operands(self) -> int:
        return sum(self.has)

    @property
    def num_others(self) -> int:
        return 2 if self.kind in ("weighted", "tangent", "gradient") else 0

    def mirrored(self) -> Exchange:
        """The exchange back, which the transposes make."""
        if self.kind not in _MIRROR:  # bilinear: its tangent is what has one
            raise NotImplementedError(
                "jax_ep.combine_start: expected no jax.linear_transpose of a weighted combine or of its gradient, got "
                "one; use jax.vjp"
            )
        has = (True,) if self.kind == "tangent" else self.has
        return dataclasses.replace(self, kind=_MIRROR[self.kind], has=has)

    def given(self, operands: Arrays) -> list[Any]:
        """The operands, with None for those that there are not."""
        there = iter(operands)
        return [next(there) if has else None for has in self.has]

    def handle_of(self, leaves: Sequence[Any]) -> Handle:
        """From the last of what start or done is bound to."""
        return jax.tree.unflatten(self.handle, leaves[-HANDLE_ARRAYS:])

    def others_of(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Likewise."""
        return leaves[len(leaves) - HANDLE_ARRAYS - self.num_others : len(leaves) - HANDLE_ARRAYS]


@dataclasses.dataclass(frozen=True)
class Halfway:
    """What lies between start and done, to be passed on whole.

    Attributes:
      exchange: what is under way.
      arrays: what start was given and gave.
      rest: what else it was given: others and the arrays of the handle.
    """

    exchange: Exchange
    arrays: tuple[jax.Array, ...]
    rest: tuple[jax.Array, ...]


def start(
    kind: Kind, handle: Handle, operands: Sequence[jax.Array | None], call: Call, others: Arrays = (), **fp8: Any
) -> Halfway:
    """Begin an exchange; see the table above."""
    arrays, tree = jax.tree.flatten(handle)
    exchange = Exchange(kind, tree, call, tuple(operand is not None for operand in operands), **fp8)
    rest = (*_in_rows(handle, others), *arrays)
    given = _in_rows(handle, [operand for operand in operands if operand is not None])
    return Halfway(exchange, tuple(_start_p.bind(*given, *rest, exchange=exchange)), rest)


def done(halfway: Halfway) -> list[jax.Array]:
    """The results that there are."""
    return _done_p.bind(*halfway.arrays, *halfway.rest, exchange=halfway.exchange)


def start_weighted_combine(handle: Handle, y: jax.Array, weights: jax.Array, call: Call) -> Halfway:
    """Of rows y [C, H] times their weights [C] float32; bilinear."""
    pieces = _pieces(handle, y)
    repeated = jnp.broadcast_to(weights[:, None], (weights.shape[0], pieces))
    return start("weighted", handle, (y, repeated), call, (y, weights))


# What they do ---------------------------------------------------------------------------------------------------------


def _whole(exchange: Exchange, handle: Handle, operands: Arrays, others: Arrays) -> list[jax.Array]:
    """The whole exchange at once."""
    given, call = exchange.given(operands), exchange.call
    results: Sequence[Any]
    match exchange.kind:
        case "dispatch":
            x, weights = given
            results = primitives.send(handle, x, weights, call)
        case "fp8":
            x, scales, weights = given
            results = primitives.send_fp8(handle, x, scales, weights, call, exchange.scale_format, exchange.dtype)
        case "combine":
            results = primitives.receive(handle, given[0], None, given[1], call)
        case "weighted":
            y, weights = others
            results = primitives.receive(handle, y, weights, None, call)
        case "tangent":
            (ty, tweights), (y, weights) = given, others
            results = (primitives.weighted_combine_tangent(handle, ty, tweights[:, 0], y, weights, call),)
        case "gradient":
            y, weights = others
            rows, dots = primitives.weighted_combine_cotangents(call, handle, given[0], y, weights)
            results = rows, jnp.pad(dots[:, None], ((0, 0), (0, _pieces(handle, rows) - 1)))
    return [result for result in results if result is not None]


def _in_rows(handle: Handle, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, laid out in memory as kernels want them: else XLA might make a copy for each of start and done."""
    if not _by_kernels(handle):
        return list(arrays)
    return [with_layout_constraint(array, Layout(tuple(range(array.ndim)))) for array in arrays]


def _begin(exchange: Exchange, handle: Handle, operands: Arrays, others: Arrays) -> list[jax.Array]:
    """The exchange by kernels of its own stream: what comes back is under way."""
    given, call = exchange.given(operands), exchange.call
    results: Sequence[Any]
    match exchange.kind:
        case "dispatch":
            x, weights = given
            results = kernels.dispatch(handle, x, None, weights, call, target=kernels.DISPATCH_START)
        case "fp8":
            dtype = exchange.dtype or jnp.float8_e4m3fn
            x, scales, weights = given
            results = kernels.dispatch(
                handle, x, scales, weights, call, exchange.scale_format, dtype, kernels.DISPATCH_START
            )
        case "combine":
            results = kernels.combine(handle, given[0], None, given[1], call, target=kernels.COMBINE_START)
        case "weighted":
            y, weights = others
            results = kernels.combine(handle, y, weights, None, call, target=kernels.COMBINE_START)
        case "gradient":
            y, weights = others
            results = kernels.gradient(handle, given[0], y, weights, call, kernels.DISPATCH_START)
    return [result for result in results if result is not None]


def _start(*leaves: jax.Array, exchange: Exchange) -> list[jax.Array]:
    def by(what: Callable[..., list[jax.Array]], *leaves: jax.Array) -> list[jax.Array]:
        return what(exchange, exchange.handle_of(leaves), leaves[: exchange.num_operands], exchange.others_of(leaves))

    whole, begin = functools.partial(by, _whole), functools.partial(by, _begin)
    if not _in_halves(exchange, leaves):
        return [*leaves[: exchange.num_operands], *whole(*leaves)]
    leaves = _in_memory(leaves)
    return [*leaves[: exchange.num_operands], *jax.lax.platform_dependent(*leaves, cuda=begin, default=whole)]


def _done(*leaves: jax.Array, exchange: Exchange) -> list[jax.Array]:
    if not _in_halves(exchange, leaves):
        return _results(exchange, leaves)

    def end(*leaves: jax.Array) -> list[jax.Array]:
        # What the kernel reads: of a weighted combine not its operands, which are in the others.
        operands = leaves[: exchange.num_operands] if exchange.kind != "weighted" else ()
        read = (*operands, *exchange.others_of(leaves))
        return list(_in_memory(kernels.done(exchange.handle_of(leaves), _results(exchange, leaves), read)))

    passed_on = len(leaves) - exchange.num_others - HANDLE_ARRAYS
    leaves = (*leaves[:passed_on], *_in_memory(leaves[passed_on:]))
    return jax.lax.platform_dependent(*leaves, cuda=end, default=lambda *leaves: _results(exchange, leaves))


def _in_memory(arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The arrays, each of them in memory by itself.

    XLA has a custom call read a part of an array where it lies, and write one there. Start would read that, and done
    be given a copy, with which nothing keeps the array itself until then; and done would have results of its own.
    """
    return tuple(jax.lax.optimization_barrier(tuple(arrays)))


def _results(exchange: Exchange, leaves: Sequence[Any]) -> list[Any]:
    """Among what done is bound to."""
    return list(leaves[exchange.num_operands : len(leaves) - exchange.num_others - HANDLE_ARRAYS])


def _by_kernels(handle: Handle) -> bool:
    # What has no elements has nothing to exchange, and no custom call's type fits it.
    return handle.group.implementation == "cuda" and handle.slots.size > 0 and handle.capacity > 0


def _pieces(handle: Handle, y: Any) -> int:
    return kernels.gradient_pieces(y.shape[1], y.dtype) if _by_kernels(handle) else 1


def _in_halves(exchange: Exchange, leaves: Sequence[Any]) -> bool:
    return _by_kernels(exchange.handle_of(leaves)) and exchange.kind != "tangent" and not exchange.eager


def _types(*leaves: Any, exchange: Exchange) -> list[Any]:
    """Of start's results."""
    handle = exchange.handle_of(leaves)
    _, tokens, top_k = handle.shape
    capacity = handle.capacity
    operands = leaves[: exchange.num_operands]
    like, *_ = operands
    words = (capacity, top_k) if handle.row_order == "rank" else (capacity,)
    float32 = jnp.dtype(jnp.float32)
    results: list[tuple[tuple[int, ...], Any]]
    match exchange.kind:
        case "dispatch":
            results = [((capacity, like.shape[1]), like.dtype), *([(words, float32)] if exchange.has[1] else [])]
        case "fp8":
            raw = exchange.dtype is None
            results = [((capacity, like.shape[1]), jnp.dtype(exchange.dtype or jnp.float8_e4m3fn))]
            results += [((capacity, num_blocks(like.shape[1])), float32)] if raw else []
            results += [(words, float32)] if exchange.has[2] else []
        case "combine":
            results = [((tokens, like.shape[1]), like.dtype)]
            results += [((tokens, top_k), float32)] if exchange.has[1] else []
        case "weighted" | "tangent":
            results = [((tokens, like.shape[1]), like.dtype)]
        case "gradient":
            y = exchange.others_of(leaves)[0]
            results = [((capacity, y.shape[1]), y.dtype), ((capacity, _pieces(handle, y)), float32)]
    return [*operands, *(_like(like, shape, dtype) for shape, dtype in results)]


def _like(array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of an array that varies over the axes that `array` varies over."""
    whole = array.sharding.update(spec=P(*(None,) * len(shape)))
    return array.update(shape=shape, dtype=dtype, weak_type=False, sharding=whole)


def _types_of_done(*leaves: Any, exchange: Exchange) -> list[Any]:
    return _results(exchange, leaves)


# Their derivatives ----------------------------------------------------------------------------------------------------


def _real(tangents: Sequence[Any]) -> list[Any]:
    return [ad.instantiate_zeros(tangent) for tangent in tangents]


def _zeros(outs: Arrays) -> list[Any]:
    return [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]


def _start_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, exchange: Exchange) -> tuple[Any, Any]:
    outs = _start_p.bind(*primals, exchange=exchange)
    n, m = exchange.num_operands, exchange.num_others
    if all(type(tangent) is ad.Zero for tangent in tangents):
        return outs, _zeros(outs)
    handle, arrays = exchange.handle_of(primals), primals[-HANDLE_ARRAYS:]
    match exchange.kind:
        case "dispatch" | "combine":
            return outs, _start_p.bind(*_in_rows(handle, _real(tangents[:n])), *arrays, exchange=exchange)
        case "fp8" if _straight_through(exchange):
            given = _in_rows(handle, _real(tangents[:n]))
            return outs, _start_p.bind(*given, *arrays, exchange=_tangent_of(exchange))
        case "fp8":  # the tangent of the weights waits for done: nothing but it has one
            return outs, [*tangents[:n], *_zeros(outs[n:])]
        case "weighted":  # the others' tangents are in those of the operands
            return outs, _start_p.bind(*_real(tangents[:n]), *primals[n:], exchange=_tangent_of(exchange))
        case _:  # Derivatives of second order are complete when start has given them.
            floats, dots = tuple(primals[: n + m]), tuple(_real(tangents[: n + m]))

            def whole(*floats: jax.Array) -> list[jax.Array]:
                return _whole(exchange, handle, floats[:n], floats[n:])

            return outs, [*dots[:n], *jax.jvp(whole, floats, dots)[1]]


def _done_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, exchange: Exchange) -> tuple[Any, Any]:
    outs = _done_p.bind(*primals, exchange=exchange)
    if all(type(tangent) is ad.Zero for tangent in tangents):
        return outs, _zeros(outs)
    n, m = exchange.num_operands, exchange.num_others
    end = len(primals) - m - HANDLE_ARRAYS
    halves, arrays = tangents[:end], primals[-HANDLE_ARRAYS:]
    match exchange.kind:
        case "dispatch" | "combine":
            return outs, _done_p.bind(*_real(halves), *arrays, exchange=exchange)
        case "fp8" if _straight_through(exchange):
            return outs, _done_p.bind(*_real(halves), *arrays, exchange=_tangent_of(exchange))
        case "fp8":
            tweights = ad.instantiate_zeros(tangents[n - 1])
            handle = exchange.handle_of(primals)
            return outs, [*_zeros(outs[:-1]), primitives.dispatch(handle, None, tweights, exchange.call)[1]]
        case "weighted":
            return outs, _done_p.bind(*_real(halves), *primals[end:], exchange=_tangent_of(exchange))
        case _:
            return outs, list(halves[n:])


def _straight_through(exchange: Exchange) -> bool:
    """Whether fp8 rows have the derivative of plain ones: tokens that come as they are, rows of their dtype."""
    return exchange.dtype is not None and not exchange.has[1]


def _tangent_of(exchange: Exchange) -> Exchange:
    if exchange.kind == "weighted":
        return dataclasses.replace(exchange, kind="tangent")
    return Exchange("dispatch", exchange.handle, exchange.call, (True, exchange.has[2]))


def _start_transpose(cotangents: Sequence[Any], *leaves: Any, exchange: Exchange) -> list[Any]:
    n = exchange.num_operands
    none = [None] * (len(leaves) - n)
    if all(type(cotangent) is ad.Zero for cotangent in cotangents):
        return [*(ad.Zero(leaf.aval) for leaf in leaves[:n]), *none]
    cotangents = _real(cotangents)
    # What the exchange back writes lies where start has what it was given; what it was given, where it writes.
    back = _done_p.bind(*cotangents[n:], *cotangents[:n], *leaves[n:], exchange=exchange.mirrored())
    return [*back, *none]


def _done_transpose(cotangents: Sequence[Any], *leaves: Any, exchange: Exchange) -> list[Any]:
    end = len(leaves) - exchange.num_others - HANDLE_ARRAYS
    none = [None] * (len(leaves) - end)
    if all(type(cotangent) is ad.Zero for cotangent in cotangents):
        return [*(ad.Zero(leaf.aval) for leaf in leaves[:end]), *none]
    given = _in_rows(exchange.handle_of(leaves), _real(cotangents))
    halves = _start_p.bind(*given, *leaves[end:], exchange=exchange.mirrored())
    n = len(cotangents)
    return [*halves[n:], *halves[:n], *none]


class _Started:
    """One for each start of a program that is lowered."""


def _lower(ctx: Any, *leaves: Any, exchange: Exchange, function: Callable[..., Any]) -> Any:
    """Numbers a program's starts: of two that are equal XLA would make one, and a copy of what it writes."""
    if function is _start:
        number = sum(isinstance(each, _Started) for each in ctx.module_context.keepalives)
        ctx.module_context.add_keepalive(_Started())
        call = dataclasses.replace(exchange.call, site=f"{exchange.call.site}, start {number}")
        exchange = dataclasses.replace(exchange, call=call)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *leaves, exchange=exchange)


class _Half(Primitive):
    """Start or done."""

    multiple_results = True

    def bind(self, *leaves: Any, exchange: Exchange) -> Any:
        eager = exchange.eager or not any(map(_is_traced, leaves))
        return super().bind(*leaves, exchange=dataclasses.replace(exchange, eager=eager))


def _is_traced(leaf: Any) -> bool:
    """Whether this is for a program that is compiled as a whole, also below a derivative."""
    while hasattr(leaf, "primal"):
        leaf = leaf.primal
    return isinstance(leaf, pe.DynamicJaxprTracer)


_start_p, _done_p = _Half("jax_ep_start"), _Half("jax_ep_done")
for _primitive, _function, _abstract in ((_start_p, _start, _types), (_done_p, _done, _types_of_done)):
    _primitive.def_abstract_eval(_abstract)
    mlir.register_lowering(_primitive, functools.partial(_lower, function=_function), cacheable=False)
    _primitive.def_impl(jax.jit(_function, static_argnames=("exchange",)))
    batching.primitive_batchers[_primitive] = lambda args, dims, **static: refuse_vmap("start and done", dims)
recompute(_start_p)
ad.primitive_jvps[_start_p], ad.primitive_jvps[_done_p] = _start_jvp, _done_jvp
ad.primitive_transposes[_start_p], ad.primitive_transposes[_done_p] = _start_transpose, _done_transpose
