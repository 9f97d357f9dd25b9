"""What can be asked of train_moe.py, and whether it fits together."""

from __future__ import annotations

import argparse
from pathlib import Path

CPU_DEVICES = 8


class UsageError(Exception):
    """The user asked for what cannot be done. The text says what was expected, what was given, and what to do."""


def parse(
    description: str | None, arguments: list[str] | None
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="train_moe.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    add = parser.add_argument_group("where it runs").add_argument
    add("--platform", choices=("cpu", "gpu"), default="cpu", help="cpu (default), or gpu: this machine's")
    add("--devices", type=_positive, metavar="N", help=f"default: {CPU_DEVICES} on cpu, all there are on gpu")

    add = parser.add_argument_group("model").add_argument
    add(
        "--experts",
        type=_positive,
        metavar="N",
        help="a multiple of the devices (default: the least from 8 on)",
    )
    add("--top-k", type=_positive, metavar="N", default=2, help="experts that each byte picks (%(default)s)")
    add(
        "--router",
        choices=("softmax", "sigmoid"),
        default="softmax",
        help="sigmoid balances by a bias, as DeepSeek-V3",
    )
    add(
        "--capacity-factor",
        type=_above_zero,
        metavar="X",
        default=1.25,
        help="room of a device over its even share (%(default)s)",
    )
    add(
        "--layers",
        type=_positive,
        metavar="N",
        default=3,
        help="blocks of attention and experts (%(default)s)",
    )
    add("--hidden", type=_positive, metavar="N", default=128, help="width between the layers (%(default)s)")
    add(
        "--intermediate",
        type=_positive,
        metavar="N",
        default=256,
        help="width inside an expert (%(default)s)",
    )
    add("--heads", type=_positive, metavar="N", default=4, help="of attention (%(default)s)")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="to compute in (float32); weights are float32",
    )

    add = parser.add_argument_group("training").add_argument
    add("--text", type=Path, metavar="FILE", help="UTF-8 text (default: Python's own documentation)")
    add("--steps", type=_positive, metavar="N", default=400, help="(%(default)s)")
    add(
        "--batch",
        type=_positive,
        metavar="N",
        help="sequences a step, a multiple of the devices (default: the least from 16 on)",
    )
    add("--sequence", type=_positive, metavar="N", default=128, help="bytes a sequence (%(default)s)")
    add("--learning-rate", type=_above_zero, metavar="X", default=4e-3, help="the highest (%(default)s)")
    add(
        "--balance-factor",
        type=_not_negative,
        metavar="X",
        default=0.01,
        help="of the load-balance loss, with softmax (%(default)s)",
    )
    add(
        "--z-factor",
        type=_not_negative,
        metavar="X",
        default=0.001,
        help="of the router's z-loss (%(default)s)",
    )
    add(
        "--bias-rate",
        type=_above_zero,
        metavar="X",
        default=0.01,
        help="of the bias, with sigmoid (%(default)s)",
    )
    add(
        "--heldout-every",
        type=_positive,
        metavar="N",
        default=40,
        help="steps between held-out losses (%(default)s)",
    )
    add("--seed", type=_not_negative_int, metavar="N", default=0, help="of weights and batches (%(default)s)")

    add = parser.add_argument_group("files").add_argument
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=Path("out/train"),
        help="for plots and figures (%(default)s)",
    )
    add(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="write checkpoints there, at the end and on Ctrl-C, too",
    )
    add(
        "--checkpoint-every",
        type=_positive,
        metavar="N",
        default=100,
        help="steps between checkpoints (%(default)s)",
    )
    add("--resume", action="store_true", help="go on from the newest checkpoint in --checkpoint")
    return parser, parser.parse_args(arguments)


def complete(options: argparse.Namespace, devices: int) -> None:
    """Fill in the defaults that depend on the number of devices, and check what depends on more than one option.

    Raises:
      UsageError: with the option that does not fit.
    """
    options.devices = devices
    options.experts = options.experts or _round_up(8, devices)
    options.batch = options.batch or _round_up(16, devices)
    for name in ("experts", "batch"):
        if (value := getattr(options, name)) % devices:
            raise UsageError(
                f"--{name}: expected a multiple of the {devices} devices, got {value}; pass "
                f"{_round_up(value, devices)}, or another --devices"
            )
    if options.top_k > options.experts:
        raise UsageError(
            f"--top-k: expected at most the {options.experts} experts, got {options.top_k}; pass less, or more --experts"
        )
    if options.hidden % (2 * options.heads):
        raise UsageError(
            f"--hidden: expected a multiple of twice the {options.heads} heads, got {options.hidden}; pass "
            f"{_round_up(options.hidden, 2 * options.heads)}, or other --heads"
        )
    if options.resume and options.checkpoint is None:
        raise UsageError(
            "--resume: expected --checkpoint FOLDER beside it, got none; name the folder to go on from"
        )


def course(options: argparse.Namespace) -> dict[str, object]:
    """The options that decide the course of a run: a resumed one must have the same."""
    free = ("platform", "devices", "out", "checkpoint", "checkpoint_every", "resume", "heldout_every")
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in free
    }


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _number(kind: type, least: float, inclusive: bool, words: str):  # type: ignore[no-untyped-def]
    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not (value >= least if inclusive else value > least) or value == float("inf"):
            raise argparse.ArgumentTypeError(f"expected {words}, got {text}")
        return value

    return convert


_positive = _number(int, 1, True, "a whole number from 1 on")
_not_negative_int = _number(int, 0, True, "a whole number from 0 on")
_above_zero = _number(float, 0, False, "a number above 0")
_not_negative = _number(float, 0, True, "a number from 0 on")
