"""The compiled module, which may be absent: loaded at first use, never by `import jax_ep`."""

import functools
from types import ModuleType
from typing import NamedTuple, TypedDict

from jax_ep._version import __version__


class Extension(NamedTuple):
    """The compiled module, or None, and in words why."""

    module: ModuleType | None
    reason: str


class BuildInfo(TypedDict):
    """What is in this installation. An empty tuple means none."""

    version: str
    extension: str | None
    reason: str
    ffi_api: tuple[int, int] | None
    cpu_handlers: tuple[str, ...]
    kernels: tuple[str, ...]
    cuda: str | None


@functools.cache
def load() -> Extension:
    """Loads the compiled module once. Never raises: without it everything runs by the pure-JAX reference."""
    try:
        import jax_ep._extension as extension
    except ModuleNotFoundError:
        return Extension(None, "the compiled module is not installed; `pip install .` builds it")
    except ImportError as error:
        return Extension(None, f"the compiled module does not load ({error}); reinstall it for this Python")
    return Extension(extension, "the compiled module is loaded")


def require() -> ModuleType:
    """The compiled module. Raises RuntimeError with the reason where there is none."""
    module, reason = load()
    if module is None:
        raise RuntimeError(f"jax_ep: expected the compiled module, got none: {reason}")
    return module


def build_info() -> BuildInfo:
    """Says what was compiled into this installation. Starts no backend and touches no device.

    Returns:
      A dict: `version` of the package; `extension`, the path of the compiled module, or None; `reason`, in
      words, why it is there or not; `ffi_api`, the (major, minor) XLA FFI API it was built for, or None;
      `cpu_handlers` and `kernels`, the operations it holds for CPU and for CUDA; `cuda`, the version of the
      toolkit that compiled the kernels, or None.

    Example:
      >>> jax_ep.build_info()["cpu_handlers"]
      ('jax_ep_layout',)
    """
    module, reason = load()
    info: BuildInfo = {
        "version": __version__,
        "extension": None,
        "reason": reason,
        "ffi_api": None,
        "cpu_handlers": (),
        "kernels": (),
        "cuda": None,
    }
    if module is not None:
        info["extension"] = module.__file__
        info.update(module.build_info())
    return info
