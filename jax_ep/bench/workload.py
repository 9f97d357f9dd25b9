"""What throughput is measured on: tokens and their routing, spread over all local devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.bench.record import Result
from jax_ep.config import RowOrder

AXIS = "ep"
CACHE = 2**27  # bytes: inputs that take turns are together more than any GPU's L2 holds
LEAST = 3  # inputs that take turns


@dataclasses.dataclass(frozen=True)
class Sizes:
    """T tokens a rank, H, E, K, and how tokens pick their experts (`record.ROUTINGS`)."""

    tokens: int = 4096
    hidden: int = 7168
    num_experts: int = 256
    top_k: int = 8
    routing: str = "uniform"


class Workload:
    """Inputs of one size on all local devices, and what follows from their routing.

    Attributes:
      sizes: as given.
      calls: how often an operation will be called: no more inputs are made.
      mesh, ranks: all devices along one axis, `AXIS`, and how many.
      index, weights: [R · T, K], on the devices.
      rows: rows of the busiest rank in each row order: groups get room for them and no more, so nothing is dropped.
      away: tokens that must cross the busiest rank's link in one direction, each once a rank that has rows of it.
    """

    def __init__(self, sizes: Sizes, calls: int) -> None:
        devices = jax.devices()
        self.sizes, self.calls, self.ranks = sizes, calls, len(devices)
        self.mesh = jax.sharding.Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
        rng = np.random.default_rng(0)
        index = draw_index(sizes, self.ranks * sizes.tokens, rng)
        weights = rng.random(index.shape, np.float32)
        self.rows, self.away = _loads(index, self.ranks, sizes)
        self.index, self.weights = jax.device_put((index, weights), NamedSharding(self.mesh, P(AXIS)))

    @functools.cached_property
    def tokens(self) -> list[jax.Array]:
        """As many inputs [R · T, H] as must take turns."""
        shape = self.ranks * self.sizes.tokens, self.sizes.hidden
        make = jax.jit(
            lambda seed: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16),
            out_shardings=NamedSharding(self.mesh, P(AXIS)),
        )
        return [make(seed) for seed in range(self.turns(self.sizes.tokens))]

    def turns(self, rows: int) -> int:
        """How many inputs of so many rows a rank take turns: together past the L2 cache, but none that no call uses."""
        if self.mesh.devices.flat[0].platform == "cpu":
            return LEAST
        past_cache = -(-CACHE // (2 * rows * self.sizes.hidden))
        return max(LEAST, min(past_cache, self.calls))

    def spread(self, function: Callable[..., Any], **options: Any) -> Any:
        """`function` of one rank's shares, over all ranks, jitted."""
        return jax.jit(jax.shard_map(function, mesh=self.mesh, in_specs=P(AXIS), out_specs=P(AXIS)), **options)

    def group(self, row_order: RowOrder, implementation: Any) -> jax_ep.Group:
        """A group with room for the rows of the busiest rank in this order."""
        return jax_ep.create_group(
            self.mesh,
            AXIS,
            max_tokens=self.sizes.tokens,
            hidden=self.sizes.hidden,
            num_experts=self.sizes.num_experts,
            top_k=self.sizes.top_k,
            capacity=self.rows[row_order],
            implementation=implementation,
        )

    def result(self, seconds: Sequence[float], **what: Any) -> Result:
        """A result of this size, from the times of single runs and the other fields of `Result`."""
        fields: dict[str, Any] = {"ranks": self.ranks, **dataclasses.asdict(self.sizes), "dtype": "bfloat16"}
        return Result.of_times(seconds, **(fields | what))


def draw_index(sizes: Sizes, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """K different experts for each token, [tokens, K] int32.

    "uniform": all experts alike. "zipf": the n-th most popular with a weight of 1 / n, drawn without replacement (the
    greatest of log weight + Gumbel noise); which experts are popular is drawn, too, so that they fall on all ranks.
    """
    popularity = np.zeros(sizes.num_experts)
    if sizes.routing == "zipf":
        popularity = -np.log(1.0 + rng.permutation(sizes.num_experts))
    score = rng.gumbel(size=(tokens, sizes.num_experts)) + popularity
    return np.argpartition(-score, sizes.top_k - 1, axis=-1)[:, : sizes.top_k].astype(np.int32)


def _loads(index: np.ndarray, ranks: int, sizes: Sizes) -> tuple[dict[str, int], int]:
    """Rows of the busiest rank in each row order, and tokens away: see `Workload`."""
    owner = index.reshape(ranks, sizes.tokens, -1) // (sizes.num_experts // ranks)
    pairs = np.stack([(owner == rank).any(-1).sum(-1) for rank in range(ranks)], axis=1)  # tokens [from, to]
    rows = {"expert": np.bincount(owner.reshape(-1)).max(), "rank": pairs.sum(0).max()}
    np.fill_diagonal(pairs, 0)
    return {order: int(count) for order, count in rows.items()}, int(max(pairs.sum(0).max(), pairs.sum(1).max()))
