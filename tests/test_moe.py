"""The MoE layer, functional and as a Flax module, against NumPy loops over tokens and experts in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import world
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import moe
from jax_ep.flax import MoE
from jax_ep.sharding import MoESharding

pytestmark = pytest.mark.processes

BATCH, SEQUENCE, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 8, 3, 12, 16, 8, 2


def config(**changes) -> jax_ep.MoEConfig:
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": EXPERTS, "top_k": TOP_K}
    return jax_ep.MoEConfig(**{**sizes, **changes})


def make_group(mesh, axis="ep", **changes) -> jax_ep.Group:
    sizes = {"max_tokens": BATCH * SEQUENCE, "hidden": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K}
    return jax_ep.create_group(mesh, axis, **{**sizes, "dtype": "float32", **changes})


def tokens(seed=0) -> np.ndarray:
    return np.array(jax.random.normal(jax.random.key(seed), (BATCH, SEQUENCE, HIDDEN)))


def weights(layer, seed=1) -> moe.MoEParams:
    return jax.tree.map(np.array, moe.init(jax.random.key(seed), layer))


def put_weights(group, params) -> moe.MoEParams:
    return jax.tree.map(functools.partial(world.put, group.mesh), moe.param_specs(config(), group), params)


def expected_output(params, x, bias=None, score="softmax"):
    """Token by token, expert by expert, in float64; and the load of each expert."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    x = np.asarray(x, np.float64)
    out, load = np.zeros_like(x), np.zeros(EXPERTS)
    for where in np.ndindex(*x.shape[:-1]):
        logits = x[where] @ params.router
        scores = 1 / (1 + np.exp(-logits)) if score == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
        chosen = np.argsort(-(scores + (0 if bias is None else bias)), kind="stable")[:TOP_K]
        weights = scores[chosen] / (scores[chosen].sum() if score == "sigmoid" else 1)
        for expert, weight in zip(chosen, weights, strict=True):
            gate = x[where] @ params.experts.gate[expert]
            inner = gate / (1 + np.exp(-gate)) * (x[where] @ params.experts.up[expert])
            out[where] += weight * (inner @ params.experts.down[expert])
            load[expert] += 1
    return out, load


@pytest.mark.parametrize(
    ("shape", "axes", "axis", "kind"),
    [
        ((4,), ("ep",), "ep", AxisType.Auto),
        ((4,), ("ep",), "ep", AxisType.Explicit),
        ((2, 4), ("dp", "ep"), "ep", AxisType.Auto),
        ((2, 4), ("node", "gpu"), ("node", "gpu"), AxisType.Auto),
    ],
    ids=str,
)
def test_under_jit_on_a_sharded_array(shape, axes, axis, kind):
    mesh = world.mesh(shape, axes, kind)
    layer, group = config(), make_group(mesh, axis)
    params, x = weights(layer), tokens()
    f = jax.jit(lambda p, x: moe.apply(p, x, config=layer, group=group, sharding=MoESharding(x=P(axes))))
    y, stats = world.fetch(f(put_weights(group, params), world.put(mesh, (axes,), x)))
    expected, load = expected_output(params, x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(stats.load, load)
    assert int(stats.num_dropped) == int(stats.num_invalid) == 0
    assert float(stats.max_over_mean) == pytest.approx(load.max() / load.mean())


def test_inside_shard_map_it_is_the_same():
    mesh = world.mesh(4)
    layer, group = config(), make_group(mesh)
    arguments = put_weights(group, weights(layer)), world.put(mesh, "ep", tokens())
    inside = jax.shard_map(
        lambda p, x: moe.apply(p, x, config=layer, group=group),
        mesh=mesh,
        in_specs=(moe.param_specs(layer, group), P("ep")),
        out_specs=(P("ep"), P()),
    )

    def outside(p, x):
        return moe.apply(p, x, config=layer, group=group)

    ours, theirs = (jax.tree.leaves(world.fetch(jax.jit(f)(*arguments))) for f in (inside, outside))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_losses_are_those_of_the_whole_batch():
    mesh = world.mesh(4)
    layer, group = config(), make_group(mesh)
    params, x = weights(layer), tokens()
    f = jax.jit(lambda p, x: moe.apply(p, x, config=layer, group=group)[1])
    stats = world.fetch(f(put_weights(group, params), world.put(mesh, "ep", x)))
    logits = np.asarray(x, np.float64) @ np.asarray(params.router, np.float64)
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    _, load = expected_output(params, x)
    count = BATCH * SEQUENCE
    switch = EXPERTS * (load / (count * TOP_K) * probability.reshape(count, EXPERTS).mean(0)).sum()
    assert float(stats.balance_loss) == pytest.approx(switch, rel=1e-5)
    assert float(stats.z_loss) == pytest.approx((np.log(np.exp(logits).sum(-1)) ** 2).mean(), rel=1e-5)
    # DeepSeek-V3, equations 17 to 20, a sequence at a time.
    chosen = np.zeros_like(probability)
    np.put_along_axis(chosen, np.argsort(-probability, axis=-1, kind="stable")[..., :TOP_K], 1, axis=-1)
    of_sequence = (EXPERTS / (TOP_K * SEQUENCE) * chosen.sum(1) * probability.mean(1)).sum(-1)
    assert float(stats.sequence_loss) == pytest.approx(1e-4 * of_sequence.mean(), rel=1e-5)


def test_the_module_is_the_functional_layer_and_its_bias_is_not_trained():
    mesh = world.mesh(4)
    layer, group = config(score="sigmoid", use_bias=True), make_group(mesh)
    module = MoE(layer, group, rngs=nnx.Rngs(3))
    assert module.experts_gate[...].sharding.spec[0] == "ep"
    for everywhere in (module.router[...], module.bias[...]):
        assert everywhere.sharding.is_fully_replicated and everywhere.sharding.device_set == set(mesh.devices.flat)
    bias = jnp.linspace(-0.2, 0.2, EXPERTS)
    module.bias[...] = bias
    x = tokens()

    @nnx.jit
    def step(module, x):
        def loss(module):
            y, stats = module(x)
            return (y**2).sum(), (y, stats)

        (_, (y, stats)), gradient = nnx.value_and_grad(loss, has_aux=True)(module)
        module.update_bias(stats.load, rate=0.01)
        return y, stats, gradient

    params = world.fetch(module.params())
    y, stats, gradient = step(module, world.put(mesh, "ep", x))
    y, stats = world.fetch((y, stats))
    expected, load = expected_output(params, x, np.asarray(bias), "sigmoid")
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(stats.load, load)
    np.testing.assert_allclose(world.fetch(module.bias[...]), bias + 0.01 * np.sign(load.mean() - load), rtol=1e-6)
    trained = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(gradient)}
    assert trained == {"router", "experts_gate", "experts_up", "experts_down"}


def test_dropped_rows_are_counted_over_all_ranks():
    mesh = world.mesh(4)
    layer, group = config(), make_group(mesh, capacity=2)
    params, x = weights(layer), tokens()
    f = jax.jit(lambda p, x: moe.apply(p, x, config=layer, group=group)[1])
    stats = world.fetch(f(put_weights(group, params), world.put(mesh, "ep", x)))
    _, load = expected_output(params, x)
    of_rank = load.reshape(4, -1).sum(-1)
    assert int(stats.num_dropped) == np.maximum(of_rank - 2, 0).sum()
    np.testing.assert_array_equal(stats.load, load)  # the load is what was asked for


def test_an_unbalanced_router_is_balanced_by_its_bias():
    mesh = world.mesh(4)
    layer, group = config(score="sigmoid", use_bias=True), make_group(mesh)
    params, x = weights(layer), tokens()
    # A direction that all tokens share and expert 0 answers to.
    x[..., 0] = 3
    params.router[0, 0] = 3
    params, x = put_weights(group, params), world.put(mesh, "ep", x)

    @jax.jit
    def step(params, x, bias):
        _, stats = moe.apply(params, x, bias, config=layer, group=group)
        return jax_ep.update_bias(bias, stats.load, rate=0.02), stats.max_over_mean

    bias, ratios = jnp.zeros(EXPERTS), []
    for _ in range(60):
        bias, ratio = step(params, x, bias)
        ratios.append(float(ratio))
    assert ratios[0] == EXPERTS / TOP_K, "every token picks expert 0 at first"
    assert min(ratios[-10:]) < 1.7


@pytest.mark.parametrize(
    ("layer", "shape", "bias", "message"),
    [
        ({"hidden": 6}, (4, 6), None, "expected hidden=6 as in the config, got a group with hidden=12"),
        ({"top_k": 1}, (4, HIDDEN), None, "expected top_k=1"),
        ({}, (4, 6), None, r"expected shape \[..., tokens, hidden=12\], got \(4, 6\)"),
        ({}, (HIDDEN,), None, "hidden=12"),
        ({"use_bias": True}, (4, HIDDEN), None, "expected an array for use_bias=True, got None"),
        ({}, (4, HIDDEN), np.zeros(8), "expected None for use_bias=False, got an array"),
    ],
)
def test_what_does_not_fit_is_refused(layer, shape, bias, message):
    layer, group = config(**layer), make_group(world.mesh(4))
    params = moe.init(jax.random.key(0), config())
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda x: moe.apply(params, x, bias, config=layer, group=group), jnp.zeros(shape))


@pytest.mark.parametrize("remat", [("jax_ep_row",), "jax_ep_rows", ("rows", "jax_ep_handle")])
def test_remat_takes_known_names_only(remat):
    with pytest.raises(ValueError, match="remat: expected None or a tuple of names among .*jax_ep_rows.*got"):
        config(remat=remat)


def test_weights_of_another_shape_are_refused():
    group = make_group(world.mesh(4))
    params = moe.init(jax.random.key(0), config(intermediate=20))
    with pytest.raises(ValueError, match=r"params.experts.\w+: expected shape \(8, 1[26], 1[26]\).*got \(8, "):
        jax.eval_shape(lambda x: moe.apply(params, x, config=config(), group=group), jnp.zeros((4, HIDDEN)))


def test_max_over_mean_of_few_picks():
    load = jnp.array([0.0, 0, 1, 0])
    zero = jnp.zeros(())
    stats = moe.MoEStats(load, zero, zero, zero, zero, zero)
    assert float(stats.max_over_mean) == 4
    assert float(dataclasses.replace(stats, load=0 * load).max_over_mean) == 0


def test_update_bias_needs_a_bias():
    module = MoE(config(), make_group(world.mesh(4)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="expected config.use_bias=True, got False"):
        module.update_bias(jnp.ones(EXPERTS))
