"""Every option of the MoE layer against a dense MoE in float64: what it computes and how it lies on a mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import world
from jax.scipy.special import erf
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import moe, presets
from jax_ep.sharding import MoESharding

BATCH, SEQUENCE = 8, 4

SMALL = jax_ep.MoEConfig(hidden=12, intermediate=16, num_experts=8, top_k=2)

# Written out from the papers, in the dtype of their operands.
GATES = {
    "silu": lambda g, u: g / (1 + jnp.exp(-g)) * u,
    "gelu": lambda g, u: g * (1 + erf(g / 2**0.5)) / 2 * u,
    "gelu_tanh": lambda g, u: g * (1 + jnp.tanh((2 / np.pi) ** 0.5 * (g + 0.044715 * g**3))) / 2 * u,
    "relu": lambda g, u: jnp.maximum(g, 0) * u,
    "clamped_swiglu": lambda g, u: (
        (jnp.clip(u, -7, 7) + 1) * jnp.minimum(g, 7) / (1 + jnp.exp(-1.702 * jnp.minimum(g, 7)))
    ),
}


def route(config: jax_ep.MoEConfig, logits, bias):
    """[tokens, K] experts and their weights, by the papers' equations."""
    experts = logits.shape[-1]
    if config.score == "sigmoid":
        scores = 1 / (1 + jnp.exp(-logits))
    else:
        scores = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    choice = scores if bias is None else scores + bias
    if config.num_groups > 1:  # DeepSeek-V3: groups by the sum of their two best
        grouped = choice.reshape(len(choice), config.num_groups, -1)
        best = jnp.sort(grouped, -1)[..., -2:].sum(-1)
        kept = jnp.argsort(-best, -1, stable=True)[:, : config.top_groups]
        allowed = jax.nn.one_hot(kept, config.num_groups).sum(1) > 0
        choice = jnp.where(jnp.repeat(allowed, experts // config.num_groups, axis=1), choice, -jnp.inf)
    index = jnp.argsort(-choice, -1, stable=True)[:, : config.top_k]
    weights = jnp.take_along_axis(scores, index, -1)
    renormalized = config.renormalize if config.renormalize is not None else config.score == "sigmoid"
    if renormalized or not config.pre_softmax:
        weights = weights / weights.sum(-1, keepdims=True)
    return index, weights * config.scale


def dense(config: jax_ep.MoEConfig, params: moe.MoEParams, x, bias):
    """Every expert on every token, masked by the routing: [tokens, H]."""
    index, weights = route(config, x @ params.router, bias)
    gate, e = GATES[config.activation], params.experts
    mask = jax.nn.one_hot(index, config.num_experts, dtype=x.dtype) * weights[..., None]  # [T, K, E]
    given = x[:, None] if config.weighted == "after" else x[:, None] * mask.sum(1)[..., None]
    given = jnp.broadcast_to(given, (len(x), config.num_experts, config.hidden))

    def linear(x, weight, bias):
        return jnp.einsum("tea,eab->teb", x, weight) + (0 if bias is None else bias)

    y = linear(gate(linear(given, e.gate, e.gate_bias), linear(given, e.up, e.up_bias)), e.down, e.down_bias)
    share = mask.sum(1) if config.weighted == "after" else (mask.sum(1) != 0)
    out = (y * share[..., None]).sum(1)
    if params.shared is not None:
        out = out + gate(x @ params.shared.gate, x @ params.shared.up) @ params.shared.down
    return out


def draw(config: jax_ep.MoEConfig, seed: int = 0):
    """Weights whose every part matters, tokens and a bias, in NumPy."""
    params = jax.tree.map(np.asarray, moe.init(jax.random.key(seed), config))
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda a: a if a.any() else rng.standard_normal(a.shape).astype(a.dtype) / 4, params)
    params = dataclasses.replace(params, router=10 * params.router)
    x = rng.standard_normal((BATCH, SEQUENCE, config.hidden)).astype(np.float32)
    bias = rng.standard_normal(config.num_experts).astype(np.float32) / 10 if config.use_bias else None
    return params, x, bias


def check(config, mesh, axis="ep", sharding=MoESharding(), tolerance=1e-5, **options):
    """Output and all gradients of the layer against the dense one in float64."""
    params, x, bias = draw(config)
    target = np.random.default_rng(9).standard_normal(x.shape)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params, x))

        def exact_loss(params, x):
            out = dense(config, params, x.reshape(-1, config.hidden), bias).reshape(x.shape)
            return (out * target).sum(), out

        (_, expected), gradient = jax.jit(jax.value_and_grad(exact_loss, argnums=(0, 1), has_aux=True))(*exact)
        expected, gradient = jax.tree.map(np.asarray, (expected, gradient))

    with jax_ep.create_group(
        mesh,
        axis,
        max_tokens=BATCH * SEQUENCE,
        hidden=config.hidden,
        num_experts=config.num_experts,
        top_k=config.top_k,
        dtype="float32",
    ) as group:
        specs = moe.param_specs(config, group, sharding)
        params = jax.tree.map(lambda a, spec: world.put(mesh, tuple(spec), a), params, specs)
        x = world.put(mesh, tuple(sharding.x_spec(group.axis)), x)
        layer = functools.partial(moe.apply, config=config, group=group, sharding=sharding, **options)

        def loss(params, x):
            out, stats = layer(params, x, bias)
            return (out * target.astype(np.float32)).sum(), (out, stats)

        (_, (out, stats)), got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    assert int(stats.num_dropped) == int(stats.num_invalid) == 0
    assert float(stats.load.sum()) == BATCH * SEQUENCE * config.top_k
    for ours, theirs in zip(jax.tree.leaves((out, got)), jax.tree.leaves((expected, gradient)), strict=True):
        error = np.linalg.norm(np.asarray(ours, np.float64) - theirs)
        assert error <= tolerance * max(np.linalg.norm(theirs), 1e-3)


def my_matmul(rows, weights, group_sizes):
    """A grouped matmul in plain jnp, as a user might bring one."""
    of_row = jnp.repeat(jnp.arange(len(group_sizes)), group_sizes, total_repeat_length=len(rows))
    return jnp.einsum("ca,cab->cb", rows, weights[of_row])


OPTIONS = {
    **{f"activation {name}": {"activation": name} for name in GATES},
    "expert biases": {"expert_biases": True},
    "shared experts": {"shared_intermediate": 20},
    "weighted before": {"weighted": "before"},
    "four chunks": {"chunks": 4},
    "exchanges beside compute": {"overlap": True},
    "of four chunks": {"overlap": True, "chunks": 4},
    "beside shared experts": {"overlap": True, "chunks": 2, "shared_intermediate": 8},
    "remat, nothing kept": {"remat": ()},
    "remat, rows kept": {"remat": ("jax_ep_rows", "jax_ep_handle")},
    "all at once": {
        "activation": "clamped_swiglu",
        "expert_biases": True,
        "shared_intermediate": 8,
        "chunks": 2,
        "remat": ("jax_ep_handle",),
    },
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(option):
    check(dataclasses.replace(SMALL, **OPTIONS[option]), world.mesh(4))


def test_replaceable_matmul():
    check(SMALL, world.mesh(4), matmul=my_matmul)


def test_fp8_wire_is_within_what_fp8_can_hold():
    # e4m3 keeps four bits: half a unit in the last place is 2**-4 of a value, and both matmuls' inputs pass it on.
    check(dataclasses.replace(SMALL, wire="fp8"), world.mesh(4), tolerance=2**-3)


MESHES = {
    "ep": ((4,), ("ep",), "ep", MoESharding()),
    "dp, ep": ((2, 4), ("dp", "ep"), "ep", MoESharding(x=P(("dp", "ep")))),
    "batch over dp, sequence over ep": ((2, 4), ("dp", "ep"), "ep", MoESharding(x=P("dp", "ep"))),
    "fsdp": ((2, 4), ("fsdp", "ep"), "ep", MoESharding(x=P(("fsdp", "ep")), fsdp=("fsdp",))),
    "tp": ((4, 2), ("ep", "tp"), "ep", MoESharding(tp=("tp",))),
    "dp, fsdp, tp": (
        (2, 2, 2),
        ("fsdp", "ep", "tp"),
        "ep",
        MoESharding(x=P(("fsdp", "ep")), fsdp=("fsdp",), tp=("tp",)),
    ),
    "same tokens on all ranks": ((4,), ("ep",), "ep", MoESharding(x=P())),
    "same tokens on ranks of one axis": ((2, 4), ("node", "gpu"), ("node", "gpu"), MoESharding(x=P("node"))),
    "same tokens, uneven shares": ((3,), ("ep",), "ep", MoESharding(x=P())),
}


EXPLICIT = ("dp, fsdp, tp", "same tokens on ranks of one axis")  # each takes seconds to compile: the richest two


@pytest.mark.parametrize(
    ("case", "kind"), [*((case, AxisType.Auto) for case in MESHES), *((case, AxisType.Explicit) for case in EXPLICIT)]
)
def test_mesh(case, kind):
    shape, axes, axis, sharding = MESHES[case]
    experts = 9 if 3 in shape else 8
    config = dataclasses.replace(SMALL, expert_biases=True, shared_intermediate=8, num_experts=experts)
    check(config, world.mesh(shape, axes, kind), axis, sharding)


def test_within_a_shard_map_over_an_outer_axis():
    """Data parallelism by hand around the layer: it opens shard_map over the axes that are left."""
    mesh = world.mesh((2, 4), ("dp", "ep"))
    params, x, _ = draw(SMALL)
    with jax_ep.create_group(mesh, "ep", max_tokens=32, hidden=12, num_experts=8, top_k=2, dtype="float32") as group:
        layer = functools.partial(moe.apply, params, config=SMALL, group=group)
        outer = jax.shard_map(lambda x: layer(x)[0], mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
        out = jax.jit(outer)(x)
    expected = dense(SMALL, params, x.reshape(-1, 12), None).reshape(x.shape)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


PRESETS = {
    "DeepSeek-V3": presets.deepseek_v3(hidden=16, intermediate=12, num_experts=32, shared_intermediate=8),
    "Qwen3-MoE": presets.qwen3_moe(hidden=16, intermediate=12, num_experts=16),
    "Mixtral": presets.mixtral_8x7b(hidden=16, intermediate=12),
}


@pytest.mark.parametrize("model", PRESETS)
def test_preset(model):
    check(PRESETS[model], world.mesh(4))


def test_presets_have_the_published_sizes():
    def total(config):
        params = jax.eval_shape(lambda: moe.init(jax.random.key(0), config))
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    # 256 experts and one shared of 3 · 7168 · 2048, a router of 7168 · 256; and so on, by the model cards.
    assert total(presets.deepseek_v3()) == 257 * 3 * 7168 * 2048 + 7168 * 256
    assert total(presets.qwen3_moe()) == 128 * 3 * 4096 * 1536 + 4096 * 128
    assert total(presets.qwen3_moe(hidden=2048, intermediate=768)) == 128 * 3 * 2048 * 768 + 2048 * 128
    assert total(presets.mixtral_8x7b()) == 8 * 3 * 4096 * 14336 + 4096 * 8
    v3 = presets.deepseek_v3()
    assert (v3.top_k, v3.num_groups, v3.top_groups, v3.scale) == (8, 8, 4, 2.5)


@pytest.mark.parametrize(
    ("changes", "sharding", "message"),
    [
        ({"activation": "swish"}, {}, "expected one of .*'silu'.*, got 'swish'"),
        ({"weighted": "never"}, {}, 'expected "after" or "before", got \'never\''),
        ({"chunks": 0}, {}, "chunks: expected at least 1, got 0"),
        ({"chunks": 3}, {}, "expected a divisor of the 8 tokens of a rank, got 3"),
        ({"shared_intermediate": 8}, {}, "got params without them"),
        ({}, {"fsdp": ("data",)}, r"fsdp: expected axes of the mesh .*, got \['data'\]"),
        ({}, {"tp": ("ep",)}, "expected different axes for the group, fsdp and tp"),
        ({}, {"x": P(("ep", "tp")), "tp": ("tp",)}, r"expected the same tokens along the tp axes.*\['tp'\]"),
    ],
)
def test_what_does_not_fit_is_refused(changes, sharding, message):
    mesh = world.mesh((4, 2), ("ep", "tp"))
    params, x, _ = draw(SMALL)
    group = jax_ep.create_group(mesh, "ep", max_tokens=32, hidden=12, num_experts=8, top_k=2, dtype="float32")
    with pytest.raises(ValueError, match=message):
        config = dataclasses.replace(SMALL, **changes)
        jax.eval_shape(lambda x: moe.apply(params, x, config=config, group=group, sharding=MoESharding(**sharding)), x)
