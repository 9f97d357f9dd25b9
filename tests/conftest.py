"""Eight CPU devices, reproducible draws, and a visible reason where a test needs a GPU."""

import os

# Read when JAX is imported. Twice as many host threads as devices: with fewer, programs in flight can starve
# each other of the threads that their collectives wait for.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("NPROC", "16")

import functools  # noqa: E402

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile(
    "fixed",  # the same draws in every run: what CI and a plain `pytest` use
    max_examples=50,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "explore",  # HYPOTHESIS_PROFILE=explore pytest ...: new draws each time, and more of them
    hypothesis.settings.get_profile("fixed"),
    max_examples=500,
    derandomize=False,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@functools.cache
def gpus() -> list[jax.Device]:
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped, with the reason, where there is none")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not gpus():
        pytest.skip("needs a GPU, and jax.devices('gpu') finds none")


@pytest.fixture(scope="session")
def cpus() -> list[jax.Device]:
    """The CPU devices, also where the default backend is another one."""
    return jax.devices("cpu")
