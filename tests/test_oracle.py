"""The oracle against numbers worked out by hand: who checks the checker."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import oracle
import pytest

# Two ranks, two tokens each, top-2, four experts: 0 and 1 live on rank 0, 2 and 3 on rank 1.
# Expert 0 is asked for three times (twice by one token), -1 is none, 9 is invalid.
INDEX = np.array([[[0, 2], [0, 0]], [[-1, 9], [1, 3]]], np.int32)
X = np.array([[[1, -2], [3, 4]], [[5, 6], [7, 8]]], np.float32)
WEIGHTS = np.array([[[0.5, 0.25], [2, 4]], [[16, 32], [64, 128]]], np.float32)


def test_expert_order_by_hand():
    lay = oracle.layout(INDEX, 4, capacity=4, alignment=2)
    # Rank 0 has two blocks of two rows: one for expert 0, whose third row is dropped, one for expert 1.
    assert lay.slots.tolist() == [
        [[[0, -1], [1, -1]], [[-1, -1], [2, -1]]],
        [[[-1, 0], [-1, -1]], [[-1, -1], [-1, 2]]],
    ]
    assert lay.group_sizes.tolist() == [[2, 2], [2, 2]]
    assert lay.counts.tolist() == [[2, 1], [1, 1]]
    assert lay.num_dropped.tolist() == [[1], [0]]  # at the rank that refused the row
    assert lay.num_invalid.tolist() == [[0], [1]]  # at the rank that asked
    assert lay.real_rows.tolist() == [[True, True, True, False], [True, False, True, False]]

    rows = oracle.dispatch(X, lay)
    assert rows.tolist() == [[[1, -2], [3, 4], [7, 8], [0, 0]], [[1, -2], [0, 0], [7, 8], [0, 0]]]
    weights = oracle.dispatch_weights(WEIGHTS, lay)
    assert weights.tolist() == [[0.5, 2, 64, 0], [0.25, 0, 128, 0]]

    rows[~lay.real_rows] = np.nan  # padding is not read
    assert oracle.combine(rows, lay).tolist() == [[[2, -4], [3, 4]], [[0, 0], [14, 16]]]
    assert oracle.combine(rows, lay, weights).tolist() == [[[0.75, -1.5], [6, 8]], [[0, 0], [1344, 1536]]]


def test_rank_order_by_hand():
    lay = oracle.layout(INDEX, 4, capacity=2, row_order="rank")
    # Rank 0 is asked for by tokens (0, 0), (0, 1) and (1, 1); the last does not fit.
    assert lay.slots.tolist() == [
        [[[0, -1], [1, 1]], [[-1, -1], [-1, -1]]],
        [[[-1, 0], [-1, -1]], [[-1, -1], [-1, 1]]],
    ]
    assert lay.counts.tolist() == lay.group_sizes.tolist() == [[3, 0], [1, 1]]  # picks, in accepted rows
    assert lay.num_dropped.tolist() == [[1], [0]]
    assert lay.num_invalid.tolist() == [[0], [1]]

    assert oracle.dispatch(X, lay).tolist() == [[[1, -2], [3, 4]], [[1, -2], [7, 8]]]
    assert oracle.local_index(lay).tolist() == [[[0, -1], [0, 0]], [[-1, 0], [-1, 1]]]
    assert oracle.dispatch_weights(WEIGHTS, lay).tolist() == [[[0.5, 0], [2, 4]], [[0, 0.25], [0, 128]]]

    y = np.array([[[10, 20], [30, 40]], [[1, 2], [3, 4]]], np.float32)
    assert oracle.combine(y, lay).tolist() == [[[11, 22], [30, 40]], [[0, 0], [3, 4]]]  # row 1 counts once


@pytest.mark.parametrize(
    ("capacity", "blocks"),
    [
        (0, [0, 0, 0, 0]),
        (1, [0, 0, 0, 0]),  # half a block is none
        (2, [1, 0, 0, 0]),  # level 0, the left-over block to the lowest number that wants one
        (4, [1, 0, 1, 0]),
        (6, [1, 0, 1, 1]),  # level 1 is full
        (12, [3, 0, 2, 1]),  # level 2 takes five blocks, one is left over for expert 0
        (13, [3, 0, 2, 1]),
        (18, [3, 0, 5, 1]),
        (99, [3, 0, 5, 1]),  # nobody gets more than asked for
    ],
)
def test_share_blocks_by_hand(capacity, blocks):
    assert oracle.share_blocks([5, 0, 9, 1], capacity, alignment=2) == blocks


def test_share_blocks_follows_the_level_rule():
    rng = np.random.default_rng(0)
    for _ in range(300):
        wanted = rng.integers(0, 20, rng.integers(1, 6)).tolist()
        capacity, alignment = int(rng.integers(0, 60)), int(rng.integers(1, 9))
        needed, budget = [-(-n // alignment) for n in wanted], capacity // alignment
        level = max(n for n in range(21) if sum(min(a, n) for a in needed) <= budget)
        blocks = [min(a, level) for a in needed]
        for expert, a in enumerate(needed):
            blocks[expert] += a > level and sum(blocks) < budget
        assert oracle.share_blocks(wanted, capacity, alignment) == blocks


def test_sanitize_compares_in_the_index_type():
    for dtype, index, clean, invalid in [
        (np.uint8, [255, 3, 4, 0], [-1, 3, -1, 0], 2),  # 255 is not -1
        (np.int8, [-1, -2, -128, 3], [-1, -1, -1, 3], 2),
        (np.int64, [2**32, -(2**32) - 1, -1, 2**63 - 1], [-1, -1, -1, -1], 3),  # not 0 and -1 in 32 bits
        (np.uint64, [2**64 - 1, 2**32 + 1, 1, 2], [-1, -1, 1, 2], 2),
    ]:
        result, num_invalid = oracle.sanitize(np.array([[index]], dtype), 4)
        assert (result.tolist(), num_invalid.tolist()) == ([[clean]], [[invalid]])


def test_rows_capacity_by_hand():
    assert oracle.rows_capacity(2, 3, 2, 8) == 12  # every row of every rank
    assert oracle.rows_capacity(2, 3, 4, 4) == 12  # two local experts: two rows a token at most
    # 12 rows in blocks of 8 over 4 experts: 12 + 4 * 7 = 40 rows at most (1, 1, 1 and 9 rows).
    assert oracle.rows_capacity(2, 3, 2, 8, alignment=8) == 40
    assert oracle.rows_capacity(2, 1, 1, 16, alignment=8) == 16  # two rows fill two blocks at most
    assert oracle.rows_capacity(2, 0, 2, 8, alignment=8) == 0
    assert oracle.rows_capacity(2, 3, 2, 8, alignment=8, capacity=17) == 24
    assert oracle.rows_capacity(2, 3, 2, 8, alignment=8, row_order="rank") == 6
    assert oracle.rows_capacity(2, 3, 2, 8, alignment=8, row_order="rank", capacity=5) == 5
    assert oracle.rows_capacity(2, 3, 2, 8, capacity_factor=1.25) == 8  # 7.5
    assert oracle.rows_capacity(2, 3, 2, 8, alignment=8, capacity_factor=1.5) == 16  # 9
    assert oracle.rows_capacity(2, 3, 2, 8, capacity_factor=1.5, row_order="rank") == 6
    assert oracle.rows_capacity(2, 25, 4, 8, capacity_factor=1.1) == 110  # 1.1 * 100 is 110.00000000000001


def test_default_capacity_drops_no_distinct_picks():
    rng = np.random.default_rng(0)
    for _ in range(100):
        ranks, local, tokens, alignment = (int(n) for n in rng.integers(1, [4, 5, 6, 9]))
        experts = ranks * local
        top_k = int(rng.integers(1, experts + 1))
        order = rng.permuted(np.tile(np.arange(experts), (ranks, tokens, 1)), axis=2)
        index = np.where(rng.random((ranks, tokens, top_k)) < rng.random(), order[..., :top_k], -1)
        capacity = oracle.rows_capacity(ranks, tokens, top_k, experts, alignment=alignment)
        assert not oracle.layout(index, experts, capacity, alignment=alignment).num_dropped.any()


def test_combine_rounds_each_rank_and_then_the_sum():
    lay = oracle.layout(np.array([[[0, 1, 2]], [[-1, -1, -1]]]), 4, capacity=2)
    tiny = 2.0**-8  # half of bfloat16's step at 1
    y = np.array([[[1.0], [tiny]], [[tiny], [0]]], ml_dtypes.bfloat16)
    # Rank 0: 1 + tiny rounds to 1 (ties to even); then 1 + tiny again. In one sum it would be 1 + 2**-7.
    assert oracle.combine(y, lay)[0].tolist() == [[1.0]]


def test_combine_rounds_products():
    lay = oracle.layout(np.array([[[0, 0]]]), 1, capacity=2)
    y = np.array([[[-1 - 2.0**-11], [1 + 2.0**-12]]], np.float32)
    weights = np.array([[1, 1 + 2.0**-12]], np.float32)
    assert oracle.combine(y, lay, weights).tolist() == [[[0.0]]]  # a fused multiply-add leaves 2**-24


def test_combine_starts_from_plus_zero():
    lay = oracle.layout(np.array([[[0]]]), 1, capacity=1)
    assert not np.signbit(oracle.combine(np.array([[[-0.0]]], np.float32), lay)).any()


def test_quantize_by_hand():
    x = np.zeros((2, 200), np.float32)
    x[0, :5] = [448, 1, -17, 0.3, -0.0]
    x[1, 0], x[1, 128] = np.nan, 1344
    payload, scales = oracle.quantize(x)
    # Scale 1: 17 is half-way between 16 and 18 and goes to the even one; 0.3 lies between 0.28125 and 0.3125.
    assert payload[0, :5].tolist() == [448, 1, -16, 0.3125, 0]
    assert np.signbit(payload[0, :5]).tolist() == [False, False, True, False, True]
    assert scales[0].tolist() == [1, 2.0**-100 * float(np.float32(1 / 448))]  # the second block is all zero
    assert np.isnan(payload[1, :128]).all() and np.isnan(scales[1, 0])
    # fl(1/448) is too large by 0.375 * 2**-23 of itself, so 1344 * fl(1/448) rounds up to the number after 3.
    assert payload[1, 128:131].tolist() == [448, 0, 0] and scales[1, 1] == 3 + 2.0**-22
    back = oracle.dequantize(payload, scales, np.float32)
    assert back[1, 128] == 1344 + 2.0**-13 and np.isnan(back[1, :128]).all() and back[0, 3] == np.float32(0.3125)

    payload, scales = oracle.quantize(np.array([[1344, -1, 0.5]], np.float32), "ue8m0")
    assert scales.tolist() == [[4]]  # 3, rounded up to a power of two
    assert payload.tolist() == [[320, -0.25, 0.125]]  # 336 is half-way between 320 (even) and 352


def test_float8_cast_is_nearest_even():
    codes = np.arange(127, dtype=np.uint8)  # all finite values that are not negative, in order
    values = [Fraction(float(v)) for v in codes.view(oracle.FP8)]
    for low, high, code in zip(values, values[1:], codes, strict=False):
        middle = (low + high) / 2
        even = low if code % 2 == 0 else high
        for x, nearest in [(middle, even), (middle - low / 1024, low), (middle + high / 1024, high)]:
            assert Fraction(float(np.float32(x).astype(oracle.FP8))) == nearest
