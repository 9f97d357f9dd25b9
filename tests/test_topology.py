"""Which devices form a group: no device is needed to know."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep.topology import axis_names, count_ranks, member_devices


def test_axis_names():
    assert axis_names("ep") == ("ep",)
    assert axis_names(["node", "gpu"]) == ("node", "gpu")
    with pytest.raises(ValueError, match="distinct"):
        axis_names(("ep", "ep"))
    with pytest.raises(TypeError, match=r"expected a mesh axis name or a tuple of them, got \(\)"):
        axis_names(())
    with pytest.raises(TypeError, match=r"got \(3,\)"):
        axis_names((3,))  # type: ignore[arg-type]


def test_count_ranks():
    shape = {"dp": 2, "ep": 3, "tp": 4}
    assert count_ranks(shape, ("ep",)) == 3
    assert count_ranks(shape, ("tp", "dp")) == 8
    with pytest.raises(ValueError, match=r"'ep': 3.*'pp'"):
        count_ranks(shape, ("ep", "pp"))


def test_members_of_each_group_in_rank_order():
    devices = np.arange(24).reshape(2, 3, 4)
    axes = ("dp", "ep", "tp")
    # device = 12 dp + 4 ep + tp
    assert member_devices(devices, axes, ("ep",)).tolist()[:2] == [[0, 4, 8], [1, 5, 9]]
    assert member_devices(devices, axes, ("ep",)).shape == (8, 3)
    assert member_devices(devices, axes, ("dp", "tp")).tolist()[0] == [0, 1, 2, 3, 12, 13, 14, 15]
    assert member_devices(devices, axes, ("tp", "dp")).tolist()[0] == [0, 12, 1, 13, 2, 14, 3, 15]


@pytest.mark.parametrize("axes", [("ep",), ("dp", "ep"), ("ep", "dp")])
def test_rank_order_is_that_of_axis_index(axes, cpus):
    mesh = jax.sharding.Mesh(np.array(cpus[:6]).reshape(2, 3), ("dp", "ep"))
    rank = jax.jit(
        jax.shard_map(
            lambda: jax.lax.axis_index(axes)[None, None],
            mesh=mesh,
            in_specs=(),
            out_specs=P("dp", "ep"),
            check_vma=False,
        )
    )()
    of_device = {shard.device: int(shard.data[0, 0]) for shard in rank.addressable_shards}
    for members in member_devices(mesh.devices, mesh.axis_names, axes):
        assert [of_device[device] for device in members] == list(range(len(members)))
