"""Benchmark records: what is written can be read, what cannot be right is refused, what is committed is whole."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import jax_ep.__main__ as command
from jax_ep.bench import record
from jax_ep.bench.record import Record, Result

COMMITTED = sorted((Path(__file__).parents[1] / "benchmarks" / "results").glob("*.json"))
WHAT = {
    "op": "dispatch",
    "implementation": "reference",
    "ranks": 2,
    "tokens": 8,
    "hidden": 16,
    "top_k": 2,
    "num_experts": 4,
    "dtype": "bfloat16",
    "row_order": "expert",
}


def make_record(**changes) -> Record:
    fields = {
        "machine": {"name": "cpu2", "devices": ["cpu"], "device_count": 8},
        "versions": {"jax": "0.11.2"},
        "commit": "0123456789" * 4,
        "date": "2026-11-30T12:00:00+00:00",
        "results": (Result.of_times([2e-6, 1e-6, 3e-6], **WHAT),),
    }
    return Record(**{**fields, **changes})


def test_a_result_states_median_and_spread_in_microseconds():
    result = Result.of_times([n * 1e-6 for n in range(11)][1:] + [11e-6], **WHAT)
    assert (result.p10_us, result.median_us, result.p90_us) == (2, 6, 10)


@pytest.mark.parametrize(
    ("moved", "must", "ratio"), [(500, 400, 1.25), (0, 400, 0.0), (None, 400, None), (500, None, None), (500, 0, None)]
)
def test_what_moved_is_compared_with_what_must(moved, must, ratio):
    assert Result.of_times([1e-6], **WHAT, link_moved=moved, link_bytes=must).moved_over_must == ratio


def test_what_is_written_is_read_again(tmp_path):
    written = make_record()
    path = written.write(tmp_path, "throughput")
    assert path.name == "throughput-cpu2-20261130T120000Z.json"
    assert record.read(path) == written
    assert set(json.loads(path.read_text())) == {"machine", "versions", "commit", "date", "results", "timelines"}
    with pytest.raises(FileExistsError):
        written.write(tmp_path, "throughput")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"commit": "main"}, "40 hex digits, got 'main'"),
        ({"machine": {"name": "x"}}, "expected 'devices'"),
        ({"results": ()}, "results: expected it to be filled in"),
        ({"date": "yesterday"}, "yesterday"),
    ],
)
def test_a_record_that_cannot_be_right_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make_record(**changes).write(tmp_path, "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "sort"}, "op: expected one of"),
        ({"median_us": 0.0}, "median_us: expected a time above 0, got 0.0"),
        ({"p90_us": float("nan")}, "p90_us"),
        ({"median_us": 9.0}, "from p10_us to p90_us"),
        ({"row_order": "column"}, '"expert" or "rank"'),
        ({"routing": "learned"}, "routing: expected one of"),
        ({"ranks": 0}, "ranks: expected at least 1, got 0"),
    ],
)
def test_a_result_that_cannot_be_right_is_refused(changes, message):
    result = dataclasses.replace(Result.of_times([1e-6, 2e-6], **WHAT), **changes)
    with pytest.raises(ValueError, match=message):
        result.check()


def test_a_file_with_other_fields_is_refused(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"results": [{"speed": 3}]}')
    with pytest.raises(ValueError, match="expected the fields of a benchmark record"):
        record.read(file)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_every_committed_record_is_whole(path):
    assert path.name.split("-")[0] in ("layout", "throughput", "overlap", "moe_step")
    record.read(path)


def test_the_command_measures_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_EP_COMMIT", "0" * 40)
    sizes = ["--tokens", "64", "--top-k", "2", "--experts", "8", "--ranks", "2", "--runs", "3"]
    assert command.main(["bench", "layout", *sizes, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    assert str(path) in capsys.readouterr().out
    results = record.read(path).results
    assert {result.op for result in results} == {"layout"}
    assert {result.row_order for result in results} == {"expert", "rank"}
    assert "reference" in {result.implementation for result in results}
