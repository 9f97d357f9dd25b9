"""What can be asked of train_moe.py, and whether it fits together."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiled import NARROWEST

CPU_DEVICES = 8
LEAST_EXPERTS = 8
LEAST_BATCH = 16
CAPACITY_FACTOR = 1.25


class UsageError(Exception):
    """The user asked for what cannot be done; the text says what was expected, what came, and what to do."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_moe.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    where = parser.add_argument_group("where it runs")
    where.add_argument("--platform", choices=("cpu", "gpu"), default="cpu", help="gpu: this machine's (cpu)")
    _whole(where, "--devices", None, f"how many ({CPU_DEVICES} on cpu, all on gpu)")

    model = parser.add_argument_group("model")
    _whole(model, "--experts", None, f"a multiple of the devices (the least from {LEAST_EXPERTS} on)")
    _whole(model, "--top-k", 2, "experts that each byte picks")
    _choice(model, "--router", ("softmax", "sigmoid"), "sigmoid balances by a bias, as DeepSeek-V3 does")
    room = f"rows a device has room for, over its even share ({CAPACITY_FACTOR}; --compare-dense: for all)"
    _number(model, "--capacity-factor", None, room, above=0)
    _whole(model, "--layers", 3, "each of attention and experts")
    _whole(model, "--hidden", 128, "width between the layers")
    _whole(model, "--intermediate", 256, "width inside an expert")
    _whole(model, "--shared", 0, "width inside an expert that every byte passes; 0 for none", least=0)
    _whole(model, "--heads", 4, "of attention")
    _whole(model, "--head-width", None, "of each (hidden / heads); small ones make attention cheap")
    _whole(model, "--chunks", 1, "pieces of a device's bytes, each exchanged by itself; room is per piece")
    model.add_argument(
        "--overlap",
        action="store_true",
        help="exchanges beside compute: the shared expert's, and the experts' of other pieces",
    )
    _choice(
        model,
        "--grouped-matmul",
        ("ragged", "tiled"),
        "tiled, for GPUs, wants many bytes: room is in tiles of 128",
    )
    _choice(model, "--dtype", ("float32", "bfloat16"), "to compute in; weights are float32")

    training = parser.add_argument_group("training")
    training.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (Python's own documentation)")
    _whole(training, "--steps", 400, "length of the run")
    _whole(training, "--batch", None, f"sequences a step, also such a multiple (the least from {LEAST_BATCH} on)")
    _whole(training, "--sequence", 128, "bytes a sequence")
    _number(training, "--learning-rate", 0.004, "the highest of the run", above=0)
    _number(training, "--balance-factor", 0.01, "of the load-balance loss; softmax only")
    _number(training, "--z-factor", 0.001, "of the router's z-loss")
    _number(training, "--bias-rate", 0.01, "step of the balancing bias; sigmoid only")
    _whole(training, "--heldout-every", 25, "steps between held-out losses")
    _whole(training, "--runs", 30, "steps of each to time with --compare-ffn and --compare-overlap")
    _whole(training, "--seed", 0, "of weights and batches", least=0)

    compare = parser.add_argument_group("comparisons").add_mutually_exclusive_group()
    compare.add_argument(
        "--compare-dense",
        action="store_true",
        help="also train the same model with every expert on every byte, masked; ends with status 1 if losses differ",
    )
    compare.add_argument(
        "--compare-ffn",
        action="store_true",
        help="do not train: time a step, and one of a plain feed-forward network of the same FLOPs a byte",
    )

    compare.add_argument(
        "--compare-overlap",
        action="store_true",
        help="do not train: time a step of --chunks with --overlap, and one with neither",
    )

    files = parser.add_argument_group("files")
    _folder(files, "--out", Path("out/train"), "for plots and figures (out/train)")
    _folder(files, "--checkpoint", None, "write checkpoints there; also at the end and on Ctrl-C")
    _whole(files, "--checkpoint-every", 100, "steps between checkpoints")
    _folder(files, "--records", Path("benchmarks/results"), "for records of comparisons (benchmarks/results)")
    files.add_argument("--resume", action="store_true", help="go on from the newest checkpoint there")
    return parser


def complete(options: argparse.Namespace, devices: int) -> None:
    """Fill in the defaults that depend on the number of devices, and check options against each other.

    Raises:
      UsageError: naming the option that does not fit.
    """
    options.devices = devices
    options.experts = options.experts or _round_up(LEAST_EXPERTS, devices)
    options.batch = options.batch or _round_up(LEAST_BATCH, devices)
    for name in ("experts", "batch"):
        if (value := getattr(options, name)) % devices:
            raise UsageError(
                f"--{name}: expected a multiple of the {devices} devices, got {value}; pass "
                f"{_round_up(value, devices)}, or another --devices"
            )
    if options.compare_overlap and not options.shared and options.chunks == 1:
        raise UsageError(
            "--compare-overlap: expected something that exchanges can run beside, got --shared 0 and --chunks 1; pass "
            "--shared WIDTH or --chunks 2"
        )
    if (per_device := options.batch * options.sequence // devices) % options.chunks:
        raise UsageError(
            f"--chunks: expected a divisor of the {per_device} bytes of a device, got {options.chunks}; pass another, "
            "or another --batch"
        )
    if options.top_k > options.experts:
        raise UsageError(
            f"--top-k: expected at most the {options.experts} experts, got {options.top_k}; pass less, or "
            "more --experts"
        )
    if options.head_width is None and options.hidden % (2 * options.heads):
        raise UsageError(
            f"--hidden: expected a multiple of twice the {options.heads} heads, got {options.hidden}; pass "
            f"{_round_up(options.hidden, 2 * options.heads)}, other --heads, or a --head-width"
        )
    options.head_width = options.head_width or options.hidden // options.heads
    if options.head_width % 2:
        raise UsageError(
            f"--head-width: expected an even number, as positions turn pairs, got {options.head_width}; pass "
            f"{options.head_width + 1}"
        )
    for name in ("hidden", "intermediate") if options.grouped_matmul == "tiled" else ():
        if (width := getattr(options, name)) % NARROWEST:
            raise UsageError(
                f"--{name}: expected a multiple of {NARROWEST} for tiles, got {width}; pass "
                f"{_round_up(width, NARROWEST)}, or another --grouped-matmul"
            )
    if options.compare_dense and (options.capacity_factor or options.dtype != "float32"):
        raise UsageError(
            "--compare-dense: expected float32 and no --capacity-factor, since a dense computation drops nothing, got "
            f"{options.dtype} and {options.capacity_factor}; leave both options out"
        )
    if not options.compare_dense:
        options.capacity_factor = options.capacity_factor or CAPACITY_FACTOR
    if options.resume and options.checkpoint is None:
        raise UsageError("--resume: expected --checkpoint FOLDER with it, got none; name the folder to go on from")


def course(options: argparse.Namespace) -> dict[str, Any]:
    """The options that decide how a run goes, so that a resumed one needs the same.

    The text is not among them: `Text.fingerprint` says more than its path.
    """
    where = ("text", "platform", "devices", "out", "records", "checkpoint", "checkpoint_every", "resume")
    free = (*where, "heldout_every", "compare_dense", "compare_ffn", "compare_overlap", "runs", "overlap")
    return {name: value for name, value in vars(options).items() if name not in free}


def _whole(parser: Any, name: str, default: int | None, text: str, least: int = 1) -> None:
    convert = _converter(int, lambda value: value >= least, f"a whole number from {least} on")
    _add(parser, name, default, text, type=convert, metavar="N")


def _number(parser: Any, name: str, default: float | None, text: str, above: float | None = None) -> None:
    """A finite number above `above`, or without it from 0 on."""
    words = "a number from 0 on" if above is None else f"a number above {above}"
    convert = _converter(float, lambda value: value >= 0 if above is None else value > above, words)
    _add(parser, name, default, text, type=convert, metavar="X")


def _choice(parser: Any, name: str, choices: tuple[str, ...], text: str) -> None:
    _add(parser, name, choices[0], text, choices=choices)


def _folder(parser: Any, name: str, default: Path | None, text: str) -> None:
    parser.add_argument(name, type=Path, metavar="FOLDER", default=default, help=text)


def _add(parser: Any, name: str, default: Any, text: str, **how: Any) -> None:
    parser.add_argument(name, default=default, help=text if default is None else f"{text} ({default})", **how)


def _converter(kind: Callable[[str], Any], fits: Callable[[Any], bool], words: str) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and fits(value)):
            raise argparse.ArgumentTypeError(f"expected {words}, got {text}")
        return value

    return convert


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
