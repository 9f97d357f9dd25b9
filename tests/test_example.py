"""examples/train_moe.py: what it writes, that it learns, that it resumes exactly, what it refuses."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))  # as Python does when it runs the script

import compare  # noqa: E402
import feed_forwards  # noqa: E402
import model  # noqa: E402
import text as text_module  # noqa: E402
import train_moe  # noqa: E402
import world  # noqa: E402
from checkpoint import History  # noqa: E402
from flax import nnx  # noqa: E402

import jax_ep  # noqa: E402
from jax_ep.bench import record, timeline  # noqa: E402

SMALL = "--layers 1 --hidden 32 --intermediate 32 --heads 2 --sequence 32 --batch 8".split()
# The sigmoid router has all there is to restore: weights, optimiser, and the bias that no optimiser keeps.
WHOLE = [*SMALL, *"--devices 4 --experts 8 --router sigmoid --steps 150 --learning-rate 0.02".split()]
PNG = b"\x89PNG\r\n\x1a\n"


def start(*arguments: str, flags: str = "") -> subprocess.Popen[str]:
    """The script in a process of its own, with these XLA_FLAGS and not the devices that conftest.py asks for."""
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"} | {"XLA_FLAGS": flags}
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "train_moe.py"), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], status: int) -> str:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == status, errors
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where three runs wrote: one from start to end, one ended by Ctrl-C, and that one resumed."""
    folder = tmp_path_factory.mktemp("runs")
    finish(start(*WHOLE, "--out", str(folder / "whole")), status=0)

    checkpointed = [*WHOLE, "--checkpoint", str(folder / "checkpoints"), "--checkpoint-every", "2"]
    process = start(*checkpointed, "--out", str(folder / "interrupted"))
    while process.poll() is None and not (folder / "checkpoints" / "2").is_dir():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert "go on with --resume" in finish(process, status=130)

    (folder / "summary").write_text(finish(start(*checkpointed, "--resume", "--out", str(folder / "resumed")), 0))
    return folder


def read(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.mark.parametrize("run", ["whole", "resumed"])
def test_writes_its_files(folder: Path, run: str) -> None:
    metrics, history = read(folder / run / "metrics.json"), read(folder / run / "history.json")
    assert (metrics["steps"], metrics["devices"], metrics["implementation"]) == (150, 4, "reference")
    assert 0 < metrics["step_time_s"] < 10
    assert metrics["heldout_loss_nats"] == history["heldout"][-1][1]
    assert len(history["loss"]) == 150
    assert [step for step, _ in history["heldout"]] == [25, 50, 75, 100, 125, 150]
    load = np.asarray(history["load"])
    assert load.shape == (150, 1, 8)
    assert (load.sum(axis=-1) == 8 * 32 * 2).all()  # every byte picks two experts
    for plot in ("loss.png", "expert_load.png"):
        assert (folder / run / plot).read_bytes().startswith(PNG)


def test_learns(folder: Path) -> None:
    metrics, history = read(folder / "whole" / "metrics.json"), read(folder / "whole" / "history.json")
    assert history["loss"][0] > math.log(256) - 1  # it starts by knowing nothing
    assert metrics["heldout_loss_nats"] < 0.9 * metrics["unigram_entropy_nats"]


def test_interrupted_and_resumed_equals_uninterrupted(folder: Path) -> None:
    whole, resumed = (read(folder / run / "history.json") for run in ("whole", "resumed"))
    assert len(resumed["seconds"]) < len(whole["seconds"]), "the first part was not taken from the checkpoint"
    for name in ("loss", "heldout", "load", "dropped"):
        assert whole[name] == resumed[name], name  # bit for bit: the same program on the same data


def test_summary_names_every_file(folder: Path) -> None:
    summary = (folder / "summary").read_text()
    for name in ("loss.png", "expert_load.png", "metrics.json", "history.json"):
        assert str(folder / "resumed" / name) in summary


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """The script's main in this process, on the devices that conftest.py asked for."""
    for name in ("XLA_FLAGS", "NPROC"):
        monkeypatch.setenv(name, os.environ[name])  # so that a change is undone
    platforms = jax.config.jax_platforms
    yield train_moe.main
    jax.config.update("jax_platforms", platforms)


def refusal(main, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What main says, in one line, before it ends with status 2."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--experts 12", "--experts: expected a multiple of the 8 devices, got 12; pass 16"),
        ("--devices 3 --batch 16", "--batch: expected a multiple of the 3 devices, got 16; pass 18"),
        ("--chunks 3", "--chunks: expected a divisor of the 256 bytes of a device, got 3; pass another"),
        ("--compare-overlap", "something that exchanges can run beside, got --shared 0 and --chunks 1; pass --shared"),
        ("--top-k 9", "--top-k: expected at most the 8 experts, got 9"),
        ("--hidden 100", "--hidden: expected a multiple of twice the 4 heads, got 100; pass 104, other --heads, or a"),
        ("--head-width 5", "--head-width: expected an even number, as positions turn pairs, got 5; pass 6"),
        ("--grouped-matmul tiled --hidden 40", "--hidden: expected a multiple of 16 for tiles, got 40; pass 48"),
        ("--devices 9", "--devices: expected at most the 8 that XLA_FLAGS asks for, got 9"),
        ("--resume", "--resume: expected --checkpoint FOLDER with it, got none"),
        ("--compare-dense --capacity-factor 2", "expected float32 and no --capacity-factor, since a dense"),
        ("--compare-dense --dtype bfloat16", "got bfloat16 and None; leave both options out"),
        ("--compare-dense --compare-ffn", "argument --compare-ffn: not allowed with argument --compare-dense"),
        ("--runs 0", "argument --runs: expected a whole number from 1 on, got 0"),
        ("--steps 0", "argument --steps: expected a whole number from 1 on, got 0"),
        ("--steps few", "argument --steps: expected a whole number from 1 on, got few"),
        ("--seed -1", "argument --seed: expected a whole number from 0 on, got -1"),
        ("--learning-rate nan", "argument --learning-rate: expected a number above 0, got nan"),
        ("--z-factor -1", "argument --z-factor: expected a number from 0 on, got -1"),
        (
            "--text /no/such/file",
            "--text: expected a readable file, got /no/such/file (No such file or directory)",
        ),
    ],
)
def test_refuses_options(main, capsys, tmp_path: Path, arguments: str, message: str) -> None:
    assert message in refusal(main, capsys, *arguments.split(), "--out", tmp_path)


def test_refuses_texts(main, capsys, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"x" * 330)
    message = refusal(main, capsys, "--text", file, "--sequence", 32, "--out", tmp_path)
    assert f"--text: expected more than one kind of byte, got one in {file}" in message
    file.write_bytes(b"x" * 329)
    message = refusal(main, capsys, "--text", file, "--sequence", 32, "--out", tmp_path)
    assert (
        f"--text: expected at least 330 bytes for --sequence 32, since a tenth is held out, got 329 in {file}"
        in message
    )
    file.write_bytes(b"abc\xff" * 1000)
    message = refusal(main, capsys, "--text", file, "--sequence", 32, "--out", tmp_path)
    assert f"--text: expected UTF-8 text, got {file}, which is none at byte 3" in message


def test_refuses_folders(main, capsys, tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert f"--out: expected a folder to write to, got {file} (File exists)" in refusal(main, capsys, "--out", file)
    arguments = [*WHOLE, "--out", tmp_path, "--checkpoint"]
    empty, full = tmp_path / "empty", folder / "checkpoints"
    assert f"expected a checkpoint in {empty}, got none" in refusal(main, capsys, *arguments, empty, "--resume")
    assert f"got {full} with one of step 150; pass --resume" in refusal(main, capsys, *arguments, full)
    message = refusal(main, capsys, *arguments, full, "--resume", "--top-k", 3)
    assert "where top_k is 2, got 3" in message


def test_refuses_gpus_where_there_are_none(main, capsys, tmp_path: Path) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there are")
    message = refusal(main, capsys, "--platform", "gpu", "--out", tmp_path)
    assert "--platform: expected a gpu that JAX can use, got none" in message
    assert "pass --platform cpu" in message


def test_own_text_in_bfloat16(main, tmp_path: Path) -> None:
    """What alternates is soon learned; this also runs the softmax router."""
    file = tmp_path / "text"
    file.write_bytes(b"ab" * 1000)
    options = [
        *SMALL,
        "--text",
        str(file),
        "--dtype",
        "bfloat16",
        "--learning-rate",
        "0.05",
        "--out",
        str(tmp_path),
    ]
    assert main([*options, "--devices", "2", "--steps", "20"]) == 0
    metrics = read(tmp_path / "metrics.json")
    assert metrics["unigram_entropy_nats"] == pytest.approx(math.log(2), rel=1e-12)
    assert metrics["heldout_loss_nats"] < 0.5 * math.log(2)


def test_unigram_entropy_and_split(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"aabc" * 100)
    text = text_module.load(file, sequence=4)
    assert text.unigram_entropy == pytest.approx(1.5 * math.log(2), rel=1e-12)
    assert text.train.tobytes() + text.heldout.tobytes() == b"aabc" * 100
    assert len(text.heldout) == 40


def test_batches_are_windows_of_their_part(tmp_path: Path) -> None:
    """In a text that counts, a window's bytes tell where it came from."""
    file = tmp_path / "text"
    file.write_bytes(bytes(range(128)))
    text = text_module.load(file, sequence=7)
    batches = [text.batch(seed=0, step=step, size=64) for step in range(50)]
    windows = np.concatenate(batches)
    assert windows.shape == (50 * 64, 8)
    assert (np.diff(windows) == 1).all()
    assert (windows.min(), windows.max()) == (0, 115)  # 12 of 128 bytes are held out, the rest is all used
    heldout = np.concatenate(text.heldout_batches(count=2, size=5))
    assert (np.diff(heldout) == 1).all()
    assert (heldout.min(), heldout.max()) == (116, 127)
    assert np.array_equal(text.batch(0, 7, 64), batches[7])
    assert not np.array_equal(text.batch(1, 7, 64), batches[7])


def test_python_topics_hold_nothing_out_that_was_trained_on() -> None:
    text = text_module.load(None, sequence=128)
    trained = set(text.train.tobytes().split(b"\n\n"))
    heldout = text.heldout.tobytes().split(b"\n\n")[1:]
    assert len(heldout) > 100
    assert not trained & set(heldout)


def test_compare_dense(main, tmp_path: Path) -> None:
    arguments = [*SMALL, "--devices", "4", "--steps", "12", "--learning-rate", "0.02", "--heldout-every", "12"]
    assert main([*arguments, "--compare-dense", "--out", str(tmp_path)]) == 0
    metrics = read(tmp_path / "metrics.json")
    losses = [np.asarray(read(tmp_path / name)["loss"]) for name in ("history.json", "history_dense.json")]
    assert losses[0][-1] < losses[0][0] - 0.5  # both learned something
    difference = np.abs(losses[0] - losses[1])
    same = metrics["dense_steps_of_same_picks"]
    assert same >= 1
    assert metrics["dense_difference_while_same_nats"] == difference[:same].max() <= 1e-5
    assert metrics["dense_largest_difference_nats"] == difference.max() <= 0.2
    assert metrics["dropped_share"] == 0
    assert (tmp_path / "compare_dense.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("moved", "step", "by", "holds"),
    [(3, 0, 9e-6, True), (3, 2, 2e-5, False), (1, 1, 0.1, True), (1, 2, 0.3, False), (0, 0, 2e-5, False)],
)
def test_dense_bounds(tmp_path: Path, moved: int, step: int, by: float, holds: bool) -> None:
    """From step `moved` on the runs pick other experts, and at `step` losses differ."""
    (tmp_path / "metrics.json").write_text("{}")
    history = History(loss=[5.0, 4.0, 3.0], heldout=[(3, 3.0)], load=3 * [[[2, 2]]])
    dense = History(loss=[5.0, 4.0, 3.0], heldout=[(3, 3.0)], load=moved * [[[2, 2]]] + (3 - moved) * [[[1, 3]]])
    dense.loss[step] += by
    assert compare.conclude_dense(tmp_path, history, dense) is holds
    assert read(tmp_path / "metrics.json")["dense_steps_of_same_picks"] == moved


# On the way to a loss are some ten sums of up to 96 products, each off by some 5e-7 of its size, and exponentials and
# roots off by a few units in the last place: together 5e-6 of its size, and as much in a gradient. A step of AdamW
# moves a weight by the learning rate, of which rounding changes its share of the weight's gradient. To first order that
# moves a loss by the learning rate times 5e-6 times the sum of the gradient's magnitudes. This sum is at most 213, the
# root of the 45,408 weights, since the gradient is clipped to a norm of 1. 20 steps at 0.004 make 8.5e-5.
SAME_BOUND = 1e-4


def same_training(history: dict, other: dict) -> int:
    """Compares two runs of 20 steps at a learning rate of 0.004; returns how many steps went by before a pick moved."""
    moved = [ours != theirs for ours, theirs in zip(history["load"], other["load"], strict=True)]
    same = [*moved, True].index(True)
    difference = np.abs(np.subtract(history["loss"], other["loss"]))
    assert len(difference) == 20
    assert difference[: max(same, 1)].max() <= SAME_BOUND, difference
    assert difference.max() <= compare.BOUND, difference  # then rounding has decided between two experts nearly tied
    assert history["dropped"][:same] == other["dropped"][:same]
    return same


@pytest.mark.parametrize(
    "platforms", [("cpu", "cpu"), pytest.param(("cpu", "gpu"), marks=pytest.mark.gpu)], ids="-".join
)
def test_losses_of_two_gpus_are_those_of_two_cpu_devices(
    platforms: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two CPU runs, one of them compiled otherwise, show how much rounding does."""
    world.mesh(2, on=platforms[1])  # or skips
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # a GPU's default is TF32
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    readme = str(EXAMPLES.parent / "README.md")
    arguments = [*SMALL, "--devices", "2", "--steps", "20", "--learning-rate", "0.004", "--text", readme]
    runs = []
    for number, platform in enumerate(platforms):
        flags = "--xla_cpu_enable_fast_math=true" if number else ""
        out = str(tmp_path / str(number))
        runs.append(start(*arguments, "--platform", platform, "--out", out, flags=flags))
    for run in runs:
        finish(run, status=0)
    metrics, histories = ([read(tmp_path / str(n) / f"{name}.json") for n in (0, 1)] for name in ("metrics", "history"))
    implementations = {"cpu": "reference", "gpu": "cuda"}
    assert [run["implementation"] for run in metrics] == [implementations[platform] for platform in platforms]
    assert same_training(*histories) >= 1
    assert histories[0]["loss"][-1] < histories[0]["loss"][0] - 0.5


def twin(layer: type, **options) -> tuple[jax_ep.MoEConfig, nnx.Module]:
    config = jax_ep.MoEConfig(hidden=8, intermediate=12, num_experts=4, top_k=2, **options)
    group = jax_ep.create_group(world.mesh(2), "ep", max_tokens=6, hidden=8, num_experts=4, top_k=2, dtype="float32")
    return config, layer(config, group, rngs=nnx.Rngs(0))


def test_masked_moe_is_the_sum_over_a_tokens_experts() -> None:
    config, layer = twin(feed_forwards.MaskedMoE, score="sigmoid", use_bias=True)
    layer.bias[...] = jax.numpy.array([0.0, 1.0, 0.0, -1.0])
    x = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
    y, stats = nnx.jit(lambda layer, x: layer(x))(layer, x)

    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), layer.params())
    wanted, load = np.zeros((2, 6, 8)), np.zeros(4)
    for place in np.ndindex(2, 6):
        token = x[place].astype(np.float64)
        score = 1 / (1 + np.exp(-token @ params.router))
        picked = np.argsort(-(score + [0, 1, 0, -1]))[:2]
        load[picked] += 1
        for expert in picked:
            gate, up = token @ params.experts.gate[expert], token @ params.experts.up[expert]
            result = (gate / (1 + np.exp(-gate)) * up) @ params.experts.down[expert]
            wanted[place] += score[expert] / score[picked].sum() * result
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(stats.load, load)


def test_plain_network_has_the_flops_of_the_picked_experts() -> None:
    config, layer = twin(feed_forwards.PlainFeedForward)
    weights = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param)))
    assert weights == config.top_k * 3 * config.hidden * config.intermediate  # each is multiplied with once a token


def test_compare_ffn(main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_EP_COMMIT", 40 * "0")
    arguments = [*SMALL, "--compare-ffn", "--runs", "3", "--records", str(tmp_path / "records")]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    (path,) = (tmp_path / "records").glob("moe_step-*.json")
    results = record.read(path).results
    assert [result.implementation for result in results] == ["reference", "ffn"]
    for result in results:
        assert (result.op, result.ranks, result.tokens, result.hidden) == ("moe_step", 8, 32, 32)
        assert (result.num_experts, result.top_k, result.dtype) == (8, 2, "float32")
    assert "32 wide, capacity factor 1.25" in results[0].note
    assert "64 wide" in results[1].note
    assert (tmp_path / "compare_ffn.png").read_bytes().startswith(PNG)
    assert not (tmp_path / "metrics.json").exists()


def test_compare_overlap(main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_EP_COMMIT", 40 * "0")
    arguments = [*SMALL, "--compare-overlap", "--chunks", "4", "--runs", "3", "--records", str(tmp_path / "records")]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    (path,) = (tmp_path / "records").glob("moe_step-*.json")
    in_turn, beside = (written := record.read(path)).results
    assert (
        (in_turn.op, in_turn.ranks, in_turn.tokens) == (beside.op, beside.ranks, beside.tokens) == ("moe_step", 8, 32)
    )
    assert in_turn.note.startswith("exchanges in turn with compute; experts 32 wide, capacity factor 1.25")
    assert beside.note.startswith("exchanges beside compute, 4 chunks; experts 32 wide")
    assert [each.name for each in written.timelines] == ["in turn", "beside"]
    assert not (tmp_path / "metrics.json").exists()


def test_the_share_of_exchanges_is_of_the_time_that_the_gpu_is_busy() -> None:
    kernels = [("nvjet", 30.0), ("void jax_ep::Dispatch<>", 8.0), ("jax_ep::LayOutByExpert", 2.0)]
    line = timeline.Timeline("step", tuple(timeline.Kernel(name, 7, 0.0, us) for name, us in kernels))
    assert compare._share_of_exchanges(line) == 10 / 40
    assert compare._share_of_exchanges(timeline.Timeline("step", ())) is None


def test_heads_may_have_a_width_of_their_own() -> None:
    sizes = model.ModelConfig(layers=1, hidden=36, heads=3, head_width=8, dtype="float32")
    attention = model.Attention(sizes, rngs=nnx.Rngs(0))
    assert attention.qkv.kernel.shape == (36, 3 * 24) and attention.out.kernel.shape == (24, 36)
    assert attention(jax.numpy.ones((2, 5, 36))).shape == (2, 5, 36)


def test_exchanges_beside_compute_train_as_a_dense_computation(main, tmp_path: Path) -> None:
    options = "--compare-dense --shared 16 --chunks 2 --overlap --devices 2 --experts 4 --steps 3".split()
    assert main([*SMALL, *options, "--out", str(tmp_path)]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["dense_steps_of_same_picks"] == 3
    assert metrics["dense_difference_while_same_nats"] <= 1e-5


def test_steps_take_turns() -> None:
    calls: list[tuple[str, int]] = []
    steps = {name: lambda number, name=name: calls.append((name, number)) for name in ("moe", "ffn")}
    seconds = compare.time_in_turn(steps, runs=3, warm_up=2)
    assert {name: len(times) for name, times in seconds.items()} == {"moe": 3, "ffn": 3}
    assert [name for name, _ in calls] == ["ffn", "moe", "moe", "ffn"] * 2 + ["ffn", "moe"]
    assert [number for _, number in calls] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
