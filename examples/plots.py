"""The pictures of a run: is it learning, do its experts share the work; and those of the two comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from checkpoint import History
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jax_ep.bench.record import Result

BLUE, ORANGE, GREY = "#2166ac", "#d6604d", "#555555"


def plot_loss(path: Path, history: History, unigram_entropy: float, target: float) -> None:
    """Training and held-out loss against steps; as levels the unigram entropy and `target` times it."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, history.steps + 1)
    axes.plot(steps, history.loss, color=BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, _smooth(history.loss), color=BLUE, linewidth=1.8, label="training (faint: each step)")
    heldout_steps, heldout = zip(*history.heldout, strict=True)
    axes.plot(heldout_steps, heldout, color=ORANGE, marker="o", markersize=5, linewidth=1.5, label="held out")
    axes.annotate(
        f"{heldout[-1]:.2f}",
        (heldout_steps[-1], heldout[-1]),
        xytext=(6, 0),
        textcoords="offset points",
        color=ORANGE,
        va="center",
    )
    _level(axes, unigram_entropy, "--", f"unigram entropy of the text: {unigram_entropy:.2f}")
    _level(axes, target * unigram_entropy, ":", f"target, {target:g} of it: {target * unigram_entropy:.2f}")
    axes.set_xlim(0, history.steps * 1.06)
    axes.set_ylim(0, max(6.0, max(history.loss)))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a byte)")
    axes.set_title("Loss", loc="left")
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def plot_expert_load(path: Path, history: History, columns: int = 160) -> None:
    """A map a layer: experts upwards, steps to the right, and as colour an expert's load over the mean."""
    load = np.asarray(history.load, np.float64)  # [steps, layers, experts]
    edges = np.unique(np.linspace(0, len(load), min(columns, len(load)) + 1).astype(int))
    load = np.stack([load[a:b].mean(axis=0) for a, b in zip(edges[:-1], edges[1:], strict=True)])
    share = load / np.maximum(load.mean(axis=-1, keepdims=True), 1e-9)
    layers, experts = share.shape[1:]
    height = np.clip(0.2 * experts, 1.6, 4.0)
    figure = Figure(figsize=(8, 1.2 + layers * height), layout="constrained")
    panels = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    for layer, axes in enumerate(panels):
        image = axes.pcolormesh(
            edges,
            np.arange(experts + 1) - 0.5,
            share[:, layer].T,
            cmap="RdBu_r",
            vmin=0,
            vmax=2,
            rasterized=True,
        )
        axes.set_ylabel("expert")
        axes.set_yticks(np.arange(0, experts, max(1, experts // 8)))
        axes.set_title(f"layer {layer}", loc="left", fontsize=10)
    panels[-1].set_xlabel("step")
    figure.colorbar(
        image,
        ax=list(panels),
        extend="max",
        label="load / mean load of the layer's experts (white: an even share)",
    )
    figure.suptitle("Expert load: picks before any drop", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def plot_dense(path: Path, history: History, dense: History, same: int, bounds: tuple[float, float]) -> None:
    """Training losses of jax_ep and of the dense computation, and below how they differ.

    `bounds` are those of the first `same` steps, which pick the same experts, and of all.
    """
    figure = Figure(figsize=(8, 6), layout="constrained")
    curves, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    steps = np.arange(1, history.steps + 1)
    curves.plot(steps, dense.loss, color=ORANGE, alpha=0.4, linewidth=5, label="every expert on every byte, masked")
    curves.plot(steps, history.loss, color=BLUE, linewidth=1, label="jax_ep")
    curves.set_ylim(0, max(6.0, max(history.loss)))
    curves.set_ylabel("training loss (nats a byte)")
    curves.set_title("The same model from the same weights on the same data", loc="left")
    curves.legend(frameon=False, loc="upper right")
    difference = np.abs(np.subtract(history.loss, dense.loss))
    below.semilogy(steps, np.maximum(difference, 1e-8), color=BLUE, linewidth=1)
    below.set_ylim(5e-9, 10 * bounds[1])
    below.set_xlim(0, history.steps)
    _level(below, bounds[1], ":", f"bound: {bounds[1]:g}")
    below.hlines(bounds[0], 0, same, color=GREY, linestyle=":", linewidth=1)
    side = 1 if same < history.steps / 2 else -1
    below.annotate(
        f"bound while picks are the same: {bounds[0]:g}",
        (same, bounds[0]),
        xytext=(5 * side, -4),
        textcoords="offset points",
        color=GREY,
        ha="left" if side > 0 else "right",
        va="center" if side > 0 else "top",
    )
    if same < history.steps:
        below.axvline(same, color=ORANGE, linewidth=1)
        below.annotate("the first pick moves", (same, 1e-8), (5, 0), color=ORANGE, textcoords="offset points")
    below.set_ylabel("difference (nats a byte)")
    below.set_xlabel("step")
    for axes in (curves, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def plot_step_times(path: Path, results: Sequence[Result], target: float) -> None:
    """Median step times of the MoE and of the plain network, from p10 to p90, with `target` times the latter's."""
    moe, ffn = results
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    for row, (result, color) in enumerate(((ffn, GREY), (moe, BLUE))):
        median, low, high = (us / 1000 for us in (result.median_us, result.p10_us, result.p90_us))
        axes.barh(row, median, color=color, alpha=0.6, height=0.6)
        axes.hlines(row, low, high, color=color, linewidth=2)
        axes.annotate(f"{median:.0f} ms", (0, row), xytext=(6, 0), textcoords="offset points", va="center")
    axes.axvline(target * ffn.median_us / 1000, color=ORANGE, linestyle=":")
    axes.annotate(
        f"target: {target:g} times",
        (target * ffn.median_us / 1000, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -2),
        textcoords="offset points",
        color=ORANGE,
        ha="right",
        va="bottom",
    )
    axes.set_yticks([0, 1], ["plain network\nof the same FLOPs", f"{moe.num_experts} experts,\n{moe.top_k} for a byte"])
    axes.set_xlim(0)
    axes.set_xlabel("ms a training step (bar: median; line: p10 to p90)")
    axes.set_title(f"Step time: {moe.median_us / ffn.median_us:.2f} times the plain network's", loc="left", pad=14)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _smooth(values: list[float]) -> np.ndarray:
    """Running mean over a twentieth of the run so far, so that the steep start is not smeared."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = end - 1 - end // 20
    return (total[end] - total[start]) / (end - start)


def _level(axes: Axes, value: float, style: str, text: str) -> None:
    axes.axhline(value, color=GREY, linestyle=style, linewidth=1)
    axes.annotate(
        text,
        (1, value),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        color=GREY,
        ha="right",
    )
