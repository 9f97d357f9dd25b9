"""The static numbers of a group, checked once, and the arithmetic of capacities."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

RowOrder = Literal["expert", "rank"]
ROW_ORDERS: tuple[RowOrder, ...] = ("expert", "rank")
TOKEN_DTYPES = tuple(np.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32))

_INT32_MAX = 2**31 - 1


def round_up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


def check_row_order(row_order: str) -> RowOrder:
    """`row_order` if it is one of `ROW_ORDERS`, else ValueError."""
    for known in ROW_ORDERS:
        if row_order == known:
            return known
    raise ValueError(f"row_order: expected one of {ROW_ORDERS}, got {row_order!r}")


def check_integer(name: str, value: Any, at_least: int) -> int:
    """`value` as an int of at least `at_least`, else TypeError or ValueError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {value!r} of type {type(value).__name__}")
    if value < at_least:
        raise ValueError(f"{name}: expected at least {at_least}, got {value}")
    return int(value)


@dataclasses.dataclass(frozen=True)
class GroupConfig:
    """What a group is made for: sizes that bound every call, and the defaults that a call may override.

    Attributes:
      num_ranks: ranks that share one set of experts (R).
      max_tokens: most tokens a rank may pass in one call (T ≤ max_tokens).
      hidden: length of a token's vector (H).
      num_experts: experts of the whole group (E), divided evenly over the ranks.
      top_k: most experts a token may pick (K).
      dtype: widest dtype of tokens and rows.
      capacity: rows a rank holds at most in a call, or None.
      capacity_factor: the same as a multiple of T·K, or None.
      alignment: rows of an expert start at, and are padded to, multiples of this (A).
    """

    num_ranks: int
    max_tokens: int
    hidden: int
    num_experts: int
    top_k: int
    dtype: np.dtype
    capacity: int | None = None
    capacity_factor: float | None = None
    alignment: int = 1

    def __post_init__(self) -> None:
        for name, least in (
            ("num_ranks", 1),
            ("max_tokens", 0),
            ("hidden", 1),
            ("num_experts", 1),
            ("top_k", 1),
            ("alignment", 1),
        ):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), least))
        dtype = np.dtype(self.dtype)
        if dtype not in TOKEN_DTYPES:
            raise TypeError(
                f"dtype: expected one of {', '.join(d.name for d in TOKEN_DTYPES)}, got {dtype.name}; "
                'for an FP8 exchange keep the dtype and call dispatch(..., wire="fp8")'
            )
        object.__setattr__(self, "dtype", dtype)
        if self.num_experts % self.num_ranks:
            raise ValueError(
                f"num_experts: expected a multiple of the group's {self.num_ranks} ranks, got {self.num_experts}; "
                f"use {round_up(self.num_experts, self.num_ranks)} experts, or a mesh axis that divides them"
            )
        if self.capacity is not None and self.capacity_factor is not None:
            raise ValueError(
                f"capacity and capacity_factor: expected at most one of them, got capacity={self.capacity} and "
                f"capacity_factor={self.capacity_factor}; drop one"
            )
        if self.capacity is not None:
            object.__setattr__(self, "capacity", check_integer("capacity", self.capacity, 0))
        if self.capacity_factor is not None:
            factor = float(self.capacity_factor)
            if not (math.isfinite(factor) and factor > 0):
                raise ValueError(f"capacity_factor: expected a finite number above 0, got {self.capacity_factor}")
            object.__setattr__(self, "capacity_factor", factor)

    @property
    def num_local_experts(self) -> int:
        """Experts of one rank (E_l = E / R)."""
        return self.num_experts // self.num_ranks

    def rows_capacity(
        self,
        tokens: int,
        top_k: int | None = None,
        alignment: int | None = None,
        row_order: RowOrder = "expert",
    ) -> int:
        """Static number of rows (C) that a rank receives in a call with `tokens` tokens a rank.

        Expert order: a multiple of the alignment. With neither `capacity` nor `capacity_factor` it is the
        least that holds R·T·min(K, E_l) rows however they fall on the local experts, so that nothing can be
        dropped unless a token names one expert twice. Rank order: rows are (source rank, token) pairs, at most R·T.
        """
        k = self.top_k if top_k is None else top_k
        a = self.alignment if alignment is None else alignment
        if row_order == "rank":
            pairs = self.num_ranks * tokens
            if self.capacity is not None:
                rows = self.capacity
            elif self.capacity_factor is not None:
                rows = min(self._scaled(tokens * k), pairs)
            else:
                rows = pairs
        elif self.capacity is not None:
            rows = round_up(self.capacity, a)
        elif self.capacity_factor is not None:
            rows = round_up(self._scaled(tokens * k), a)
        else:
            wanted = self.num_ranks * tokens * min(k, self.num_local_experts)
            # Every expert with rows may waste up to a - 1 of them on its last block.
            rows = (wanted + min(self.num_local_experts, wanted) * (a - 1)) // a * a
        if max(rows, self.num_ranks * tokens * k) > _INT32_MAX:
            raise ValueError(
                f"rows: expected at most {_INT32_MAX} rows and picks a call (int32 slots), got a capacity of {rows} "
                f"rows for {self.num_ranks} ranks × {tokens} tokens × top-{k}; pass fewer tokens a call, or a capacity"
            )
        return rows

    def _scaled(self, picks: int) -> int:
        # The factor as the decimal the user wrote: 1.1 × 10 is 11 rows, not the 12 of binary floating point.
        assert self.capacity_factor is not None
        return math.ceil(Fraction(repr(self.capacity_factor)) * picks)
