"""Checkpoints of the MoE layer outlive the number of ranks: saved at 8, restored at 4 and 2 and onto other axes."""

from __future__ import annotations

import functools

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import world
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import moe
from jax_ep.flax import MoE
from jax_ep.sharding import MoESharding

BATCH, SEQUENCE = 8, 3
# Four experts a token on eight: at 2 ranks some have three rows on one rank, and there the order of sums differs.
CONFIG = jax_ep.MoEConfig(
    hidden=12,
    intermediate=16,
    num_experts=8,
    top_k=4,
    score="sigmoid",
    use_bias=True,
    expert_biases=True,
    shared_intermediate=8,
)
SAVED_AT = (8,), ("ep",), MoESharding()
RESTORED_AT = {
    "4 ranks": ((4,), ("ep",), MoESharding()),
    "2 ranks": ((2,), ("ep",), MoESharding()),
    "2 ranks, fsdp, tp": ((2, 2, 2), ("fsdp", "ep", "tp"), MoESharding(P(("fsdp", "ep")), ("fsdp",), ("tp",))),
}


def make_group(mesh: jax.sharding.Mesh) -> jax_ep.Group:
    return jax_ep.create_group(
        mesh,
        "ep",
        max_tokens=BATCH * SEQUENCE,
        hidden=CONFIG.hidden,
        num_experts=CONFIG.num_experts,
        top_k=CONFIG.top_k,
        dtype="float32",
    )


def tokens(mesh: jax.sharding.Mesh, group: jax_ep.Group, sharding: MoESharding) -> jax.Array:
    x = np.random.default_rng(0).standard_normal((BATCH, SEQUENCE, CONFIG.hidden)).astype(np.float32)
    return world.put(mesh, tuple(sharding.x_spec(group.axis)), x)


def functional(place, seed):
    """Weights and bias as they lie on the mesh, and the function of them."""
    shape, axes, sharding = place
    mesh = world.mesh(shape, axes)
    group = make_group(mesh)
    params = jax.tree.map(np.asarray, moe.init(jax.random.key(seed), CONFIG))
    bias = np.random.default_rng(seed).standard_normal(CONFIG.num_experts).astype(np.float32) / 10
    specs = moe.param_specs(CONFIG, group, sharding)
    state = {
        "params": jax.tree.map(lambda a, spec: world.put(mesh, tuple(spec), a), params, specs),
        "bias": world.put(mesh, (), bias),
    }
    layer = jax.jit(functools.partial(moe.apply, config=CONFIG, group=group, sharding=sharding))
    x = tokens(mesh, group, sharding)
    return state, lambda state: layer(state["params"], x, state["bias"])


def flax_module(place, seed):
    """The same of the NNX layer: its state as a plain dict, and the function of it."""
    shape, axes, sharding = place
    mesh = world.mesh(shape, axes)
    group = make_group(mesh)

    @nnx.jit  # so that all of it is born on the mesh: what eager NNX has no axes for stays on one device
    def make():
        module = MoE(CONFIG, group, sharding=sharding, rngs=nnx.Rngs(seed))
        module.bias[...] = jax.random.normal(jax.random.key(seed), (CONFIG.num_experts,)) / 10
        return module

    module = make()
    x = tokens(mesh, group, sharding)
    layer = nnx.jit(lambda module, x: module(x))

    def call(arrays):
        state = nnx.state(module)
        nnx.replace_by_pure_dict(state, arrays)
        nnx.update(module, state)
        return layer(module, x)

    return nnx.to_pure_dict(nnx.state(module)), call


@pytest.fixture(scope="module", params=[functional, flax_module], ids=lambda make: make.__name__)
def saved(request, tmp_path_factory):
    """A checkpoint at 8 ranks, and what the layer said there."""
    state, call = request.param(SAVED_AT, seed=1)
    folder = tmp_path_factory.mktemp("reshard") / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state)
        checkpointer.wait_until_finished()
    return request.param, folder, jax.tree.map(np.asarray, (state, call(state)))


@pytest.mark.parametrize("where", RESTORED_AT)
def test_saved_at_8_ranks_and_restored_at(where, saved):
    make, folder, (weights, (expected, stats)) = saved
    target, call = make(RESTORED_AT[where], seed=2)
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), target)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder, like)

    for ours, mine, theirs in zip(*map(jax.tree.leaves, (restored, target, weights)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.sharding == mine.sharding
    got, got_stats = jax.tree.map(np.asarray, call(restored))
    # Not bit for bit: a rank adds up its own rows of a token before it sends their sum, so with other ranks the same
    # float32 terms are added in another order (and over tp, each in parts).
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    np.testing.assert_array_equal(got_stats.load, stats.load)
    assert got_stats.num_dropped == stats.num_dropped == 0
    # What was restored made the difference: with the weights that were there before it is another function.
    assert np.abs(np.asarray(call(target)[0]) - expected).max() > 0.1
