"""Who may import whom. The table below is the design; a new module is added here first."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The compiled module, for those that name it in the table and nobody above them.
EXTENSION = "_extension"
# Module: the modules right below it. What those may import, it may import too.
BELOW: dict[str, tuple[str, ...]] = {
    "_version": (),
    "_native": ("_version", EXTENSION),
    "config": (),
    "topology": (),
    "router": (),
    "quantize": (),
    "layout": ("config",),
    "reference": ("layout", "quantize"),
    "bootstrap": ("topology", "config", "_native"),
    "group": ("bootstrap",),
    "ffi": ("_native", "layout"),
    "guard": (),
    "call": (),
    "kernels": ("ffi", "quantize", "call"),
    "primitives": ("reference", "group", "guard", "kernels"),
    "wire": ("primitives",),
    "ops": ("wire",),
    "tie": (),
    "halves": ("primitives", "tie"),
    "pending": ("ops", "halves"),
    "experts": (),
    "sharding": (),
    "moe": ("pending", "router", "experts", "sharding"),
    "presets": ("moe",),
    "flax": ("moe",),
}
# These use the package as its users do: `import jax_ep`, and any module without an underscore.
OUTSIDE = ("bench", "doctor", "__main__")
# What `import jax_ep` must not pull in.
NOT_IN_INIT = ("flax", *OUTSIDE)

# Packages from elsewhere, over and above the standard library.
LIBRARIES: dict[str, set[str]] = {
    "_version": set(),
    "_native": set(),
    "flax": {"jax", "numpy", "flax"},
    "bench": {"jax", "numpy", "matplotlib"},
}
DEFAULT_LIBRARIES = {"jax", "numpy"}

CXX_SUFFIXES = {".h", ".cuh", ".cc", ".cu"}
STANDARD_HEADER = r"[a-z_0-9]+"
XLA_FFI_INCLUDES = re.compile(rf"{STANDARD_HEADER}|nanobind/.+|xla/ffi/api/\w+\.h|(cuda|xla_ffi)/\w+\.h")
# Nothing of XLA, of the handlers or of Python: a launcher takes plain pointers, sizes and a stream.
CUDA_FORBIDDEN = re.compile(r"\bxla::|\bXLA_FFI|[\"<](\.\./)?(xla|xla_ffi|nanobind)/|[\"<]Python\.h")


def allowed_modules(module: str) -> set[str]:
    """The modules below `module`, at any depth."""
    if module == "__init__":
        return {m for m in BELOW if m not in NOT_IN_INIT}
    if module in OUTSIDE:
        return {"__init__", *OUTSIDE, *(m for m in BELOW if not m.startswith("_"))}
    return set(BELOW[module]).union(*(allowed_modules(m) - {EXTENSION} for m in BELOW[module] if m in BELOW))


def imports(tree: ast.AST, package: str) -> list[tuple[int, str]]:
    """Every imported name with its line, made absolute, inside functions too; "." points at `package`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            anchor = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*anchor, *([node.module] if node.module else [])])
            # `from jax_ep import layout` may name a module; `from jax_ep.layout import f` does so already.
            found += [(node.lineno, f"{base}.{a.name}" if base == "jax_ep" else base) for a in node.names]
    return found


def python_violations(module: str, source: str, package: str = "jax_ep") -> list[str]:
    """What is wrong with `source` as jax_ep/`module`.py (or a file of the folder jax_ep/`module`/)."""
    if module != "__init__" and module not in BELOW and module not in OUTSIDE:
        return [f"jax_ep/{module} is not in the table: add it to BELOW in tests/test_layering.py"]
    known = {"__init__", EXTENSION, *BELOW, *OUTSIDE}
    modules = allowed_modules(module) | ({module} if package != "jax_ep" else set())
    libraries = LIBRARIES.get(module, DEFAULT_LIBRARIES)
    wrong = []
    for line, name in imports(ast.parse(source), package):
        top, *rest = name.split(".")
        if top == "jax_ep":
            target = rest[0] if rest and rest[0] in known else "__init__"
            if target not in modules:
                wrong.append(f"jax_ep/{module}:{line} imports {name}; it may import {sorted(modules)}")
        elif top not in libraries and top not in sys.stdlib_module_names:
            wrong.append(f"jax_ep/{module}:{line} imports {top}; it may import {sorted(libraries)}")
    return wrong


def cxx_violations(folder: str, name: str, source: str) -> list[str]:
    """What is wrong with `source` as `folder`/`name`; comments don't count."""
    code = re.sub(r"/\*.*?\*/|//[^\n]*", "", source, flags=re.DOTALL)
    if folder == "cuda":
        return [f"cuda/{name}: {m[0]} belongs in xla_ffi/" for m in CUDA_FORBIDDEN.finditer(code)]
    included = re.findall(r"^\s*#\s*include\s*[\"<]([^\">]+)[\">]", code, flags=re.MULTILINE)
    return [f"xla_ffi/{name}: may not include {i}" for i in included if not XLA_FFI_INCLUDES.fullmatch(i)]


def test_python_layers() -> None:
    wrong = []
    for path in sorted((ROOT / "jax_ep").rglob("*.py")):
        parts = path.relative_to(ROOT / "jax_ep").with_suffix("").parts
        package = ".".join(["jax_ep", *parts[:-1]])
        wrong += python_violations(parts[0], path.read_text(), package)
    assert not wrong, "\n".join(wrong)


def test_cxx_layers() -> None:
    wrong, files = [], 0
    for folder in ("cuda", "xla_ffi"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in CXX_SUFFIXES:
                files += 1
                wrong += cxx_violations(folder, path.name, path.read_text())
    assert files
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "module, source",
    [
        ("config", "import jax_ep.layout"),
        ("router", "from jax_ep import config"),
        ("layout", "from . import reference"),
        ("layout", "from .reference import dispatch"),
        ("reference", "def f():\n    from jax_ep.group import Group"),
        ("group", "from jax_ep._extension import build_info"),
        ("group", "from jax_ep import create_group"),
        ("_native", "import jax"),
        ("moe", "from flax import nnx"),
        ("moe", "import optax"),
        ("__init__", "from jax_ep import flax as flax"),
        ("bench", "from jax_ep._native import load"),
        ("newcomer", ""),
    ],
)
def test_python_violation_is_found(module: str, source: str) -> None:
    assert len(python_violations(module, source)) == 1


@pytest.mark.parametrize(
    "module, source",
    [
        ("config", "import functools\nimport jax.numpy as jnp\nimport numpy as np"),
        ("_native", "import jax_ep._extension as extension"),
        ("ops", "from .config import Group\nfrom jax_ep import primitives\nfrom jax_ep._native import load"),
        ("flax", "from flax import nnx\nfrom jax_ep import moe"),
        ("__init__", "from jax_ep.moe import moe as moe"),
        ("bench", "import jax_ep\nfrom jax_ep import dispatch, create_group"),
    ],
)
def test_python_use_is_allowed(module: str, source: str) -> None:
    assert python_violations(module, source) == []


@pytest.mark.parametrize(
    "folder, source",
    [
        ("cuda", '#include "xla/ffi/api/ffi.h"'),
        ("cuda", "void launch(xla::ffi::AnyBuffer rows);"),
        ("cuda", '#include "../xla_ffi/module.h"'),
        ("cuda", "#include <nanobind/nanobind.h>"),
        ("xla_ffi", '#include "xla/service/hlo.h"'),
        ("xla_ffi", "#  include <cuda_runtime.h>"),
        ("xla_ffi", '#include "cuda/internal/kernel.cuh"'),
    ],
)
def test_cxx_violation_is_found(folder: str, source: str) -> None:
    assert len(cxx_violations(folder, "made_up", source)) == 1


def test_cxx_use_is_allowed() -> None:
    headers = ("<cstdint>", '"cuda/layout.h"', '"xla/ffi/api/ffi.h"', "<nanobind/nanobind.h>")
    assert cxx_violations("xla_ffi", "made_up", "\n".join(f"#include {h}" for h in headers)) == []
    assert cxx_violations("cuda", "made_up", "// no xla:: here\n#include <cuda_runtime.h>\n") == []
