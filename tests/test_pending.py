"""Start and done: the bits and the derivatives of whole exchanges, and nothing that parts the two.

What was written for whole exchanges is run again with these in two halves (in_halves.py).
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import cases
import in_halves
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_gradients
import test_transforms
import world
from jax.extend.core import Var
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_conformance import Program, assert_same_bits, inputs_and_expected
from test_kernels import IMPLEMENTATION
from test_transforms import (
    FEW,
    HIDDEN,
    OPERATIONS,
    RANKS,
    TOP_K,
    TRANSFORMS,
    Operation,
    assert_equal_trees,
    check,
    grad,
    loss,
    make_group,
    point,
    remat,
    sharded,
)

import jax_ep
from jax_ep import halves

pytestmark = pytest.mark.processes


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def on(request) -> str:
    return request.param


@pytest.fixture
def halved(monkeypatch) -> None:
    in_halves.use(monkeypatch)


# The same as whole exchanges.


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_every_bit_is_the_oracles(halved, on, case):
    program = Program(case, IMPLEMENTATION[on])
    with program.group:
        for draw in cases.some_draws(case, 5):
            arrays, wanted = inputs_and_expected(case, draw)
            assert_same_bits(program(**arrays), wanted)


@pytest.mark.parametrize("dtype", test_gradients.BOUNDS)
@pytest.mark.parametrize("case", test_gradients.CASES, ids=str)
def test_gradients_equal_a_dense_moe_in_float64(halved, case, dtype):
    test_gradients.test_gradients_equal_a_dense_moe_in_float64(case, dtype)


def test_picks_without_a_row_get_a_weight_gradient_of_exactly_zero(halved):
    test_gradients.test_picks_without_a_row_get_a_weight_gradient_of_exactly_zero()


# Derivatives.


def between(x: jax.Array) -> jax.Array:
    """Stands between a start and its done; its transpose is a cumsum, too, which nothing else here makes."""
    return jax.lax.cumsum(x, axis=1) / HIDDEN


@dataclasses.dataclass(frozen=True)
class Halved(Operation):
    """An operation with something between start and done."""

    def parallel(self, group, x, index, weights):
        options = {"group": group, "row_order": self.row_order, "wire": self.wire}
        pending = jax_ep.dispatch_start(x, index, weights, **options)
        first, pending = jax_ep.beside(pending, between, x)
        rows = jax_ep.dispatch_done(pending)
        pending = jax_ep.combine_start(*self.experts(group, rows))
        second, pending = jax_ep.beside(pending, between, first)
        return jax_ep.combine_done(pending) + second

    def dense(self, kept, x, index, weights):
        return super().dense(kept, x, index, weights) + between(between(x))


HALVED = [Halved(**dataclasses.asdict(operation)) for operation in OPERATIONS]
policies = jax.checkpoint_policies
MORE_TRANSFORMS = TRANSFORMS | {
    "linearize": lambda f: lambda x, w: jax.linearize(f, x, w)[1](x, w),
    "jit inside": lambda f: grad(jax.jit(f)),
    "third order": lambda f: lambda x, w: jax.jvp(grad(lambda x, w: grad(f)(x, w)[0]), (x, w), (x, w)),
    "remat of remat": lambda f: grad(jax.checkpoint(jax.checkpoint(f))),
    "remat with CSE": lambda f: grad(jax.checkpoint(f, prevent_cse=False)),
    "remat, hessian-vector product": lambda f: lambda x, w: jax.jvp(remat()(f), (x, w), (x, w)),
    "remat, reverse over reverse": lambda f: grad(lambda x, w: remat()(f)(x, w)[0]),
    "remat, all but rows saved": remat(policies.save_anything_except_these_names("jax_ep_rows")),
    "remat, all names but rows saved": remat(policies.save_any_names_but_these("jax_ep_rows")),
    # What no sane policy says: keep what is under way, and not what comes of it.
    "remat, all but done saved": remat(lambda primitive, *_, **__: primitive.name != "jax_ep_done"),
    "remat, start and ties saved": remat(lambda primitive, *_, **__: primitive.name in ("jax_ep_start", "jax_ep_tie")),
}


@pytest.mark.parametrize("transform", MORE_TRANSFORMS)
def test_transform(transform):
    check(HALVED[0], MORE_TRANSFORMS[transform], AxisType.Auto, True)


@pytest.mark.parametrize(
    ("kind", "check_vma"),
    [(AxisType.Explicit, True), (AxisType.Explicit, False), (AxisType.Auto, False)],
    ids=["Explicit-check_vma", "Explicit-no check_vma", "Auto-no check_vma"],
)
@pytest.mark.parametrize("transform", FEW)
def test_transform_on_other_meshes(transform, kind, check_vma):
    check(HALVED[0], TRANSFORMS[transform], kind, check_vma)


@pytest.mark.parametrize("transform", FEW)
@pytest.mark.parametrize("operation", HALVED[1:], ids=lambda operation: operation.name)
def test_operation(operation, transform):
    check(operation, TRANSFORMS[transform], AxisType.Auto, True)


WITHOUT_JIT = ["value", "grad", "jvp", "linearize", "hessian-vector product", "remat", "scan with remat", "jit inside"]


@pytest.mark.parametrize("transform", WITHOUT_JIT)
def test_without_jit(transform):
    """Each primitive is a program of its own then, so start has to do it all."""
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    apply = MORE_TRANSFORMS[transform]
    with make_group(mesh) as group:
        f = sharded(HALVED[0], mesh, group, True)
        tokens, picks, of_picks = world.put(mesh, "ep", (x, index, weights))
        got = apply(lambda x, w: f(x, picks, w))(tokens, of_picks)
        assert_equal_trees(got, apply(lambda x, w: HALVED[0].dense(1, x, index, w))(x, weights))


@pytest.mark.parametrize("transform", ["value", "grad", "jvp", "linearize"])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["without jit", "jit"])
def test_each_half_knows_whether_it_is_a_program_of_its_own(transform, jit, monkeypatch):
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    said: list[bool] = []
    in_halves = halves._in_halves
    monkeypatch.setattr(halves, "_in_halves", lambda e, leaves: said.append(e.eager) or in_halves(e, leaves))
    with make_group(mesh) as group:
        f = sharded(HALVED[0], mesh, group, True)
        apply = MORE_TRANSFORMS[transform]
        jax.block_until_ready(
            jit(lambda x, i, w: apply(lambda x, w: f(x, i, w))(x, w))(*world.put(mesh, "ep", (x, index, weights)))
        )
    assert len(said) >= 4 and set(said) == {jit is not jax.jit}


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no check_vma"])
def test_grad_inside_shard_map(check_vma):
    test_transforms.check_grad_inside_shard_map(HALVED[0], check_vma)


def test_quantised_rows_refuse_the_gradient_of_tokens_and_give_that_of_weights():
    x, index, weights = point()
    cotangent = np.random.default_rng(1).random(weights.shape).astype(np.float32)
    mesh = world.mesh(RANKS)
    with make_group(mesh) as group:

        def inside(x, index, weights, cotangent):
            pending = jax_ep.dispatch_start(x, index, weights, group=group, wire="fp8", dequantize=False)
            first, pending = jax_ep.beside(pending, between, weights)
            rows = jax_ep.dispatch_done(pending)
            # Back at its pick, a row's weight times what lies there; and, beside it, a share of its own.
            back = jax_ep.combine(rows.weights[:, None] * jnp.ones(HIDDEN), rows.handle)
            return back[:, :1] * cotangent + first

        f = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
        arguments = world.put(mesh, "ep", (x, index, weights, cotangent))
        got = world.fetch(
            jax.jit(jax.grad(lambda w, x, i, c: f(x, i, w, c).sum()))(arguments[2], *arguments[:2], arguments[3])
        )
        expected = cotangent.sum(1, keepdims=True) + np.arange(TOP_K, 0, -1) / HIDDEN
        np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), rtol=1e-6)
        with pytest.raises(TypeError, match="no differentiation with respect to tokens"):
            jax.eval_shape(jax.grad(lambda x: f(x, *arguments[1:]).sum()), x)


@pytest.mark.parametrize("transform", [grad, lambda f: lambda x, w: jax.jvp(f, (x, w), (x, w))], ids=["grad", "jvp"])
def test_only_what_lies_between_is_differentiated(transform):
    """Tokens and weights have no tangent, so there is no exchange of any; least of all half of one."""
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    with make_group(mesh) as group:

        def inside(x, index, weights, v):
            pending = jax_ep.dispatch_start(x, index, weights, group=group)
            first, pending = jax_ep.beside(pending, between, v)
            rows = jax_ep.dispatch_done(pending)
            pending = jax_ep.combine_start(rows.x, rows.handle, rows.weights)
            second, pending = jax_ep.beside(pending, lambda first: v * first, first)
            return jax_ep.combine_done(pending, after=second) + second

        f = jax.shard_map(inside, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))

        def ours(v, w):
            return f(*map(jax.lax.stop_gradient, (x, index, weights)), v) * w

        def dense(v, w):
            return (x * weights.sum(1, keepdims=True) + v * between(v)) * w

        step = transform(ours)
        v, w = point(1)[0], point(2)[0]
        assert pairs(step, v, w) == 2
        assert_equal_trees(jax.jit(step)(*world.put(mesh, "ep", (v, w))), jax.jit(transform(dense))(v, w))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_what_lies_between_may_be_of_any_type(wrap):
    """Integers, random keys, numbers of Python, what is equal on all ranks (and stays so), and nothing at all."""
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    scale = np.linspace(1, 2, HIDDEN).astype(np.float32)
    with make_group(mesh) as group:

        def inside(x, index, weights, scale, key):
            def function(x, index, scale, key, factor, nothing):
                assert nothing is None
                noise = jax.random.normal(key, x.shape)
                return {"y": factor * x + noise, "index": index + 1, "scale": scale**2, "nothing": None}, key

            pending = jax_ep.dispatch_start(x, index, weights, group=group)
            (out, key), pending = jax_ep.beside(pending, function, x, index, scale, key, 2.0, None)
            rows = jax_ep.dispatch_done(pending, after=(out["index"], key))
            combined = jax_ep.combine(rows.x, rows.handle, rows.weights)
            return combined * out["y"] + out["index"].sum(1, keepdims=True), out["scale"]

        specs = (P("ep"), P("ep"), P("ep"), P(), P())
        f = wrap(jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=(P("ep"), P())))

        def dense(x, index, weights, scale, key):
            noise = jnp.tile(jax.random.normal(key, (len(x) // RANKS, HIDDEN)), (RANKS, 1))
            combined = x * weights.sum(1, keepdims=True)
            return combined * (2 * x + noise) + (index + 1).sum(1, keepdims=True), scale**2

        key = jax.random.key(3)

        def step(f):
            def total(x, index, weights, scale):
                y, squared = f(x, index, weights, scale, key)
                return (y**2).sum() + squared.sum()

            return jax.jit(jax.value_and_grad(total, argnums=(0, 2, 3)))

        placed = (*world.put(mesh, "ep", (x, index, weights)), world.put(mesh, (), scale))
        assert_equal_trees(step(f)(*placed), step(dense)(x, index, weights, scale))


def test_parts_of_arrays():
    """XLA has a custom call read a part of an array, and write one, where that lies: start and done must agree."""
    layers, tokens, hidden = 3, 128, HIDDEN  # the parts begin at whole cache lines
    halves = slice(0, tokens // 2), slice(tokens // 2, tokens)
    rng = np.random.default_rng(0)
    all_tokens = RANKS * tokens
    x = rng.standard_normal((all_tokens, hidden)).astype(np.float32)
    more = rng.standard_normal((layers, all_tokens, hidden)).astype(np.float32)
    index = np.argsort(rng.random((layers, all_tokens, 4)), axis=-1)[..., :2].astype(np.int32)
    weights = rng.random((layers, all_tokens, 2)).astype(np.float32)
    mesh = world.mesh(RANKS)
    options = {"max_tokens": tokens, "hidden": hidden, "num_experts": 4, "top_k": 2, "dtype": "float32"}
    with jax_ep.create_group(mesh, "ep", **options) as group:

        def exchange(part, more, index, weights):
            pending = jax_ep.dispatch_start(more[part], index[part], weights[part], group=group)
            first, pending = jax_ep.beside(pending, between, more[part])
            rows = jax_ep.dispatch_done(pending)
            pending = jax_ep.combine_start(rows.x, rows.handle, rows.weights)
            second, pending = jax_ep.beside(pending, between, first)
            return jax_ep.combine_done(pending), second

        def layer(x, of_layer):
            outs, seconds = zip(*(exchange(part, *of_layer) for part in halves), strict=True)
            return x * jnp.concatenate(outs) + jnp.concatenate(seconds), outs

        def dense(x, more, weights):
            def layer(x, of_layer):
                more, weights = of_layer
                y = more * weights.sum(1, keepdims=True)
                return x * y + between(between(more)), y

            return jax.lax.scan(layer, x, (more, weights))

        specs = P("ep"), P(None, "ep"), P(None, "ep"), P(None, "ep")
        f = jax.shard_map(
            lambda x, *stacked: jax.lax.scan(layer, x, stacked),
            mesh=mesh,
            in_specs=specs,
            out_specs=(P("ep"), (P(None, "ep"), P(None, "ep"))),
        )

        def ours(x, more, index, weights):
            last, (first, second) = f(x, more, index, weights)
            by_rank = [half.reshape(layers, RANKS, -1, hidden) for half in (first, second)]
            return last, jnp.concatenate(by_rank, axis=2).reshape(layers, all_tokens, hidden)

        def step(f):
            def total(x, more, weights):
                last, each = f(x, more, weights)
                return (last**2).sum() + (each**3).sum(), each

            return jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)

        of_tokens = P(None, "ep")
        placed = (world.put(mesh, "ep", x), *world.put(mesh, of_tokens, (more, index, weights)))
        got = jax.jit(lambda x, more, index, weights: step(lambda x, m, w: ours(x, m, index, w))(x, more, weights))(
            *placed
        )
        assert_equal_trees(got, jax.jit(step(dense))(x, more, weights))


def test_linear_transpose_of_dispatch_and_of_combine(halved):
    test_transforms.test_linear_transpose_of_dispatch_and_of_combine()


def test_linear_transpose_of_a_weighted_combine_is_refused():
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    with make_group(mesh) as group:

        def inside(x, index, weights):
            rows = jax_ep.dispatch(x, index, weights, group=group)
            return jax.linear_transpose(lambda y: in_halves.combine(y, rows.handle, rows.weights), rows.x)(x)

        f = jax.shard_map(inside, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        with pytest.raises(NotImplementedError, match="no jax.linear_transpose of a weighted combine.*jax.vjp"):
            jax.eval_shape(f, x, index, weights)


def test_axes_that_shard_map_leaves_alone():
    """Explicit ones have their say in every type."""
    x, index, weights = point()
    mesh = world.mesh((RANKS, 2), ("ep", "tp"), AxisType.Explicit)
    with make_group(mesh) as group:
        f = jax.shard_map(
            lambda *arrays: HALVED[0].parallel(group, *arrays),
            mesh=mesh,
            in_specs=P("ep"),
            out_specs=P("ep"),
            axis_names={"ep"},
        )
        expected = grad(lambda x, w: HALVED[0].dense(1, x, index, w))(x, weights)
        arguments = world.put(mesh, "ep", (x, index, weights))
        got = jax.jit(lambda x, index, w: grad(lambda x, w: f(x, index, w))(x, w))(*arguments)
        assert_equal_trees(got, expected)


# Start and done as JAX traces them.


def within(eqn: Any) -> Iterator[Any]:
    for leaf in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
        inner = getattr(leaf, "jaxpr", leaf)
        if hasattr(inner, "eqns"):
            yield inner


def jaxprs(jaxpr: Any) -> Iterator[Any]:
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in within(eqn):
            yield from jaxprs(inner)


def traced(f, *arguments) -> list[Any]:
    """The jaxpr of a function and all within it, without what nobody uses, as it is compiled."""
    jaxpr = jax.make_jaxpr(f)(*arguments).jaxpr
    return list(jaxprs(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]))


def pairs(f, *arguments) -> int:
    """How many starts there are. All that one gives goes to one done, each to its place, by way of ties alone."""
    return sum(pairs_in(jaxpr) for jaxpr in traced(f, *arguments))


def pairs_in(jaxpr: Any) -> int:
    readers = collections.defaultdict(list)
    for eqn in jaxpr.eqns:
        for place, var in enumerate(eqn.invars):
            if isinstance(var, Var):
                readers[var].append((eqn, place))

    def ends(var: Var) -> list[tuple[str, int, int]]:
        """Where what lies in `var` is read."""
        assert var not in jaxpr.outvars, "it gets out"
        found = []
        for eqn, place in readers[var]:
            tied = eqn.primitive.name == "jax_ep_tie"
            found += ends(eqn.outvars[place]) if tied else [(eqn.primitive.name, id(eqn), place)]
        return found

    starts = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "jax_ep_start"]
    for eqn in starts:
        found = [ends(var) for var in eqn.outvars]
        done = found[0][0][1]
        assert found == [[("jax_ep_done", done, place)] for place in range(len(found))], eqn.params["exchange"].kind
    assert len(starts) == sum(eqn.primitive.name == "jax_ep_done" for eqn in jaxpr.eqns)
    return len(starts)


@pytest.mark.parametrize("transform", MORE_TRANSFORMS)
@pytest.mark.parametrize("operation", HALVED, ids=lambda operation: operation.name)
def test_no_transform_parts_start_and_done(operation, transform):
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    with make_group(mesh, operation) as group:
        f = sharded(operation, mesh, group, True)
        assert pairs(MORE_TRANSFORMS[transform](lambda x, w: f(x, index, w)), x, weights) >= 2


def test_remat_repeats_only_what_the_backward_pass_needs():
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    with make_group(mesh) as group:
        f = sharded(HALVED[0], mesh, group, True)

        def exchanges(policy):
            return pairs(remat(policy)(lambda x, w: f(x, index, w)), x, weights)

        # Two forward, two back; and the dispatch again, unless its rows are kept. Nothing needs what combine gives.
        assert exchanges(policies.nothing_saveable) == 5
        assert exchanges(policies.everything_saveable) == 4
        assert exchanges(policies.save_only_these_names("jax_ep_rows", "jax_ep_handle")) == 4


def is_between(eqn: Any) -> bool:
    return eqn.primitive.name == "cumsum" and eqn.outvars[0].aval.dtype == jnp.float32


def comes_behind(jaxpr: Any, later: Any, earlier: Any) -> bool:
    """Whether one equation depends on another."""
    maker = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    seen, ahead = set(), [later]
    while ahead:
        for var in ahead.pop().invars:
            eqn = maker.get(var) if isinstance(var, Var) else None
            if eqn is earlier:
                return True
            if eqn is not None and id(eqn) not in seen:
                seen.add(id(eqn))
                ahead.append(eqn)
    return False


def test_what_lies_between_lies_between_in_the_backward_pass():
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    with make_group(mesh) as group:
        f = sharded(HALVED[0], mesh, group, True)
        step = jax.value_and_grad(loss(lambda x, w: f(x, index, w)), argnums=(0, 1))
        found = []
        for jaxpr in traced(step, x, weights):
            starts, dones = (
                [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name] for name in ("jax_ep_start", "jax_ep_done")
            )
            middles = [eqn for eqn in jaxpr.eqns if is_between(eqn)]
            for start, middle, done in zip(starts, middles, dones, strict=True):
                assert comes_behind(jaxpr, middle, start)
                assert comes_behind(jaxpr, done, middle)
                found.append((start.params["exchange"].kind, middle.params["reverse"]))
    assert found == [("dispatch", False), ("weighted", False), ("gradient", True), ("combine", True)]


def test_after_is_waited_for_in_the_forward_pass_alone():
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    with make_group(mesh) as group:

        def inside(x, index, weights):
            pending = jax_ep.dispatch_start(x, index, weights, group=group)
            other = between(x)
            return jax_ep.dispatch_done(pending, after={"other": other}).x.sum(0, keepdims=True) + other.sum()

        f = jax.shard_map(inside, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        step = jax.grad(lambda x: (f(x, index, weights) ** 2).sum())
        found = []
        for jaxpr in traced(step, x):
            middles = [eqn for eqn in jaxpr.eqns if is_between(eqn)]
            for done in (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "jax_ep_done"):
                found.append([comes_behind(jaxpr, done, middle) for middle in middles])
    assert found == [[True], [False]]


# What is refused.


ONCE = "expected a pending exchange, got one that was passed on already; done takes it once, and after beside"
NO_PENDING = "pending: expected what a start returned, got"


def beside(pending):
    return jax_ep.beside(pending, jnp.sin, jnp.ones(3))


@pytest.mark.parametrize(
    ("error", "message", "calls"),
    [
        (ValueError, f"dispatch_done: {ONCE}", [lambda p: jax_ep.dispatch_done(p.dispatch)] * 2),
        (ValueError, f"combine_done: {ONCE}", [lambda p: jax_ep.combine_done(p.combine)] * 2),
        (
            ValueError,
            f"dispatch_done: {ONCE}",
            [lambda p: beside(p.dispatch), lambda p: jax_ep.dispatch_done(p.dispatch)],
        ),
        (ValueError, f"beside: {ONCE}", [lambda p: jax_ep.combine_done(p.combine), lambda p: beside(p.combine)]),
        (ValueError, f"beside: {ONCE}", [lambda p: beside([p.combine, p.dispatch, p.combine])]),
        (
            TypeError,
            "dispatch_done pending: expected one of dispatch_start, got one of combine_start; call combine_done",
            [lambda p: jax_ep.dispatch_done(p.combine)],
        ),
        (
            TypeError,
            "combine_done pending: expected one of combine_start, got one of dispatch_start; call dispatch_done",
            [lambda p: jax_ep.combine_done(p.dispatch)],
        ),
        (TypeError, f"dispatch_done {NO_PENDING} Rows", [lambda p: jax_ep.dispatch_done(p.rows)]),
        (TypeError, f"combine_done {NO_PENDING} NoneType", [lambda p: jax_ep.combine_done(None)]),
        (TypeError, f"beside {NO_PENDING} Rows", [lambda p: beside(p.rows)]),
        (TypeError, f"beside {NO_PENDING} NoneType", [lambda p: beside([p.dispatch, None])]),
        (TypeError, "Pending", [lambda p: jax_ep.beside(p.dispatch, lambda: p.combine)]),
        (
            TypeError,
            "combine_start num_sms: expected an integer",
            [lambda p: jax_ep.combine_start(p.rows.x, p.rows.handle, num_sms=2.5)],
        ),
    ],
)
def test_wrong_use(error, message, calls):
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    with make_group(mesh) as group:

        def inside(x, index, weights):
            rows = jax_ep.dispatch(x, index, weights, group=group)
            given = types.SimpleNamespace(
                rows=rows,
                dispatch=jax_ep.dispatch_start(x, index, weights, group=group),
                combine=jax_ep.combine_start(rows.x, rows.handle, rows.weights),
            )
            assert repr(given.dispatch) == "Pending(dispatch)"
            for call in calls[:-1]:
                call(given)
            with pytest.raises(error, match=message):
                calls[-1](given)
            return x

        jax.eval_shape(jax.shard_map(inside, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")), x, index, weights)


def test_a_pending_exchange_stays_in_its_function():
    x, index, _ = point()
    mesh = world.mesh(RANKS)
    with make_group(mesh) as group:

        def inside(x, index):
            def start(x):
                return jax_ep.dispatch_start(x, index, group=group)

            for out in (jax.jit(start), jax.checkpoint(start), lambda x: jax.lax.map(start, x[None])):
                with pytest.raises(TypeError, match="Pending"):
                    out(x)

            pending = start(x)

            def done(x):
                return jax_ep.dispatch_done(pending).x.sum() + x.sum()

            for into in (
                jax.jit(done),
                jax.checkpoint(done),
                jax.grad(done),
                lambda x: jax.lax.map(done, x[None]),
                lambda x: jax.lax.cond(x[0, 0] > 0, done, jnp.sum, x),
                jax.vmap(lambda row: jax_ep.beside(pending, jnp.sin, row)[0]),
            ):
                with pytest.raises(ValueError, match="started in the same function, got one from outside"):
                    into(x)
            return jax_ep.dispatch_done(pending).x

        jax.eval_shape(jax.shard_map(inside, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")), x, index)


@pytest.mark.parametrize("mapped", ["x", "weights", "rows", "cotangents"])
def test_vmap_is_refused_with_the_way_out(halved, mapped):
    test_transforms.test_vmap_is_refused_with_the_way_out(mapped)
