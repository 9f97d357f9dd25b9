"""The numbers of a group: what a rank must hold, counted by hand and by brute force."""

from __future__ import annotations

import itertools

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ep.config import GroupConfig


def config(**changes) -> GroupConfig:
    sizes = {"num_ranks": 4, "max_tokens": 10, "hidden": 8, "num_experts": 8, "top_k": 4, "dtype": "bfloat16"}
    return GroupConfig(**{**sizes, **changes})


def test_worst_case_capacity_by_hand():
    # 4 ranks × 10 tokens, of whose 4 picks only 2 can live on a rank of 2 experts.
    assert config().rows_capacity(10) == 80
    # 80 rows over 2 experts waste most as 1 + 79 or 9 + 71 ..: 1 block of 8 and 10 of 8.
    assert config(alignment=8).rows_capacity(10) == 88
    assert config().rows_capacity(10, top_k=1) == 40
    assert config().rows_capacity(0) == 0
    assert config().rows_capacity(10, row_order="rank") == 40


@pytest.mark.parametrize(
    ("factor", "tokens", "top_k", "alignment", "rows"),
    [
        (1.1, 10, 1, 1, 11),  # not the 12 that ceil(1.1 * 10) gives in binary floating point
        (1.25, 10, 4, 1, 50),
        (1.25, 10, 4, 8, 56),
        (0.07, 100, 1, 1, 7),
        (1e-3, 1, 1, 1, 1),
    ],
)
def test_capacity_factor_is_read_as_the_decimal_it_was_written_as(factor, tokens, top_k, alignment, rows):
    made = config(capacity_factor=factor, top_k=top_k, alignment=alignment, max_tokens=tokens)
    assert made.rows_capacity(tokens) == rows


def test_capacity_is_rounded_up_to_whole_blocks_but_not_in_rank_order():
    made = config(capacity=13, alignment=8)
    assert made.rows_capacity(10) == 16
    assert made.rows_capacity(10, alignment=1) == 13
    assert made.rows_capacity(10, row_order="rank") == 13
    assert config(capacity_factor=2.0).rows_capacity(10, row_order="rank") == 40  # 80, but only 40 pairs exist
    assert config(capacity_factor=0.25).rows_capacity(10, row_order="rank") == 10


@given(
    ranks=st.integers(1, 4),
    tokens=st.integers(0, 6),
    top_k=st.integers(1, 4),
    local_experts=st.integers(1, 4),
    alignment=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_worst_case_capacity_drops_nothing(ranks, tokens, top_k, local_experts, alignment, seed):
    experts = ranks * local_experts
    top_k = min(top_k, experts)
    made = GroupConfig(ranks, tokens, 1, experts, top_k, np.dtype("float32"), alignment=alignment)
    capacity = made.rows_capacity(tokens)
    assert capacity % alignment == 0
    rng = np.random.default_rng(seed)
    # Distinct experts a token, with a leaning towards rank 0.
    noise = rng.random((ranks, tokens, experts)) - 0.7 * (np.arange(experts) < local_experts)
    index = np.argsort(noise, axis=-1)[..., :top_k].astype(np.int32)
    assert oracle.layout(index, experts, capacity, alignment=alignment).num_dropped.sum() == 0


def test_worst_case_capacity_has_no_block_too_many():
    for ranks, local_experts, alignment, tokens in itertools.product((1, 2), (1, 2, 3), (1, 3, 4), (1, 2, 3)):
        made = GroupConfig(ranks, tokens, 1, ranks * local_experts, 1, np.dtype("float32"), alignment=alignment)
        picks = ranks * tokens
        worst = max(
            sum(-(-n // alignment) for n in split)
            for split in itertools.product(range(picks + 1), repeat=local_experts)
            if sum(split) == picks
        )
        assert made.rows_capacity(tokens) == worst * alignment


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts": 9}, ValueError, r"multiple of the group's 4 ranks, got 9; use 12"),
        ({"capacity": 4, "capacity_factor": 1.0}, ValueError, "at most one of them, got capacity=4"),
        ({"capacity": -1}, ValueError, "capacity: expected at least 0, got -1"),
        ({"capacity": 1.5}, TypeError, "capacity: expected an integer, got 1.5"),
        ({"capacity_factor": 0.0}, ValueError, "above 0, got 0.0"),
        ({"capacity_factor": float("nan")}, ValueError, "finite"),
        ({"alignment": 0}, ValueError, "alignment: expected at least 1, got 0"),
        ({"top_k": True}, TypeError, "top_k: expected an integer, got True"),
        ({"hidden": 0}, ValueError, "hidden: expected at least 1"),
        ({"max_tokens": -1}, ValueError, "max_tokens: expected at least 0"),
        ({"dtype": "int32"}, TypeError, "float16, bfloat16, float32, got int32"),
        ({"dtype": "float64"}, TypeError, "got float64"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        config(**changes)


def test_more_rows_than_int32_slots_can_count_are_refused():
    big = config(max_tokens=2**29, num_experts=4, top_k=8)
    with pytest.raises(ValueError, match="2147483647 rows"):
        big.rows_capacity(2**29)
