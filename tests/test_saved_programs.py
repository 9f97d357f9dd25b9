"""Programs that outlive their process: exported and read again, and found in the persistent compilation cache."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = """
    import os, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    import jax_ep
    from jax_ep import ffi

    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Auto,))
    group = jax_ep.create_group(
        mesh, "ep", max_tokens=6, hidden=8, num_experts=8, top_k=2, dtype="float32")

    def step(x, index, weights):
        rows = jax_ep.dispatch(x, index, weights, group=group)
        return jax_ep.combine(jnp.sin(rows.x), rows.handle, weights=rows.weights)

    f = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((24, 8)).astype(np.float32)
    index = rng.integers(0, 8, (24, 2), np.int32)
    weights = rng.random((24, 2)).astype(np.float32)
    arguments = jax.device_put((x, index, weights), NamedSharding(mesh, P("ep")))
    expected = (np.sin(x)[:, None] * weights[..., None]).sum(1)
"""


def run(program: str, **environment: str) -> str:
    """Runs PROGRAM and what follows it in a process of its own with four devices; returns what it printed."""
    program = textwrap.dedent(PROGRAM) + textwrap.dedent(program)
    variables = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "NPROC": "8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | variables | environment,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_exported_in_one_process_and_called_in_another(tmp_path):
    file = tmp_path / "program.bin"
    run(
        """
        calls = [jax.export.DisabledSafetyCheck.custom_call(ffi.LAYOUT)]
        exported = jax.export.export(f, disabled_checks=calls)(*arguments)
        open(os.environ["FILE"], "wb").write(exported.serialize())
        """,
        FILE=str(file),
    )
    run(
        """
        ffi.layout_platforms()  # what the program calls must be registered
        exported = jax.export.deserialize(open(os.environ["FILE"], "rb").read())
        np.testing.assert_allclose(jax.jit(exported.call)(*arguments), expected, rtol=1e-5, atol=1e-6)
        """,
        FILE=str(file),
    )


def test_found_in_the_persistent_cache(tmp_path):
    program = """
        hits = []
        jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
        np.testing.assert_allclose(f(*arguments), expected, rtol=1e-5, atol=1e-6)
        print("hits", len(hits))
    """
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    assert "hits 0" in run(program, **variables)
    second = run(program, **variables)
    assert "hits 0" not in second and "hits" in second
