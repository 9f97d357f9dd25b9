"""Results of bench overlap as a picture: bars, a panel for each exchange with each matmul. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jax_ep.bench.record import Record, Result

WITH = "+matmul"


def is_beside(result: Result) -> bool:
    """Whether it is of an exchange and a matmul."""
    return result.op.endswith(WITH)


def draw(record: Record) -> Figure:
    """Medians of what takes an exchange and a matmul together, with the matmul alone as a line."""
    panels: dict[tuple[str, str, str], list[Result]] = {}
    for result in filter(is_beside, record.results):
        panels.setdefault((result.op, result.row_order, matmul_of(result)), []).append(result)
    alone = {matmul_of(r): r.median_us for r in record.results if r.op == "matmul" and r.note.startswith("alone")}
    most = max(map(len, panels.values()))
    figure = Figure(figsize=(10, (0.28 * most + 0.9) * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False).reshape(-1)
    for axes, ((op, order, matmul), results) in zip(grid, panels.items(), strict=True):
        _draw_panel(axes, results, alone.get(matmul))
        first = results[0]
        sizes = f"R={first.ranks}, T={first.tokens}, H={first.hidden}, K={first.top_k}, E={first.num_experts}"
        axes.set_title(
            f"{op.removesuffix(WITH)} in {order} order and a matmul, {matmul}; {sizes}", loc="left", fontsize=9
        )
    grid[-1].set_xlabel("µs: median, p10 to p90; the line is the matmul alone", fontsize=8)
    return figure


def matmul_of(result: Result) -> str:
    """What is multiplied: the last part of the note."""
    return result.note.rpartition(": ")[2]


def label(result: Result) -> str:
    """What is done how: the first part of the note."""
    how = result.note.partition(":")[0].partition(",")[0].partition(";")[0]
    if how.startswith("at once"):
        how += f", {result.num_sms} SMs" if result.num_sms else ", SMs of the formula"
    return how if result.implementation in ("cuda", "reference") else f"{result.implementation}: {how}"


def _draw_panel(axes: Axes, results: Sequence[Result], alone: float | None) -> None:
    heights = range(len(results), 0, -1)
    medians = [r.median_us for r in results]
    spread = [[r.median_us - r.p10_us for r in results], [r.p90_us - r.median_us for r in results]]
    axes.barh(heights, medians, xerr=spread, height=0.7, color="tab:blue", ecolor="black", capsize=2)
    axes.set_yticks(heights, [label(r) for r in results], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    if alone is not None:
        axes.axvline(alone, color="black", linewidth=1)
    axes.spines[["top", "right"]].set_visible(False)
