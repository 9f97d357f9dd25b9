"""Records as a picture, time over tokens with the link's limit, and as a Markdown table. Needs matplotlib."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jax_ep.bench import record
from jax_ep.bench.record import Record, Result

COLUMNS = 3  # panels beside each other
LEGEND = 90  # characters a line


@dataclasses.dataclass(frozen=True)
class Panel:
    """What results must share to be compared over tokens."""

    op: str
    row_order: str
    dtype: str
    machine: str
    ranks: int
    hidden: int
    top_k: int
    num_experts: int
    routing: str

    @classmethod
    def of(cls, result: Result, machine: str) -> Panel:
        names = [field.name for field in dataclasses.fields(cls) if field.name != "machine"]
        return cls(machine=machine, **{name: getattr(result, name) for name in names})

    def title(self) -> str:
        sizes = f"R={self.ranks}, H={self.hidden}, K={self.top_k}, E={self.num_experts}, {self.routing}"
        return f"{self.op}, {self.row_order} order, {self.dtype}\n{self.machine}: {sizes}"


def write(paths: Sequence[Path], folder: Path) -> tuple[Path, Path]:
    """Draws the records together and writes their table; both files have the first record's name."""
    records = [record.read(path) for path in paths]
    folder.mkdir(parents=True, exist_ok=True)
    picture, text = folder / f"{paths[0].stem}.png", folder / f"{paths[0].stem}.md"
    draw(records).savefig(picture, dpi=120)
    text.write_text(table(records))
    return picture, text


def table(records: Sequence[Record]) -> str:
    """All results, a line each."""
    heads: tuple[str, ...] = ("op", "implementation", "dtype", "order", "R", "T", "H", "K", "E", "routing", "SMs")
    heads += ("median µs", "p10 to p90 µs", "limit µs", "note")
    lines: list[tuple[Any, ...]] = [heads, ("---",) * len(heads)]
    for each in records:
        for r in each.results:
            which: tuple[Any, ...] = (
                r.op,
                r.implementation,
                r.dtype,
                r.row_order,
                r.ranks,
                r.tokens,
                r.hidden,
                r.top_k,
            )
            which += (r.num_experts, r.routing, r.num_sms or "")
            limit = "" if r.limit_us is None else f"{r.limit_us:.1f}"
            lines.append((*which, f"{r.median_us:.1f}", f"{r.p10_us:.1f} to {r.p90_us:.1f}", limit, r.note))
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def draw(records: Sequence[Record]) -> Figure:
    """A panel for each operation, with all that implement it."""
    panels: dict[Panel, list[tuple[str, Result]]] = {}
    several = len({each.commit for each in records}) > 1
    for each in records:
        commit = f", {each.commit[:7]}" if several else ""
        for result in each.results:
            panels.setdefault(Panel.of(result, each.machine["name"]), []).append((_name(result) + commit, result))
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(7 * columns, 6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for axes, (panel, named) in zip(grid, panels.items(), strict=False):
        _draw_panel(axes, named)
        axes.set_title(panel.title(), loc="left", fontsize=9)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    return figure


def _name(result: Result) -> str:
    sms = f", {result.num_sms} SMs" if result.num_sms else ""
    return f"{result.implementation}{sms}: {result.note}"


def _draw_panel(axes: Axes, named: Sequence[tuple[str, Result]]) -> None:
    """A line of medians for each name, with bars from p10 to p90; the limit dashed."""
    results = [result for _, result in named]
    for name in dict.fromkeys(name for name, _ in named):
        line = sorted((result for its, result in named if its == name), key=lambda result: result.tokens)
        median = [r.median_us for r in line]
        spread = [[r.median_us - r.p10_us for r in line], [r.p90_us - r.median_us for r in line]]
        label = textwrap.fill(name, LEGEND)
        axes.errorbar([r.tokens for r in line], median, yerr=spread, marker="o", markersize=4, capsize=2, label=label)
    limits = sorted({(r.tokens, r.limit_us) for r in results if r.limit_us is not None})
    if limits:
        tokens, limit = zip(*limits, strict=True)
        axes.plot(tokens, limit, color="black", linestyle="--", marker="_", label="limit of the link")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({r.tokens for r in results}), minor=False)
    for axis in (axes.xaxis, axes.yaxis):  # numbers as they are, not as powers
        axis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(which="both", labelsize=8)
    axes.set_xlabel("tokens of each rank")
    axes.set_ylabel("µs: median, p10 to p90")
    axes.grid(which="both", axis="y", linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.12), borderaxespad=0)
