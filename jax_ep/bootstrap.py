"""Opening symmetric memory for a group: which devices can, and how its ranks learn of each other's memory.

Names of memory travel over JAX's own CPU devices (gloo between processes); nothing here listens on a socket, and a CUDA
IPC handle reaches the job's processes only.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import _native
from jax_ep.config import GroupConfig
from jax_ep.topology import member_devices

GROUP_KERNELS = ("jax_ep_group_layout", "jax_ep_dispatch", "jax_ep_combine")
_HEAD_WORDS = 2  # of a record: device id, and whether it failed
_HANDLE_BYTES = 64  # of a CUDA IPC handle
_NAME_WORDS = 3  # process, address, device
_COPY_BYTES, _COPIES = 2**28, 20  # long enough that starting a copy does not count


def why_not(mesh: Any, axes: tuple[str, ...], config: GroupConfig) -> str | None:
    """Why the kernels cannot run for this group, in words, or None if they can. Starts the backend of the mesh only."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return "the mesh is abstract: it names no devices"
    platforms = {device.platform for device in mesh.devices.flat}
    if platforms != {"gpu"}:
        return f"the mesh's devices are {', '.join(sorted(platforms))}, not CUDA GPUs"
    module, reason = _native.load()
    if module is None or not set(GROUP_KERNELS) <= set(_native.build_info()["kernels"]):
        return f"this build of jax_ep has no CUDA kernels for dispatch and combine ({reason})"
    if config.num_ranks > module.max_ranks:
        return f"the group has {config.num_ranks} ranks, and the kernels take {module.max_ranks}"
    if config.num_local_experts > module.max_local_experts:
        return f"a rank has {config.num_local_experts} experts, and the kernels take {module.max_local_experts}"
    if config.top_k > module.max_top_k:
        return f"top_k is {config.top_k}, and the kernels take {module.max_top_k}"
    row_bytes = config.hidden * config.dtype.itemsize
    if row_bytes % 16:
        step = 16 // config.dtype.itemsize
        padded = -(-config.hidden // step) * step
        return f"rows of {row_bytes} bytes are no multiple of 16; pad hidden from {config.hidden} to {padded}"
    # What this process sees of its devices may not be what others see of theirs: all must choose alike.
    obstacle = _obstacle_here(module, mesh, axes)
    seen = _gather_records(np.array([[_host(), obstacle is not None]], np.int64))
    if obstacle is not None:
        return obstacle
    if seen[:, 1].any():
        return f"process {int(seen[:, 1].argmax())} cannot run them; its own group says why"
    hosts = {int(host) for host in seen[:, 0]}
    if len(hosts) > 1:
        return f"its processes run on {len(hosts)} hosts, and the kernels reach within one"
    return None


def _obstacle_here(module: Any, mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> str | None:
    for device in _local_members(mesh):
        facts = module.device_facts(device.local_hardware_id)
        if facts["compute_capability"] != (9, 0):
            return f"{device} has compute capability {facts['compute_capability']}, and the kernels are for (9, 0)"
    for members in member_devices(mesh.devices, mesh.axis_names, axes):
        local = [d for d in members if d.process_index == jax.process_index()]
        for device in local:
            for peer in local:
                if not module.can_reach(device.local_hardware_id, peer.local_hardware_id):
                    return f"{device} cannot reach the memory of {peer}"
    return None


def group_bytes(config: GroupConfig) -> int:
    """Bytes of symmetric memory that a group of these numbers holds on each rank."""
    return int(_native.require().group_bytes(*_shape(config)))


def open_group(
    serial: int,
    mesh: jax.sharding.Mesh,
    axes: tuple[str, ...],
    config: GroupConfig,
    *,
    fingerprint: int,
    timeout_s: float,
    num_sms: int | None,
) -> None:
    """Allocates the memory of this process's ranks and reaches that of all others. Every process calls it alike.

    Raises:
      RuntimeError: memory cannot be had or reached; with the bytes wanted and what makes them fewer.
    """
    module = _native.require()
    records = []
    problem = ""
    for device in _local_members(mesh):
        address, ordinal, handle = 0, 0, bytes(_HANDLE_BYTES)
        try:
            address, ordinal, handle = module.allocate_group(serial, device.local_hardware_id, *_shape(config))
        except RuntimeError as error:  # said once the others know: they would wait for this process
            problem = str(error)
        words = np.array([device.id, bool(problem), jax.process_index(), address, ordinal], np.int64)
        records.append(np.concatenate([words, np.frombuffer(handle, np.int64)]))
    gathered = _gather_records(np.stack(records))
    _raise_if_any(problem, gathered[:, 1], "allocate its memory")
    everyone = {int(record[0]): record for record in gathered}
    for members in member_devices(mesh.devices, mesh.axis_names, axes):
        names = [_name(everyone[device.id]) for device in members]
        for rank, device in enumerate(members):
            if device.process_index != jax.process_index():
                continue
            ordinal = device.local_hardware_id
            try:
                module.connect_group(
                    serial, ordinal, rank, jax.process_index(), names, fingerprint, timeout_s, num_sms or 0
                )
            except RuntimeError as error:
                problem = str(error)
    # Nobody launches before all are connected.
    _raise_if_any(problem, _gather_records(np.array([[bool(problem)]], np.int64))[:, 0], "reach the others' memory")


def _raise_if_any(problem: str, failed: np.ndarray, what: str) -> None:
    """RuntimeError in every process if there was a problem in one."""
    if problem:
        raise RuntimeError(problem)
    if failed.any():
        raise RuntimeError(f"create_group: expected every process to {what}, got one that could not; it says why")


def close_group(serial: int) -> None:
    """Frees what `open_group` took in this process."""
    _native.require().release_group(serial)


def link_bandwidth(devices: Sequence[Any], copies: int = _COPIES) -> float | None:
    """GB/s each way at once that the copy engines reach between neighbours of these devices, of the fastest pair,
    by the median of so many copies.

    None where it cannot be measured: fewer than two devices, none that are GPUs of this process, no compiled kernels,
    or devices that do not reach each other. Both devices of a pair should be idle, with 1 GB of memory free.
    """
    module, _ = _native.load()
    mine = all(device.platform == "gpu" and device.process_index == jax.process_index() for device in devices)
    if len(devices) < 2 or not mine or not hasattr(module, "link_bandwidth"):
        return None
    assert module is not None
    ordinals = [device.local_hardware_id for device in devices]
    pairs = list(zip(ordinals, ordinals[1:], strict=False))
    if not all(module.can_reach(a, b) and module.can_reach(b, a) for a, b in pairs):
        return None
    return max(module.link_bandwidth(a, b, _COPY_BYTES, copies) for a, b in pairs)


def fingerprint(config: GroupConfig, axes: tuple[str, ...]) -> int:
    """A number that is equal for equal groups, in every process."""
    digest = hashlib.sha256(repr((config, axes)).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _shape(config: GroupConfig) -> tuple[int, int, int, int, int]:
    return config.num_ranks, config.max_tokens, config.top_k, config.hidden, config.dtype.itemsize


def _local_members(mesh: jax.sharding.Mesh) -> list[Any]:
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


def _name(record: np.ndarray) -> tuple[int, int, int, bytes]:
    process, address, ordinal = (int(word) for word in record[_HEAD_WORDS : _HEAD_WORDS + _NAME_WORDS])
    return process, address, ordinal, record[_HEAD_WORDS + _NAME_WORDS :].tobytes()


def _host() -> int:
    digest = hashlib.sha256(socket.gethostname().encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _gather_records(records: np.ndarray) -> np.ndarray:
    """The rows of all processes, each with as many, in process order; int64 [n, words] to [n · processes, words]."""
    if jax.process_count() == 1:
        return records
    first_of_process: dict[int, Any] = {}
    for device in jax.devices("cpu"):
        first_of_process.setdefault(device.process_index, device)
    if len(first_of_process) < jax.process_count():
        raise RuntimeError(
            f"create_group: expected a CPU device in each of {jax.process_count()} processes, to tell them of each "
            f"other's memory, got them in {len(first_of_process)}; set JAX_PLATFORMS=cuda,cpu and "
            'jax.config.update("jax_cpu_collectives_implementation", "gloo") before jax.distributed.initialize'
        )
    devices = [first_of_process[process] for process in sorted(first_of_process)]
    mesh = jax.sharding.Mesh(np.array(devices), ("process",))
    words = records.view(np.int32).reshape(1, *records.shape, 2)  # int64 would need x64
    shape = (len(devices), *words.shape[1:])
    whole = jax.make_array_from_single_device_arrays(
        shape,
        NamedSharding(mesh, P("process")),
        [jax.device_put(words, first_of_process[jax.process_index()])],
    )
    gathered = jax.jit(lambda a: a, out_shardings=NamedSharding(mesh, P()))(whole)
    return np.ascontiguousarray(np.asarray(gathered)).view(np.int64).reshape(-1, records.shape[1])
