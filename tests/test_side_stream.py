"""cuda/side_stream.cc with a CUDA runtime that only writes down what it is asked for: no GPU is needed."""

import shutil
import subprocess
from pathlib import Path

import pytest
from test_kernels_on_cpu import CXX

ROOT = Path(__file__).parents[1]


def test_what_it_asks_of_cuda(tmp_path):
    if shutil.which(CXX) is None:
        pytest.skip(f"no C++ compiler ({CXX})")
    fake = ROOT / "tests" / "cuda" / "side_stream"
    sources = [fake / "main.cc", ROOT / "cuda" / "side_stream.cc"]
    build = [CXX, "-std=c++17", "-Wall", "-Werror", f"-I{fake}", f"-I{ROOT}", *sources, "-o", tmp_path / "main"]
    compiled = subprocess.run(build, capture_output=True, text=True, timeout=200)
    assert compiled.returncode == 0, compiled.stderr
    ran = subprocess.run([tmp_path / "main"], capture_output=True, text=True, timeout=20)
    assert (ran.returncode, ran.stdout) == (0, "right\n"), ran.stdout + ran.stderr
