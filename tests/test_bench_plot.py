"""bench plot: a picture and a table from records."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import jax_ep.__main__ as command
from jax_ep.bench import plot, record

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
COMMITTED = sorted(RESULTS.glob("throughput-*.json"))


def test_committed_records_make_a_picture_and_a_table(tmp_path, capsys):
    assert command.main(["bench", "plot", *map(str, COMMITTED), "--out", str(tmp_path)]) == 0
    name = COMMITTED[0].stem
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.png", f"{name}.md"}
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / f"{name}.md") in capsys.readouterr().out
    lines = (tmp_path / f"{name}.md").read_text().splitlines()
    results = [result for path in COMMITTED for result in record.read(path).results]
    assert len(lines) == 2 + len(results)
    assert len({line.count("|") for line in lines}) == 1
    for line, result in zip(lines[2:], results, strict=True):
        assert f"| {result.median_us:.1f} | {result.p10_us:.1f} to {result.p90_us:.1f} |" in line


def some_dispatch() -> tuple[record.Record, record.Result]:
    """A record, and a result in it of a dispatch with the group's own number of SMs."""
    (path,) = RESULTS.glob("throughput-*T211524Z.json")
    whole = record.read(path)
    return whole, next(each for each in whole.results if each.op == "dispatch" and each.num_sms is None)


def test_lines_go_over_tokens_with_the_limit():
    whole, first = some_dispatch()
    own = [dataclasses.replace(first, tokens=n, median_us=n, p10_us=n - 1, p90_us=n + 1) for n in (64, 16, 32)]
    own = [dataclasses.replace(r, limit_us=r.tokens / 2) for r in own]
    peer = dataclasses.replace(own[0], implementation="xla", note="padded")
    other = dataclasses.replace(first, op="combine", limit_us=None)
    figure = plot.draw([dataclasses.replace(whole, results=(*own, peer, other))])
    panels = {axes.get_title("left").split(",")[0]: axes for axes in figure.axes}
    assert panels.keys() == {"dispatch", "combine"}
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in panels["dispatch"].get_lines()]
    assert ([16, 32, 64], [16, 32, 64]) in drawn and ([64], [64]) in drawn
    assert ([16, 32, 64], [8, 16, 32]) in drawn
    legend = [text.get_text() for text in panels["dispatch"].get_legend().get_texts()]
    assert {"xla: padded", "limit of the link"} <= set(legend)
    assert "limit of the link" not in [text.get_text() for text in panels["combine"].get_legend().get_texts()]


def test_lines_go_over_sms_with_the_limit():
    whole, first = some_dispatch()
    own = [
        dataclasses.replace(first, tokens=64, num_sms=n, median_us=n, p10_us=n, p90_us=n, limit_us=3)
        for n in (24, 132, 8)
    ]
    by_the_group = dataclasses.replace(own[0], num_sms=None)
    fewer_tokens = dataclasses.replace(own[0], tokens=16)
    figure = plot.draw([dataclasses.replace(whole, results=(*own, by_the_group, fewer_tokens))], "num_sms")
    panels = {axes.get_title("left").split("R=")[1].split(",")[1].strip(): axes for axes in figure.axes}
    assert panels.keys() == {"T=64", "T=16"}
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in panels["T=64"].get_lines()]
    assert ([8, 24, 132], [8, 24, 132]) in drawn and ([8, 24, 132], [3, 3, 3]) in drawn
    legend = {text.get_text() for text in panels["T=64"].get_legend().get_texts()}
    assert legend == {f"{first.implementation}: {first.note}", "limit of the link"}
    with pytest.raises(ValueError, match="results to draw over SMs of a kernel, got none"):
        plot.draw([dataclasses.replace(whole, results=(by_the_group,))], "num_sms")


def test_operations_can_be_chosen(tmp_path):
    (path,) = RESULTS.glob("throughput-*T211723Z.json")
    options = ["--over", "sms", "--ops", "combine", "combine_backward", "--out", str(tmp_path)]
    assert command.main(["bench", "plot", str(path), *options]) == 0
    chosen = [r.op for r in record.read(path).results if r.op.startswith("combine")]
    lines = (tmp_path / f"{path.stem}.md").read_text().splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == [f"| {op}" for op in chosen]
    with pytest.raises(ValueError, match=r"expected ops among \['combine', .*, got \['combine', 'sort'\]"):
        plot.write([path], tmp_path, ops=["combine", "sort"])


def test_the_table_compares_what_moved_with_what_must():
    whole, first = some_dispatch()
    moved = dataclasses.replace(first, link_bytes=400, link_moved=500)
    (head, _, with_it, without) = plot.table([dataclasses.replace(whole, results=(moved, first))]).splitlines()
    column = head.split("|").index(" moved/must ")
    assert [line.split("|")[column].strip() for line in (with_it, without)] == ["1.25", ""]


@pytest.mark.parametrize("kind, files", [("layout", 2), ("moe_step", 3), ("overlap", 3)])  # the third: timelines
def test_other_benchmarks_can_be_drawn(kind, files, tmp_path):
    written = plot.write(sorted(RESULTS.glob(f"{kind}-*.json")), tmp_path)
    assert len(written) == files and set(written) == set(tmp_path.iterdir())
