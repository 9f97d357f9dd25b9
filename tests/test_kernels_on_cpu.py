"""The kernels' own sources on the CPU (tests/cuda/emulator), each result compared by tests/cuda/exchange_driver.cu."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

EMULATOR = Path(__file__).parent / "cuda" / "emulator"
CXX = os.environ.get("CXX", "g++")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(CXX) is None:
        pytest.skip(f"no C++ compiler ({CXX})")
    folder = tmp_path_factory.mktemp("emulator")
    build = subprocess.run([EMULATOR / "build.sh", folder], capture_output=True, text=True, timeout=280)
    assert build.returncode == 0, build.stdout + build.stderr
    return folder / "emulated_driver"


def run(driver: Path, seed: int, *options: str) -> subprocess.CompletedProcess[str]:
    # A kernel waits a second for its peers: of the emulator's time, in which little takes as long as a millisecond.
    command = [driver, "--seed", str(seed), "--timeout", "1", *options]
    environment = {**os.environ, "JAX_EP_EMULATOR_SEED": str(seed)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(
    "seed, options", [(0, ["--quick"]), (1, ["--quick", "--delay"]), (2, ["--cases", "20"]), (3, ["--quick"])]
)
def test_every_result_is_right(driver: Path, seed: int, options: list[str]) -> None:
    result = run(driver, seed, *options)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    summary = re.fullmatch(r"(\d+) checks, 0 wrong", result.stdout.splitlines()[-1])
    assert summary is not None, result.stdout[-4000:]
    assert int(summary[1]) > 500


def test_a_changed_bit_is_found(driver: Path) -> None:
    result = run(driver, 0, "--quick", "--spoil")
    assert result.returncode == 1, result.stdout[-4000:] + result.stderr[-4000:]
    assert "wrong: operation" in result.stdout
