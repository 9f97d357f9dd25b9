"""What crossed NVLink by the GPUs' counters: read right, a call's share, and not asked for where nothing can cross."""

from __future__ import annotations

import itertools
import os
import types
from pathlib import Path

import jax
import pytest

from jax_ep.bench import link_counters, timing

SAMPLE = """\
GPU 0: NVIDIA H200 (UUID: GPU-30ca0e2d-0000-0000-0000-000000000000)
\t Link 0: Data Tx: 772403 KiB
\t Link 0: Data Rx: 740065 KiB
\t Link 1: Data Tx: 770299 KiB
\t Link 1: Data Rx: 3 KiB
GPU 1: NVIDIA H200 (UUID: GPU-5b1c2d3e-0000-0000-0000-000000000000)
\t Link 0: Data Tx: N/A
\t Link 0: Data Rx: N/A
GPU 10: NVIDIA H200 (UUID: GPU-7f8a9b0c-0000-0000-0000-000000000000)
\t Link 17: Data Tx: 0 KiB
\t Link 17: Data Rx: 1 KiB
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that counts up: of GPU 0 40 KiB sent and 60 received between two readings, of GPU 1 75 sent over two links
    and 50 received. The file has a line for each time that it was asked."""
    asked = tmp_path / "asked"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"""#!/bin/sh
[ "$*" = "nvlink -gt d" ] || exit 2
echo >> {asked}
n=$(wc -l < {asked})
printf 'GPU 0: NVIDIA H200 (UUID: GPU-0)\\n'
printf '\\t Link 0: Data Tx: %d KiB\\n\\t Link 0: Data Rx: %d KiB\\n' $((100000 + n * 40)) $((n * 60))
printf 'GPU 1: NVIDIA H200 (UUID: GPU-1)\\n'
printf '\\t Link 0: Data Tx: %d KiB\\n\\t Link 0: Data Rx: %d KiB\\n' $((n * 35)) $((7 + n * 50))
printf '\\t Link 1: Data Tx: %d KiB\\n\\t Link 1: Data Rx: 9 KiB\\n' $((n * 40))
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return asked


def test_links_are_added_up_for_each_gpu():
    # 772403 + 770299 = 1542702 and 740065 + 3 = 740068 KiB, of 1024 bytes
    assert link_counters.parse(SAMPLE) == {0: (1579726848, 757829632), 10: (0, 1024)}


def test_the_busiest_gpu_and_direction_count(nvidia_smi):
    first, second, third = (link_counters.read() for _ in range(3))
    assert link_counters.moved(first, second) == 75 * 1024
    assert link_counters.moved(first, third) == 150 * 1024
    received = {0: (5, 5), 1: (5, 5)}, {0: (6, 9), 1: (8, 7)}
    assert link_counters.moved(*received) == 4


@pytest.mark.parametrize("program", ["exit 1", "echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'", "echo 'Not Supported'", None])
def test_nothing_counts(program, tmp_path, monkeypatch):
    if program:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert link_counters.read() is None


def test_two_readings_of_other_gpus_say_nothing():
    counted = {0: (1, 1)}
    assert link_counters.moved(None, counted) is link_counters.moved(counted, None) is None
    assert link_counters.moved(counted, {0: (2, 2), 1: (2, 2)}) is None


def test_a_call_moves_its_share(nvidia_smi, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    clock = itertools.count(0, 1e-6)  # by which programs are short, so that a run has as many as it may
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    asked_before = []  # of each call of `function`, which a program makes ten of

    def function(x):
        asked_before.append(nvidia_smi.exists() and len(nvidia_smi.read_text()))
        return x

    seconds, moved = timing.time_in_a_row(lambda many: many, function, [(0,)], runs=2)
    assert len(seconds) == 2
    # Two programs to warm up, then all that is timed between the first reading and the second: 2 times 100 calls.
    assert asked_before == [False] * 20 + [1] * 200
    assert len(nvidia_smi.read_text()) == 2
    assert moved == 384  # 75 * 1024 / 200


@pytest.mark.parametrize(("backend", "devices"), [("cpu", 8), ("gpu", 1)])
def test_nobody_is_asked_where_nothing_can_cross(backend, devices, nvidia_smi, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    _, moved = timing.time_in_a_row(lambda many: many, lambda x: x, [(0,)], runs=1)
    assert moved is None and not nvidia_smi.exists()
