"""Layout alone: the counting order of all ranks' top-k indices, in JAX and by the compiled module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import ffi
from jax_ep.bench.record import Result
from jax_ep.bench.timing import time_runs
from jax_ep.config import ROW_ORDERS, GroupConfig
from jax_ep.layout import place_rows


def run(*, tokens: int, top_k: int, num_experts: int, ranks: int, runs: int) -> Iterator[Result]:
    """Times the layout of one rank of `ranks`, for `tokens` tokens in all, on the default device."""
    config = GroupConfig(
        num_ranks=ranks,
        max_tokens=tokens // ranks,
        hidden=1,
        num_experts=num_experts,
        top_k=top_k,
        dtype=np.dtype(jnp.bfloat16),
    )
    rng = np.random.default_rng(0)
    scores = rng.random((4, ranks, config.max_tokens, num_experts))
    indices = [jnp.asarray(np.argsort(score, axis=-1)[..., :top_k], jnp.int32) for score in scores]
    platform = jax.devices()[0].platform
    ways: dict[str, tuple[Callable[..., Any], str]] = {"reference": (place_rows, "pure JAX")}
    compiled = {"cpu": "cpu", "gpu": "cuda"}.get(platform)
    if compiled in ffi.layout_platforms():
        ways[f"extension-{compiled}"] = (ffi.place_rows, "custom call of the compiled module")
    for row_order in ROW_ORDERS:
        answers = []
        for name, (place, note) in ways.items():
            function = jax.jit(
                functools.partial(
                    place,
                    num_local_experts=config.num_local_experts,
                    capacity=config.rows_capacity(config.max_tokens, row_order=row_order),
                    alignment=config.alignment,
                    row_order=row_order,
                )
            )
            arguments = [(index, jnp.int32(0)) for index in indices]
            answers.append(jax.tree.map(np.asarray, function(*arguments[0])))
            for ours, theirs in zip(answers[0], answers[-1], strict=True):
                np.testing.assert_array_equal(ours, theirs, err_msg=f"{name} differs from the reference")
            yield Result.of_times(
                time_runs(function, arguments, runs=runs),
                op="layout",
                implementation=name,
                ranks=ranks,
                tokens=config.max_tokens,
                hidden=config.hidden,
                top_k=top_k,
                num_experts=num_experts,
                dtype="int32",
                row_order=row_order,
                note=f"{note}; one rank's share of all ranks' gathered indices, on one {platform} device",
            )
