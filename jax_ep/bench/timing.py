"""Timing of jitted functions: warm, on inputs that take turns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_ep.bench import link_counters


def calls_in_a_row() -> int:
    """Calls that one time is the mean of. On CPU fewer, as XLA's CPU devices may starve each other with more than 32
    programs in flight."""
    return 100 if jax.default_backend() == "gpu" else 10


def calls_in_a_program() -> int:
    """How many of them one jitted program makes: on GPUs several, as enqueuing a program takes the host longer than the
    device needs for a small operation."""
    return 10 if jax.default_backend() == "gpu" else 1


def time_runs(function: Callable[..., Any], inputs: Sequence[tuple], *, runs: int, warm_up: int = 3) -> list[float]:
    """Seconds of each of `runs` calls, by the host's clock, from the call to the last result being ready.

    Args:
      function: jitted.
      inputs: argument tuples, gone through in turn: several, so that no cache holds the next one.
      runs: how many calls to time.
      warm_up: calls before, which compile.
    """
    turn = itertools.cycle(inputs)
    for _ in range(warm_up):
        jax.block_until_ready(function(*next(turn)))
    seconds = []
    for _ in range(runs):
        arguments = next(turn)
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return seconds


def time_in_a_row(
    spread: Callable[..., Any], function: Callable[..., Any], inputs: Sequence[tuple], *, runs: int
) -> tuple[list[float], int | None]:
    """Times calls inside jit, and counts the bytes that they send over NVLink.

    Args:
      spread: makes of a function a jitted one.
      function: what to time.
      inputs: argument tuples, gone through in turn.
      runs: how many times to give.

    Returns:
      for each run the seconds a call, the mean of `calls_in_a_row()`, timed until the last of them is done; and the
      bytes a call over all runs, as `Result.link_moved`.
    """
    each, turn = calls_in_a_program(), itertools.cycle(inputs)
    program = spread(lambda *many: [function(*arguments) for arguments in many])

    def call() -> Any:
        return program(*itertools.islice(turn, each))

    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    # Where programs take long fewer of them are enough, and their results take less memory.
    enough = int(0.03 / (time.perf_counter() - start))
    programs = max(1, min(calls_in_a_row() // each, enough))
    seconds = []
    before = _link_counters()  # while the devices are idle, as they are after the last run
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(programs):
            last = call()
        jax.block_until_ready(last)
        seconds.append((time.perf_counter() - start) / (programs * each))
    moved = link_counters.moved(before, _link_counters())
    return seconds, None if moved is None else round(moved / (runs * programs * each))


def _link_counters() -> link_counters.Counters | None:
    """The counters now; nvidia-smi is not asked where no call can cross NVLink."""
    several_gpus = jax.default_backend() == "gpu" and jax.device_count() > 1
    return link_counters.read() if several_gpus else None


def time_enqueue(function: Callable[..., Any], inputs: Sequence[tuple], *, runs: int, warm_up: int = 3) -> list[float]:
    """Seconds from a call to its return, results not yet ready: the host's time.

    Devices and host have rested for a millisecond before each, whatever the function: how long a host's threads take to
    wake up depends on how long they slept.
    """
    turn = itertools.cycle(inputs)
    seconds = []
    for number in range(warm_up + runs):
        arguments = next(turn)
        time.sleep(1e-3)
        start = time.perf_counter()
        result = function(*arguments)
        seconds.append(time.perf_counter() - start)
        jax.block_until_ready(result)
        del result
        if number < warm_up:
            seconds.clear()
    return seconds
