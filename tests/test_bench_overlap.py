"""bench overlap: what is timed computes what it says, in a chain; timelines are read, kept and drawn."""

from __future__ import annotations

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep.__main__ as command
from jax_ep.bench import overlap, overlap_plot, plot, record, timeline, timeline_plot
from jax_ep.bench.timeline import Kernel, Timeline
from jax_ep.bench.workload import Sizes, Workload

pytestmark = pytest.mark.usefixtures("on_cpus")

SIZES = Sizes(tokens=6, hidden=8, num_experts=16, top_k=3)
SMALL = ["bench", "overlap", "--tokens", "8", "--hidden", "16", "--experts", "8", "--top-k", "2", "--runs", "1"]


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(SIZES, calls=1)


@pytest.mark.parametrize("order", ["expert", "rank"])
@pytest.mark.parametrize("number", [0, 1], ids=["dispatch", "combine"])
def test_at_once_gives_the_exchange_and_the_matmul(workload, number, order):
    matmul = overlap.make_matmul(workload, 4)
    rows, gate, up, down = (np.asarray(each, np.float64).reshape(workload.ranks, -1, each.shape[-1]) for each in matmul)
    gated = np.einsum("rah,rhf->raf", rows, gate)
    inner = gated / (1 + np.exp(-gated)) * np.einsum("rah,rhf->raf", rows, up)
    wanted = np.einsum("raf,rfh->rah", inner, down)
    with workload.group(order, "reference") as group:
        exchange = list(overlap.exchanges(workload, group, order))[number]
        whole = workload.spread(exchange.whole)(*exchange.operands)
        moved, product = workload.spread(overlap.beside(exchange, 0))(*exchange.operands, *matmul)
    np.testing.assert_array_equal(moved, whole)
    np.testing.assert_allclose(np.asarray(product, np.float64).reshape(wanted.shape), wanted, rtol=0.05, atol=1e-4)


def test_calls_of_a_chain_are_all_made(workload):
    calls = []

    def function(x):
        calls.append(1)
        return x + 1, -x

    ends = overlap.chained(workload, function, calls=3)(jnp.arange(workload.ranks * 2.0))
    assert len(calls) == 3 and len(ends) == 6
    np.testing.assert_array_equal(ends[0], np.arange(workload.ranks) * 2 + 1)  # of each rank the first element
    np.testing.assert_array_equal(ends[1], np.arange(workload.ranks) * -2)


def test_the_command_writes_all_of_it(tmp_path):
    assert command.main([*SMALL, "--intermediate", "4", "8", "--sms", "0", "3", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    results = record.read(path).results
    by_op = {op: [r for r in results if r.op == op] for op in ("dispatch", "combine", "matmul")}
    both = {op: [r for r in results if r.op == f"{op}+matmul"] for op in ("dispatch", "combine")}
    # Whole, by halves with each number of SMs, XLA's once; with each matmul in turn, at once with each number, XLA's.
    assert [len(by_op[op]) for op in ("dispatch", "combine", "matmul")] == [7, 7, 2]
    assert [len(both[op]) for op in both] == [14, 14]
    assert [r.num_sms for r in both["dispatch"]] == [None, None, 3, None, None, None, 3] * 2
    for op, peer in (("dispatch", "xla all_gather"), ("combine", "xla psum_scatter")):
        assert [r.implementation for r in both[op]] == [*["reference"] * 3, peer, *["reference"] * 3] * 2
        assert [r.row_order for r in both[op]] == [*["expert"] * 4, *["rank"] * 3] * 2
        assert ["experts of 4 on" in r.note for r in both[op]] == [True] * 7 + [False] * 7
    assert all(not each.kernels for each in record.read(path).timelines)  # the profiler sees no GPU here


# Timelines ------------------------------------------------------------------------------------------------------------


def plane(name, **lines):
    events = {
        line: [types.SimpleNamespace(name=n, start_ns=start, duration_ns=duration) for n, start, duration in of_line]
        for line, of_line in lines.items()
    }
    return types.SimpleNamespace(
        name=name, lines=[types.SimpleNamespace(name=line, events=of_line) for line, of_line in events.items()]
    )


KERNELS = (Kernel("nvjet_x", 7, 0.0, 2.5), Kernel("void jax_ep::Dispatch<>", 12, 1.0, 4.0), Kernel("add", 7, 3.0, 0.5))


def test_kernels_are_those_of_the_first_gpu_by_their_start():
    streams = {
        "Stream #7(Compute)": [("nvjet_x", 5000, 2500), ("add", 8000, 500)],
        "Stream #12(Compute)": [("void jax_ep::Dispatch<>", 6000, 4000)],
        "XLA Ops": [("fusion.1", 100, 100)],
    }
    planes = [plane("/host:CPU", **streams), plane("/device:GPU:0", **streams), plane("/device:GPU:1", **streams)]
    assert timeline.kernels_of(planes) == KERNELS


def test_a_timeline_on_cpus_is_empty():
    assert timeline.take("nothing", lambda: jnp.ones(3) + 1) == Timeline("nothing", ())


def test_a_record_keeps_timelines(tmp_path):
    whole = dataclasses.replace(
        record.read(next(plot_records())), timelines=(Timeline("one", KERNELS), Timeline("empty", ()))
    )
    assert record.read(whole.write(tmp_path, "overlap")) == whole


def plot_records():
    from test_record import COMMITTED

    yield from COMMITTED


def test_kernels_have_the_colour_of_their_kind():
    names = {
        "void jax_ep::Combine<__nv_bfloat16>(...)": "exchange of jax_ep",
        "ncclDevKernel_AllGather_RING_LL": "collective of XLA",
        "nvjet_sm90_tst_128x160": "matmul",
        "gemm_fusion_dot_4": "matmul",
        "grouped_matmul__1": "matmul",
        "loop_multiply_fusion": "anything else",
    }
    assert {name: timeline_plot.kind_of(Kernel(name, 1, 0, 1)) for name in names} == names


def test_bars_are_medians_beside_the_matmul_alone():
    (path,) = (path for path in plot_records() if path.stem == "overlap-2xnvidia-h200-20261130T222016Z")
    whole = record.read(path)
    figure = overlap_plot.draw(whole)
    titles = [axes.get_title("left").split(";")[0] for axes in figure.axes]
    shapes = [f"gated experts of {width} on 32768 rows a rank" for width in (512, 2048)]
    assert titles == [
        f"{op} in expert order and a matmul, {shape}" for shape in shapes for op in ("dispatch", "combine")
    ]
    for axes, title in zip(figure.axes, titles, strict=True):
        op, shape = title.split(" in expert order and a matmul, ")
        bars = sorted((bar.get_y(), bar.get_width()) for bar in axes.patches)[::-1]
        wanted = [r.median_us for r in whole.results if r.op == f"{op}+matmul" and r.note.endswith(shape)]
        assert [width for _, width in bars] == wanted
        (alone,) = (r.median_us for r in whole.results if r.note == f"alone: {shape}")
        assert alone in [line.get_xdata()[0] for line in axes.get_lines()]
        peer = {"dispatch": "xla all_gather", "combine": "xla psum_scatter"}[op]
        assert [tick.get_text() for tick in axes.get_yticklabels()] == [
            "one after the other",
            "at once, SMs of the formula",
            *(f"at once, {sms} SMs" for sms in (8, 16, 32)),
            f"{peer}: as XLA schedules the two",
        ]


def test_timelines_are_drawn_stream_by_stream(tmp_path):
    figure = timeline_plot.draw([Timeline("one", KERNELS), Timeline("empty", ())])
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stream 7", "stream 12"]
    bars = {
        tuple(
            round(float(v), 6)
            for v in (path.vertices[:, 0].min(), path.vertices[:, 0].max(), path.vertices[:, 1].mean())
        )
        for collection in axes.collections
        for path in collection.get_paths()
    }
    centre = {7: -0.08, 12: 0.92}  # a closed path names its first corner twice
    assert bars == {(k.start_us, k.start_us + k.duration_us, centre[k.stream]) for k in KERNELS}
    with pytest.raises(ValueError, match="expected timelines with kernels, got none"):
        timeline_plot.draw([Timeline("empty", ())])
    kept = dataclasses.replace(record.read(next(plot_records())), timelines=(Timeline("one", KERNELS),))
    written = plot.write([kept.write(tmp_path, "overlap")], tmp_path)
    assert written[2].name.endswith("-timelines.png") and written[2].read_bytes().startswith(b"\x89PNG")
