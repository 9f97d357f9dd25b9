"""What a deep model costs to compile and to hold: nothing of layers × ranks × tokens × hidden."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import world
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import moe

LAYERS, RANKS, TOKENS, HIDDEN = 48, 8, 32, 64


def test_48_scanned_layers_with_remat_and_grad():
    mesh = world.mesh(RANKS)
    config = jax_ep.MoEConfig(hidden=HIDDEN, intermediate=HIDDEN, num_experts=RANKS, top_k=2)
    group = jax_ep.create_group(
        mesh,
        "ep",
        max_tokens=TOKENS,
        hidden=HIDDEN,
        num_experts=RANKS,
        top_k=2,
        dtype="float32",
        capacity_factor=1.25,
    )

    def model(layers, x):
        @jax.checkpoint
        def layer(x, params):
            y, stats = moe.apply(params, x, config=config, group=group)
            return x + y, stats.balance_loss

        x, losses = jax.lax.scan(layer, x, layers)
        return jax.lax.psum((x**2).sum(), "ep") + losses.sum()

    layers = jax.eval_shape(
        lambda: jax.vmap(lambda key: moe.init(key, config))(jax.random.split(jax.random.key(0), LAYERS))
    )
    specs = jax.tree.map(lambda spec: P(None, *spec), moe.param_specs(config, group))
    loss = jax.shard_map(model, mesh=mesh, in_specs=(specs, P("ep")), out_specs=P())
    shapes = jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.NamedSharding(mesh, spec)), layers, specs
    )
    x = jax.ShapeDtypeStruct((RANKS * TOKENS, HIDDEN), jnp.float32, sharding=jax.NamedSharding(mesh, P("ep")))
    compiled = jax.jit(jax.grad(loss)).lower(shapes, x).compile()

    rows_everywhere = LAYERS * RANKS * TOKENS * HIDDEN * 4
    weights = sum(a.size * 4 for a in jax.tree.leaves(layers)) // RANKS
    temporary = compiled.memory_analysis().temp_size_in_bytes
    # What must live: each layer's input (remat's residual), gradients as they are made, a few layers' rows.
    must = LAYERS * TOKENS * HIDDEN * 4 + 2 * weights
    assert temporary < must + rows_everywhere // 4, (temporary, must, rows_everywhere)
    # 48 layers are one body: the program does not grow with them.
    assert compiled.as_text().count("all-to-all(") < 20
