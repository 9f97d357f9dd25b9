"""Dispatch and combine under every JAX transform: one table of operations, one of transforms.

Each operation stands beside the same written densely in plain jnp, where JAX's own rules differentiate it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import world
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep

pytestmark = pytest.mark.processes

RANKS, TOKENS, TOP_K, EXPERTS, HIDDEN = world.at_most(2), 6, 3, 4, 16
SLOPES = np.linspace(0.5, 2, EXPERTS).astype(np.float32)  # an expert is tanh(slope * x)
CAPACITY = 11


@dataclasses.dataclass(frozen=True)
class Operation:
    """An MoE block by jax_ep, and what it must equal."""

    row_order: str = "expert"
    wire: str | None = None
    capacity: int | None = None
    weighted: bool = True

    @property
    def name(self) -> str:
        parts = [self.row_order, self.wire, self.capacity and "dropping", None if self.weighted else "plain"]
        return "-".join(filter(None, parts))

    def parallel(self, group, x, index, weights):
        """Inside shard_map: x [T, H], index and weights [T, K]."""
        rows = jax_ep.dispatch(x, index, weights, group=group, row_order=self.row_order, wire=self.wire)
        return jax_ep.combine(*self.experts(group, rows))

    def experts(self, group, rows):
        """What combine is given."""
        mine = jax.lax.dynamic_slice_in_dim(
            SLOPES, jax.lax.axis_index("ep") * group.num_local_experts, group.num_local_experts
        )
        if self.row_order == "rank":
            each = jnp.tanh(rows.x[:, None] * mine[rows.index][..., None])
            y = (each * jnp.where(rows.index >= 0, rows.weights, 0)[..., None]).sum(1)
            return y, rows.handle, None
        slope = jnp.repeat(mine, rows.group_sizes, total_repeat_length=rows.x.shape[0])
        y = jnp.tanh(rows.x * slope[:, None])
        return y, rows.handle, rows.weights if self.weighted else None

    def dense(self, kept, x, index, weights):
        """The same on whole arrays."""
        if self.wire:  # straight through
            crossed = jax_ep.dequantize(*jax_ep.quantize(jax.lax.stop_gradient(x)), dtype=x.dtype)
            x = x + jax.lax.stop_gradient(crossed - x)
        each = jnp.tanh(x[:, None] * SLOPES[index][..., None])
        return (each * ((weights if self.weighted else 1) * kept)[..., None]).sum(1)


OPERATIONS = [
    Operation(),
    Operation(row_order="rank"),
    Operation(capacity=CAPACITY),
    Operation(wire="fp8"),
    Operation(weighted=False),
]

# A transform takes f(x, weights) -> [tokens, H] and the point, and returns a tree to compare.
Function = Callable[[jax.Array, jax.Array], jax.Array]


def loss(f: Function) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda x, w: (f(x, w) ** 2).sum()


def grad(f: Function):
    return jax.grad(loss(f), argnums=(0, 1))


def layers(f: Function, wrap=lambda body: body) -> Function:
    def stack(x, w):
        return jax.lax.scan(wrap(lambda h, _: (h + f(h, w), None)), x, None, length=3)[0]

    return stack


def remat(policy=None):
    return lambda f: grad(jax.checkpoint(f, policy=policy))


policies = jax.checkpoint_policies
TRANSFORMS = {
    "value": lambda f: f,
    "grad": grad,
    "grad of tokens alone": lambda f: jax.grad(loss(f)),
    "grad of weights alone": lambda f: jax.grad(loss(f), argnums=1),
    "value_and_grad": lambda f: jax.value_and_grad(loss(f), argnums=(0, 1)),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (w.sum() * x, w**2)),
    "hessian-vector product": lambda f: lambda x, w: jax.jvp(grad(f), (x, w), (x, w)),
    "reverse over reverse": lambda f: grad(lambda x, w: grad(f)(x, w)[0]),
    "remat": remat(),
    "remat, all saved": remat(policies.everything_saveable),
    "remat, rows and handles saved": remat(policies.save_only_these_names("jax_ep_rows", "jax_ep_handle")),
    "scan": lambda f: grad(layers(f)),
    "scan with remat": lambda f: grad(layers(f, jax.checkpoint)),
}
FEW = ("value", "grad", "jvp", "hessian-vector product", "scan with remat")


def point(seed: int = 0):
    rng = np.random.default_rng(seed)
    tokens = RANKS * TOKENS
    x = rng.standard_normal((tokens, HIDDEN)).astype(np.float32)
    index = np.argsort(rng.random((tokens, EXPERTS)), axis=-1)[:, :TOP_K].astype(np.int32)
    weights = rng.random((tokens, TOP_K)).astype(np.float32)
    return x, index, weights


def make_group(mesh, operation: Operation = OPERATIONS[0]):
    return jax_ep.create_group(
        mesh,
        "ep",
        max_tokens=TOKENS,
        hidden=HIDDEN,
        num_experts=EXPERTS,
        top_k=TOP_K,
        dtype="float32",
        capacity=operation.capacity,
    )


def kept_picks(operation: Operation, index: np.ndarray) -> np.ndarray:
    if operation.capacity is None:
        return np.ones(index.shape, np.float32)
    layout = oracle.layout(index.reshape(RANKS, TOKENS, TOP_K), EXPERTS, operation.capacity)
    assert layout.num_dropped.sum() > 0
    return (layout.slots.max(0) >= 0).reshape(index.shape).astype(np.float32)


def sharded(operation, mesh, group, check_vma):
    return jax.shard_map(
        functools.partial(operation.parallel, group),
        mesh=mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
        check_vma=check_vma,
    )


def assert_equal_trees(got, expected):
    for ours, theirs in zip(jax.tree.leaves(world.fetch(got)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def check(operation, transform, kind, check_vma):
    x, index, weights = point()
    kept = kept_picks(operation, index)
    expected = jax.jit(transform(lambda x, w: operation.dense(kept, x, index, w)))(x, weights)
    mesh = world.mesh(RANKS, kind=kind)
    with make_group(mesh, operation) as group:
        f = sharded(operation, mesh, group, check_vma)
        got = jax.jit(lambda x, index, w: transform(lambda x, w: f(x, index, w))(x, w))
        assert_equal_trees(got(*world.put(mesh, "ep", (x, index, weights))), expected)


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no check_vma"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform(transform, kind, check_vma):
    check(OPERATIONS[0], TRANSFORMS[transform], kind, check_vma)


@pytest.mark.parametrize("transform", FEW)
@pytest.mark.parametrize("operation", OPERATIONS[1:], ids=lambda operation: operation.name)
def test_operation(operation, transform):
    check(operation, TRANSFORMS[transform], AxisType.Auto, True)


def check_grad_inside_shard_map(operation, check_vma):
    x, index, weights = point()
    expected = jax.jit(grad(lambda x, w: operation.dense(1, x, index, w)))(x, weights)
    mesh = world.mesh(RANKS)
    with make_group(mesh) as group:

        def inside(x, index, weights):
            return grad(lambda x, w: operation.parallel(group, x, index, w))(x, weights)

        f = jax.shard_map(inside, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=check_vma)
        assert_equal_trees(jax.jit(f)(*world.put(mesh, "ep", (x, index, weights))), expected)


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no check_vma"])
def test_grad_inside_shard_map(check_vma):
    check_grad_inside_shard_map(OPERATIONS[0], check_vma)


def test_without_jit():
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    with make_group(mesh) as group:
        f = sharded(OPERATIONS[0], mesh, group, True)
        arguments = world.put(mesh, "ep", (x, index, weights))
        assert_equal_trees(f(*arguments), OPERATIONS[0].dense(1, x, index, weights))


def test_linear_transpose_of_dispatch_and_of_combine():
    """Each is the other: dispatch copies, its transpose adds up the copies, and the reverse."""
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    with make_group(mesh) as group:

        def both(x, index):
            handle = jax_ep.layout(index, group=group)
            dispatch, combine = (
                lambda x: jax_ep.dispatch(x, handle=handle).x,
                lambda y: jax_ep.combine(y, handle),
            )
            rows = dispatch(x)
            (back,) = jax.linear_transpose(dispatch, x)(rows)
            (out,) = jax.linear_transpose(combine, rows)(x)
            return rows, back, out

        f = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
        rows, back, out = world.fetch(f(*world.put(mesh, "ep", (x, index))))
    np.testing.assert_allclose(back, TOP_K * x, rtol=1e-6)
    np.testing.assert_array_equal(out, rows)


@pytest.mark.parametrize("mapped", ["x", "index", "weights", "rows", "cotangents"])
def test_vmap_is_refused_with_the_way_out(mapped):
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    with make_group(mesh) as group:

        def inside(x, index, weights):
            rows = jax_ep.dispatch(x, index, weights, group=group)
            calls = {
                "x": (lambda x: jax_ep.dispatch(x, index, weights, group=group).x, x),
                "index": (lambda index: jax_ep.layout(index, group=group).slots, index),
                "weights": (lambda w: jax_ep.dispatch(x, index, w, group=group).weights, weights),
                "rows": (lambda y: jax_ep.combine(y, rows.handle, weights=rows.weights), rows.x),
                "cotangents": (
                    lambda ct: jax.vjp(lambda x: jax_ep.dispatch(x, index, weights, group=group).x, x)[1](ct),
                    rows.x,
                ),
            }
            call, operand = calls[mapped]
            return jax.vmap(call)(jnp.stack([operand, operand]))

        f = jax.shard_map(inside, mesh=mesh, in_specs=P("ep"), out_specs=P(None, "ep"))
        with pytest.raises(NotImplementedError, match=r"jax_ep\.\w+: expected .*reshape the mapped axis.*lax\.map"):
            jax.eval_shape(f, x, index, weights)


def count_primitive(name: str, jaxpr) -> int:
    """How often a primitive stands in a jaxpr and in all within it."""
    within = [
        inner
        for eqn in jaxpr.eqns
        for leaf in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns"))
        if (inner := getattr(leaf, "jaxpr", leaf)) is not None and hasattr(inner, "eqns")
    ]
    here = sum(eqn.primitive.name == name for eqn in jaxpr.eqns)
    return here + sum(count_primitive(name, inner) for inner in within)


def test_a_policy_keeps_rows_or_handles_and_does_not_repeat_the_exchange():
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    with make_group(mesh) as group:
        f = sharded(OPERATIONS[0], mesh, group, True)

        def exchanges(policy):
            step = jax.checkpoint(lambda x, w: f(x, index, w), policy=policy)
            return count_primitive("all_gather", jax.make_jaxpr(grad(step))(x, weights).jaxpr)

        # Forward: index, tokens, weights. Backward: the cotangent of the output, for weighted combine's two factors.
        saved_all = exchanges(policies.everything_saveable)
        saved_none = exchanges(policies.nothing_saveable)
        saved_handles = exchanges(policies.save_only_these_names("jax_ep_handle"))
        saved_both = exchanges(policies.save_only_these_names("jax_ep_handle", "jax_ep_rows"))
    assert saved_none == saved_all + 3, "everything is exchanged again"
    assert saved_handles == saved_none - 1, "the indices are not"
    assert saved_both == saved_all, "nothing is"


def test_donated_inputs():
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    with make_group(mesh) as group:
        f = jax.jit(sharded(OPERATIONS[0], mesh, group, True), donate_argnums=0)
        arguments = world.put(mesh, "ep", (x, index, weights))
        assert_equal_trees(f(*arguments), OPERATIONS[0].dense(1, x, index, weights))
        assert arguments[0].is_deleted()


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no check_vma"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("nothing", ["tokens", "rows"])
def test_nothing_has_a_gradient_of_nothing(nothing, weighted, check_vma):
    """Tokens that take no part, and tokens none of which gets a row, have gradients of zero."""
    x, index, weights = point()
    mesh = world.mesh(RANKS)
    operation = Operation(capacity=None if nothing == "tokens" else 0, weighted=weighted)
    taken = 0 if nothing == "tokens" else TOKENS
    with make_group(mesh, operation) as group:

        def inside(x, index, weights):  # the gradient, too: shard_map of arrays without elements can crash XLA
            def out(x, weights):
                return operation.parallel(group, *(array[:taken] for array in (x, index, weights)))

            return grad(out)(x, weights)

        f = jax.shard_map(inside, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=check_vma)
        got = jax.jit(f)(*world.put(mesh, "ep", (x, index, weights)))
        assert_equal_trees(got, (np.zeros_like(x), np.zeros_like(weights)))
