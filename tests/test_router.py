"""Routing, losses and statistics against loops in float64 written from the papers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jax_ep.router import (
    Routing,
    expert_load,
    load_balance_loss,
    route,
    sequence_balance_loss,
    update_bias,
    z_loss,
)

EXPERTS = 12
OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {"top_k": 3},
    "softmax-renormalize": {"top_k": 3, "renormalize": True, "scale": 0.5},
    "softmax-last": {"top_k": 4, "pre_softmax": False},
    "softmax-groups-max": {"top_k": 2, "num_groups": 6, "top_groups": 3, "group_score": "max", "scale": 16.0},
    "sigmoid": {"top_k": 5, "score": "sigmoid"},
    "sigmoid-raw": {"top_k": 1, "score": "sigmoid", "renormalize": False},
    "deepseek-v3": {"top_k": 4, "score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5},
    "one-expert-a-group": {
        "top_k": 2,
        "score": "sigmoid",
        "num_groups": 12,
        "top_groups": 5,
        "group_score": "max",
        "renormalize": False,
    },
    "every-expert": {"top_k": 12, "score": "sigmoid", "num_groups": 3, "top_groups": 3},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
some_options = pytest.mark.parametrize(
    "options",
    [OPTIONS[name] for name in ("softmax-last", "softmax-groups-max", "deepseek-v3")],
    ids=["softmax-last", "softmax-groups-max", "deepseek-v3"],
)
each_vma = pytest.mark.parametrize("check_vma", [True, False])


def scores64(logits: np.ndarray, score: str) -> np.ndarray:
    logits = logits.astype(np.float64)
    if score == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    exp = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def best(values: list[float], count: int) -> list[int]:
    """Places of the largest values, largest first, ties to the lower place."""
    return sorted(range(len(values)), key=lambda place: (-values[place], place))[:count]


def select(choice: np.ndarray, options: dict[str, Any]) -> list[int]:
    """Experts of one token from its [E] float32 values."""
    groups = options.get("num_groups", 1)
    size = len(choice) // groups
    allowed = list(range(len(choice)))
    if groups > 1:
        group_scores = []
        for group in range(groups):
            members = sorted(choice[group * size : (group + 1) * size], reverse=True)
            group_scores.append(members[0] if options.get("group_score") == "max" else members[0] + members[1])
        kept = best(group_scores, options["top_groups"])
        allowed = [expert for expert in allowed if expert // size in kept]
    return [allowed[place] for place in best([choice[expert] for expert in allowed], options["top_k"])]


def weights64(logits: np.ndarray, index: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """Weights of the selected experts, [T, E] and [T, K] to [T, K]."""
    score = options.get("score", "softmax")
    weights = np.zeros(index.shape)
    for token, experts in enumerate(index):
        if not options.get("pre_softmax", True):
            weights[token] = scores64(logits[token, experts], "softmax")
            continue
        weights[token] = scores64(logits[token], score)[experts]
        renormalize = options.get("renormalize")
        if renormalize or (renormalize is None and score == "sigmoid"):
            weights[token] /= weights[token].sum() + 1e-20
    return weights * options.get("scale", 1.0)


def finite_differences(function: Any, x: np.ndarray) -> np.ndarray:
    """Gradient of a scalar float64 function by central differences."""
    x = x.astype(np.float64)
    gradient = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        step = np.zeros(x.shape)
        step[place] = 1e-5
        gradient[place] = (function(x + step) - function(x - step)) / 2e-5
    return gradient


@functools.cache
def compiled(**options: Any) -> Any:
    return jax.jit(functools.partial(route, **options))


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def logit(probability: list[float]) -> np.ndarray:
    p = np.array([probability])
    return np.log(p / (1 - p)).astype(np.float32)


# --- route --------------------


def test_deepseek_v3_by_hand():
    """Eight experts in four groups of two."""
    scores = [0.9, 0.1, 0.6, 0.5, 0.7, 0.2, 0.3, 0.4]
    bias = jnp.array([0, 0, 0, 0, 0, 0.35, 0.1, 0])
    # Score + bias by group: 0.9 0.1, 0.6 0.5, 0.7 0.55, 0.4 0.4. Sums: 1.0, 1.1, 1.25, 0.8. The middle two
    # are kept, so that expert 0 is not picked although it is the best of all.
    options: dict[str, Any] = {"top_k": 3, "score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5}
    routing = route(logit(scores), bias, **options)
    assert routing.index.tolist() == [[4, 2, 5]] and routing.index.dtype == jnp.int32
    # Weighed without the bias: 0.7, 0.6 and 0.2 of 1.5.
    np.testing.assert_allclose(routing.weights, [[2.5 * 0.7 / 1.5, 1.0, 2.5 * 0.2 / 1.5]], rtol=1e-6)
    np.testing.assert_allclose(routing.scores, [scores], rtol=1e-6)
    np.testing.assert_array_equal(routing.logits, logit(scores))
    # By their best expert groups score 0.9, 0.6, 0.7, 0.4: the first and the third are kept.
    routing = route(logit(scores), bias, **options, group_score="max")
    assert routing.index.tolist() == [[0, 4, 5]]
    np.testing.assert_allclose(routing.weights, [[2.5 * 0.9 / 1.8, 2.5 * 0.7 / 1.8, 2.5 * 0.2 / 1.8]], rtol=1e-6)


def test_softmax_by_hand():
    logits = np.log(np.array([[1, 4, 2, 1]], np.float32))  # softmax 1/8, 4/8, 2/8, 1/8
    cases: list[tuple[dict[str, Any], list[float]]] = [
        ({}, [1 / 2, 1 / 4]),
        ({"renormalize": True}, [2 / 3, 1 / 3]),
        ({"pre_softmax": False}, [2 / 3, 1 / 3]),
        ({"scale": 3.0}, [3 / 2, 3 / 4]),
    ]
    for options, weights in cases:
        routing = route(logits, top_k=2, **options)
        assert routing.index.tolist() == [[1, 2]]
        np.testing.assert_allclose(routing.weights, [weights], rtol=1e-6)
        np.testing.assert_allclose(routing.scores, [[1 / 8, 1 / 2, 1 / 4, 1 / 8]], rtol=1e-6)
    # A bias of 1 on expert 3: 1/8 + 1 wins before the softmax, log(1) + 1 < log(4) does not win after it.
    bias = jnp.array([0.0, 0, 0, 1])
    assert route(logits, bias, top_k=1).index.tolist() == [[3]]
    assert route(logits, bias, top_k=1, pre_softmax=False).index.tolist() == [[1]]


@each_option
@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.1, 1.0, 10.0]), coarse=st.booleans())
def test_random_logits(options, seed, spread, coarse):
    logits = spread * draw(seed, 7, EXPERTS)
    bias = 0.1 * draw(seed + 1, EXPERTS)
    if coarse:  # many exact ties
        logits, bias = np.round(logits), np.round(bias)
    routing = jax.tree.map(np.asarray, compiled(**options)(logits, bias))
    score = options.get("score", "softmax")
    np.testing.assert_array_equal(routing.logits, logits)
    np.testing.assert_allclose(routing.scores, scores64(logits, score), rtol=3e-6, atol=1e-30)
    # Selection is compared exactly, hence from the scores as they were rounded.
    choice = (routing.scores if options.get("pre_softmax", True) else logits) + bias
    np.testing.assert_array_equal(routing.index, [select(token, options) for token in choice])
    np.testing.assert_allclose(routing.weights, weights64(logits, routing.index, options), rtol=5e-6, atol=1e-30)


@each_option
def test_gradient_of_weights_and_scores(options):
    logits, bias = 2 * draw(0, 7, EXPERTS), 0.1 * draw(1, EXPERTS)
    pull, push = draw(2, 7, options["top_k"]), draw(3, 7, EXPERTS)
    score = options.get("score", "softmax")
    index = np.asarray(compiled(**options)(logits, bias).index)

    def loss(logits: jax.Array, bias: jax.Array) -> jax.Array:
        routing = route(logits, bias, **options)
        return jnp.sum(pull * routing.weights) + jnp.sum(push * (routing.scores + 0.5 * routing.logits))

    expected = finite_differences(
        lambda x: np.sum(pull * weights64(x, index, options)) + np.sum(push * (scores64(x, score) + 0.5 * x)),
        logits,
    )
    direction = draw(4, 7, EXPERTS)

    @jax.jit
    def derivatives(logits: jax.Array, bias: jax.Array) -> Any:
        _, slope = jax.jvp(lambda x: loss(x, bias), (logits,), (direction,))
        return jax.grad(loss, argnums=(0, 1))(logits, bias), slope

    (by_logits, by_bias), slope = derivatives(logits, bias)
    tolerance = 1e-6 * np.abs(expected).max()
    np.testing.assert_allclose(by_logits, expected, atol=tolerance, rtol=1e-5)
    np.testing.assert_array_equal(by_bias, np.zeros(EXPERTS))
    np.testing.assert_allclose(slope, np.sum(expected * direction), rtol=1e-4, atol=10 * tolerance)


def test_second_derivative():
    """Of s0 / (s0 + s1), where both of two experts are selected."""
    logits = np.array([0.3, -0.4], np.float32)

    def first_weight(x: np.ndarray) -> float:
        s = 1 / (1 + np.exp(-x))
        return s[0] / (s[0] + s[1])

    hessian = jax.jit(jax.hessian(lambda x: route(x, top_k=2, score="sigmoid").weights[0]))(logits)
    expected = [
        finite_differences(lambda x, row=row: finite_differences(first_weight, x)[row], logits) for row in range(2)
    ]
    np.testing.assert_allclose(hessian, expected, atol=1e-5)


tiny = jax.jit(jax.value_and_grad(lambda x: route(x, top_k=2, score="sigmoid").weights[0, 0]))


@pytest.mark.parametrize("at", [-30.0, -46.0, -60.0, -80.0, -200.0])
def test_where_all_scores_are_tiny(at):
    """The sum of scores reaches the 1e-20 added to it, and its square underflows: all must stay finite and right."""
    logits = np.full((1, 4), at, np.float32)
    value, gradient = tiny(logits)
    expected = functools.partial(weights64, index=np.array([[0, 1]]), options={"top_k": 2, "score": "sigmoid"})
    np.testing.assert_allclose(value, expected(logits)[0, 0], rtol=1e-5, atol=1e-30)
    slope = finite_differences(lambda x: expected(x)[0, 0], logits)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-22)


@each_option
def test_ties_go_to_the_lower_expert(options):
    k = options["top_k"]
    index = compiled(**options)(np.zeros((7, EXPERTS), np.float32), np.zeros(EXPERTS, np.float32)).index
    np.testing.assert_array_equal(index, [range(k)] * 7)


def test_zeros_of_either_sign_tie():
    signs = jnp.array([[-0.0, 0.0, -0.0, 0.0]])
    assert route(signs, top_k=3, pre_softmax=False).index.tolist() == [[0, 1, 2]]
    assert jax.jit(lambda x: route(x, top_k=3, pre_softmax=False).index)(signs).tolist() == [[0, 1, 2]]


@each_option
def test_nan_reaches_its_token_only(options):
    logits = draw(0, 7, EXPERTS)
    others = np.array([0, 5, 6])
    clean = compiled(**options)(logits, np.zeros(EXPERTS, np.float32))
    bad = logits.copy()
    bad[1, 7] = np.nan
    bad[2, 0] = -np.nan  # the other sign bit
    bad[3] = np.nan
    bad[4, [2, 3, 8]] = [np.nan, np.inf, -np.inf]
    routing = compiled(**options)(bad, np.zeros(EXPERTS, np.float32))
    for index in np.asarray(routing.index):
        assert len(set(index)) == options["top_k"] and 0 <= index.min() and index.max() < EXPERTS
    assert np.isnan(routing.weights[1:5]).all()
    for leaf, before in zip(jax.tree.leaves(routing), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf)[others], np.asarray(before)[others])
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.square(route(x, **options).weights)[others])))
    np.testing.assert_array_equal(gradient(bad)[others], gradient(logits)[others])


def test_nan_ranks_with_infinity():
    logits = jnp.array([[0.0, 1.0, jnp.nan, 2.0]])
    assert route(logits, top_k=2, score="sigmoid").index.tolist() == [[2, 3]]
    assert route(-logits, top_k=2, score="sigmoid").index.tolist() == [[2, 0]]


def test_nan_bias_is_not_silent():
    routing = route(draw(0, 3, 4), jnp.array([0, jnp.nan, 0, 0]), top_k=2, score="sigmoid")
    assert np.isnan(routing.weights).all()
    assert all(len(set(index)) == 2 for index in routing.index.tolist())


@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
def test_minus_infinity_stays_within_kept_groups(group_score):
    """Three groups of four, one kept, in which no more than one expert is not at -inf."""
    options: dict[str, Any] = {
        "top_k": 3,
        "score": "sigmoid",
        "num_groups": 3,
        "top_groups": 1,
        "group_score": group_score,
    }
    bias = np.full(EXPERTS, -np.inf, np.float32)
    bias[[0, 4, 9]] = [0.1, 0.2, 5.0]
    index = compiled(**options)(np.zeros((1, EXPERTS), np.float32), bias).index
    if group_score == "max":
        assert index.tolist() == [[9, 8, 10]]
    else:  # every group scores -inf, so the first is kept
        assert index.tolist() == [[0, 1, 2]]
    everything = np.full(EXPERTS, -np.inf, np.float32)
    assert compiled(**options)(np.zeros((1, EXPERTS), np.float32), everything).index.tolist() == [[0, 1, 2]]


def test_infinite_logits_are_no_nan():
    """Experts masked with -inf have no weight, and are picked last, lowest first."""
    logits = jnp.array([[-jnp.inf, 2.0, -jnp.inf, -jnp.inf]])
    for options in ({}, {"score": "sigmoid"}, {"pre_softmax": False}):
        routing = route(logits, top_k=3, **options)
        assert routing.index.tolist() == [[1, 0, 2]]
        np.testing.assert_array_equal(routing.weights > 0, [[True, False, False]])
    assert route(-logits, top_k=1, score="sigmoid").weights.tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_logits_are_widened_first(dtype):
    logits = jnp.asarray(draw(0, 7, EXPERTS), dtype)
    bias = jnp.asarray(draw(1, EXPERTS), jnp.bfloat16)
    function = compiled(**OPTIONS["deepseek-v3"])
    narrow = function(logits, bias)
    wide = function(logits.astype(jnp.float32), bias.astype(jnp.float32))
    for leaf, expected in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert leaf.dtype == expected.dtype and leaf.dtype in (jnp.int32, jnp.float32)
        np.testing.assert_array_equal(leaf, expected)


def test_float64_mode_gives_float32():
    def everything(logits: jax.Array) -> Any:
        routing = route(logits, top_k=2, scale=np.float64(2.5))
        bias = update_bias(jnp.zeros(2, jnp.float32), jnp.ones(2), rate=np.float64(1))
        sequence = sequence_balance_loss(routing, factor=np.float64(1e-4))
        return routing, load_balance_loss(routing), sequence, z_loss(routing.logits), bias

    with jax.enable_x64(True):
        results = jax.eval_shape(everything, jnp.asarray(draw(0, 7, EXPERTS), jnp.float64))
    assert [leaf.dtype for leaf in jax.tree.leaves(results)] == [jnp.int32] + [jnp.float32] * 7


@some_options
def test_leading_axes_jit_and_vmap(options):
    logits, bias = draw(0, 2, 3, EXPERTS), 0.1 * draw(1, EXPERTS)
    function = compiled(**options)
    flat, one = function(logits.reshape(6, EXPERTS), bias), function(logits[0, 0], bias)

    @jax.jit
    def variants(logits: jax.Array, bias: jax.Array) -> list[Routing]:
        return [
            function(logits, bias),
            jax.vmap(function)(logits, jnp.stack([bias, bias])),
            jax.vmap(function, in_axes=(1, None), out_axes=1)(logits, bias),
        ]

    for routing in variants(logits, bias):
        assert routing.index.shape == (2, 3, options["top_k"])
        np.testing.assert_array_equal(routing.index.reshape(6, -1), flat.index)
        np.testing.assert_allclose(routing.weights.reshape(6, -1), flat.weights, rtol=1e-6)
    assert one.index.shape == (options["top_k"],)
    np.testing.assert_array_equal(one.index, flat.index[0])
    assert function(jnp.zeros((0, EXPERTS)), bias).weights.shape == (0, options["top_k"])


def mesh_of(cpus: list[jax.Device], kind: jax.sharding.AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("ep",), axis_types=(kind,), devices=cpus[:8])


@each_vma
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_inside_shard_map(cpus, kind, check_vma):
    """Routing, its gradient, and statistics of all ranks: what one device gets for the whole batch."""
    mesh = mesh_of(cpus, kind)
    options = OPTIONS["deepseek-v3"]
    logits, bias = draw(0, 24, EXPERTS), jnp.asarray(0.1 * draw(1, EXPERTS))

    def rank(logits: jax.Array, bias: jax.Array) -> tuple[Any, Any]:
        routing = route(logits, bias, **options)
        load = expert_load(routing.index, EXPERTS, axis="ep")
        loss = load_balance_loss(routing, axis=("ep",))
        squares = jnp.sum(jnp.square(routing.weights), keepdims=True)
        return (routing, squares), (load, loss, update_bias(bias, load))

    spread = jax.shard_map(rank, mesh=mesh, in_specs=(P("ep"), P()), out_specs=(P("ep"), P()), check_vma=check_vma)

    def total(logits: jax.Array) -> Any:
        (routing, squares), (load, loss, new_bias) = spread(logits, bias)
        return jnp.sum(squares) + loss, (routing, load, loss, new_bias)

    def dense(logits: jax.Array) -> Any:
        routing = route(logits, bias, **options)
        loss = load_balance_loss(routing)
        return jnp.sum(jnp.square(routing.weights)) + loss, (routing, loss)

    sharded = jax.device_put(logits, jax.NamedSharding(mesh, P("ep")))
    gradient, (routing, load, loss, new_bias) = jax.jit(jax.grad(total, has_aux=True))(sharded)
    expected, (whole, whole_loss) = jax.jit(jax.grad(dense, has_aux=True))(jnp.asarray(logits))
    np.testing.assert_array_equal(routing.index, whole.index)
    np.testing.assert_allclose(routing.weights, whole.weights, rtol=1e-6)
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    np.testing.assert_array_equal(load, np.bincount(np.asarray(whole.index).ravel(), minlength=EXPERTS))
    np.testing.assert_allclose(new_bias, bias + 0.001 * np.sign(8 - np.asarray(load)), rtol=1e-6)


def test_losses_of_tokens_on_explicit_axes(cpus):
    """Outside shard_map, on arrays whose types carry their sharding."""
    mesh = mesh_of(cpus, jax.sharding.AxisType.Explicit)
    logits = draw(0, 8, 3, EXPERTS)
    options = OPTIONS["deepseek-v3"]

    def losses(logits: jax.Array) -> list[jax.Array]:
        routing = route(logits, **options)
        load = expert_load(routing.index, EXPERTS)
        return [load, load_balance_loss(routing), sequence_balance_loss(routing), z_loss(routing.logits)]

    with jax.set_mesh(mesh):
        got = jax.jit(losses)(jax.device_put(logits, jax.NamedSharding(mesh, P("ep"))))
    for value, expected in zip(got, jax.jit(losses)(logits), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def bad(error: type[Exception], says: str, *arrays: Any, **options: Any) -> Any:
    return pytest.param(error, says, arrays or (jnp.zeros((2, 8)),), {"top_k": 2, **options}, id=says)


@pytest.mark.parametrize(
    ("error", "says", "arrays", "options"),
    [
        bad(TypeError, "logits: expected a float array, got int32", jnp.zeros((2, 8), jnp.int32)),
        bad(ValueError, r"logits: expected \[..., experts\], got shape \(\)", jnp.zeros(())),
        bad(ValueError, r"logits: expected \[..., experts\], got shape \(2, 0\)", jnp.zeros((2, 0))),
        bad(TypeError, "bias: expected a float array, got int32", jnp.zeros((2, 8)), jnp.zeros(8, jnp.int32)),
        bad(ValueError, r"bias: expected shape \(8,\).*got \(7,\)", jnp.zeros((2, 8)), jnp.zeros(7)),
        bad(ValueError, r"bias: expected shape \(8,\).*got \(2, 8\)", jnp.zeros((2, 8)), jnp.zeros((2, 8))),
        bad(ValueError, "top_k: expected at most the 8 experts.*got 9", top_k=9),
        bad(ValueError, "top_k: expected at least 1, got 0", top_k=0),
        bad(TypeError, "top_k: expected an int.*got 2.0", top_k=2.0),
        bad(TypeError, "top_k: expected an int.*trace time", top_k=jnp.zeros(2)),
        bad(ValueError, "score: expected one of.*'sigmoid'.*got 'tanh'", score="tanh"),
        bad(ValueError, "group_score: expected one of.*'top2_sum'.*got 'sum'", group_score="sum"),
        bad(ValueError, "num_groups: expected a divisor of the 8 experts, got 3", num_groups=3, top_groups=2),
        bad(ValueError, "num_groups: expected at most the 8 experts.*got 16", num_groups=16, top_groups=2),
        bad(ValueError, "two experts a group.*8 groups of 1.*max", num_groups=8, top_groups=4),
        bad(ValueError, "top_groups: expected 1 to 4, got None", num_groups=4),
        bad(ValueError, "top_groups: expected at most num_groups=4, got 5", num_groups=4, top_groups=5),
        bad(ValueError, "top_groups: expected at most num_groups=1, got 2", top_groups=2),
        bad(ValueError, "top_groups: expected at least 1, got 0", num_groups=4, top_groups=0),
        bad(ValueError, "groups of 2 experts for top_k=5, got 2", top_k=5, num_groups=4, top_groups=2),
        bad(ValueError, "pre_softmax: expected True.*sigmoid.*got False", score="sigmoid", pre_softmax=False),
        bad(ValueError, "renormalize: expected True or None.*got False", pre_softmax=False, renormalize=False),
    ],
)
def test_bad_input(error, says, arrays, options):
    with pytest.raises(error, match=says):
        jax.jit(functools.partial(route, **options))(*arrays)


def test_one_expert_needs_no_groups():
    routing = route(jnp.zeros((2, 1)), top_k=1, score="sigmoid")
    assert routing.index.tolist() == [[0], [0]] and routing.weights.tolist() == [[1.0], [1.0]]


# --- load, bias, losses --------------------


def routing_of(logits: ArrayLike, top_k: int = 2, score: Any = "softmax") -> Routing:
    return route(logits, top_k=top_k, score=score)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_expert_load_counts_what_is_an_expert(dtype):
    info = np.iinfo(dtype)
    values = [0, 0, 3, 4, 5, 100, 126, 127, 128, 255, 256, 299, 300, 2**32, 2**32 + 3, -1, -2, -128]
    values = [v for v in values if info.min <= v <= info.max] + [info.max, info.min]
    values += [1] * (len(values) % 2)
    with jax.enable_x64(True):
        for experts in (5, 128, 256, 300):
            load = jax.jit(expert_load, static_argnums=1)(np.array(values, dtype).reshape(-1, 2), experts)
            assert load.dtype == jnp.float32
            np.testing.assert_array_equal(load, [values.count(expert) for expert in range(experts)])


@pytest.mark.parametrize("shape", [(12,), (6, 2), (1, 3, 4)])
def test_expert_load_of_any_shape(shape):
    index = np.array([0, 3, 3, 1, -1, 4, 0, 3, 9, 0, 0, 1]).reshape(shape)
    np.testing.assert_array_equal(expert_load(index, 5), [4, 2, 0, 3, 1])


def test_expert_load_of_nothing():
    np.testing.assert_array_equal(expert_load(jnp.zeros((0, 2), jnp.int32), 3), np.zeros(3))
    with pytest.raises(TypeError, match="index: expected integers, got float32"):
        expert_load(jnp.zeros((3, 2)), 4)
    with pytest.raises(ValueError, match="num_experts: expected at least 1, got 0"):
        expert_load(jnp.zeros((3, 2), jnp.int32), 0)


def test_update_bias_by_hand():
    # The mean is 3: below it up, above it down, at it unmoved.
    bias, load = jnp.array([0.5, 0.0, -0.25, 1.0]), jnp.array([1, 3, 4, 4])
    np.testing.assert_allclose(update_bias(bias, load), [0.501, 0.0, -0.251, 0.999], rtol=1e-6)
    np.testing.assert_allclose(update_bias(bias, load, rate=0.25), [0.75, 0.0, -0.5, 0.75])
    with pytest.raises(ValueError, match=r"load: expected.*got \(3,\) for bias \(4,\)"):
        update_bias(bias, load[:3])
    with pytest.raises(TypeError, match="bias: expected float32, got bfloat16"):
        update_bias(bias.astype(jnp.bfloat16), load)


def test_update_bias_evens_out_a_skewed_router():
    logits = draw(0, 512, 8) + np.linspace(-1.5, 1.5, 8, dtype=np.float32)

    def load_of(bias: jax.Array) -> jax.Array:
        return expert_load(route(logits, bias, top_k=2, score="sigmoid").index, 8)

    bias, _ = jax.lax.scan(lambda b, _: (update_bias(b, load_of(b), rate=0.005), None), jnp.zeros(8), length=200)
    assert load_of(jnp.zeros(8)).max() > 2 * 128  # 1024 picks, so 128 each when even
    assert load_of(bias).max() < 1.1 * 128


def switch_loss64(logits: np.ndarray, index: np.ndarray, score: str) -> float:
    """Switch Transformers, equations 4 to 6, for K picks a token."""
    tokens, experts = logits.shape
    total = 0.0
    for expert in range(experts):
        f = np.sum(index == expert) / index.size
        p = 0.0
        for token in range(tokens):
            s = scores64(logits[token], score)
            p += s[expert] / s.sum() / tokens
        total += f * p
    return experts * total


def sequence_loss64(logits: np.ndarray, index: np.ndarray, score: str, factor: float) -> float:
    """DeepSeek-V3, equations 17 to 20, the mean of several sequences."""
    losses = []
    for sequence, picks in zip(logits, index, strict=True):
        length, experts = sequence.shape
        loss = 0.0
        for expert in range(experts):
            f = experts / (picks.shape[1] * length) * sum(expert in picks[t] for t in range(length))
            shares = [scores64(token, score) / scores64(token, score).sum() for token in sequence]
            p = sum(share[expert] for share in shares) / length
            loss += f * p
        losses.append(factor * loss)
    return float(np.mean(losses))


def z_loss64(logits: np.ndarray) -> float:
    return float(np.mean([np.log(np.sum(np.exp(token))) ** 2 for token in logits.reshape(-1, logits.shape[-1])]))


def test_losses_by_hand():
    # Two tokens, two experts, softmax 3/4 1/4 and 1/2 1/2; both pick expert 0 (the second by the tie).
    routing = routing_of(np.log(np.array([[3, 1], [1, 1]], np.float32)), top_k=1)
    # f = 1, 0; P = 5/8, 3/8.
    np.testing.assert_allclose(load_balance_loss(routing), 2 * 5 / 8, rtol=1e-6)
    np.testing.assert_allclose(sequence_balance_loss(routing), 1e-4 * 2 * 5 / 8, rtol=1e-6)
    # logsumexp is log 4 and log 2.
    np.testing.assert_allclose(z_loss(routing.logits), (np.log(4) ** 2 + np.log(2) ** 2) / 2, rtol=1e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_losses_at_the_extremes(score, top_k):
    even = routing_of(10 * np.tile(np.eye(6, dtype=np.float32), (2, 1)), top_k=1, score=score)
    np.testing.assert_allclose(load_balance_loss(even), 1, rtol=1e-6)
    np.testing.assert_allclose(sequence_balance_loss(even, factor=0.5), 0.5, rtol=1e-6)
    one = np.full((12, 6), -80, np.float32)
    one[:, :top_k] = 20
    # top_k experts share everything: f = 1 / K each, P = 1 / K each.
    np.testing.assert_allclose(load_balance_loss(routing_of(one, top_k, score)), 6 / top_k, rtol=1e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_and_their_gradients(score):
    logits = 2 * draw(0, 2, 5, 6)
    index = np.asarray(routing_of(logits, score=score).index)
    cases: list[tuple[Any, Any]] = [
        (
            lambda x: load_balance_loss(routing_of(x, score=score)),
            lambda x: switch_loss64(x.reshape(-1, 6), index, score),
        ),
        (
            lambda x: sequence_balance_loss(routing_of(x, score=score), factor=0.3),
            lambda x: sequence_loss64(x, index, score, 0.3),
        ),
        (lambda x: z_loss(routing_of(x, score=score).logits), z_loss64),
    ]
    for loss, expected in cases:
        value, gradient = jax.jit(jax.value_and_grad(loss))(logits)
        assert value.shape == () and value.dtype == jnp.float32
        np.testing.assert_allclose(value, expected(logits.astype(np.float64)), rtol=2e-6)
        np.testing.assert_allclose(gradient, finite_differences(expected, logits), rtol=2e-5, atol=1e-7)


def test_losses_count_picks_that_were_masked():
    """-1 in the index (a padding token, say) is no pick of any expert, and still one of the T · K places."""
    routing = routing_of(draw(0, 5, 6))
    masked = Routing(routing.index.at[2:].set(-1), routing.weights, routing.scores, routing.logits)
    expected = switch_loss64(np.asarray(routing.logits), np.asarray(masked.index), "softmax")
    np.testing.assert_allclose(load_balance_loss(masked), expected, rtol=1e-6)


def test_losses_of_no_tokens_are_zero():
    def losses(logits: jax.Array) -> list[jax.Array]:
        routing = routing_of(logits)
        return [load_balance_loss(routing), sequence_balance_loss(routing), z_loss(routing.logits)]

    for shape in [(3, 0, 6), (0, 3, 6)]:
        assert [float(loss) for loss in jax.jit(losses)(np.zeros(shape, np.float32))] == [0, 0, 0]


def test_losses_refuse_what_they_cannot_mean():
    with pytest.raises(ValueError, match=r"expected scores of \[..., sequence, experts\], got \(6,\)"):
        sequence_balance_loss(routing_of(np.zeros(6, np.float32)))
    with pytest.raises(TypeError, match="logits: expected a float array, got int32"):
        z_loss(jnp.zeros((2, 3), jnp.int32))
