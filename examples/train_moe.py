"""Train a small mixture-of-experts language model whose experts are spread over devices by jax_ep.

Without options: 8 CPU devices, an expert on each, the bytes of Python's own documentation; some minutes on two cores.
At the end the --out folder holds loss.png, expert_load.png, metrics.json and history.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import jax
import numpy as np
import options as command_line
import plots
from checkpoint import Checkpoints, History
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from model import LanguageModel, ModelConfig
from options import UsageError
from text import Text, load
from tqdm import tqdm
from training import TrainingConfig, heldout_loss, make_optimizer, make_train_step, place

import jax_ep
import jax_ep.flax

TARGET = 0.8  # of the unigram entropy, below which a model must have learned which bytes follow which
HELDOUT_BATCHES = 8
INTERRUPTED = 130  # exit status that shells expect after Ctrl-C


def main(arguments: list[str] | None = None) -> int:
    parser, options = command_line.parse(__doc__, arguments)
    try:
        devices = start_devices(options.platform, options.devices)
        command_line.complete(options, len(devices))
        text = load(options.text, options.sequence)
        make_folder("--out", options.out)
        checkpoints = open_checkpoints(options)

        mesh = jax.make_mesh((len(devices),), ("ep",), (jax.sharding.AxisType.Auto,), devices=devices)
        group = make_group(mesh, options)
        model = make_model(group, options)
        place(model, mesh)
        config = training_config(options)
        optimizer = make_optimizer(model, config)
        place(optimizer, mesh)
        history = checkpoints.restore(model, optimizer) if checkpoints and options.resume else History()
    except UsageError as error:
        parser.error(str(error))

    print(f"text      {text.name}: {len(text.train):,} bytes to train on, {len(text.heldout):,} held out")
    print(f"model     {parameters(model):,} parameters, {options.layers} layers of {options.experts} experts")
    print(
        f"devices   {len(devices)} x {devices[0].device_kind}, {group.implementation}: {group.implementation_reason}"
    )
    with ctrl_c() as wish:
        train(model, optimizer, text, mesh, history, checkpoints, config, options, wish)
    if checkpoints:
        checkpoints.save(model, optimizer, history)
        checkpoints.close()
    if history.steps < options.steps:
        kept = "go on with --resume" if checkpoints else "nothing is kept without --checkpoint FOLDER"
        print(f"stopped after {history.steps} of {options.steps} steps: {kept}")
        return INTERRUPTED
    report(text, group, model, history, options)
    return 0


def start_devices(platform: str, wanted: int | None) -> list[jax.Device]:
    """The devices to run on. CPU devices are made here, so JAX's backend must not have started yet."""
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")  # leaves the GPUs, if any, to others
        made = wanted or command_line.CPU_DEVICES
        flags, flag = os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count"
        if flag not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {flag}={made}".strip()
        # The host threads that the devices' programs share: with too few, collectives wait for each other for ever.
        os.environ.setdefault("NPROC", str(2 * made))
    try:
        found = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise UsageError(
            f"--platform: expected a {platform} that JAX can use, got none ({error}); install JAX for it (pip install "
            '"jax-ep[cuda13]"), or pass --platform cpu'
        ) from error
    if wanted and wanted > len(found):
        where = "XLA_FLAGS makes" if platform == "cpu" else "JAX finds"
        raise UsageError(
            f"--devices: expected at most {len(found)}, which is what {where} here, got {wanted}"
        )
    return found[:wanted]


def make_group(mesh: jax.sharding.Mesh, options: argparse.Namespace) -> jax_ep.Group:
    return jax_ep.create_group(
        mesh,
        "ep",
        max_tokens=options.batch * options.sequence // mesh.size,
        hidden=options.hidden,
        num_experts=options.experts,
        top_k=options.top_k,
        dtype=options.dtype,
        capacity_factor=options.capacity_factor,
    )


def make_model(group: jax_ep.Group, options: argparse.Namespace) -> LanguageModel:
    moe = jax_ep.MoEConfig(
        hidden=options.hidden,
        intermediate=options.intermediate,
        num_experts=options.experts,
        top_k=options.top_k,
        score=options.router,
        use_bias=options.router == "sigmoid",
    )
    sizes = ModelConfig(options.layers, options.hidden, options.heads, options.dtype)
    return LanguageModel(
        sizes, lambda rngs: jax_ep.flax.MoE(moe, group, rngs=rngs), rngs=nnx.Rngs(options.seed)
    )


def training_config(options: argparse.Namespace) -> TrainingConfig:
    sigmoid = options.router == "sigmoid"
    return TrainingConfig(
        steps=options.steps,
        learning_rate=options.learning_rate,
        balance_factor=0.0 if sigmoid else options.balance_factor,
        z_factor=options.z_factor,
        bias_rate=options.bias_rate if sigmoid else None,
    )


def open_checkpoints(options: argparse.Namespace) -> Checkpoints | None:
    if options.checkpoint is None:
        return None
    make_folder("--checkpoint", options.checkpoint)
    checkpoints = Checkpoints(options.checkpoint, command_line.course(options))
    if options.resume and checkpoints.latest is None:
        raise UsageError(
            f"--resume: expected a checkpoint in {options.checkpoint}, got none; check the folder, or leave --resume out"
        )
    if not options.resume and checkpoints.latest is not None:
        raise UsageError(
            f"--checkpoint: expected a folder without checkpoints, got {options.checkpoint} with one of step "
            f"{checkpoints.latest}; pass --resume to go on from it, or another folder"
        )
    return checkpoints


def make_folder(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{option}: expected a folder to write to, got {folder} ({error.strerror}); pass another"
        ) from error


@contextmanager
def ctrl_c() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C, so that the step at hand can be finished. A second Ctrl-C ends at once."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def train(
    model: LanguageModel,
    optimizer: nnx.Optimizer,
    text: Text,
    mesh: jax.sharding.Mesh,
    history: History,
    checkpoints: Checkpoints | None,
    config: TrainingConfig,
    options: argparse.Namespace,
    interrupt: list[int],
) -> None:
    """Run the steps that are missing in history, and record them there."""
    split = NamedSharding(mesh, P("ep"))
    heldout = [
        jax.device_put(windows, split) for windows in text.heldout_batches(HELDOUT_BATCHES, options.batch)
    ]
    train_step = make_train_step(config)

    def evaluate() -> None:
        loss = statistics.fmean(float(heldout_loss(model, windows)) for windows in heldout)
        history.heldout.append((history.steps, loss))

    if history.steps == 0:
        evaluate()
    compiled = False
    with tqdm(total=config.steps, initial=history.steps, unit="step", dynamic_ncols=True) as bar:
        while history.steps < config.steps and not interrupt:
            start = time.perf_counter()
            windows = jax.device_put(text.batch(options.seed, history.steps, options.batch), split)
            # Reading the result waits for the step. With many CPU devices on few cores it must: JAX may else have so
            # many steps in flight that their collectives starve each other of threads.
            metrics = jax.device_get(train_step(model, optimizer, windows))
            if compiled:
                history.seconds.append(time.perf_counter() - start)
            compiled = True
            history.loss.append(float(metrics["loss"]))
            history.load.append(metrics["load"].astype(int).tolist())
            history.dropped.append(int(metrics["dropped"].sum()))
            if history.steps % options.heldout_every == 0 or history.steps == config.steps:
                evaluate()
            if checkpoints and history.steps % options.checkpoint_every == 0:
                checkpoints.save(model, optimizer, history)
            bar.set_postfix(
                loss=f"{history.loss[-1]:.3f}", held_out=f"{history.heldout[-1][1]:.3f}", refresh=False
            )
            bar.update()


def report(
    text: Text, group: jax_ep.Group, model: LanguageModel, history: History, options: argparse.Namespace
) -> None:
    """Write plots and figures, and say what they show."""
    loss, entropy = history.heldout[-1][1], text.unigram_entropy
    late = max(1, history.steps // 10)
    load = np.asarray(history.load[-late:]).sum(axis=0)  # [layers, experts]
    metrics = {
        "heldout_loss_nats": loss,
        "unigram_entropy_nats": entropy,
        "step_time_s": statistics.median(history.seconds) if history.seconds else None,
        "steps": history.steps,
        "devices": group.num_ranks,
        "implementation": group.implementation,
        "platform": options.platform,
        "experts": group.num_experts,
        "parameters": parameters(model),
        "tokens_per_step": options.batch * options.sequence,
        "dropped_share_late": sum(history.dropped[-late:]) / int(load.sum()),
        "busiest_over_mean_late": float((load.max(axis=1) / load.mean(axis=1)).max()),
        "text": text.name,
        "jax": jax.__version__,
        "options": command_line.course(options),
    }
    out: Path = options.out
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (out / "history.json").write_text(json.dumps(dataclasses.asdict(history)) + "\n")
    plots.plot_loss(out / "loss.png", history, entropy, TARGET)
    plots.plot_expert_load(out / "expert_load.png", history)

    verdict = (
        "reached" if loss < TARGET * entropy else "missed: train longer (--steps) or on more text (--text)"
    )
    step_time = "-" if metrics["step_time_s"] is None else f"{1000 * metrics['step_time_s']:.0f} ms"
    print(f"""
held-out loss    {loss:.3f} nats a byte, {loss / entropy:.2f} of the text's unigram entropy {entropy:.3f}
                 target {TARGET:g} of it: {verdict}
time of a step   {step_time} (median, without compilation)
experts          last {late} steps: busiest {metrics["busiest_over_mean_late"]:.2f} times the mean of its layer, {metrics["dropped_share_late"]:.1%} of picks dropped
look at
  {out / "loss.png"}: both curves should fall, the held-out one below the dotted line
  {out / "expert_load.png"}: colours should fade to white as the router learns to use every expert
for scripts
  {out / "metrics.json"}: these figures; {out / "history.json"}: each step's""")


def parameters(model: nnx.Module) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


if __name__ == "__main__":
    sys.exit(main())
