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


def test_lines_go_over_tokens_with_the_limit():
    (first, *_) = (whole := record.read(COMMITTED[0])).results
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


@pytest.mark.parametrize("kind", ["layout", "moe_step"])
def test_other_benchmarks_can_be_drawn(kind, tmp_path):
    plot.write(sorted(RESULTS.glob(f"{kind}-*.json")), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
