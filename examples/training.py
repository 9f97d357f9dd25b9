"""One step of training: losses, optimiser, where the weights lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from model import LanguageModel

Step = Callable[[LanguageModel, nnx.Optimizer, jax.Array], dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """What is minimised and how.

    Attributes:
      steps: length of the run. The learning rate warms up over the first twentieth of it, then falls by a
        cosine to a tenth.
      learning_rate: the highest.
      balance_factor, z_factor: of the Switch balance loss and the z-loss, which are summed over the layers.
      bias_rate: of DeepSeek-V3's update of the selection bias; None: there is no such bias.
    """

    steps: int
    learning_rate: float
    balance_factor: float
    z_factor: float
    bias_rate: float | None


def make_optimizer(model: LanguageModel, config: TrainingConfig) -> nnx.Optimizer:
    """AdamW behind clipping. Norms do not decay. The selection bias, no `nnx.Param`, is left alone."""
    warm_up = max(1, config.steps // 20)
    rate = optax.warmup_cosine_decay_schedule(
        config.learning_rate / warm_up,
        config.learning_rate,
        warm_up,
        max(config.steps, warm_up + 1),
        config.learning_rate / 10,
    )
    adamw = optax.adamw(
        rate, b2=0.98, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    )
    return nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adamw), wrt=nnx.Param)


def place(module: nnx.Module | nnx.Optimizer, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> None:
    """Put a copy on every device of what no layer has placed on the mesh itself, as MoE does its weights."""

    def put(leaf: jax.Array) -> jax.Array:
        return leaf if isinstance(leaf.sharding, NamedSharding) else jax.device_put(leaf, everywhere)

    everywhere = NamedSharding(mesh, P())
    nnx.update(module, jax.tree.map(put, nnx.state(module)))


def cross_entropy(model: LanguageModel, windows: jax.Array) -> tuple[jax.Array, Any]:
    """Mean nats a byte of windows [batch, sequence + 1], and the feed-forwards' statistics."""
    logits, stats = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean(), stats


def make_train_step(config: TrainingConfig) -> Step:
    """A jitted step, which updates model and optimiser in place.

    It returns, over the whole batch: loss [] (cross entropy alone), and in picks load [layers, experts] and
    dropped [layers].
    """

    def objective(model: LanguageModel, windows: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, stats = cross_entropy(model, windows)
        total = loss + config.balance_factor * stats.balance_loss.sum() + config.z_factor * stats.z_loss.sum()
        if config.bias_rate is not None:
            # DeepSeek-V3 balances by the bias, and within a sequence by this small loss.
            total += stats.sequence_loss.sum()
        return total, {"loss": loss, "load": stats.load, "dropped": stats.num_dropped}

    @nnx.jit
    def step(model: LanguageModel, optimizer: nnx.Optimizer, windows: jax.Array) -> dict[str, jax.Array]:
        gradients, metrics = nnx.grad(objective, has_aux=True)(model, windows)
        optimizer.update(model, gradients)
        if config.bias_rate is not None:
            for block, load in zip(model.blocks, metrics["load"], strict=True):
                block.feed_forward.update_bias(load, rate=config.bias_rate)
        return metrics

    return step


@nnx.jit
def heldout_loss(model: LanguageModel, windows: jax.Array) -> jax.Array:
    """[] mean nats a byte."""
    return cross_entropy(model, windows)[0]
