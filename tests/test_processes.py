"""`pytest --processes 2` runs what is marked for it, fails if any process fails, and leaves none waiting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import processes
import pytest

TESTS = Path(__file__).parent


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a test file; returns the arguments with which pytest runs it as if it lay beside this one."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])))

    def write(source: str) -> list[str]:
        header = (
            "import os, time\nimport jax, numpy as np, pytest, world\nfrom jax.sharding import PartitionSpec as P\n"
        )
        file = tmp_path / "test_written.py"
        file.write_text(header + textwrap.dedent(source))
        return ["-p", "conftest", "-p", "no:cacheprovider", "-ra", "--timeout=100", str(file)]

    return write


def test_arrays_span_the_processes_and_come_back_whole(write, tmp_path):
    arguments = write(
        """
        @pytest.mark.processes
        @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
        def test_split_and_summed(dtype):
            assert (jax.process_count(), len(jax.devices()), len(jax.local_devices())) == (2, 8, 4)
            mesh = world.mesh((4, 2), ("dp", "ep"))
            assert [device.process_index for device in mesh.devices.flat] == [0, 1] * 4
            bits = np.arange(16, dtype=np.uint8)
            x = bits.astype(dtype)
            f = jax.jit(jax.shard_map(
                lambda x, bits: (x[::-1], jax.lax.psum(bits, "ep"), x[:0]),
                mesh=mesh,
                in_specs=(P(("dp", "ep")), P(("dp", "ep"))),
                out_specs=(P(("dp", "ep")), P("dp"), P(("dp", "ep"))),
            ))
            given = world.put(mesh, (("dp", "ep"),), (x, bits))
            assert not given[0].is_fully_addressable
            flipped, summed, empty = world.fetch(f(*given))
            np.testing.assert_array_equal(flipped, x.reshape(8, 2)[:, ::-1].reshape(-1))
            np.testing.assert_array_equal(summed, bits.reshape(4, 2, 2).sum(1).reshape(-1))
            assert (flipped.dtype, empty.shape) == (x.dtype, (0,))


        @pytest.mark.processes
        def test_too_few_ranks():
            world.mesh(1)


        def test_of_one_process():
            raise AssertionError("runs in several")
        """
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "--processes", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed, 2 skipped" in done.stdout
    assert "runs in one process only" in done.stdout and "1 devices for 2 processes" in done.stdout
    assert done.stdout.count("test session starts") == 1, "one process has the terminal"


def test_a_failure_in_one_process_is_a_failure(write, tmp_path, capfd):
    arguments = write(
        """
        pytestmark = pytest.mark.processes


        def test_fails_everywhere():
            assert not jax.process_count(), "everywhere"


        def test_fails_in_one():
            assert jax.process_index() == 0, "in the second"


        def test_after_that():
            pass
        """
    )
    code = processes.launch(arguments, 2, tmp_path)
    first, second = capfd.readouterr().out.split("======== process 1 wrote")
    assert code == 1, first + second
    assert "passed in process 0, failed in process 1" in first and "passed in process 0, failed in process 1" in second
    assert "in the second" not in first and "in the second" in second
    # Who failed alone did not take part in what the others did: nothing after that means anything.
    assert "1 failed, 1 passed, 1 error" in first and "2 failed, 1 error" in second


def test_a_process_that_dies_takes_the_others_with_it(write, tmp_path, capfd):
    arguments = write(
        """
        @pytest.mark.processes
        def test_dies_in_one():
            if jax.process_index() == 1:
                os._exit(7)
            mesh = world.mesh(2)
            f = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "ep"), mesh=mesh, in_specs=P("ep"), out_specs=P()))
            f(world.put(mesh, "ep", np.ones(2))).block_until_ready()
            time.sleep(600)
        """
    )
    address = processes.free_address()
    command = [sys.executable, "-m", "pytest", *arguments]
    code = processes.run([command] * 2, [processes.environment(address, 2, n) for n in range(2)], tmp_path, grace=2)
    out = capfd.readouterr().out
    assert code, out
    assert "process 1: exit code 7" in out and "process 0: exit code" in out


def test_the_documented_program_runs_in_several_processes(tmp_path, capfd):
    page = (TESTS.parent / "docs" / "processes.md").read_text()
    (source,) = (block for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if "initialize" in block)
    (tmp_path / "program.py").write_text(source)
    address = processes.free_address()
    commands = [[sys.executable, "program.py", address, "2", str(number)] for number in range(2)]
    code = processes.run(commands, [processes.environment(address, 2, n) for n in range(2)], tmp_path)
    out = capfd.readouterr().out
    assert code == 0, out
    assert "process 0 of 2, 4 of 8 devices: 256 rows" in out


FAILS, WAITS = "raise SystemExit(3)", "import time; time.sleep(600)"
STARTS_ANOTHER = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {WAITS!r}]).pid, flush=True); "


@pytest.mark.parametrize(
    ("scripts", "code", "says"),
    [
        (["", ""], 0, ""),
        ([FAILS, ""], 3, "process 0: exit code 3"),
        (["", f"print('why'); {FAILS}"], 3, "why\n"),
        ([FAILS, WAITS], 137, "process 1: exit code -9, stopped 0.5 s after another one had ended"),
        (["", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], 139, "process 1: exit code -11"),
    ],
)
def test_the_worst_exit_code_counts_and_nobody_is_left(scripts, code, says, tmp_path, capfd):
    commands = [[sys.executable, "-c", script] for script in scripts]
    assert processes.run(commands, [dict(os.environ)] * len(commands), tmp_path, grace=0.5) == code
    assert says in capfd.readouterr().out


def test_what_a_stopped_process_had_started_is_stopped_too(tmp_path, capfd):
    commands = [[sys.executable, "-c", script] for script in (STARTS_ANOTHER + WAITS, "import time; time.sleep(3)")]
    assert processes.run(commands, [dict(os.environ)] * 2, tmp_path, grace=0.5) == 137
    started = int(capfd.readouterr().out.split()[0])

    def runs() -> bool:
        try:
            return Path(f"/proc/{started}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + 20  # it was sent SIGKILL: a busy machine may take a while to carry that out
    while runs() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs()


def test_one_number_of_processes_too_many():
    command = [sys.executable, "-m", "pytest", "--processes", "9", str(TESTS / "test_group.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "--processes: expected 1 to 8, got 9" in done.stderr
