"""What ran when on one device, by JAX's profiler."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

STREAM = re.compile(r"Stream #(\d+)")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel or copy.

    Attributes:
      name: as the profiler has it.
      stream: its number.
      start_us: from the first one's start.
      duration_us: how long it ran.
    """

    name: str
    stream: int
    start_us: float
    duration_us: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The kernels of one run on the first device."""

    name: str
    kernels: tuple[Kernel, ...]


def take(name: str, run: Callable[[], Any], warm_up: int = 2) -> Timeline:
    """The timeline of one call of `run`, whose results are awaited. Empty where the profiler sees no GPU."""
    for _ in range(warm_up):
        jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        return Timeline(name, kernels_of(jax.profiler.ProfileData.from_file(str(path)).planes))


def kernels_of(planes: Iterable[Any]) -> tuple[Kernel, ...]:
    """Those on the first GPU, by their start."""
    found = [
        (event.name, int(stream[1]), event.start_ns, event.duration_ns)
        for plane in planes
        if plane.name.startswith("/device:GPU:0")
        for line in plane.lines
        if (stream := STREAM.match(line.name))
        for event in line.events
    ]
    first = min((start for _, _, start, _ in found), default=0)
    kernels = [Kernel(n, s, round((t - first) / 1e3, 2), round(d / 1e3, 2)) for n, s, t, d in found]
    return tuple(sorted(kernels, key=lambda kernel: kernel.start_us))
