"""The table of static cases, and random draws of what may change within one: routing and data.

A program is compiled once per case. Whatever may differ at run time (how many tokens are real, where they go,
which values they have) is drawn for it again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
import oracle
from hypothesis import strategies as st

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@dataclass(frozen=True)
class Case:
    """Everything that is static in one program."""

    ranks: int
    tokens: int
    top_k: int
    num_experts: int
    hidden: int = 4
    dtype: str = "float32"
    alignment: int = 1
    capacity: int | None = None
    capacity_factor: float | None = None
    row_order: Literal["expert", "rank"] = "expert"
    wire: Literal["fp8", "fp8_ue8m0"] | None = None
    index_dtype: str = "int32"

    def __str__(self) -> str:
        limit = "" if self.capacity is None else f"-c{self.capacity}"
        limit += "" if self.capacity_factor is None else f"-f{self.capacity_factor}"
        return (
            f"{self.row_order}-r{self.ranks}-t{self.tokens}-k{self.top_k}-e{self.num_experts}-h{self.hidden}"
            f"-a{self.alignment}{limit}-{self.dtype}-{self.index_dtype}{'-' + self.wire if self.wire else ''}"
        )

    @property
    def rows(self) -> int:
        """Rows of one rank, by the oracle's count."""
        return oracle.rows_capacity(
            self.ranks,
            self.tokens,
            self.top_k,
            self.num_experts,
            alignment=self.alignment,
            row_order=self.row_order,
            capacity=self.capacity,
            capacity_factor=self.capacity_factor,
        )

    @property
    def scale_format(self) -> Literal["float32", "ue8m0"]:
        return "ue8m0" if self.wire == "fp8_ue8m0" else "float32"


CASES = [
    # ranks, tokens, top-k, experts, hidden
    Case(1, 1, 1, 1),
    Case(1, 0, 2, 4, dtype="bfloat16"),
    Case(1, 70, 16, 16, alignment=8),
    Case(1, 5, 3, 8, 100, "bfloat16", capacity=7),
    Case(2, 2, 2, 4),
    Case(2, 1, 1, 2, 128, "float16"),
    Case(2, 70, 8, 16, alignment=8, capacity=200),
    Case(2, 9, 4, 4, 100, "bfloat16", capacity=0),
    Case(2, 17, 2, 4, 200, "bfloat16", alignment=128),
    Case(2, 6, 4, 64, alignment=8, capacity=33, index_dtype="int8"),
    Case(2, 7, 3, 6, 4, "float16", capacity_factor=1.25, index_dtype="uint8"),
    Case(3, 5, 2, 6, capacity=30, index_dtype="int64"),  # room for every pick of every rank
    Case(3, 25, 4, 12, 100, "bfloat16", capacity_factor=1.1, index_dtype="uint16"),  # 1.1 * 100 in binary is > 110
    Case(3, 4, 9, 9, capacity=5, index_dtype="uint64"),
    Case(3, 0, 1, 3, 128),
    Case(6, 3, 2, 12),
    Case(6, 12, 11, 24, 4, "bfloat16", alignment=8, capacity=64, index_dtype="int16"),
    Case(6, 7, 5, 6, alignment=128, capacity=128, index_dtype="uint32"),
    Case(8, 1, 1, 8, 4, "bfloat16"),
    Case(8, 16, 8, 32, 128, "bfloat16", capacity_factor=1.0),
    Case(8, 6, 8, 256, alignment=8, capacity=48, index_dtype="int8"),  # more experts than the type can name
    Case(8, 5, 4, 256, index_dtype="uint8"),  # exactly as many: no value is invalid
    Case(8, 70, 2, 8, capacity=90),
    Case(8, 4, 16, 64, 200, "float16", alignment=8),
    Case(8, 11, 3, 16, 100, "bfloat16", alignment=128, capacity=256),
    # rows by (source rank, token)
    Case(1, 6, 4, 8, row_order="rank"),
    Case(2, 0, 2, 4, 4, "bfloat16", row_order="rank"),
    Case(2, 13, 4, 8, 100, "bfloat16", alignment=8, capacity=10, row_order="rank"),  # alignment has no say
    Case(3, 8, 6, 6, row_order="rank", index_dtype="uint8"),
    Case(6, 5, 16, 24, 4, "float16", capacity_factor=0.25, row_order="rank"),
    Case(8, 9, 8, 64, 128, "bfloat16", row_order="rank", index_dtype="int64"),
    Case(8, 33, 2, 8, capacity=0, row_order="rank"),
    Case(8, 3, 16, 16, capacity=5, row_order="rank"),
    # FP8 on the wire
    Case(1, 3, 1, 2, 128, "float16", alignment=128, wire="fp8"),
    Case(2, 5, 2, 4, 100, wire="fp8"),
    Case(8, 6, 4, 16, 200, "bfloat16", alignment=8, capacity=24, wire="fp8"),
    Case(3, 7, 3, 6, 128, "bfloat16", row_order="rank", wire="fp8"),
    Case(2, 9, 2, 8, 200, "bfloat16", capacity=11, wire="fp8_ue8m0"),
    Case(6, 4, 2, 6, 4, row_order="rank", wire="fp8_ue8m0"),
]
assert len(CASES) <= 40


@dataclass(frozen=True)
class Draw:
    """One draw of routing and data in few words; `inputs` spells it out."""

    seed: int
    routing: str  # "uniform" | "distinct" | "skewed" | "one expert"
    live: tuple[int, ...]  # tokens of each rank that are real; those after them ask for no expert
    none: bool  # some picks are none
    invalid: bool  # some picks are out of range
    duplicates: bool  # some tokens ask for one expert k times
    special: str  # "" | "nan" | "inf": one token, row and weight of that kind


def draws(case: Case) -> st.SearchStrategy[Draw]:
    """Routing and data for `case`. Shrinks to all tokens real, drawn uniformly, nothing special."""
    full = (case.tokens,) * case.ranks
    unequal = st.tuples(*[st.integers(0, case.tokens)] * case.ranks)
    return st.builds(
        Draw,
        seed=st.integers(0, 2**32 - 1),
        routing=st.sampled_from(["uniform", "distinct", "skewed", "one expert"]),
        live=st.one_of(st.just(full), unequal),
        none=st.booleans(),
        invalid=st.booleans(),
        duplicates=st.booleans(),
        special=st.sampled_from(["", "nan", "inf"]),
    )


def some_draws(case: Case, count: int) -> list[Draw]:
    """Draws without Hypothesis: first all tokens to one expert, then all on the last rank, then of every kind."""
    rng = np.random.default_rng(0)
    live = [(case.tokens,) * case.ranks, (0,) * (case.ranks - 1) + (case.tokens,)]
    live += [tuple(rng.integers(0, case.tokens, case.ranks, endpoint=True).tolist()) for _ in range(2, count)]
    routings = ("one expert", "skewed", "uniform", "distinct")
    specials = ("", "nan", "inf")
    return [
        Draw(n, routings[n % 4], live[n], bool(n & 1), bool(n & 2), bool(n & 4), specials[n % 3]) for n in range(count)
    ]


@dataclass(frozen=True)
class Inputs:
    """What every rank passes in, the rank leading."""

    index: np.ndarray  # [R, T, K] of the case's index type
    x: np.ndarray  # [R, T, H]
    weights: np.ndarray  # [R, T, K] float32
    y: np.ndarray  # [R, C, H]: rows to combine, NaN in padding
    row_weights: np.ndarray  # [R, C] float32, NaN in padding


def inputs(case: Case, draw: Draw) -> tuple[Inputs, oracle.Layout]:
    """The arrays that `draw` describes, and the oracle's layout for them.

    NaN lies wherever nothing may read: in tokens without a pick, in weights of picks that are none, in
    padding.
    """
    rng = np.random.default_rng(draw.seed)
    index = _index(case, draw, rng)
    lay = oracle.layout(index, case.num_experts, case.rows, alignment=case.alignment, row_order=case.row_order)
    dtype = DTYPES[case.dtype]
    x = moderate(rng, (case.ranks, case.tokens, case.hidden), dtype)
    weights = moderate(rng, index.shape, np.float32)
    y = moderate(rng, (case.ranks, case.rows, case.hidden), dtype)
    row_weights = moderate(rng, (case.ranks, case.rows), np.float32)
    if draw.special:
        value = {"nan": np.nan, "inf": np.inf}[draw.special] * rng.choice([-1, 1])
        for array in (x, weights, y, row_weights):
            if array.size:
                array[tuple(rng.integers(0, array.shape))] = value
    x[(lay.index < 0).all(axis=2)] = np.nan
    weights[lay.index < 0] = np.nan
    y[~lay.real_rows] = np.nan
    row_weights[~lay.real_rows] = np.nan
    return Inputs(index, x, weights, y, row_weights), lay


def moderate(rng: np.random.Generator, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Random sign, exponent within +-6 and mantissa; one in twenty is a zero of either sign."""
    values = np.ldexp(1 + rng.random(shape), rng.integers(-6, 6, shape, endpoint=True))
    values[rng.random(shape) < 0.05] = 0
    return (values * rng.choice([-1, 1], shape)).astype(dtype)


def invalid_values(index_dtype: str, num_experts: int) -> list[int]:
    """Values of the type that name no expert and are not -1; cut or of another sign, many would be valid."""
    info = np.iinfo(index_dtype)
    wrapped = [sign * 2**n + low for n in (8, 16, 31, 32, 63) for sign in (-1, 1) for low in (-1, 0, num_experts - 1)]
    values = {-2, -num_experts, num_experts, num_experts + 1, int(info.min), int(info.max), *wrapped}
    return sorted(v for v in values if info.min <= v <= info.max and not -1 <= v < num_experts)


def _index(case: Case, draw: Draw, rng: np.random.Generator) -> np.ndarray:
    info = np.iinfo(case.index_dtype)
    experts = min(case.num_experts, int(info.max) + 1)
    shape = (case.ranks, case.tokens, case.top_k)
    if draw.routing == "uniform":
        index = rng.integers(0, experts, shape)
    elif draw.routing == "distinct":
        index = rng.permuted(np.broadcast_to(np.arange(experts), (*shape[:2], experts)), axis=2)[..., : case.top_k]
    elif draw.routing == "skewed":
        popular = 1 / np.arange(1, experts + 1) ** 1.5
        index = rng.permutation(experts)[rng.choice(experts, shape, p=popular / popular.sum())]
    else:
        index = np.full(shape, rng.integers(experts))
    index = index.astype(case.index_dtype)
    if draw.duplicates:
        doubled = rng.random(shape[:2]) < 0.3
        index[doubled] = index[doubled][:, :1]
    outside = np.array(invalid_values(case.index_dtype, case.num_experts), case.index_dtype)
    none = -1 if info.min < 0 else info.max  # an unsigned type has no -1: its greatest value is invalid
    if draw.none:
        index[rng.random(shape) < 0.2] = none
    if draw.invalid and outside.size:
        index = np.where(rng.random(shape) < 0.1, rng.choice(outside, shape), index)
    for rank, live in enumerate(draw.live):
        index[rank, live:] = none
    return index
