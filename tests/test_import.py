"""What `import jax_ep` loads: no backend, nothing of CUDA, no optional package."""

import json
import subprocess
import sys

import pytest

import jax_ep
from jax_ep import _native

REPORT = """
import json, sys
from jax._src import xla_bridge
try:
    maps = open("/proc/self/maps").read()
except OSError:
    maps = ""
print(json.dumps({
    "backends": sorted(xla_bridge._backends),
    "modules": sorted(sys.modules),
    "libraries": sorted({line.split("/")[-1] for line in maps.splitlines() if "/" in line}),
}))
"""
OPTIONAL = ("flax", "optax", "orbax", "matplotlib", "tqdm", "jax_ep._extension", "jax_ep.flax")
CUDA = ("libcuda", "libcudart", "libnvshmem", "libnccl", "xla_cuda_plugin")


def loaded_after(statement: str) -> dict[str, list[str]]:
    """What a fresh interpreter holds after `statement`."""
    command = [sys.executable, "-c", f"{statement}\n{REPORT}"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120).stdout)


def test_import_loads_nothing_more() -> None:
    loaded = loaded_after("import jax_ep")
    assert loaded["backends"] == []
    assert [m for m in loaded["modules"] if m in OPTIONAL] == []
    assert [lib for lib in loaded["libraries"] if lib.startswith(CUDA)] == []


def test_report_sees_what_it_looks_for() -> None:
    loaded = loaded_after("import ctypes, flax, jax; jax.local_devices(backend='cpu'); import jax_ep")
    assert "cpu" in loaded["backends"]
    assert "flax" in loaded["modules"]
    if sys.platform == "linux":
        assert any(lib.startswith("_ctypes") for lib in loaded["libraries"])


def test_build_info_starts_no_backend() -> None:
    assert loaded_after("import jax_ep; jax_ep.build_info()")["backends"] == []


def test_build_info_names_the_version() -> None:
    info = jax_ep.build_info()
    assert info["version"] == jax_ep.__version__
    assert bool(info["kernels"]) == (info["cuda"] is not None)
    assert ("jax_ep_layout" in info["cpu_handlers"]) == (info["extension"] is not None)
    assert (info["extension"] is None) == (info["ffi_api"] is None)


def test_build_info_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    _native.load.cache_clear()
    monkeypatch.setitem(sys.modules, "jax_ep._extension", None)  # makes its import fail
    try:
        info = jax_ep.build_info()
    finally:
        _native.load.cache_clear()
    assert info["extension"] is None
    assert "pip install" in info["reason"]
    assert info["cpu_handlers"] == info["kernels"] == ()


def test_build_targets_the_oldest_ffi_api() -> None:
    """Headers of jaxlib 0.10.x, whatever runs: a newer API would be refused by 0.10.x."""
    info = jax_ep.build_info()
    if info["extension"] is None:
        pytest.skip(info["reason"])
    assert info["ffi_api"] is not None and info["ffi_api"] <= (0, 3)
