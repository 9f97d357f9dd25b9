"""Timing of jitted functions: warm, one run at a time, on inputs that take turns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


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
