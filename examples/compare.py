"""The comparisons of train_moe.py: the same losses as a dense computation, the time of a plain network, and that of
exchanges in turn with compute."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import plots
from checkpoint import History

import jax_ep
from jax_ep.bench.record import Record, Result
from jax_ep.bench.timeline import Timeline

SAME_BOUND = 1e-5
"""Most that the losses of a step may differ, in nats a byte, while both runs pick the same experts.

It is not zero: results are the same sums, in another order, and float32 rounds a sum by some 1e-7 of its size."""

BOUND = 0.2
"""Most that the losses of any step may differ.

Sooner or later rounding decides between two experts that are nearly tied for a byte. From then on the runs train
slightly different models, whose losses differ as those of two orders of summation must."""

STEP_TARGET = 1.5
"""Most that a step of the MoE should take, over one of the plain network."""


def conclude_dense(out: Path, history: History, dense: History) -> bool:
    """Write compare_dense.png, history_dense.json and keys of metrics.json; whether both bounds hold."""
    difference = np.abs(np.subtract(history.loss, dense.loss))
    moved = [ours != theirs for ours, theirs in zip(history.load, dense.load, strict=True)]
    same = moved.index(True) if any(moved) else len(moved)  # steps before a pick moved
    while_same, largest = float(difference[: max(same, 1)].max()), float(difference.max())  # the first always counts
    holds = while_same <= SAME_BOUND and largest <= BOUND
    metrics = json.loads((out / "metrics.json").read_text())
    metrics |= {
        "dense_heldout_loss_nats": dense.heldout[-1][1],
        "dense_steps_of_same_picks": same,
        "dense_difference_while_same_nats": while_same,
        "dense_bound_while_same_nats": SAME_BOUND,
        "dense_largest_difference_nats": largest,
        "dense_bound_nats": BOUND,
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (out / "history_dense.json").write_text(json.dumps(dataclasses.asdict(dense)) + "\n")
    plots.plot_dense(out / "compare_dense.png", history, dense, same, (SAME_BOUND, BOUND))
    print(f"""
jax_ep against every expert on every byte, masked: training losses differ
  by at most {while_same:.1e} nats a byte (bound {SAME_BOUND:g}) in the first {same} steps, which pick the same experts
  by at most {largest:.1e} (bound {BOUND:g}) in any step: {"equal" if holds else "NOT EQUAL"}
  {out / "compare_dense.png"}: the curves lie on each other
  {out / "history_dense.json"}: the dense run, step by step""")
    return holds


def time_in_turn(
    steps: Mapping[str, Callable[[int], None]], runs: int, warm_up: int = 3, in_a_row: int = 1
) -> dict[str, list[float]]:
    """Seconds of a step, for each of `runs` calls of each of `steps`. They take turns, so all meet the same weather.

    Args:
      steps: by name, functions that do the steps of that number and wait for their end.
      runs: calls of each to time.
      warm_up: calls of each before, which compile.
      in_a_row: steps of a call.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(warm_up + runs):
        names = sorted(steps, reverse=bool(number % 2))
        for name in names:
            start = time.perf_counter()
            steps[name](number)
            if number >= warm_up:
                seconds[name].append((time.perf_counter() - start) / in_a_row)
    return seconds


def conclude_ffn(options: argparse.Namespace, group: jax_ep.Group, seconds: Mapping[str, list[float]]) -> None:
    """Write the record and compare_ffn.png of the times of "moe" and "ffn", and say what they show."""
    setting = _setting(options, "--compare-ffn")
    notes = {
        "moe": f"experts {options.intermediate} wide, capacity factor {options.capacity_factor:g}; {setting}",
        "ffn": f"a plain gated network {options.top_k * options.intermediate} wide, data-parallel; {setting}",
    }
    results = [
        _step_result(group, seconds[name], implementation, notes[name])
        for name, implementation in (("moe", group.implementation), ("ffn", "ffn"))
    ]
    record = Record.here(results).write(options.records, "moe_step")
    plots.plot_step_times(options.out / "compare_ffn.png", results, STEP_TARGET)
    moe, ffn = results
    for result in results:
        print(
            f"{result.implementation:10} {result.median_us / 1000:8.1f} ms a step "
            f"(p10 {result.p10_us / 1000:.1f}, p90 {result.p90_us / 1000:.1f})"
        )
    print(f"""MoE over plain network: {moe.median_us / ffn.median_us:.2f} (target: at most {STEP_TARGET:g})
  {options.out / "compare_ffn.png"}: both times
  {record}: the record""")


def conclude_overlap(
    options: argparse.Namespace,
    group: jax_ep.Group,
    seconds: Mapping[str, list[float]],
    timelines: Sequence[Timeline],
    in_a_row: int,
) -> None:
    """Write the record of the times "in turn" and "beside", with their timelines, and say what they show."""
    sizes = f"experts {options.intermediate} wide, capacity factor {options.capacity_factor:g}"
    setting = f"{sizes}; {_setting(options, '--compare-overlap')}, {in_a_row} steps in a row"
    share = _share_of_exchanges(timelines[0])
    exchanges = "" if share is None else f", which take {share:.0%} of the time that the GPU is busy"
    notes = {
        "in turn": f"exchanges in turn with compute{exchanges}; {setting}",
        "beside": f"exchanges beside compute, {options.chunks} chunks; {setting}",
    }
    results = [_step_result(group, seconds[name], group.implementation, note) for name, note in notes.items()]
    record = Record.here(results, timelines).write(options.records, "moe_step")
    in_turn, beside = results
    for name, result in zip(notes, results, strict=True):
        print(
            f"exchanges {name:8} {result.median_us / 1000:8.2f} ms a step "
            f"(p10 {result.p10_us / 1000:.2f}, p90 {result.p90_us / 1000:.2f})"
        )
    print(f"""beside over in turn: {beside.median_us / in_turn.median_us:.3f}; {notes["in turn"].split(";")[0]}
  {record}: the record""")


def _share_of_exchanges(timeline: Timeline) -> float | None:
    """Of the time that the first GPU is busy; None where nothing is known of it."""
    busy = sum(kernel.duration_us for kernel in timeline.kernels)
    return sum(kernel.duration_us for kernel in timeline.kernels if "jax_ep::" in kernel.name) / busy if busy else None


def _setting(options: argparse.Namespace, comparison: str) -> str:
    experts = (
        f"{options.layers} layers, {options.heads} heads of {options.head_width}, shared {options.shared}, "
        f"{options.grouped_matmul} matmul"
    )
    return (
        f"train_moe.py {comparison}, {experts}, sequence {options.sequence}, whole step (forward, backward, AdamW), "
        f"runs in turn, load {os.getloadavg()[0]:.1f}"
    )


def _step_result(group: jax_ep.Group, seconds: Sequence[float], implementation: str, note: str) -> Result:
    return Result.of_times(
        seconds,
        op="moe_step",
        implementation=implementation,
        ranks=group.num_ranks,
        tokens=group.max_tokens,
        hidden=group.hidden,
        top_k=group.top_k,
        num_experts=group.num_experts,
        dtype=group.dtype.name,
        row_order="expert",
        note=note,
    )
