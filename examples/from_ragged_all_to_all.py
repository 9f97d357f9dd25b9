"""The exchange of an MoE layer as it is usually written by hand, and the same layer with jax_ep.

Without options: 8 CPU devices and an expert on each. It asserts that both give equal outputs and gradients, and times
both. What `by_hand` does is replaced as follows:

  sort picks by expert, count, exchange counts, exchange rows, sort rows by expert   rows = jax_ep.dispatch(...)
  the experts: ragged_dot over rows and group sizes                                  stay as they are
  undo both sorts, exchange rows back, weight them, add them up                      jax_ep.combine(...)
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from devices import start_devices
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from options import UsageError

import jax_ep
from jax_ep.bench.timing import time_runs

BOUND = 1e-5
"""Most that two results may differ, over the largest value in them. They are not equal bit for bit: a token's rows are
added in another order, and float32 rounds sums by some 1e-7 of their size, matmuls of a thousand terms by some more."""

Experts = dict[str, jax.Array]


def feed_forward(experts: Experts, rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """A gated network: rows [C, H], in the order of the local experts, to [C, H]. The same in both layers."""
    gate = jax.lax.ragged_dot(rows, experts["gate"], group_sizes)
    up = jax.lax.ragged_dot(rows, experts["up"], group_sizes)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, experts["down"], group_sizes)


# With jax_ep --------------------------------------------------------------------------------------------------------


def with_jax_ep(
    experts: Experts, x: jax.Array, index: jax.Array, weights: jax.Array, *, group: jax_ep.Group
) -> jax.Array:
    """Tokens x [T, H] by their experts index [T, K] and weights [T, K], to [T, H]. Inside shard_map over "ep"."""
    rows = jax_ep.dispatch(x, index, weights, group=group)
    y = feed_forward(experts, rows.x, rows.group_sizes)
    return jax_ep.combine(y, rows.handle, rows.weights)


# By hand ------------------------------------------------------------------------------------------------------------


def by_hand(
    experts: Experts, x: jax.Array, index: jax.Array, weights: jax.Array, *, num_experts: int, ragged: bool
) -> jax.Array:
    """The same. ragged: by `jax.lax.ragged_all_to_all`, which CPUs lack; else by all_to_all with padding."""
    (tokens, top_k), ranks, rank = index.shape, jax.lax.axis_size("ep"), jax.lax.axis_index("ep")
    num_local = num_experts // ranks
    most = tokens * min(top_k, num_local)  # rows from one rank to another

    # Each pick gets a row, in the order of the experts, and so of the ranks that hold them.
    picks = index.reshape(-1)
    order = jnp.argsort(picks, stable=True)
    rows = x[order // top_k]

    # Everybody learns who sends how many rows to which expert.
    counts = jax.lax.all_gather(jnp.bincount(picks, length=num_experts), "ep")  # [R, E]
    sizes = counts.reshape(ranks, ranks, num_local).sum(-1)  # [from, to]
    rows = exchange(rows, sizes, ranks * most, most, ragged)

    # Rows arrive in the order (source rank, expert); the matmul wants all of an expert together.
    mine = jax.lax.dynamic_slice_in_dim(counts, rank * num_local, num_local, axis=1)  # [R, E_l]
    expert = jnp.tile(jnp.arange(num_local), ranks)
    expert = jnp.repeat(expert, mine.reshape(-1), total_repeat_length=ranks * most)
    expert = jnp.where(jnp.arange(ranks * most) < mine.sum(), expert, num_local)  # rows without a token: at the end
    by_expert = jnp.argsort(expert, stable=True)
    y = feed_forward(experts, rows[by_expert], mine.sum(0))

    # All the way back.
    y = y[jnp.argsort(by_expert)]
    y = exchange(y, sizes.T, tokens * top_k, most, ragged)
    y = y[jnp.argsort(order)].reshape(tokens, top_k, -1)
    return jnp.sum(y * weights[:, :, None], axis=1)


def exchange(rows: jax.Array, sizes: jax.Array, room: int, most: int, ragged: bool) -> jax.Array:
    """Rows in the order of their destinations, to [room, H] in the order of their sources.

    Args:
      rows: [N, H].
      sizes: [R, R], how many go from one rank to another.
      room: rows of the result.
      most: a bound of every entry of sizes.
      ragged: how.
    """
    rank = jax.lax.axis_index("ep")
    first_sent = jnp.cumsum(sizes, axis=1) - sizes  # [from, to], the sender's first row for the receiver
    first_received = jnp.cumsum(sizes, axis=0) - sizes  # [from, to], where the receiver has it
    if ragged:
        empty = jax.lax.pcast(jnp.zeros((room, rows.shape[1]), rows.dtype), "ep", to="varying")
        there = first_sent[rank], sizes[rank], first_received[rank]
        return jax.lax.ragged_all_to_all(rows, empty, *there, sizes[:, rank], axis_name="ep")

    nth = jnp.arange(most)
    padded = rows[jnp.minimum(first_sent[rank][:, None] + nth, rows.shape[0] - 1)]  # [to, most, H]
    padded = jnp.where((nth < sizes[rank][:, None])[:, :, None], padded, 0)
    arrived = jax.lax.all_to_all(padded, "ep", 0, 0)  # [from, most, H]
    row, ends = jnp.arange(room), jnp.cumsum(sizes[:, rank])
    source = jnp.minimum(jnp.searchsorted(ends, row, side="right"), len(ends) - 1)
    packed = arrived[source, jnp.minimum(row - first_received[source, rank], most - 1)]
    return jnp.where((row < ends[-1])[:, None], packed, 0)


# Both, side by side -------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        devices = start_devices(options.platform, options.devices)
        check(options, len(devices))
    except UsageError as error:
        parser.error(str(error))  # ends with status 2
    mesh = jax.make_mesh((len(devices),), ("ep",), (AxisType.Auto,), devices=devices)
    inputs = make_inputs(options, mesh)
    group = jax_ep.create_group(
        mesh,
        "ep",
        max_tokens=options.tokens,
        hidden=options.hidden,
        num_experts=options.experts,
        top_k=options.top_k,
        dtype="float32",
    )
    ragged = options.platform != "cpu"
    by = "ragged_all_to_all" if ragged else "all_to_all with padding"
    layers: dict[str, Callable[..., jax.Array]] = {
        f"by hand, {by}": lambda *operands: by_hand(*operands, num_experts=options.experts, ragged=ragged),
        f"jax_ep, {group.implementation}": lambda *operands: with_jax_ep(*operands, group=group),
    }
    steps = {name: make_step(layer, mesh) for name, layer in layers.items()}

    print(f"{len(devices)} {options.platform} devices, float32; on each {options.tokens} tokens of {options.hidden},")
    print(f"{options.experts // len(devices)} of {options.experts} experts, of which a token picks {options.top_k}")
    hand, ours = (jax.device_get(step(*inputs)) for step in steps.values())
    names = ("output", "gradient of experts", "gradient of tokens", "gradient of weights")
    for name, left, right in zip(names, hand, ours, strict=True):
        difference = largest_difference(left, right)
        print(f"  {name:20} differs by {difference:.1e} of its largest value (bound {BOUND:g})")
        assert difference <= BOUND, f"{name}: expected at most {BOUND:g}, got {difference:.1e}"

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.runs):  # in turn, so that both meet the same weather
        for name, step in steps.items():
            seconds[name] += time_runs(step, [inputs], runs=1, warm_up=0)
    print(f"forward and backward, median of {options.runs} runs")
    for name, times in seconds.items():
        print(f"  {name:32} {1000 * statistics.median(times):8.2f} ms")
    group.close()
    return 0


def make_step(layer: Callable[..., jax.Array], mesh: jax.sharding.Mesh) -> Callable[..., tuple[Any, ...]]:
    """Jitted: (experts, x, index, weights, cotangent), whole arrays on the mesh, to output and three gradients."""
    sharded = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))

    def step(
        experts: Experts, x: jax.Array, index: jax.Array, weights: jax.Array, cotangent: jax.Array
    ) -> tuple[Any, ...]:
        output, transpose = jax.vjp(
            lambda *floats: sharded(floats[0], floats[1], index, floats[2]), experts, x, weights
        )
        return (output, *transpose(cotangent))

    return jax.jit(step)


def make_inputs(options: argparse.Namespace, mesh: jax.sharding.Mesh) -> tuple[Any, ...]:
    """Random operands of a step, split over the mesh by their first dimension; some experts are picked more often."""
    random = np.random.default_rng(options.seed)
    tokens, hidden, inner = options.tokens * mesh.size, options.hidden, options.intermediate

    def normal(*shape: int, fan_in: int = 1) -> np.ndarray:
        return random.standard_normal(shape, np.float32) / np.float32(fan_in) ** 0.5

    experts = {
        "gate": normal(options.experts, hidden, inner, fan_in=hidden),
        "up": normal(options.experts, hidden, inner, fan_in=hidden),
        "down": normal(options.experts, inner, hidden, fan_in=inner),
    }
    logits = normal(tokens, options.experts) + normal(options.experts)
    routing = jax_ep.route(jnp.asarray(logits), top_k=options.top_k)
    inputs = experts, normal(tokens, hidden), routing.index, routing.weights, normal(tokens, hidden)
    return jax.device_put(inputs, NamedSharding(mesh, P("ep")))


def largest_difference(left: Any, right: Any) -> float:
    """Of two pytrees of arrays of equal shapes, over the largest value in the same array."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="from_ragged_all_to_all.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu", help="gpu: this machine's (cpu)")
    parser.add_argument("--devices", type=int, metavar="N", help="how many (8 on cpu, all on gpu)")
    sizes = {
        "tokens": (512, "of each device"),
        "hidden": (256, "length of a token"),
        "intermediate": (256, "width inside an expert"),
        "experts": (8, "a multiple of the devices"),
        "top_k": (2, "experts that each token picks"),
        "runs": (5, "to time"),
        "seed": (0, "of all numbers"),
    }
    for name, (default, text) in sizes.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, metavar="N", default=default, help=f"{text} ({default})")
    return parser


def check(options: argparse.Namespace, devices: int) -> None:
    """UsageError, naming the option that does not fit."""
    for name in ("tokens", "hidden", "intermediate", "experts", "top_k", "runs"):
        if (value := getattr(options, name)) < 1:
            raise UsageError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    if options.experts % devices:
        raise UsageError(f"--experts: expected a multiple of the {devices} devices, got {options.experts}")
    if options.top_k > options.experts:
        raise UsageError(f"--top-k: expected at most the {options.experts} experts, got {options.top_k}")


if __name__ == "__main__":
    sys.exit(main())
