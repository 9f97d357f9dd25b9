"""Train a small mixture-of-experts language model whose experts are spread over devices by jax_ep.

Without options: 8 CPU devices, an expert on each, and Python's own documentation
as text, read as bytes; a few minutes on two cores. At the end the --out folder
holds loss.png, expert_load.png, metrics.json and history.json.
With --compare-dense also compare_dense.png; --compare-ffn writes compare_ffn.png
alone, --compare-overlap a record alone.

Defaults are in brackets.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import compare
import jax
import options as command_line
import report
from checkpoint import Checkpoints, History
from devices import start_devices
from feed_forwards import MaskedMoE, PlainFeedForward
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model import FeedForward, LanguageModel, ModelConfig
from options import UsageError
from text import Text, load
from tiled import TILE, tiled_matmul
from tqdm import tqdm
from training import TrainingConfig, heldout_loss, make_optimizer, make_train_step, place

import jax_ep
import jax_ep.flax
from jax_ep.bench import timeline

HELDOUT_BATCHES = 8
IN_A_ROW = 5
"""Steps that are timed together on GPUs, where the host prepares one while the one before runs."""

INTERRUPTED = 130  # the exit status that shells give a program ended by Ctrl-C


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a run is made of; model, optimizer and history change as it goes."""

    options: argparse.Namespace
    text: Text
    group: jax_ep.Group
    config: TrainingConfig
    model: LanguageModel
    optimizer: nnx.Optimizer
    history: History
    checkpoints: Checkpoints | None


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.make_parser(__doc__)
    try:
        run = set_up(parser.parse_args(arguments))
    except UsageError as error:
        parser.error(str(error))  # ends with status 2
    report.introduce(run.options, run.text, run.group, run.model)
    if run.options.compare_ffn:
        compare_ffn(run)
        return 0
    if run.options.compare_overlap:
        compare_overlap(run)
        return 0
    with ctrl_c() as asked:
        train(run, asked)
    if run.checkpoints:
        run.checkpoints.save(run.model, run.optimizer, run.history)
        run.checkpoints.close()
    if run.history.steps < run.config.steps:
        kept = "go on with --resume" if run.checkpoints else "nothing is kept without --checkpoint FOLDER"
        print(f"stopped after {run.history.steps} of {run.config.steps} steps: {kept}")
        return INTERRUPTED
    report.conclude(run.options, run.text, run.group, run.model, run.history)
    return compare_dense(run) if run.options.compare_dense else 0


def compare_dense(run: Run) -> int:
    """Train once more from the same weights on the same data, without an exchange; the exit status."""
    twin = make_run(run.options, run.text, run.group, MaskedMoE)
    with ctrl_c() as asked:
        train(twin, asked)
    if twin.history.steps < twin.config.steps:
        print(f"stopped after {twin.history.steps} of {twin.config.steps} steps of the dense twin: not compared")
        return INTERRUPTED
    return 0 if compare.conclude_dense(run.options.out, run.history, twin.history) else 1


def compare_ffn(run: Run) -> None:
    """Time steps of the model and of its twin with plain feed-forwards, in turn."""
    twin = make_run(run.options, run.text, run.group, PlainFeedForward)
    seconds = compare.time_in_turn({"moe": stepper(run), "ffn": stepper(twin)}, run.options.runs)
    compare.conclude_ffn(run.options, run.group, seconds)


def compare_overlap(run: Run) -> None:
    """Time steps with exchanges beside compute and, of a twin, with exchanges of all tokens at once, in turn."""

    def remade(**changes: Any) -> Run:
        options = argparse.Namespace(**vars(run.options) | changes)
        return make_run(options, run.text, run.group, jax_ep.flax.MoE)

    runs = {"in turn": remade(overlap=False, chunks=1), "beside": remade(overlap=True)}
    in_a_row = IN_A_ROW if run.options.platform == "gpu" else 1
    steps = {name: stepper(each, in_a_row) for name, each in runs.items()}
    seconds = compare.time_in_turn(steps, run.options.runs, in_a_row=in_a_row)
    timelines = [timeline.take(name, functools.partial(stepper(each), 0)) for name, each in runs.items()]
    compare.conclude_overlap(run.options, run.group, seconds, timelines, in_a_row)


def stepper(run: Run, in_a_row: int = 1) -> Callable[[int], None]:
    """Does so many training steps on the batch of a number, and waits for their end."""
    split = NamedSharding(run.group.mesh, P("ep"))
    train_step = make_train_step(run.config)

    def step(number: int) -> None:
        windows = jax.device_put(run.text.batch(run.options.seed, number, run.options.batch), split)
        metrics = [train_step(run.model, run.optimizer, windows) for _ in range(in_a_row)]
        jax.block_until_ready((metrics, nnx.state(run.model)))

    return step


def set_up(options: argparse.Namespace) -> Run:
    """Everything that must be right before the first step.

    Raises:
      UsageError: it is not.
    """
    devices = start_devices(options.platform, options.devices)
    command_line.complete(options, len(devices))
    text = load(options.text, options.sequence)
    make_folder("--out", options.out)
    checkpoints = open_checkpoints(options, text)

    # One mesh axis serves twice: each device holds some of the experts, and some of the batch's sequences.
    mesh = jax.make_mesh((len(devices),), ("ep",), (AxisType.Auto,), devices=devices)
    group = jax_ep.create_group(
        mesh,
        "ep",
        max_tokens=options.batch * options.sequence // len(devices),
        hidden=options.hidden,
        num_experts=options.experts,
        top_k=options.top_k,
        dtype=options.dtype,
        capacity_factor=options.capacity_factor,
        alignment=TILE if options.grouped_matmul == "tiled" else 1,
    )
    run = make_run(options, text, group, jax_ep.flax.MoE)
    history = checkpoints.restore(run.model, run.optimizer) if checkpoints and options.resume else History()
    return dataclasses.replace(run, history=history, checkpoints=checkpoints)


def make_run(options: argparse.Namespace, text: Text, group: jax_ep.Group, layer: Callable[..., FeedForward]) -> Run:
    """A run that begins, on the group's mesh, with `layer` as its feed-forwards."""
    model = make_model(group, options, layer)
    place(model, group.mesh)
    config = training_config(options)
    optimizer = make_optimizer(model, config)
    place(optimizer, group.mesh)
    return Run(options, text, group, config, model, optimizer, History(), None)


def make_layer(layer: Callable[..., FeedForward], options: argparse.Namespace) -> Callable[..., FeedForward]:
    """`layer` with the grouped matmul that was asked for."""
    tiled = options.grouped_matmul == "tiled" and issubclass(layer, jax_ep.flax.MoE)  # type: ignore[arg-type]
    return functools.partial(layer, matmul=tiled_matmul) if tiled else layer


def make_model(group: jax_ep.Group, options: argparse.Namespace, layer: Callable[..., FeedForward]) -> LanguageModel:
    moe = jax_ep.MoEConfig(
        hidden=options.hidden,
        intermediate=options.intermediate,
        shared_intermediate=options.shared,
        num_experts=options.experts,
        top_k=options.top_k,
        score=options.router,
        use_bias=options.router == "sigmoid",
        chunks=options.chunks,
        overlap=options.overlap,
    )
    layer = make_layer(layer, options)
    sizes = ModelConfig(options.layers, options.hidden, options.heads, options.head_width, options.dtype)
    return LanguageModel(sizes, lambda rngs: layer(moe, group, rngs=rngs), rngs=nnx.Rngs(options.seed))


def training_config(options: argparse.Namespace) -> TrainingConfig:
    sigmoid = options.router == "sigmoid"
    return TrainingConfig(
        steps=options.steps,
        learning_rate=options.learning_rate,
        balance_factor=0.0 if sigmoid else options.balance_factor,
        z_factor=options.z_factor,
        bias_rate=options.bias_rate if sigmoid else None,
    )


def open_checkpoints(options: argparse.Namespace, text: Text) -> Checkpoints | None:
    folder: Path | None = options.checkpoint
    if folder is None:
        return None
    make_folder("--checkpoint", folder)
    checkpoints = Checkpoints(folder, command_line.course(options) | {"text": text.fingerprint})
    if options.resume and checkpoints.latest is None:
        raise UsageError(
            f"--resume: expected a checkpoint in {folder}, got none; check the folder, or leave --resume out"
        )
    if not options.resume and checkpoints.latest is not None:
        raise UsageError(
            f"--checkpoint: expected a folder without checkpoints, got {folder} with one of step "
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


def train(run: Run, interrupt: list[int]) -> None:
    """Do the steps that history lacks, until something is in `interrupt`."""
    options, history = run.options, run.history
    split = NamedSharding(run.group.mesh, P("ep"))
    heldout = [jax.device_put(batch, split) for batch in run.text.heldout_batches(HELDOUT_BATCHES, options.batch)]
    train_step = make_train_step(run.config)
    compiled = False
    bar = tqdm(
        total=run.config.steps,
        initial=history.steps,
        unit="step",
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 10,  # a log file wants fewer lines
    )
    with bar:
        while history.steps < run.config.steps and not interrupt:
            start = time.perf_counter()
            windows = jax.device_put(run.text.batch(options.seed, history.steps, options.batch), split)
            # Reading the result waits for the step. Steps in flight would compete for the host's threads,
            # and with many CPU devices on few cores that can hang.
            metrics = jax.device_get(train_step(run.model, run.optimizer, windows))
            history.append(metrics, time.perf_counter() - start if compiled else None)
            compiled = True
            if history.steps % options.heldout_every == 0 or history.steps == run.config.steps:
                losses = [float(heldout_loss(run.model, batch)) for batch in heldout]
                history.heldout.append((history.steps, statistics.fmean(losses)))
            if run.checkpoints and history.steps % options.checkpoint_every == 0:
                run.checkpoints.save(run.model, run.optimizer, history)
            bar.set_postfix(history.latest(), refresh=False)
            bar.update()


@contextmanager
def ctrl_c() -> Iterator[list[int]]:
    """A list that Ctrl-C puts something into, so that the step at hand ends first. A second one ends all."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
