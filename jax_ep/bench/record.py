"""Benchmark records: the one module that writes, reads and checks them.

A record is a JSON file `benchmarks/results/<benchmark>-<machine>-<date>.json`:
`{machine, versions, commit, date, results: [...]}`, each result a `Result`.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_ep.bench.timeline import Kernel, Timeline

OPS = (
    "layout",
    "dispatch",
    "combine",
    "dispatch_start",
    "dispatch_done",
    "combine_start",
    "combine_done",
    "enqueue",
    "moe_step",
    "matmul",
    "dispatch+matmul",
    "combine+matmul",
)
ROUTINGS = ("uniform", "zipf")
_VERSIONS_OF = ("jax", "jaxlib", "numpy", "flax") + tuple(
    name.format(cuda) for cuda in (13, 12) for name in ("jax-cuda{}-plugin", "nvidia-nvshmem-cu{}", "nvidia-nccl-cu{}")
)


@dataclasses.dataclass(frozen=True)
class Result:
    """One operation, measured.

    Attributes:
      op: one of `OPS`, or one of these with "_backward". "enqueue" is the host's time for dispatch and combine; "+"
        joins what runs at once or in turn, as the note says.
      implementation: "cuda", "reference", or a peer's name.
      ranks, tokens, hidden, top_k, num_experts: R, T a rank, H, K, E.
      dtype: of the tokens.
      row_order: "expert" or "rank".
      num_sms: SMs that the operation was given, or None where that says nothing.
      median_us, p10_us, p90_us: time of the whole operation in microseconds.
      link_bytes: bytes that must cross the busiest rank's link in one direction, or None.
      link_moved: bytes a call that the busiest GPU sent or received over NVLink in one direction, by its own counters,
        or None where nothing counts.
      limit_us: the time that these bytes take at the link's measured limit, or None.
      note: what else a reader must know.
      routing: how experts were picked, "uniform" or "zipf"; says nothing of a moe_step, which has a router.
    """

    op: str
    implementation: str
    ranks: int
    tokens: int
    hidden: int
    top_k: int
    num_experts: int
    dtype: str
    row_order: str
    median_us: float
    p10_us: float
    p90_us: float
    num_sms: int | None = None
    link_bytes: int | None = None
    link_moved: int | None = None
    limit_us: float | None = None
    note: str = ""
    routing: str = "uniform"

    @classmethod
    def of_times(cls, seconds: Sequence[float], **what: Any) -> Result:
        """A result from the times of single runs, in seconds."""
        p10, median, p90 = np.percentile(np.asarray(seconds) * 1e6, [10, 50, 90])
        return cls(median_us=round(median, 2), p10_us=round(p10, 2), p90_us=round(p90, 2), **what)

    @property
    def moved_over_must(self) -> float | None:
        """`link_moved` over `link_bytes`: 1 where only what must cross does. None where either says nothing."""
        return None if self.link_moved is None or not self.link_bytes else self.link_moved / self.link_bytes

    def check(self) -> None:
        """ValueError, naming the field, if a value cannot be right."""

        def require(holds: bool, field: str, expected: str) -> None:
            if not holds:
                raise ValueError(f"result {field}: expected {expected}, got {getattr(self, field)!r}")

        require(self.op.removesuffix("_backward") in OPS, "op", f"one of {OPS}, or one with _backward")
        require(bool(self.implementation), "implementation", "a name")
        for field in ("ranks", "hidden", "top_k", "num_experts"):
            require(isinstance(getattr(self, field), int) and getattr(self, field) >= 1, field, "at least 1")
        require(isinstance(self.tokens, int) and self.tokens >= 0, "tokens", "at least 0")
        require(self.row_order in ("expert", "rank"), "row_order", '"expert" or "rank"')
        require(self.routing in ROUTINGS, "routing", f"one of {ROUTINGS}")
        for field in ("p10_us", "median_us", "p90_us"):
            require(math.isfinite(getattr(self, field)) and getattr(self, field) > 0, field, "a time above 0")
        require(self.p10_us <= self.median_us <= self.p90_us, "median_us", "a value from p10_us to p90_us")


@dataclasses.dataclass(frozen=True)
class Record:
    """What one run of one benchmark on one machine measured."""

    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str
    date: str
    results: tuple[Result, ...]
    timelines: tuple[Timeline, ...] = ()

    @classmethod
    def here(cls, results: Sequence[Result], timelines: Sequence[Timeline] = (), **machine: Any) -> Record:
        """A record of results measured just now, on this machine; `machine` is what else was measured of it."""
        described = describe_machine() | {name: value for name, value in machine.items() if value is not None}
        return cls(described, describe_versions(), describe_commit(), _now(), tuple(results), tuple(timelines))

    def check(self) -> None:
        """ValueError if a part is missing or cannot be right."""
        for field in ("machine", "versions", "commit", "date", "results"):
            if not getattr(self, field):
                raise ValueError(f"record {field}: expected it to be filled in, got {getattr(self, field)!r}")
        if not re.fullmatch(r"[0-9a-f]{40}(\+changes)?", self.commit):
            raise ValueError(f"record commit: expected 40 hex digits, got {self.commit!r}")
        datetime.datetime.fromisoformat(self.date)
        for field in ("devices", "device_count"):
            if field not in self.machine:
                raise ValueError(f"record machine: expected {field!r} in it, got {sorted(self.machine)}")
        for result in self.results:
            result.check()

    def write(self, folder: Path, benchmark: str) -> Path:
        """Checks and writes the record into `folder`; returns its path. An older record is never overwritten."""
        self.check()
        folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.datetime.fromisoformat(self.date).strftime("%Y%m%dT%H%M%SZ")
        path = folder / f"{benchmark}-{self.machine['name']}-{stamp}.json"
        text = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)
        with path.open("x") as file:
            file.write(text + "\n")
        return path


def read(path: Path) -> Record:
    """Reads and checks a record."""
    fields = json.loads(path.read_text())
    try:
        results = tuple(Result(**result) for result in fields.pop("results"))
        timelines = tuple(
            Timeline(each["name"], tuple(Kernel(**kernel) for kernel in each["kernels"]))
            for each in fields.pop("timelines", ())
        )
        record = Record(**fields, results=results, timelines=timelines)
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path}: expected the fields of a benchmark record, got {error}") from None
    record.check()
    return record


def describe_machine() -> dict[str, Any]:
    """What was measured on: devices, their count, processor, driver."""
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    on_cpu = devices[0].platform == "cpu"
    name = f"cpu{os.cpu_count()}" if on_cpu else f"{len(devices)}x{kinds[0]}"
    machine = {
        "name": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"),
        "devices": kinds,
        "device_count": len(devices),
        "platform": devices[0].platform,
        "processor": _processor(),
        "cores": os.cpu_count(),
    }
    if not on_cpu:
        drivers = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        machine["driver"] = drivers.split("\n")[0]
    return machine


def describe_versions() -> dict[str, str]:
    """Versions of Python, jax_ep and what it runs on; those that are not installed are left out."""
    from jax_ep import __version__

    versions = {"python": platform.python_version(), "jax_ep": __version__}
    for package in _VERSIONS_OF:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def describe_commit() -> str:
    """The commit that ran, with "+changes" if the sources differ from it. JAX_EP_COMMIT names it where git cannot."""
    named = os.environ.get("JAX_EP_COMMIT")
    if named:
        return named
    root = Path(__file__).resolve().parents[2]
    commit = output_of("git", "-C", str(root), "rev-parse", "HEAD")
    if not commit:
        raise RuntimeError(
            "benchmark: expected to run from a git checkout, to name the commit in the record, got none at "
            f"{root}; set JAX_EP_COMMIT to the commit"
        )
    changed = output_of("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return commit + ("+changes" if changed else "")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def output_of(*command: str) -> str:
    """What a command prints, stripped; "" where there is none of that name, or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
