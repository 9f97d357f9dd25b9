"""Timelines as a picture: a row for each stream, a bar for each kernel. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jax_ep.bench.timeline import Kernel, Timeline

KINDS = {
    "exchange of jax_ep": ("tab:orange", ("jax_ep::",)),
    "collective of XLA": ("tab:green", ("nccl",)),
    "matmul": ("tab:blue", ("gemm", "nvjet", "cutlass", "wgmma", "matmul")),
    "anything else": ("tab:gray", ("",)),
}
"""Colours, and what names of kernels have in them: the first kind that fits."""


def kind_of(kernel: Kernel) -> str:
    """One of `KINDS`."""
    return next(kind for kind, (_, parts) in KINDS.items() if any(part in kernel.name for part in parts))


def draw(timelines: Sequence[Timeline]) -> Figure:
    """A panel for each timeline that has kernels, all on one scale.

    Raises:
      ValueError: none has any.
    """
    shown = [each for each in timelines if each.kernels]
    if not shown:
        raise ValueError("bench plot: expected timelines with kernels, got none")
    figure = Figure(figsize=(10, 1.3 * len(shown) + 0.8), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False).reshape(-1)
    for axes, timeline in zip(panels, shown, strict=True):
        _draw_panel(axes, timeline)
    panels[-1].set_xlabel("µs", fontsize=8)
    colours = [Patch(color=colour, label=kind) for kind, (colour, _) in KINDS.items()]
    figure.legend(handles=colours, loc="outside lower center", ncols=len(KINDS), frameon=False, fontsize=8)
    return figure


def _draw_panel(axes: Axes, timeline: Timeline) -> None:
    streams = sorted({kernel.stream for kernel in timeline.kernels})
    for row, stream in enumerate(streams):
        for kind, (colour, _) in KINDS.items():
            bars = [
                (kernel.start_us, kernel.duration_us)
                for kernel in timeline.kernels
                if kernel.stream == stream and kind_of(kernel) == kind
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
    axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(timeline.name, loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
