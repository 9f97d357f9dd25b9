"""What the GPUs' own counters say crossed NVLink.

They count payload, not the packets' heads, over all links of a GPU, whoever moved it: a process beside this one, too.
"""

from __future__ import annotations

import re

from jax_ep.bench.record import output_of

Counters = dict[int, tuple[int, int]]
"""Bytes sent and received by each GPU of the host, by its number, since some moment in the past."""


def read() -> Counters | None:
    """The counters now; None where there is no nvidia-smi, where it fails, or where it lists none."""
    return parse(output_of("nvidia-smi", "nvlink", "-gt", "d")) or None


def parse(text: str) -> Counters:
    """Sums over the links of each GPU in what nvidia-smi prints; without GPUs of which it prints no numbers."""
    counters = {}
    for part in re.split("^GPU ", text, flags=re.MULTILINE)[1:]:
        sent, received = (re.findall(rf"Data {direction}: (\d+) KiB", part) for direction in ("Tx", "Rx"))
        if sent and received:
            counters[int(part.partition(":")[0])] = 1024 * sum(map(int, sent)), 1024 * sum(map(int, received))
    return counters


def moved(before: Counters | None, after: Counters | None) -> int | None:
    """Bytes that the busiest GPU sent or received in between, in one direction; None where nothing counted."""
    if before is None or after is None or before.keys() != after.keys():
        return None
    return max(now - then for gpu in after for now, then in zip(after[gpu], before[gpu], strict=True))
