"""The custom calls that kernels are reached by, as JAX traces them. Nothing runs, so no GPU is needed."""

from __future__ import annotations

import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from jax_ep import kernels
from jax_ep.call import Call
from jax_ep.layout import Handle

TOKENS, HIDDEN, TOP_K, EXPERTS = 4, 128, 2, 4


@pytest.fixture
def handle(monkeypatch):
    native = types.SimpleNamespace(dispatch_pieces=lambda row_bytes: 1)
    monkeypatch.setattr(kernels, "_register", lambda: None)
    monkeypatch.setattr(kernels._native, "require", lambda: native)
    mesh = jax.make_mesh((1,), ("ep",), devices=jax.devices("cpu")[:1])
    group = jax_ep.create_group(
        mesh, "ep", max_tokens=TOKENS, hidden=HIDDEN, num_experts=EXPERTS, top_k=TOP_K, implementation="reference"
    )
    ints = lambda *shape: jnp.zeros(shape, jnp.int32)  # noqa: E731
    return Handle(
        ints(1, TOKENS, TOP_K), ints(EXPERTS), ints(EXPERTS), ints(1), ints(1), group, "expert", 1, TOKENS * TOP_K
    )


def custom_calls(function, *arguments) -> Iterator:
    yield from (
        equation for equation in jax.make_jaxpr(function)(*arguments).eqns if equation.primitive.name == "ffi_call"
    )


x = jnp.ones((TOKENS, HIDDEN), jnp.bfloat16)
y = jnp.ones((TOKENS * TOP_K, HIDDEN), jnp.bfloat16)
scales = jnp.ones((TOKENS, 1))
weights, words = jnp.ones((TOKENS, TOP_K)), jnp.ones(TOKENS * TOP_K)
CALLS = {
    "dispatch": lambda handle: kernels.dispatch(handle, x, None, None, Call()),
    "dispatch with weights": lambda handle: kernels.dispatch(handle, x, None, weights, Call()),
    "dispatch that quantises": lambda handle: kernels.dispatch(handle, x, None, None, Call(), "float32"),
    "dispatch of FP8": lambda handle: kernels.dispatch(
        handle, x.astype(jnp.float8_e4m3fn), scales, weights, Call(), "float32"
    ),
    "gradient": lambda handle: kernels.gradient(handle, x, y, words, Call()),
    "combine": lambda handle: kernels.combine(handle, y, None, None, Call()),
    "combine with weights": lambda handle: kernels.combine(handle, y, words, None, Call()),
    "combine with words": lambda handle: kernels.combine(handle, y, None, words, Call()),
}


@pytest.mark.parametrize("name", CALLS)
def test_operands_have_elements(name, handle):
    """One without could be taken out of a loop and a shard_map, where XLA's Shardy crashes on it (jaxlib 0.11)."""
    (call,) = custom_calls(CALLS[name], handle)
    assert all(operand.aval.size > 0 for operand in call.invars)


@pytest.mark.parametrize("name", CALLS)
def test_attributes_say_what_is_there(name, handle):
    (call,) = custom_calls(CALLS[name], handle)
    said = {key: bool(value) for key, value in dict(call.params["attributes"]).items() if key.startswith("has_")}
    expected = {
        "dispatch": {"has_scales": False, "has_weights": False, "has_y": False},
        "dispatch with weights": {"has_scales": False, "has_weights": True, "has_y": False},
        "dispatch that quantises": {"has_scales": False, "has_weights": False, "has_y": False},
        "dispatch of FP8": {"has_scales": True, "has_weights": True, "has_y": False},
        "gradient": {"has_scales": False, "has_weights": False, "has_y": True},
        "combine": {"has_weights": False, "has_words": False},
        "combine with weights": {"has_weights": True, "has_words": False},
        "combine with words": {"has_weights": False, "has_words": True},
    }
    assert said == expected[name]
