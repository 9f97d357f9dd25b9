"""Kernels with a rank in each of several processes, on one GPU or two; and how a program ends whose ranks disagree.

What runs in the processes is tests/kernel_worker.py. A kernel that ends its program takes the CUDA context with it, so
such programs have processes of their own, too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import processes
import pytest
import world
from test_kernels import GRAPHS

TESTS = Path(__file__).parent
LIMIT = 150.0  # seconds for all of it


def run(folder: Path, mode: str, platform: str, places: tuple[int, ...], flags: str = "") -> list[str]:
    """What the workers wrote, a rank on each of the GPUs `places` (which may be one GPU); all must end well."""
    if platform == "gpu":
        world.mesh(1 + max(places), on="gpu")  # or skips
    address = processes.free_address()
    logs = [folder / f"rank{number}" for number in range(len(places))]
    children = []
    try:
        for number, place in enumerate(places):
            variables = processes.environment(address, len(places), number) | {
                "JAX_PLATFORMS": {"cpu": "cpu", "gpu": "cuda,cpu"}[platform],
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1",
                "PYTHONUNBUFFERED": "1",
            }
            variables["XLA_FLAGS"] += f" {flags}"
            if platform == "gpu":
                variables["JAX_LOCAL_DEVICE_IDS"] = str(place)
            command = [sys.executable, str(TESTS / "kernel_worker.py"), mode, platform]
            with open(logs[number], "wb") as file:
                children.append(processes.start(command, variables, TESTS.parent, file))
        stopped = processes.wait(children, grace=10, limit=LIMIT)
    finally:
        for child in children:
            processes.stop(child)
    outputs = [log.read_text(errors="replace") for log in logs]
    codes = [child.returncode for child in children]
    whole = "\n".join(f"== rank {n}, exit code {codes[n]}\n{output}" for n, output in enumerate(outputs))
    print(whole)  # pytest shows it where the test fails
    assert not stopped, f"ranks {stopped} had to be stopped"
    assert codes == [0] * len(codes)
    return outputs


def on_gpus(*places: int):
    ranks = f"{len(places)} on {1 + max(places)}"
    return pytest.param("gpu", places, marks=pytest.mark.gpu, id=f"gpu-{ranks}")


@pytest.mark.parametrize(
    ("platform", "places"),
    [
        pytest.param("cpu", (0, 0), id="cpu-2"),
        on_gpus(0),
        on_gpus(0, 0),
        on_gpus(0, 0, 0),
        on_gpus(0, 0, 0, 0),
        on_gpus(0, 1),
    ],
)
def test_every_bit_is_the_oracles(tmp_path, platform, places):
    for output in run(tmp_path, "conformance", platform, places):
        assert output.count("right") == 4


@pytest.mark.parametrize(
    ("platform", "places"), [pytest.param("cpu", (0, 0), id="cpu-2"), on_gpus(0, 0), on_gpus(0, 0, 0), on_gpus(0, 1)]
)
def test_every_bit_is_the_oracles_between_start_and_done(tmp_path, platform, places):
    for output in run(tmp_path, "halves", platform, places):
        assert output.count("right") == 4


@pytest.mark.parametrize(
    ("platform", "flags"),
    [
        pytest.param("cpu", "", id="cpu"),
        pytest.param("gpu", GRAPHS["none"], marks=pytest.mark.gpu, id="gpu-no graphs"),
        pytest.param("gpu", GRAPHS["of all calls"], marks=pytest.mark.gpu, id="gpu-graphs"),
    ],
)
def test_a_program_of_a_closed_group(tmp_path, platform, flags):
    """With kernels it raises. One of the reference runs on, since its group held nothing."""
    (output,) = run(tmp_path, "closed", platform, (0,), flags)
    if platform == "cpu":
        assert "rank 0: returned" in output
        return
    assert "rank 0: raised: " in output
    by_host = r"rank 0: raised: .*expected an open group \d+ on device 0, got none; it was closed"
    by_kernel = r"jax_ep: group \d+, layout: the group was closed, and a program that was compiled for it still runs"
    assert re.search(by_kernel if flags == GRAPHS["of all calls"] else by_host, output)


@pytest.mark.gpu
def test_a_rank_that_stays_away(tmp_path):
    first, second = run(tmp_path, "absent", "gpu", (0, 0))
    assert "rank 0: raised: " in first and "raised" not in second
    message = r"jax_ep: group \d+, [\w ]+: rank 0 waited 4\.0 s for rank 1, which is at epoch (\d+) of (\d+); is it"
    said = re.search(message, first)
    assert said, "no message of the kernel"
    assert 1 <= int(said[1]) == int(said[2]) - 1, "it waits in the epoch after the last that both finished"
    assert "waited" not in second


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "places"), [("shapes", (0, 1)), ("swapped", (0, 1))])
def test_ranks_at_different_calls(tmp_path, mode, places):
    # XLA shares out the tuning of a program among processes: with different programs each would wait for the others.
    flags = "--xla_gpu_shard_autotuning=false"
    for rank, output in enumerate(run(tmp_path, mode, "gpu", places, flags)):
        assert f"rank {rank}: raised: " in output
        sites = rf"rank {rank} is at call site [0-9a-f]+ and rank {1 - rank} at [0-9a-f]+, both in epoch \d+"
        assert re.search(rf"jax_ep: group \d+, [\w ]+: {sites}; the ranks run different programs", output)
