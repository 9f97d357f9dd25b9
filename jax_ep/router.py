"""Routers: from logits to the experts of each token, and the losses and statistics that keep the load even.

Float32 inside, whatever the logits are. All functions take leading axes, and run under jit, grad, vmap and
shard_map; those with `axis` then count the tokens of every rank along it.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Score = Literal["softmax", "sigmoid"]
GroupScore = Literal["top2_sum", "max"]
SCORES: tuple[Score, ...] = ("softmax", "sigmoid")
GROUP_SCORES: tuple[GroupScore, ...] = ("top2_sum", "max")

Axis = str | Sequence[str]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """What `route` returns (a pytree). [...] are the leading axes of the logits, tokens as a rule.

    Attributes:
      index: [..., K] int32 top-k index: distinct experts, best first.
      weights: [..., K] float32 routing weights of these experts.
      scores: [..., E] float32 sigmoid or softmax of all logits, differentiable.
      logits: [..., E] float32, what the scores were made from.
    """

    index: jax.Array
    weights: jax.Array
    scores: jax.Array
    logits: jax.Array


def route(
    logits: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    top_k: int,
    score: Score = "softmax",
    num_groups: int = 1,
    top_groups: int | None = None,
    group_score: GroupScore = "top2_sum",
    scale: ArrayLike = 1.0,
    renormalize: bool | None = None,
    pre_softmax: bool = True,
) -> Routing:
    """Picks the experts of every token and weighs them.

    Experts are selected by score + bias: first the best `top_groups` of `num_groups` contiguous groups, then
    the best `top_k` experts within these; ties go to the lower number. They are weighed by score alone.
    Gradients flow through weights, scores and logits, none through bias and index.

    A token whose logits (or the bias) hold a NaN gets weights of NaN and a valid index, for which NaN ranks
    with +inf. Other tokens do not notice.

    Args:
      logits: [..., E] float.
      bias: [E] float, added for the selection only (see `update_bias`), or None.
      top_k: experts a token, K.
      score: "softmax" over the experts, or "sigmoid" (DeepSeek-V3).
      num_groups: equal contiguous groups that the experts fall into.
      top_groups: groups a token may pick from; needed with num_groups > 1.
      group_score: what groups compete by: "top2_sum", the sum of their two best experts, or "max".
      scale: factor on the weights, last.
      renormalize: whether weights are divided by (their sum + 1e-20). Default: for sigmoid only.
      pre_softmax: softmax only. True: softmax over all experts, then select. False: select by logit + bias,
        then softmax over the selected, whose weights sum to one.

    Raises:
      TypeError: logits or bias are not float, or a count is not an integer.
      ValueError: a shape, count or name that does not fit, or options that contradict each other.

    Example:
      >>> logits = jnp.log(jnp.array([[1.0, 4.0, 2.0, 1.0]]))  # softmax: 1/8, 4/8, 2/8, 1/8
      >>> route(logits, top_k=2, renormalize=True)
      Routing(index=[[1, 2]], weights=[[0.667, 0.333]], ...)

      DeepSeek-V3: route(logits, bias, top_k=8, score="sigmoid", num_groups=8, top_groups=4, scale=2.5).

    Source: DeepSeek-V3, arXiv:2412.19437, equations 12-16; groups by "max": DeepSeek-V2, arXiv:2405.04434.
    """
    logits = _check_logits(logits)
    num_experts = logits.shape[-1]
    if bias is not None:
        bias = _check_float("bias", bias)
        _require(
            bias.shape == (num_experts,),
            f"bias: expected shape ({num_experts},), one value for each expert, got {bias.shape}; reshape it",
        )
    kept = _check_options(num_experts, top_k, score, num_groups, top_groups, group_score, renormalize, pre_softmax)

    logits = logits.astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if score == "sigmoid" else jax.nn.softmax(logits)
    choice = jax.lax.stop_gradient(scores if pre_softmax else logits)
    if bias is not None:
        choice = choice + jax.lax.stop_gradient(bias.astype(jnp.float32))
    index = _select(choice, top_k, num_groups, kept, group_score)

    if pre_softmax:
        weights = _pick(scores, index)
        if renormalize or (renormalize is None and score == "sigmoid"):
            weights = _normalize(weights)
    else:
        weights = jax.nn.softmax(_pick(logits, index))
    weights = weights * jnp.asarray(scale, jnp.float32)
    # Said outright, as the NaN may belong to an expert that was not selected.
    poisoned = jnp.any(jnp.isnan(choice), axis=-1, keepdims=True)
    return Routing(index, jnp.where(poisoned, jnp.nan, weights), scores, logits)


def expert_load(index: ArrayLike, num_experts: int, *, axis: Axis | None = None) -> jax.Array:
    """How many times each expert was picked, before any drop.

    Args:
      index: [..., K], or flat, of any integer dtype; -1 and what else is no expert is not counted.
      num_experts: E.
      axis: mesh axis or axes to sum over, inside shard_map.

    Returns:
      [E] float32.

    Raises:
      TypeError: index or num_experts are not integers.

    Example:
      >>> expert_load(jnp.array([[0, 2], [2, -1]]), 4)
      [1, 0, 2, 0]
    """
    index = jnp.asarray(index)
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"index: expected integers, got {index.dtype.name}; pass the index of a Routing")
    _check_count("num_experts", num_experts)
    if index.ndim < 2:
        index = index.reshape(-1, 1)
    load = jnp.sum(_count(index, num_experts), axis=tuple(range(index.ndim - 1)))
    if axis is not None:
        load = jax.lax.psum(load, axis)
    return load.astype(jnp.float32)


def update_bias(bias: ArrayLike, load: ArrayLike, *, rate: ArrayLike = 0.001) -> jax.Array:
    """The selection bias after one step: up for experts with less than the mean load, down for the others.

    Args:
      bias: [E] float32. It is no trainable parameter: keep it out of the optimizer.
      load: [E], from `expert_load` over the global batch.
      rate: how far a bias moves in one step.

    Returns:
      [E] float32, bias + rate · sign(mean(load) - load).

    Raises:
      TypeError: bias is not float32.
      ValueError: bias and load are not [E] both.

    Example:
      >>> update_bias(jnp.zeros(3), jnp.array([1.0, 2.0, 6.0]), rate=0.01)
      [0.01, 0.01, -0.01]

    Source: loss-free balancing, arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """
    bias, load = jnp.asarray(bias), jnp.asarray(load)
    if bias.dtype != jnp.float32:
        raise TypeError(
            f"bias: expected float32, got {bias.dtype.name}; a narrower type rounds the steps away: keep the "
            "bias out of casts of the parameters"
        )
    _require(
        bias.ndim == 1 and load.shape == bias.shape,
        f"load: expected [E], as bias, got {load.shape} for bias {bias.shape}; use `expert_load`",
    )
    load = load.astype(jnp.float32)
    return bias + jnp.asarray(rate, jnp.float32) * jnp.sign(jnp.mean(load) - load)


def load_balance_loss(routing: Routing, *, axis: Axis | None = None) -> jax.Array:
    """Switch Transformer's auxiliary loss: 1 for an even load, up to E for all tokens on one expert.

    E · sum over experts of f · P, where f is the expert's share of all picks (no gradient), and P the mean
    over tokens of its share of the token's scores.

    Args:
      routing: from `route`.
      axis: mesh axis or axes whose ranks hold the rest of the batch; f and P are then those of all of it.

    Returns:
      Scalar float32, equal on all ranks of the axis; 0 when there are no tokens.

    Example:
      >>> load_balance_loss(route(jnp.log(jnp.array([[3.0, 1.0]])), top_k=1))  # 2 · (1 · 3/4 + 0 · 1/4)
      1.5

    Source: Switch Transformers, arXiv:2101.03961, equations 4-6, with f divided by K.
    """
    scores, tokens = routing.scores, tuple(range(routing.scores.ndim - 1))
    f = expert_load(routing.index, scores.shape[-1]) / max(routing.index.size, 1)
    p = jnp.sum(_normalize(scores), axis=tokens) / max(scores.size // scores.shape[-1], 1)
    if axis is not None:
        f, p = jax.lax.pmean((f, p), axis)
    return scores.shape[-1] * jnp.sum(f * p)


def sequence_balance_loss(routing: Routing, *, factor: ArrayLike = 1e-4) -> jax.Array:
    """DeepSeek-V3's loss against imbalance within one sequence: `factor` for an even load.

    factor · sum over experts of f · P, where f is E / K times the part of the sequence's tokens that picked
    the expert (no gradient), and P the mean over its tokens of the expert's share of the token's scores.

    Args:
      routing: from `route` on logits of [..., S, E]: S tokens of one sequence, any number of sequences.
      factor: α of the paper.

    Returns:
      Scalar float32, the mean over sequences; 0 when there are no tokens.

    Raises:
      ValueError: the routing has no sequence axis.

    Example:
      >>> routing = route(jnp.log(jnp.array([[3.0, 1.0], [1.0, 1.0]])), top_k=1)  # both pick expert 0
      >>> sequence_balance_loss(routing, factor=1.0)  # f = 2, 0; P = 5/8, 3/8
      1.25

    Source: DeepSeek-V3, arXiv:2412.19437, equations 17-20.
    """
    _require(
        routing.scores.ndim >= 2,
        f"routing: expected scores of [..., sequence, experts], got {routing.scores.shape}; route all tokens "
        "of a sequence in one call",
    )
    *sequences, length, num_experts = routing.scores.shape
    picks = length * routing.index.shape[-1]
    f = jnp.sum(_count(routing.index, num_experts), axis=-2) * (num_experts / max(picks, 1))
    p = jnp.sum(_normalize(routing.scores), axis=-2) / max(length, 1)
    return jnp.asarray(factor, jnp.float32) * jnp.sum(f * p) / max(math.prod(sequences), 1)


def z_loss(logits: ArrayLike) -> jax.Array:
    """Router z-loss, the mean over tokens of logsumexp(logits)²: it keeps logits small.

    Args:
      logits: [..., E] float, `routing.logits` for instance.

    Returns:
      Scalar float32; 0 when there are no tokens.

    Raises:
      TypeError: logits are not float.

    Example:
      >>> z_loss(jnp.zeros((5, 8)))  # log(8)²
      4.324

    Source: ST-MoE, arXiv:2202.08906, equation 5.
    """
    squares = jax.nn.logsumexp(_check_logits(logits).astype(jnp.float32), axis=-1) ** 2
    return jnp.sum(squares) / max(squares.size, 1)


def _select(choice: jax.Array, top_k: int, num_groups: int, top_groups: int, group_score: GroupScore) -> jax.Array:
    """The experts with the largest `choice` within the best groups: [..., E] to [..., K] int32."""
    if top_groups == num_groups:
        return _top_k(choice, top_k)[1]
    size = choice.shape[-1] // num_groups
    groups = choice.reshape(*choice.shape[:-1], num_groups, size)
    best = _top_k(groups, 1 if group_score == "max" else 2)[0]
    # The kept groups are set side by side and searched. Were the others masked with -inf instead, an expert
    # of a kept group that has -inf itself could lose to one of them.
    kept = jnp.sort(_top_k(jnp.sum(best, axis=-1), top_groups)[1], axis=-1)
    inside = jnp.take_along_axis(groups, kept[..., None], axis=-2, mode="promise_in_bounds")
    place = _top_k(inside.reshape(*choice.shape[:-1], top_groups * size), top_k)[1]
    return _pick(kept, place // size) * size + place % size


def _top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    # jax.lax.top_k puts +0 before -0, and NaNs first or last by sign. Here zeros tie, and NaN is +inf.
    values = jnp.where(values == 0, 0.0, values)
    return jax.lax.top_k(jnp.where(jnp.isnan(values), jnp.inf, values), k)


def _count(index: jax.Array, num_experts: int) -> jax.Array:
    """How many times each token picked each expert: [..., K] to [..., E] int32."""
    # Compared in the index's own type if that can hold an expert: a cast could turn 2**32 into expert 0.
    dtype = index.dtype if jnp.iinfo(index.dtype).max >= num_experts - 1 else jnp.int32
    index, experts = index.astype(dtype), jnp.arange(num_experts, dtype=dtype)
    # Pick by pick, as XLA for CPUs would write out [..., K, E]. No scatter, as that has no rule for sharded
    # tokens on a mesh of Explicit axes.
    picks = [(index[..., k, None] == experts).astype(jnp.int32) for k in range(index.shape[-1])]
    return sum(picks, start=jnp.zeros((*index.shape[:-1], num_experts), jnp.int32))


def _pick(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, index, axis=-1, mode="promise_in_bounds")


def _normalize(scores: jax.Array) -> jax.Array:
    """scores / (their sum over the last axis + 1e-20)."""
    total = jnp.sum(scores, axis=-1, keepdims=True) + 1e-20
    # scores / total as it stands has total**-2 in its derivative, infinite where all scores are tiny.
    # Dividing both by a constant changes neither value nor derivatives: total / constant is exactly 1.
    constant = jax.lax.stop_gradient(total)
    return (scores / constant) / (total / constant)


def _check_options(
    num_experts: int,
    top_k: int,
    score: str,
    num_groups: int,
    top_groups: int | None,
    group_score: str,
    renormalize: bool | None,
    pre_softmax: bool,
) -> int:
    """Raises unless the options of `route` fit each other; returns how many groups are kept."""
    for name, value, known in (("score", score, SCORES), ("group_score", group_score, GROUP_SCORES)):
        _require(value in known, f"{name}: expected one of {known}, got {value!r}; pick one of them")
    for name, count in (("top_k", top_k), ("num_groups", num_groups)):
        _check_count(name, count, num_experts, f"the {num_experts} experts of the logits")
    size = num_experts // num_groups
    _require(
        size * num_groups == num_experts,
        f"num_groups: expected a divisor of the {num_experts} experts, got {num_groups}; groups are equal",
    )
    _require(
        num_groups == 1 or size > 1 or group_score == "max",
        f'num_groups: expected two experts a group at least with group_score="top2_sum", got '
        f'{num_groups} groups of {size}; use fewer groups, or group_score="max"',
    )
    if top_groups is None:
        _require(num_groups == 1, f"top_groups: expected 1 to {num_groups}, got None; give a number")
        top_groups = 1
    _check_count("top_groups", top_groups, num_groups, f"num_groups={num_groups}")
    _require(
        top_groups * size >= top_k,
        f"top_groups: expected enough groups of {size} experts for top_k={top_k}, got {top_groups}; raise it "
        "or lower top_k",
    )
    _require(
        pre_softmax or score == "softmax",
        f'pre_softmax: expected True with score="{score}", got False; leave it out, or use score="softmax"',
    )
    _require(
        pre_softmax or renormalize is not False,
        "renormalize: expected True or None with pre_softmax=False, got False; a softmax over the selected "
        "experts sums to one anyway: leave it out, or use pre_softmax=True",
    )
    return top_groups


def _check_count(name: str, value: Any, at_most: int | None = None, what: str = "") -> None:
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, known at trace time, got {value!r}; pass an int") from None
    _require(count >= 1, f"{name}: expected at least 1, got {value}; raise it")
    _require(at_most is None or count <= at_most, f"{name}: expected at most {what}, got {value}; lower it")


def _check_float(name: str, values: Any) -> jax.Array:
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(f"{name}: expected a float array, got {values.dtype.name}; cast it to float32")
    return values


def _check_logits(logits: Any) -> jax.Array:
    logits = _check_float("logits", logits)
    _require(
        logits.ndim > 0 and logits.shape[-1] > 0,
        f"logits: expected [..., experts], got shape {logits.shape}; put the experts on the last axis",
    )
    return logits


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
