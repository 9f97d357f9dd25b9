"""`jax.lax.ragged_all_to_all` as it ships, timed in a process of its own: it may take very long there, or never end.

`python -m jax_ep.bench.ragged JOB` is that process: it prints a result a line as soon as it has it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

import jax

from jax_ep.bench import peers
from jax_ep.bench.record import Result
from jax_ep.bench.timing import calls_in_a_row
from jax_ep.bench.workload import Sizes, Workload


def measure(many: Sequence[Sizes], *, runs: int, timeout_s: float, say: Callable[[str], None] = print) -> list[Result]:
    """Results of all sizes that came in time, and by `say` why others did not.

    Call it while this process holds few arrays: both processes have the devices.

    Args:
      many: sizes.
      runs: times of each.
      timeout_s: for each of the sizes; after as much for all of them together the process is killed.
      say: is told why there are no results, or fewer.
    """
    reason = _why_not()
    if reason:
        say(f"xla ragged_all_to_all: left out, {reason}")
        return []
    job = json.dumps({"sizes": [dataclasses.asdict(sizes) for sizes in many], "runs": runs})
    results, problem = collect([sys.executable, "-m", "jax_ep.bench.ragged", job], timeout_s=timeout_s * len(many))
    if problem:
        say(f"xla ragged_all_to_all: {len(results)} results, then {problem}")
    return results


def collect(command: Sequence[str], *, timeout_s: float) -> tuple[list[Result], str]:
    """The results that a command prints, one a line; and what went wrong, "" for nothing."""
    # Not pipes: what the command started could keep them open after its end.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command,
            # Takes memory as it needs it: this process has most of it.
            env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,  # a process group, to be ended as a whole
        )
        problem = ""
        try:
            if child.wait(timeout_s):
                errors.seek(0)
                problem = f"exit status {child.returncode}: {(errors.read().strip().splitlines() or [''])[-1]}"
        except subprocess.TimeoutExpired:
            problem = f"killed after {timeout_s:g} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        output.seek(0)
        lines = [line for line in output if line.startswith("{") and line.endswith("}\n")]
    return [Result(**json.loads(line)) for line in lines], problem


def _why_not() -> str:
    if jax.devices()[0].platform != "gpu":
        return f"XLA has none for {jax.devices()[0].platform} devices"
    if jax.process_count() > 1:
        return "it is tried in one process only"
    return ""


def main(job: str) -> int:
    """Measures what the job says and prints it."""
    asked = json.loads(job)
    for sizes in asked["sizes"]:
        workload = Workload(Sizes(**sizes), asked["runs"] * calls_in_a_row())
        for result in peers.measure_whole(workload, peers.RAGGED, asked["runs"]):
            print(json.dumps(dataclasses.asdict(result)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
