"""Dispatch and combine made of start and done, with compute between them: for tests written for whole ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_ep


def dispatch(x: Any, *args: Any, **options: Any) -> jax_ep.Rows:
    computed, pending = _beside(jax_ep.dispatch_start(x, *args, **options), x)
    return jax_ep.dispatch_done(pending, after=computed)


def combine(y: jax.Array, *args: Any, **options: Any) -> jax.Array:
    computed, pending = _beside(jax_ep.combine_start(y, *args, **options), y)
    return jax_ep.combine_done(pending, after=computed)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here to the end of the test `jax_ep.dispatch` and `jax_ep.combine` are these."""
    monkeypatch.setattr(jax_ep, "dispatch", dispatch)
    monkeypatch.setattr(jax_ep, "combine", combine)


def _beside(pending: jax_ep.Pending, given: Any) -> tuple[jax.Array, jax_ep.Pending]:
    return jax_ep.beside(pending, lambda array: jnp.sin(array.astype(jnp.float32)), jax.tree.leaves(given)[0])
