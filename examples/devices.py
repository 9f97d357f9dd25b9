"""The devices to run on; those of a CPU have to be asked for before JAX's backend starts."""

from __future__ import annotations

import os

import jax
from options import CPU_DEVICES, UsageError


def start_devices(platform: str, wanted: int | None) -> list[jax.Device]:
    """The devices to run on. CPU devices are made here, so JAX's backend must not have started before.

    Args:
      platform: "cpu" or "gpu".
      wanted: how many; None for 8 CPU devices, or all GPUs.

    Raises:
      UsageError: there are none, or not so many.
    """
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")  # leaves GPUs to others
        count = wanted or CPU_DEVICES
        flags, flag = os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count"
        if flag not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {flag}={count}".strip()
        # Host threads, which the devices share. With too few, collectives can wait for one another for ever.
        os.environ.setdefault("NPROC", str(2 * count))
    try:
        found = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise UsageError(
            f"--platform: expected a {platform} that JAX can use, got none ({error}); install JAX for it, as "
            'in pip install "jax-ep[cuda13]", or pass --platform cpu'
        ) from error
    if wanted and wanted > len(found):
        source = "XLA_FLAGS asks for" if platform == "cpu" else "JAX finds here"
        raise UsageError(f"--devices: expected at most the {len(found)} that {source}, got {wanted}; pass less")
    return found[:wanted]
