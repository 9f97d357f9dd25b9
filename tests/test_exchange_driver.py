"""The kernels without JAX, every rank a stream of one process: tests/cuda/exchange_driver.cu, built beforehand."""

import os
import subprocess

import pytest

pytestmark = pytest.mark.gpu
DRIVER = "JAX_EP_EXCHANGE_DRIVER"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    driver = os.environ.get(DRIVER)
    if not driver:
        pytest.skip(f"{DRIVER} is not set to the built driver (CONTRIBUTING.md, On GPUs)")
    return subprocess.run([driver, *options], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("options", [[], ["--delay", "--seed", "1"], ["--ranks", "8", "--cases", "20", "--seed", "2"]])
def test_every_result_is_right(options):
    result = run(*options)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    checks, wrong = result.stdout.splitlines()[-1].split(" checks, ")
    assert int(checks) > 0
    assert wrong == "0 wrong"


def test_a_changed_bit_is_found():
    result = run("--quick", "--spoil")
    assert result.returncode == 1, result.stdout[-4000:] + result.stderr[-4000:]
    assert "wrong: operation" in result.stdout
