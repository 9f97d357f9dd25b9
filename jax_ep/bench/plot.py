"""Records as a picture, time over tokens or SMs with the link's limit, and as a Markdown table. Needs matplotlib."""

from __future__ import annotations

import dataclasses
import math
import operator
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from matplotlib.transforms import ScaledTranslation

from jax_ep.bench import overlap_plot, record, timeline_plot
from jax_ep.bench.record import Record, Result

COLUMNS = 3  # panels beside each other
LEGEND = 60  # characters a line
AXES = {"tokens": "tokens of each rank", "num_sms": "SMs of a kernel"}
"""What times can be drawn over: a field of `Result`, and its label."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """What results must share to be compared; `tokens` is None where that is what they are drawn over."""

    op: str
    row_order: str
    dtype: str
    machine: str
    ranks: int
    hidden: int
    top_k: int
    num_experts: int
    routing: str
    tokens: int | None = None

    @classmethod
    def of(cls, result: Result, machine: str, over: str) -> Panel:
        names = {field.name for field in dataclasses.fields(cls)} - {"machine", over}
        return cls(machine=machine, **{name: getattr(result, name) for name in names})

    def title(self) -> str:
        tokens = "" if self.tokens is None else f"T={self.tokens}, "
        sizes = f"R={self.ranks}, {tokens}H={self.hidden}, K={self.top_k}, E={self.num_experts}, {self.routing}"
        return f"{self.op}, {self.row_order} order, {self.dtype}\n{self.machine}: {sizes}"


def write(
    paths: Sequence[Path], folder: Path, *, over: str = "tokens", ops: Sequence[str] | None = None
) -> tuple[Path, ...]:
    """Draws the records together, writes their table and draws their timelines; the files have the first record's name.

    Args:
      paths: of the records.
      folder: of the files, made if need be.
      over: one of `AXES`. Results that say nothing of it are in the table only. A record of bench overlap is drawn by
        itself, over nothing.
      ops: results of other operations are left out.

    Raises:
      ValueError: there are no results of one of `ops`, or none that say anything of `over`.
    """
    records = [record.read(path) for path in paths]
    if ops is not None:
        records = _only(records, ops)
    overlapping = [each for each in records if any(map(overlap_plot.is_beside, each.results))]
    figure = overlap_plot.draw(overlapping[0]) if overlapping else draw(records, over)
    folder.mkdir(parents=True, exist_ok=True)
    picture, text = folder / f"{paths[0].stem}.png", folder / f"{paths[0].stem}.md"
    figure.savefig(picture, dpi=110)
    text.write_text(table(records))
    timelines = [timeline for each in records for timeline in each.timelines if timeline.kernels]
    if not timelines:
        return picture, text
    of_timelines = folder / f"{paths[0].stem}-timelines.png"
    timeline_plot.draw(timelines).savefig(of_timelines, dpi=110)
    return picture, text, of_timelines


def _only(records: Sequence[Record], ops: Sequence[str]) -> list[Record]:
    """The records with their results of these operations."""
    there = {result.op for each in records for result in each.results}
    if not there.issuperset(ops):
        raise ValueError(f"bench plot: expected ops among {sorted(there)}, got {list(ops)}")
    return [dataclasses.replace(each, results=tuple(r for r in each.results if r.op in ops)) for each in records]


def table(records: Sequence[Record]) -> str:
    """All results, a line each."""
    heads: tuple[str, ...] = ("op", "implementation", "dtype", "order", "R", "T", "H", "K", "E", "routing", "SMs")
    heads += ("median µs", "p10 to p90 µs", "limit µs", "moved/must", "note")
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
            moved = "" if r.moved_over_must is None else f"{r.moved_over_must:.2f}"
            lines.append((*which, f"{r.median_us:.1f}", f"{r.p10_us:.1f} to {r.p90_us:.1f}", limit, moved, r.note))
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def draw(records: Sequence[Record], over: str = "tokens") -> Figure:
    """A panel for each operation, with all that implement it.

    Args:
      records: of which the results that say nothing of `over` are left out.
      over: one of `AXES`.

    Raises:
      ValueError: no result is left.
    """
    panels: dict[Panel, list[tuple[str, Result]]] = {}
    several = len({each.commit for each in records}) > 1
    for each in records:
        commit = f", {each.commit[:7]}" if several else ""
        for result in each.results:
            if getattr(result, over) is not None:
                panel = Panel.of(result, each.machine["name"], over)
                panels.setdefault(panel, []).append((_name(result, over) + commit, result))
    if not panels:
        raise ValueError(f"bench plot: expected results to draw over {AXES[over]}, got none")
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    most = max(len({name for name, _ in named}) for named in panels.values())  # in a legend, below its panel
    figure = Figure(figsize=(4.6 * columns, (3.4 + 0.25 * most) * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for axes, (panel, named) in zip(grid, panels.items(), strict=False):
        _draw_panel(axes, named, over)
        axes.set_title(panel.title(), loc="left", fontsize=9)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    return figure


def _name(result: Result, over: str) -> str:
    sms = f", {result.num_sms} SMs" if result.num_sms and over != "num_sms" else ""
    return f"{result.implementation}{sms}: {result.note}"


def _draw_panel(axes: Axes, named: Sequence[tuple[str, Result]], over: str) -> None:
    """A line of medians for each name, with bars from p10 to p90; the limit dashed."""
    results = [result for _, result in named]
    position = operator.attrgetter(over)
    for name in dict.fromkeys(name for name, _ in named):
        line = sorted((result for its, result in named if its == name), key=position)
        median = [r.median_us for r in line]
        spread = [[r.median_us - r.p10_us for r in line], [r.p90_us - r.median_us for r in line]]
        label = textwrap.fill(name, LEGEND)
        axes.errorbar(
            [position(r) for r in line], median, yerr=spread, marker="o", markersize=4, capsize=2, label=label
        )
    limits = sorted({(position(r), r.limit_us) for r in results if r.limit_us is not None})
    if limits:
        at, limit = zip(*limits, strict=True)
        axes.plot(at, limit, color="black", linestyle="--", marker="_", label="limit of the link")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({position(r) for r in results}), minor=False)
    for axis in (axes.xaxis, axes.yaxis):  # numbers as they are, not as powers
        axis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(which="both", labelsize=8)
    axes.set_xlabel(AXES[over], fontsize=8)
    axes.set_ylabel("µs: median, p10 to p90", fontsize=8)
    axes.grid(which="both", axis="y", linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    below = axes.transAxes + ScaledTranslation(0, -0.45, axes.figure.dpi_scale_trans)  # inches: the axis has its labels
    axes.legend(
        frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below, borderaxespad=0
    )
