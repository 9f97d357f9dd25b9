"""What layout, dispatch and combine must return: NumPy loops over all ranks, written from the semantics only.

Every array has the rank as its leading dimension: `index[r]` is what rank `r` passes in, `slots[r]` what it
gets back. Nothing here imports `jax_ep` or JAX, so that a test which compares the two compares two authors.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np

FP8 = ml_dtypes.float8_e4m3fn
FP8_MAX = np.float32(448)
FP8_BLOCK = 128
ONE = np.float32(1)


@dataclass(frozen=True)
class Layout:
    """Where every row goes. R ranks, T tokens a rank, K top-k, E_l local experts."""

    slots: np.ndarray  # [R, R, T, K] int32: rank that holds the row, source rank, token, k; -1 for no row
    group_sizes: np.ndarray  # [R, E_l] int32
    counts: np.ndarray  # [R, E_l] int32
    num_dropped: np.ndarray  # [R, 1] int32
    num_invalid: np.ndarray  # [R, 1] int32
    index: np.ndarray  # [R, T, K] int64: the sanitised top-k index, -1 for none
    capacity: int
    row_order: str

    @property
    def real_rows(self) -> np.ndarray:
        """[R, C] bool: the rows that hold a token (the others are padding)."""
        real = np.zeros((len(self.slots), self.capacity), bool)
        for rank, slots in enumerate(self.slots):
            real[rank, slots[slots >= 0]] = True
        return real


def sanitize(index: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """index [R, T, K] of any integer type to int64, -1 for none and invalid, and invalid entries [R, 1].

    The values become Python integers, which do not wrap: 255 of uint8 and 2**32 of int64 stay what they are.
    """
    clean = np.full(index.shape, -1, np.int64)
    num_invalid = np.zeros((len(index), 1), np.int32)
    for rank, tokens in enumerate(index.tolist()):
        for token, picks in enumerate(tokens):
            for k, expert in enumerate(picks):
                if 0 <= expert < num_experts:
                    clean[rank, token, k] = expert
                elif expert != -1:
                    num_invalid[rank, 0] += 1
    return clean, num_invalid


def rows_capacity(
    ranks: int,
    tokens: int,
    top_k: int,
    num_experts: int,
    *,
    alignment: int = 1,
    row_order: str = "expert",
    capacity: int | None = None,
    capacity_factor: float | None = None,
) -> int:
    """Static row limit of one rank for one call."""
    if capacity_factor is not None:
        exact = Fraction(str(capacity_factor)) * tokens * top_k  # 1.1 means 11/10, not the nearest binary fraction
        capacity = exact.numerator // exact.denominator + (exact.denominator != 1)
        if row_order == "rank":
            capacity = min(capacity, ranks * tokens)
    if row_order == "rank":
        return ranks * tokens if capacity is None else capacity
    if capacity is None:
        # The worst case with distinct experts in a token: every row is here, and as many groups as there can
        # be end in a block with one row only.
        local = num_experts // ranks
        rows = ranks * tokens * min(top_k, local)
        capacity = (rows + min(local, rows) * (alignment - 1)) // alignment * alignment
    while capacity % alignment:
        capacity += 1
    return capacity


def share_blocks(wanted: list[int], capacity: int, alignment: int) -> list[int]:
    """Blocks each local expert gets, when `wanted[e]` rows ask for expert e.

    Level by level, one block a level to each expert that still wants one, in order of expert number, until
    the budget is spent.
    """
    budget = capacity // alignment
    needed = [-(-rows // alignment) for rows in wanted]
    blocks = [0] * len(wanted)
    while budget > 0 and blocks != needed:
        for expert in range(len(wanted)):
            if blocks[expert] < needed[expert] and budget > 0:
                blocks[expert] += 1
                budget -= 1
    return blocks


def layout(
    index: np.ndarray, num_experts: int, capacity: int, *, alignment: int = 1, row_order: str = "expert"
) -> Layout:
    """Slots and counts for `index` [R, T, K] of any integer type; `capacity` rows a rank."""
    build = {"expert": _expert_order, "rank": _rank_order}[row_order]
    clean, num_invalid = sanitize(index, num_experts)
    ranks, tokens, top_k = clean.shape
    local = num_experts // ranks
    slots = np.full((ranks, ranks, tokens, top_k), -1, np.int32)
    group_sizes = np.zeros((ranks, local), np.int32)
    counts = np.zeros((ranks, local), np.int32)
    num_dropped = np.zeros((ranks, 1), np.int32)
    picks: list[list[tuple[int, ...]]] = [
        [] for _ in range(ranks)
    ]  # of each rank: (source, token, k, local expert), in that order
    for source, of_rank in enumerate(clean.tolist()):
        for token, of_token in enumerate(of_rank):
            for k, expert in enumerate(of_token):
                if expert >= 0:
                    picks[expert // local].append((source, token, k, expert % local))
    for rank in range(ranks):
        num_dropped[rank, 0] = build(picks[rank], capacity, alignment, slots[rank], group_sizes[rank], counts[rank])
    return Layout(slots, group_sizes, counts, num_dropped, num_invalid, clean, capacity, row_order)


def _expert_order(picks, capacity, alignment, slots, group_sizes, counts) -> int:
    local = len(counts)
    of_expert = [[pick[:3] for pick in picks if pick[3] == expert] for expert in range(local)]
    blocks = share_blocks([len(rows) for rows in of_expert], capacity, alignment)
    start = dropped = 0
    for expert, rows in enumerate(of_expert):
        size = blocks[expert] * alignment
        for place, pick in enumerate(rows):
            if place < size:
                slots[pick] = start + place
                counts[expert] += 1
            else:
                dropped += 1
        group_sizes[expert] = size
        start += size
    return dropped


def _rank_order(picks, capacity, alignment, slots, group_sizes, counts) -> int:
    row_of: dict[tuple[int, int], int] = {}
    for source, token, k, expert in picks:
        row = row_of.setdefault((source, token), len(row_of))
        if row < capacity:
            slots[source, token, k] = row
            counts[expert] += 1
    group_sizes[:] = counts
    return max(0, len(row_of) - capacity)


def dispatch(x: np.ndarray, lay: Layout) -> np.ndarray:
    """x [R, T, ...] to rows [R, C, ...]: each row is a copy of its token, the others are +0."""
    rows = np.zeros((len(x), lay.capacity, *x.shape[2:]), x.dtype)
    for rank, source, token, k in np.argwhere(lay.slots >= 0):
        rows[rank, lay.slots[rank, source, token, k]] = x[source, token]
    return rows


def dispatch_weights(weights: np.ndarray, lay: Layout) -> np.ndarray:
    """weights [R, T, K] to float32 [R, C] in expert order, [R, C, K] in rank order; +0 where no pick is."""
    rank_order = lay.row_order == "rank"
    rows = np.zeros((len(weights), lay.capacity, weights.shape[2])[: 3 if rank_order else 2], np.float32)
    for rank, source, token, k in np.argwhere(lay.slots >= 0):
        row = lay.slots[rank, source, token, k]
        rows[(rank, row, k) if rank_order else (rank, row)] = weights[source, token, k]
    return rows


def local_index(lay: Layout) -> np.ndarray:
    """Rank order: each row's local experts, [R, C, K] int32; -1 for those of other ranks and in padding."""
    local = lay.counts.shape[1]
    rows = np.full((len(lay.slots), lay.capacity, lay.slots.shape[3]), -1, np.int32)
    for rank, source, token, k in np.argwhere(lay.slots >= 0):
        rows[rank, lay.slots[rank, source, token, k], k] = lay.index[source, token, k] % local
    return rows


@np.errstate(invalid="ignore", over="ignore")
def combine(y: np.ndarray, lay: Layout, weights: np.ndarray | None = None) -> np.ndarray:
    """y [R, C, H], weights [R, C] float32 or None, to [R, T, H] in y's dtype.

    Two sums in float32, each from +0 and rounded once at its end: over k at the rank that holds the rows,
    over the ranks at the source. A rank-ordered row has been summed over its k already and counts once.
    """
    ranks, _, tokens, _ = lay.slots.shape
    out = np.zeros((ranks, tokens, y.shape[2]), y.dtype)
    for source in range(ranks):
        for token in range(tokens):
            total = np.zeros(y.shape[2], np.float32)
            for rank in range(ranks):
                slots = [slot for slot in lay.slots[rank, source, token].tolist() if slot >= 0]
                if lay.row_order == "rank":
                    slots = slots[:1]
                if not slots:
                    continue  # its partial is +0, which changes no sum that began with +0
                partial = np.zeros(y.shape[2], np.float32)
                for slot in slots:
                    product = y[rank, slot].astype(np.float32)
                    if weights is not None:
                        product = product * weights[rank, slot]
                    partial = partial + product
                total = total + partial.astype(y.dtype).astype(np.float32)
            out[source, token] = total.astype(y.dtype)
    return out


def quantize(x: np.ndarray, scale_format: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """x [..., H] to (float8_e4m3fn [..., H], float32 scales [..., ceil(H / 128)])."""
    blocks = -(-x.shape[-1] // FP8_BLOCK)
    payload = np.zeros(x.shape, FP8)
    scales = np.zeros((*x.shape[:-1], blocks), np.float32)
    for token in np.ndindex(x.shape[:-1]):
        for block in range(blocks):
            part = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
            payload[(*token, part)], scales[(*token, block)] = _quantize_block(x[(*token, part)], scale_format)
    return payload, scales


@np.errstate(invalid="ignore")
def _quantize_block(x: np.ndarray, scale_format: str) -> tuple[np.ndarray, np.float32]:
    x = x.astype(np.float32)
    largest = (x.view(np.int32) & 0x7FFFFFFF).max()
    if largest >= 0x7F800000:  # an infinity or a NaN
        return np.full(x.shape, np.nan, FP8), np.float32(np.nan)
    amax = max(largest.view(np.float32), np.float32(2.0**-100))
    scale = amax * (ONE / FP8_MAX)
    inverse = FP8_MAX / amax
    if scale_format == "ue8m0":
        mantissa, exponent = np.frexp(scale)  # scale = mantissa * 2**exponent, mantissa in [0.5, 1)
        power = int(exponent) - (mantissa == 0.5)  # the least power of two that is not below scale
        scale, inverse = np.float32(2.0**power), np.float32(2.0**-power)
    return np.clip(x * inverse, -FP8_MAX, FP8_MAX).astype(FP8), scale


@np.errstate(invalid="ignore", over="ignore")
def dequantize(payload: np.ndarray, scales: np.ndarray, dtype: type | np.dtype) -> np.ndarray:
    """(payload [..., H], scales [..., ceil(H / 128)]) to [..., H]: a float32 product, then one cast."""
    wide = np.repeat(scales, FP8_BLOCK, axis=-1)[..., : payload.shape[-1]]
    return (payload.astype(np.float32) * wide).astype(dtype)


def bits(array: np.ndarray) -> np.ndarray:
    """The integer view of `array` by which results are compared: -0 is not +0, and all NaNs are one value."""
    array = np.ascontiguousarray(array)
    if np.issubdtype(array.dtype, np.integer) or array.dtype == bool:
        return array
    view = array.view(f"uint{8 * array.dtype.itemsize}")
    return np.where(np.isnan(array.astype(np.float32)), view.dtype.type(np.iinfo(view.dtype).max), view)
