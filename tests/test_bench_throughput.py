"""bench throughput: what is timed beside jax_ep computes the same, is timed alone, and gets into the record."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ragged_example import ragged_all_to_all

import jax_ep
import jax_ep.__main__ as command
from jax_ep import bootstrap
from jax_ep.bench import peers, ragged, record, throughput, timing
from jax_ep.bench.record import Result
from jax_ep.bench.workload import Sizes, Workload, draw_index

pytestmark = pytest.mark.usefixtures("on_cpus")

SIZES = Sizes(tokens=6, hidden=8, num_experts=16, top_k=3, routing="zipf")
SMALL = ["bench", "throughput", "--tokens", "8", "--hidden", "16", "--experts", "8", "--top-k", "2", "--runs", "1"]
OPS, ROW_ORDERS = ("dispatch", "combine"), ("expert", "rank")
WHOLE = (*peers.WHOLE, *peers.RAGGED)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(SIZES, calls=1)


def group_of(workload: Workload, dtype: str) -> jax_ep.Group:
    names = ("hidden", "num_experts", "top_k")
    sizes = {name: getattr(SIZES, name) for name in names} | {"max_tokens": SIZES.tokens}
    return jax_ep.create_group(workload.mesh, "ep", **sizes, dtype=dtype, capacity=workload.rows["expert"])


def result(**changes) -> Result:
    fields = {
        **{"op": "dispatch", "implementation": "reference", "ranks": 2, "dtype": "bfloat16", "row_order": "expert"},
        **dataclasses.asdict(SIZES),
        **changes,
    }
    return Result.of_times([1e-6, 2e-6], **fields)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", WHOLE, ids=lambda form: f"{form.op}-{form.implementation}")
def test_whole_forms_give_what_the_reference_gives(workload, form, dtype, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    x = workload.tokens[0].astype(dtype)
    operands = x, workload.index, workload.weights
    with group_of(workload, dtype) as group:
        rows = workload.spread(functools.partial(jax_ep.dispatch, group=group))(*operands)
        assert int(rows.handle.num_dropped.sum()) == 0 and int((np.asarray(rows.weights) == 0).sum()) > 0
        if form.op == "dispatch":
            got = workload.spread(functools.partial(form.function, group=group))(*operands)
            for ours, theirs in zip((rows.x, rows.weights), got, strict=True):
                np.testing.assert_array_equal(*(np.asarray(array).view(np.uint8) for array in (ours, theirs)))
            return
        combine = workload.spread(lambda rows: jax_ep.combine(rows.x, rows.handle, weights=rows.weights))
        wanted = np.asarray(combine(rows), np.float32)
        got = workload.spread(form.function)(rows.x, rows.weights, workload.index, rows.handle)
        tolerance = {"float32": 1e-6, "bfloat16": 2.0**-7}[dtype]
        np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("form", peers.RAGGED, ids=lambda form: form.op)
def test_gpus_get_the_ragged_exchange(workload, form):
    with group_of(workload, "bfloat16") as group:
        operands = workload.tokens[0], workload.index, workload.weights
        function = workload.spread(functools.partial(form.function, group=group))
        if form.op == "combine":
            rows = workload.spread(functools.partial(jax_ep.dispatch, group=group))(*operands)
            function, operands = workload.spread(form.function), (rows.x, rows.weights, workload.index, rows.handle)
        lowered = function.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("ragged_all_to_all") == 1
    assert "all_to_all" not in lowered.replace("ragged_all_to_all", "")


def test_a_form_that_computes_something_else_is_not_timed(workload):
    wrong = dataclasses.replace(peers.WHOLE[-1], function=lambda y, *rest: y[: SIZES.tokens])
    with pytest.raises(AssertionError, match="xla add . all_to_all, combine: differs from jax_ep's by"):
        list(peers.measure_whole(workload, [wrong], runs=1))


def test_backward_sends_nothing_forward(workload):
    """Of the reference dispatch is an all-gather, combine an all-to-all, and their transposes each other's."""
    with group_of(workload, "bfloat16") as group:
        x, weights = workload.tokens[0], workload.weights
        rows = workload.spread(functools.partial(jax_ep.dispatch, group=group))(x, workload.index, weights)
        cases = {
            "all-gather": (throughput.dispatch_backward, (rows.x, rows.weights, x, weights, rows.handle)),
            "all-to-all": (throughput.weighted_combine_backward, (x, rows.x, rows.weights, rows.handle)),
        }
        for forward, (function, operands) in cases.items():
            compiled = workload.spread(functools.partial(function, num_sms=None)).lower(*operands).compile()
            assert f" {forward}(" not in compiled.as_text()
            (backward,) = cases.keys() - {forward}
            assert f" {backward}(" in compiled.as_text()


@pytest.mark.parametrize("routing", record.ROUTINGS)
def test_routing(routing):
    sizes = Sizes(num_experts=32, top_k=4, routing=routing)
    index = draw_index(sizes, 4000, np.random.default_rng(0))
    assert index.min() == 0 and index.max() == 31
    assert all(len(set(picks)) == 4 for picks in index)
    share = np.bincount(index.reshape(-1), minlength=32) / 4000
    if routing == "uniform":  # 4 of 32 are an eighth
        assert share.min() > 0.1 and share.max() < 0.15
    else:  # nearly all tokens pick the most popular, few the least; and the most popular are not all on one rank
        assert share.max() > 0.6 and share.min() < 0.06
        assert len(set(np.argsort(-share)[:4] // 4)) > 1


def test_groups_have_room_for_the_busiest_rank(workload):
    index, ranks = np.asarray(workload.index).reshape(-1, SIZES.tokens, SIZES.top_k), workload.ranks
    picks, pairs = np.zeros(ranks, int), np.zeros((ranks, ranks), int)
    for source, token in np.ndindex(index.shape[:2]):
        owners = index[source, token] // (SIZES.num_experts // ranks)
        for owner in owners:
            picks[owner] += 1
        for owner in set(owners.tolist()):
            pairs[source, owner] += 1
    assert workload.rows == {"expert": picks.max(), "rank": pairs.sum(0).max()}
    away = pairs - np.diag(np.diag(pairs))
    assert workload.away == max(away.sum(0).max(), away.sum(1).max())


# The command ----------------------------------------------------------------------------------------------------------


def run(tmp_path, monkeypatch, *options: str) -> record.Record:
    monkeypatch.setenv("JAX_EP_COMMIT", "0" * 40)
    assert command.main([*SMALL, *options, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    return record.read(path)


def test_everything_is_in_the_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bootstrap, "link_bandwidth", lambda devices: 400.0)
    counted = itertools.count(0, 10**9)
    monkeypatch.setattr(timing, "_link_counters", lambda: {0: (next(counted), 0)})
    written = run(tmp_path, monkeypatch, "--routing", "zipf")
    found = {(r.op, r.implementation, r.row_order, r.dtype) for r in written.results}
    ours = {
        *((op + phase, order, "bfloat16") for op in OPS for phase in ("", "_backward") for order in ROW_ORDERS),
        ("dispatch", "expert", "float8_e4m3fn"),
        ("layout", "expert", "int32"),
        ("enqueue", "expert", "bfloat16"),
    }
    forms = [*((form, "expert") for form in peers.WHOLE), *((form, "rank") for form in peers.links(8))]
    assert found == {
        *((op, "reference", order, dtype) for op, order, dtype in ours),
        *((form.op, form.implementation, order, "bfloat16") for form, order in forms),
        ("enqueue", "empty jit", "expert", "bfloat16"),
    }
    fp8 = [r.note for r in written.results if r.dtype == "float8_e4m3fn"]
    assert len(fp8) == 2 and ["dequantised" in note for note in fp8] == [False, True]
    assert {r.routing for r in written.results} == {"zipf"}
    assert written.machine["link_gigabytes_per_second"] == 400
    for r in written.results:  # 400 GB/s are 400 000 bytes a microsecond
        assert r.limit_us == (None if r.op == "enqueue" else round(r.link_bytes / 4e5, 4))
        assert r.link_moved is None if r.op == "enqueue" else r.link_moved > 0
    printed = capsys.readouterr().out
    assert "moved/must" in printed
    assert "xla ragged_all_to_all: left out, XLA has none for cpu devices" in printed
    assert "400.0 GB/s each way at once" in printed


def test_options_choose_what_is_measured(tmp_path, monkeypatch):
    options = ["--phases", "backward", "--row-orders", "rank", "--sms", "0", "3", "--tokens", "8", "4"]
    written = run(tmp_path, monkeypatch, *options)
    assert [(r.tokens, r.num_sms, r.op, r.row_order) for r in written.results] == [
        (tokens, sms, op, "rank")
        for tokens in (4, 8)
        for sms in (None, 3)
        for op in ("dispatch_backward", "combine_backward")
    ]
    assert {(r.limit_us, r.link_moved) for r in written.results} == {(None, None)}


def test_no_peers(tmp_path, monkeypatch, capsys):
    written = run(tmp_path, monkeypatch, "--no-peers", "--phases", "forward", "--row-orders", "rank")
    assert [(r.op, r.implementation) for r in written.results] == [("dispatch", "reference"), ("combine", "reference")]
    assert "ragged" not in capsys.readouterr().out


@pytest.mark.gpu
def test_gpus_run_everything(tmp_path, monkeypatch, capsys):
    experts = ["--experts", str(4 * jax.device_count()), "--ragged-timeout", "60"]
    written = run(tmp_path, monkeypatch, *experts)
    ours = [r for r in written.results if r.implementation in ("cuda", "reference")]
    assert {r.op.removesuffix("_backward") for r in ours} == {"layout", "dispatch", "combine", "enqueue"}
    measured = {(r.op, r.implementation) for r in written.results}
    assert {(form.op, form.implementation) for form in (*peers.WHOLE, *peers.links(1))} <= measured
    ragged_too = {(form.op, form.implementation) for form in peers.RAGGED} <= measured
    assert ragged_too or "xla ragged_all_to_all: " in capsys.readouterr().out
    # Without compiled kernels there is no rate, and on one GPU nothing crosses a link.
    if jax.device_count() > 1 and written.machine.get("link_gigabytes_per_second"):
        assert all(r.limit_us is not None for r in written.results if r.link_bytes)


# The limit ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "rate", "limit"),
    [
        ({"link_bytes": 4_000_000}, 400.0, 10.0),
        ({"link_bytes": 4_000_000}, None, None),
        ({"link_bytes": 4_000_000, "ranks": 1}, 400.0, None),
        ({"link_bytes": None}, 400.0, None),
    ],
)
def test_the_limit_is_the_bytes_at_the_rate(changes, rate, limit):
    assert throughput.with_limit(result(**changes), rate).limit_us == limit


def test_a_link_that_cannot_be_measured_loses_nothing(cpus, monkeypatch, capsys):
    assert bootstrap.link_bandwidth(cpus) is None

    def fail(devices):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bootstrap, "link_bandwidth", fail)
    assert throughput.link_gigabytes_per_second() is None
    assert "link: not measured, out of memory" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_link_of_gpus():
    gpus = jax.devices("gpu")
    if len(gpus) < 2:
        pytest.skip(f"needs 2 gpu devices, and there are {len(gpus)}")
    assert bootstrap.link_bandwidth(gpus) > 1


# The process of ragged_all_to_all -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("then", "problem"),
    [
        ("", ""),
        ("import time; time.sleep(600)", "killed after 5 s"),
        ("import sys; sys.exit('no such operation')", "exit status 1: no such operation"),
        ("import os; print('{', end='', flush=True); os.abort()", "exit status -6: "),
    ],
)
def test_what_came_before_the_end_is_kept(then, problem):
    line = json.dumps(dataclasses.asdict(result()))
    program = f"print({line!r}, flush=True); print('a message', flush=True); {then}"
    start = time.monotonic()
    assert ragged.collect([sys.executable, "-c", program], timeout_s=5) == ([result()], problem)
    assert time.monotonic() - start < 60


def test_the_process_prints_results(monkeypatch, capsys):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    assert ragged.main(json.dumps({"sizes": [dataclasses.asdict(SIZES)], "runs": 1})) == 0
    results = [Result(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    assert [(r.op, r.implementation) for r in results] == [(f.op, f.implementation) for f in peers.RAGGED]
    for r in results:
        r.check()


def test_inputs_are_more_than_the_cache_holds(workload, monkeypatch):
    assert len(workload.tokens) == workload.turns(1) == 3  # on CPUs no more than that
    large = Workload.__new__(Workload)
    gpu = dataclasses.make_dataclass("Device", ["platform"])("gpu")
    large.mesh = dataclasses.make_dataclass("Mesh", ["devices"])(np.array([gpu]))
    large.sizes, large.calls = Sizes(tokens=128, hidden=1024), 150
    assert [large.turns(rows) for rows in (1, 1024, 65536)] == [150, 64, 3]


def test_time_is_divided_by_the_calls():
    calls = []

    def function(x):
        calls.append(int(x))
        return x

    inputs = [(jnp.int32(n),) for n in range(3)]
    seconds, _ = throughput.time_in_a_row(lambda many: many, function, inputs, runs=2)
    assert len(seconds) == 2 and calls == [n % 3 for n in range(2 + 2 * timing.calls_in_a_row())]


def test_calls_of_one_program_take_turns(monkeypatch):
    monkeypatch.setattr(timing, "calls_in_a_program", lambda: 5)
    programs = []

    def spread(function):
        def program(*many):
            programs.append([int(x) for (x,) in many])
            return function(*many)

        return program

    timing.time_in_a_row(spread, lambda x: x, [(jnp.int32(n),) for n in range(3)], runs=1)
    assert [len(program) for program in programs] == [5] * (2 + timing.calls_in_a_row() // 5)
    assert sum(programs, []) == [n % 3 for n in range(5 * len(programs))]


def test_enqueuing_is_timed_call_by_call():
    inputs = [(jnp.int32(n),) for n in range(3)]
    assert len(throughput.time_enqueue(lambda x: x, inputs, runs=4)) == 4
