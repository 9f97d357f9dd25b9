"""What a run tells its user: a few lines at the start, and plots, figures and a summary at the end."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import jax
import numpy as np
import options as command_line
import plots
from checkpoint import History
from flax import nnx
from model import LanguageModel
from text import Text

import jax_ep

TARGET = 0.8
"""Share of the unigram entropy below which the model has learned which bytes follow which."""


def introduce(options: argparse.Namespace, text: Text, group: jax_ep.Group, model: LanguageModel) -> None:
    print(f"text     {text.name}: {len(text.train):,} bytes to train on, {len(text.heldout):,} held out")
    sizes = f"{options.layers} x {group.num_experts} experts, {options.top_k} of each layer for a byte"
    print(f"model    {parameters(model):,} parameters: {sizes}")
    print(
        f"runs on  {group.num_ranks} {options.platform} devices, implementation {group.implementation}",
        end="",
    )
    print(f" ({group.implementation_reason})", flush=True)


def conclude(
    options: argparse.Namespace, text: Text, group: jax_ep.Group, model: LanguageModel, history: History
) -> None:
    """Write the plots, metrics.json and history.json, and say what they show."""
    out: Path = options.out
    entropy = text.unigram_entropy
    loss = history.heldout[-1][1]
    last = max(1, history.steps // 10)
    load = np.asarray(history.load[-last:]).sum(axis=0)  # [layers, experts]
    busiest = float((load.max(axis=1) / load.mean(axis=1)).max())
    dropped = sum(history.dropped[-last:]) / int(load.sum())
    step_time = statistics.median(history.seconds) if history.seconds else None
    metrics = {
        "heldout_loss_nats": loss,
        "unigram_entropy_nats": entropy,
        "step_time_s": step_time,
        "steps": history.steps,
        "devices": group.num_ranks,
        "implementation": group.implementation,
        "platform": options.platform,
        "parameters": parameters(model),
        "tokens_per_step": options.batch * options.sequence,
        "busiest_expert_over_mean": busiest,
        "dropped_share": dropped,
        "text": f"{text.name}, {text.fingerprint}",
        "jax": jax.__version__,
        "options": command_line.course(options),
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (out / "history.json").write_text(json.dumps(dataclasses.asdict(history)) + "\n")
    plots.plot_loss(out / "loss.png", history, entropy, TARGET)
    plots.plot_expert_load(out / "expert_load.png", history)

    reached = "reached" if loss < TARGET * entropy else "missed: try more --steps, or a longer --text"
    timed = "not measured" if step_time is None else f"{1000 * step_time:.0f} ms"
    print(f"""
held-out loss  {loss:.3f} nats a byte = {loss / entropy:.2f} of the text's unigram entropy, {entropy:.3f};
               the target, {TARGET:g} of it, is {reached}
step time      {timed} (median, without compilation)
experts        in the last {last} steps the busiest had {busiest:.2f} times the mean load of its layer;
               {dropped:.1%} of the picks were dropped for want of capacity

To look at
  {out / "loss.png"}: both curves fall, and the held-out one ends below the dotted line
  {out / "expert_load.png"}: colours fade as the router learns to use all experts
For scripts
  {out / "metrics.json"}: the figures above
  {out / "history.json"}: loss, load and drops of each step""")


def parameters(model: nnx.Module) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
