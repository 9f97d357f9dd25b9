"""examples/from_ragged_all_to_all.py: both layers against a loop over tokens, and what the script says."""

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import world

import jax_ep

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))  # as Python does when it runs the script

import from_ragged_all_to_all as script  # noqa: E402

SMALL = "--tokens 12 --hidden 8 --intermediate 16 --experts 16 --top-k 3 --runs 1".split()


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """The script's main in this process, on the devices that conftest.py asked for."""
    for name in ("XLA_FLAGS", "NPROC"):
        monkeypatch.setenv(name, os.environ[name])  # so that a change is undone
    platforms = jax.config.jax_platforms
    yield script.main
    jax.config.update("jax_platforms", platforms)


@pytest.fixture(scope="module")
def inputs() -> tuple:
    options = script.make_parser().parse_args(SMALL)
    return script.make_inputs(options, world.mesh(8))


def wanted(experts: dict, x: np.ndarray, index: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The layer in float64, token by token."""
    out = np.zeros(x.shape)
    for token, pick in np.ndindex(index.shape):
        gate, up, down = (experts[name][index[token, pick]].astype(np.float64) for name in ("gate", "up", "down"))
        inner = x[token] @ gate
        out[token] += weights[token, pick] * ((inner / (1 + np.exp(-inner)) * (x[token] @ up)) @ down)
    return out


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What CPUs lack, as its documentation describes it: copied row by row from everybody's rows."""
    rank = jax.lax.axis_index(axis_name)
    rows, start, size, there = (
        jax.lax.all_gather(array, axis_name) for array in (operand, input_offsets, send_sizes, output_offsets)
    )
    for source in range(rows.shape[0]):
        nth = jnp.arange(output.shape[0]) - there[source, rank]
        comes = (nth >= 0) & (nth < size[source, rank])
        output = jnp.where(comes[:, None], rows[source][jnp.where(comes, start[source, rank] + nth, 0)], output)
    return output


@pytest.mark.parametrize("how", ["padded", "ragged", "jax_ep"])
def test_layers_compute_what_a_loop_does(inputs: tuple, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    mesh = world.mesh(8)
    layer = functools.partial(script.by_hand, num_experts=16, ragged=how == "ragged")
    if how == "jax_ep":
        group = jax_ep.create_group(mesh, "ep", max_tokens=12, hidden=8, num_experts=16, top_k=3, dtype="float32")
        layer = functools.partial(script.with_jax_ep, group=group)
    output, *_ = script.make_step(layer, mesh)(*inputs)
    operands = jax.tree.map(np.asarray, inputs[:4])
    np.testing.assert_allclose(np.asarray(output), wanted(*operands), rtol=0, atol=1e-5)


def test_gpus_get_the_ragged_exchange(inputs: tuple) -> None:
    mesh = world.mesh(8)
    layer = functools.partial(script.by_hand, num_experts=16, ragged=True)
    lowered = script.make_step(layer, mesh).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("ragged_all_to_all") >= 4  # there and back, forward and backward


def test_says_that_both_are_equal(main, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    printed = capsys.readouterr().out
    assert "2 of 16 experts, of which a token picks 3" in printed
    for name in ("output", "gradient of experts", "gradient of tokens", "gradient of weights"):
        assert f"  {name} " in printed
    assert printed.count(" ms\n") == 2


def test_fails_where_they_differ(main, monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = script.by_hand
    monkeypatch.setattr(script, "by_hand", lambda *operands, **how: 1.001 * by_hand(*operands, **how))
    with pytest.raises(AssertionError, match="output: expected at most 1e-05, got 1.0e-03"):
        main(SMALL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--experts 12", "--experts: expected a multiple of the 8 devices, got 12"),
        ("--top-k 9", "--top-k: expected at most the 8 experts, got 9"),
        ("--tokens 0", "--tokens: expected at least 1, got 0"),
        ("--devices 9", "--devices: expected at most the 8 that XLA_FLAGS asks for, got 9"),
    ],
)
def test_refuses_options(main, capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err
