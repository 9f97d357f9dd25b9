"""Gradients of tokens, router and experts against a dense MoE in float64, which knows nothing of rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import world
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.experts import ExpertParams, apply_experts

pytestmark = pytest.mark.processes

TOKENS, HIDDEN, INTERMEDIATE, TOP_K = 12, 24, 24, 3

# fp32: what issue, paper and users want to hold. bf16: eight bits of mantissa, rounded at the tokens, the experts'
# three matmuls and the two sums of combine, forward and backward: 2**-8 each, in the worst case in line.
BOUNDS = {"float32": 1e-5, "bfloat16": 8 * 2**-8}


@dataclasses.dataclass(frozen=True)
class Case:
    ranks: int
    experts: int
    capacity_factor: float | None = None
    row_order: str = "expert"
    score: str = "softmax"
    alignment: int = 1


CASES = [
    Case(ranks=1, experts=4),
    Case(ranks=2, experts=8, score="sigmoid"),
    Case(ranks=8, experts=8, alignment=8),
    Case(ranks=4, experts=8, capacity_factor=0.6),
    Case(ranks=4, experts=8, row_order="rank"),
]


def draw(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = case.ranks * TOKENS

    def normal(*shape: int, fan_in: int = 1) -> np.ndarray:
        return (rng.standard_normal(shape) / fan_in**0.5).astype(np.float32)

    return {
        "x": normal(tokens, HIDDEN),
        "router": normal(HIDDEN, case.experts, fan_in=HIDDEN),
        "gate": normal(case.experts, HIDDEN, INTERMEDIATE, fan_in=HIDDEN),
        "up": normal(case.experts, HIDDEN, INTERMEDIATE, fan_in=HIDDEN),
        "down": normal(case.experts, INTERMEDIATE, HIDDEN, fan_in=INTERMEDIATE),
        "target": normal(tokens, HIDDEN),
    }


def kept_picks(case: Case, index: np.ndarray) -> np.ndarray:
    """[tokens, K]: which picks got a row, by the NumPy oracle."""
    if case.capacity_factor is None:
        return np.ones(index.shape, bool)
    capacity = int(np.ceil(case.capacity_factor * TOKENS * TOP_K))
    capacity = -(-capacity // case.alignment) * case.alignment
    picks = index.reshape(case.ranks, TOKENS, TOP_K)
    layout = oracle.layout(picks, case.experts, capacity, alignment=case.alignment, row_order=case.row_order)
    return (layout.slots.max(0) >= 0).reshape(index.shape)


def dense_loss(params: dict, case: Case, kept: np.ndarray):
    """A dense MoE: every expert on every token, masked. In the dtype of its operands, float64 here."""
    x = params["x"]
    logits = x @ params["router"]
    if case.score == "sigmoid":
        scores = 1 / (1 + jnp.exp(-logits))
    else:
        scores = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    index = jnp.argsort(-scores, axis=-1, stable=True)[:, :TOP_K]
    weights = jnp.take_along_axis(scores, index, axis=-1)
    if case.score == "sigmoid":
        weights = weights / weights.sum(-1, keepdims=True)
    mask = (jax.nn.one_hot(index, case.experts, dtype=x.dtype) * (weights * kept)[..., None]).sum(1)
    gate = jnp.einsum("th,ehf->tef", x, params["gate"])
    inner = gate / (1 + jnp.exp(-gate)) * jnp.einsum("th,ehf->tef", x, params["up"])
    out = jnp.einsum("tef,efh,te->th", inner, params["down"], mask)
    return (out * params["target"]).sum() + (out**2).sum() / 2


def parallel_loss(case: Case, dtype: str):
    mesh = world.mesh(case.ranks, kind=AxisType.Explicit)
    group = jax_ep.create_group(
        mesh,
        "ep",
        max_tokens=TOKENS,
        hidden=HIDDEN,
        num_experts=case.experts,
        top_k=TOP_K,
        dtype=dtype,
        capacity_factor=case.capacity_factor,
        alignment=case.alignment,
    )

    def local(p: dict) -> jax.Array:
        routing = jax_ep.route(jnp.matmul(p["x"], p["router"], precision="highest"), top_k=TOP_K, score=case.score)
        rows = jax_ep.dispatch(
            p["x"].astype(dtype), routing.index, routing.weights, group=group, row_order=case.row_order
        )
        if case.row_order == "expert":
            y = apply_experts(ExpertParams(p["gate"], p["up"], p["down"]), rows.x, rows.group_sizes)
            out = jax_ep.combine(y, rows.handle, weights=rows.weights)
        else:
            gate, up, down = (p[name].astype(dtype) for name in ("gate", "up", "down"))
            inner = jax.nn.silu(jnp.einsum("ch,ehf->cef", rows.x, gate)) * jnp.einsum("ch,ehf->cef", rows.x, up)
            local_experts = case.experts // case.ranks
            mask = (jax.nn.one_hot(rows.index, local_experts) * rows.weights[..., None]).sum(1)
            out = jax_ep.combine(jnp.einsum("cef,efh,ce->ch", inner, down, mask.astype(dtype)), rows.handle)
        out = out.astype(jnp.float32)
        return jax.lax.psum((out * p["target"]).sum() + (out**2).sum() / 2, "ep")

    specs = {name: P("ep") for name in ("x", "gate", "up", "down", "target")} | {"router": P()}

    def place(p: dict) -> dict:
        return {name: world.put(mesh, spec, p[name]) for name, spec in specs.items()}

    return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P()), place


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_a_dense_moe_in_float64(case, dtype):
    params = draw(case)
    if dtype == "bfloat16":  # both start from what bf16 can hold; the router stays in fp32
        params |= {
            name: np.asarray(jnp.asarray(params[name], jnp.bfloat16).astype(jnp.float32))
            for name in ("x", "gate", "up", "down")
        }
    index = np.asarray(jax.lax.top_k(jnp.matmul(params["x"], params["router"], precision="highest"), TOP_K)[1])
    kept = kept_picks(case, index)
    assert kept.all() == (case.capacity_factor is None), "the case with a capacity must drop rows"

    with jax.enable_x64(True):
        exact = {name: jnp.asarray(value, jnp.float64) for name, value in params.items()}
        expected_loss, expected = jax.jit(jax.value_and_grad(lambda p: dense_loss(p, case, kept)))(exact)
        expected_loss, expected = float(expected_loss), jax.tree.map(np.asarray, expected)
    loss_of, place = parallel_loss(case, dtype)
    loss, got = world.fetch(jax.jit(jax.value_and_grad(loss_of))(place(params)))

    assert abs(loss - expected_loss) <= BOUNDS[dtype] * abs(expected_loss)
    for name in ("x", "router", "gate", "up", "down"):
        error = np.linalg.norm(np.asarray(got[name], np.float64) - expected[name])
        assert error <= BOUNDS[dtype] * np.linalg.norm(expected[name]), name


def test_picks_without_a_row_get_a_weight_gradient_of_exactly_zero():
    case = Case(ranks=2, experts=4, capacity_factor=0.5)
    rng = np.random.default_rng(1)
    index = rng.integers(-1, case.experts, (2 * TOKENS, TOP_K), np.int32)
    kept = kept_picks(case, index)
    mesh = world.mesh(2, kind=AxisType.Explicit)
    group = jax_ep.create_group(
        mesh,
        "ep",
        max_tokens=TOKENS,
        hidden=HIDDEN,
        num_experts=4,
        top_k=TOP_K,
        dtype="float32",
        capacity_factor=0.5,
    )

    def local(x, index, weights):
        rows = jax_ep.dispatch(x, index, weights, group=group)
        return jax_ep.combine(rows.x, rows.handle, weights=rows.weights)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    x = rng.standard_normal((2 * TOKENS, HIDDEN), np.float32)
    tokens, picks, weights = world.put(mesh, "ep", (x, index, np.ones(index.shape, np.float32)))
    gradient = world.fetch(jax.jit(jax.grad(lambda w, x, i: sharded(x, i, w).sum()))(weights, tokens, picks))
    expected = np.where(kept, x.astype(np.float64).sum(1)[:, None], 0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
    without = gradient[~kept]
    assert without.size and not without.view(np.uint32).any(), "+0, to the bit"
