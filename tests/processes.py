"""`pytest --processes 2`: the same pytest in several processes under jax.distributed, none of which waits for ever."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

COUNT, NUMBER = "JAX_EP_TEST_PROCESSES", "JAX_EP_TEST_PROCESS"  # how many processes there are, and which this one is
DEVICES = 8  # CPU devices of all processes together
GRACE = 20.0  # seconds in which all processes must end once the first has


def launch(arguments: Sequence[str], count: int, directory: Path) -> int:
    """Runs pytest with these arguments in `count` processes; returns the worst of their exit codes."""
    command = [sys.executable, "-m", "pytest", *arguments]
    address = free_address()
    return run([command] * count, [environment(address, count, number) for number in range(count)], directory)


def free_address() -> str:
    """A port of this machine that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def environment(address: str, count: int, number: int) -> dict[str, str]:
    """What conftest.py of process `number` reads, and JAX with it."""
    return os.environ | {
        COUNT: str(count),
        NUMBER: str(number),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # nobody from outside
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {device_flag(count)}",  # of two the last one counts
        "PYTHONHASHSEED": "0",  # the order of a set may reach a program, which must be the same everywhere
    }


def device_flag(count: int) -> str:
    """For XLA_FLAGS: each of `count` processes gets its share of the CPU devices."""
    return f"--xla_force_host_platform_device_count={max(1, DEVICES // count)}"


def run(
    commands: Sequence[Sequence[str]],
    environments: Sequence[dict[str, str]],
    directory: Path,
    grace: float = GRACE,
) -> int:
    """Runs the commands side by side until all have ended; returns the worst of their exit codes.

    The first has the terminal; what another one wrote is printed at the end, if it failed. Once one has ended the
    others have `grace` seconds: what they wait for may never come.
    """
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="processes-") as logs:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            for number, (command, variables) in enumerate(zip(commands, environments, strict=True)):
                with open(Path(logs, str(number)), "wb") as file:
                    children.append(start(command, variables, directory, file if number else None))
            stopped = wait(children, grace)
        finally:
            for child in children:
                stop(child)
            signal.signal(signal.SIGTERM, before)
        codes = [child.returncode for child in children]
        for number, code in enumerate(codes):
            if code and number:
                log = Path(logs, str(number)).read_text(errors="replace")
                print(f"\n======== process {number} wrote ========\n{log}======== process {number}, end ========")
            if code:
                why = f", stopped {grace:g} s after another one had ended" if number in stopped else ""
                print(f"process {number}: exit code {code}{why}", flush=True)
    return max(code if code >= 0 else 128 - code for code in codes)  # as shells count signals


def start(
    command: Sequence[str], variables: dict[str, str], directory: Path, output: BinaryIO | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=variables,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # a process group, to be ended as a whole
    )


def wait(children: Sequence[subprocess.Popen[bytes]], grace: float, limit: float = float("inf")) -> set[int]:
    """Until all have ended, or `grace` seconds after the first has, or `limit` from now. Returns who still runs."""
    deadline = time.monotonic() + limit
    while running := {number for number, child in enumerate(children) if child.poll() is None}:
        if len(running) < len(children):
            deadline = min(deadline, time.monotonic() + grace)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return running


def stop(child: subprocess.Popen[bytes]) -> None:
    """Ends a process, if it runs, and all that it started."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
