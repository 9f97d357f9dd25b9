"""Timing of jitted functions: warm, on inputs that take turns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def calls_in_a_row() -> int:
    """Calls that are enqueued in a row for one time: many, so that starting and ending them weighs little.

    On CPU fewer, as XLA's CPU devices may starve each other with more than 32 programs in flight.
    """
    return 40 if jax.default_backend() == "gpu" else 10


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


def time_in_a_row(function: Callable[..., Any], inputs: Sequence[tuple], *, runs: int, warm_up: int = 2) -> list[float]:
    """Seconds a call: for each run the mean of `calls_in_a_row()`, timed until the last of them is done.

    The host's work hides behind the device's: it is the device's time, unless the host takes longer than the device.
    """
    turn = itertools.cycle(inputs)
    for _ in range(warm_up):
        jax.block_until_ready(function(*next(turn)))
    seconds, calls = [], calls_in_a_row()
    for _ in range(runs):
        start = time.perf_counter()
        last = None
        for _ in range(calls):
            last = function(*next(turn))
        jax.block_until_ready(last)
        seconds.append((time.perf_counter() - start) / calls)
    return seconds


def time_enqueue(function: Callable[..., Any], inputs: Sequence[tuple], *, runs: int, warm_up: int = 3) -> list[float]:
    """Seconds from a call to its return, with nothing else enqueued: the host's time, results not yet ready."""
    turn = itertools.cycle(inputs)
    seconds = []
    for number in range(warm_up + runs):
        arguments = next(turn)
        start = time.perf_counter()
        result = function(*arguments)
        seconds.append(time.perf_counter() - start)
        jax.block_until_ready(result)
        del result
        if number < warm_up:
            seconds.clear()
    return seconds
