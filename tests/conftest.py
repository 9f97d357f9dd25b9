"""Eight CPU devices, in one process or in several, reproducible draws, and a visible reason where a test is skipped."""

import os
from collections.abc import Generator
from typing import Any

import processes

# Read when JAX is imported. Twice as many host threads as devices: with fewer, programs in flight can starve
# each other of the threads that their collectives wait for.
os.environ.setdefault("XLA_FLAGS", processes.device_flag(int(os.environ.get(processes.COUNT, "1"))))
os.environ.setdefault("NPROC", "16")

import functools  # noqa: E402

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
import world  # noqa: E402

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
if world.COUNT > 1:
    hypothesis.settings.register_profile(
        "processes",  # all processes must draw alike: nothing from a database, nothing that looks at a clock
        hypothesis.settings.get_profile(hypothesis.settings.get_current_profile_name()),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],  # shrinking has a time limit
    )
    hypothesis.settings.load_profile("processes")

OUTCOME = pytest.StashKey[str]()


@functools.cache
def gpus() -> list[jax.Device]:
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, metavar="N", help="run in N processes under jax.distributed")
    parser.addoption(
        "--on", choices=("cpu", "gpu"), default="cpu", help="devices of the tests that take theirs from tests/world.py"
    )


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """With --processes, in the process that was asked: the tests run in others."""
    count = config.option.processes
    if count == 1 or world.COUNT > 1:
        return None
    if not 1 < count <= processes.DEVICES:
        raise pytest.UsageError(f"--processes: expected 1 to {processes.DEVICES}, got {count}")
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("--processes: expected no -n, as all processes run the same tests in the same order")
    return processes.launch(config.invocation_params.args, count, config.invocation_params.dir)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped, with the reason, where there is none")
    config.addinivalue_line("markers", "processes: runs in several processes, too (pytest --processes 2)")
    world.platform = config.option.on
    if world.platform == "gpu":  # float32 means float32: the default would be TF32
        jax.config.update("jax_default_matmul_precision", "highest")
    if world.COUNT > 1:
        world.join()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if world.COUNT > 1 and not item.get_closest_marker("processes"):
        pytest.skip("runs in one process only: without the mark `processes`")
    if item.get_closest_marker("gpu") and not gpus():
        pytest.skip("needs a GPU, and jax.devices('gpu') finds none")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, pytest.TestReport]:
    """In several processes a test ends alike in all, or it fails in all; and then no collective can be trusted."""
    report = yield
    if report.outcome != "passed":
        item.stash[OUTCOME] = report.outcome
    if world.COUNT > 1 and call.when == "teardown" and item.get_closest_marker("processes"):
        difference = world.disagreement(item.nodeid, item.stash.get(OUTCOME, "passed"))
        if difference:
            report.outcome, report.longrepr = "failed", difference
            item.session.shouldfail = f"the processes disagree: {difference}"
    return report


@pytest.fixture(scope="session")
def cpus() -> list[jax.Device]:
    """The CPU devices, also where the default backend is another one."""
    return jax.devices("cpu")


@pytest.fixture
def on_cpus(request: pytest.FixtureRequest) -> None:
    """For benchmarks, which take the default devices."""
    if jax.default_backend() != "cpu" and not request.node.get_closest_marker("gpu"):
        pytest.skip(f"the benchmark takes the default devices, and those are {jax.default_backend()}s here")
