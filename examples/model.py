"""A small decoder language model over bytes; what follows attention in a block is the caller's choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

VOCABULARY = 256

FeedForward = Callable[[jax.Array], tuple[jax.Array, Any]]
"""[batch, sequence, hidden] to the same, and a pytree of statistics: `jax_ep.flax.MoE` is one."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. `dtype` is what it computes in; weights are float32."""

    layers: int
    hidden: int
    heads: int
    head_width: int
    dtype: Any


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864) of x [batch, sequence, heads, head dimension]."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return turned.astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        options: dict[str, Any] = {"use_bias": False, "dtype": config.dtype, "rngs": rngs}
        width = config.heads * config.head_width
        self.qkv = nnx.Linear(config.hidden, 3 * width, **options)
        self.out = nnx.Linear(width, config.hidden, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.qkv(x).reshape(*x.shape[:2], 3 * self.heads, -1)
        query, key, value = jnp.split(heads, 3, axis=2)
        mixed = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(mixed.reshape(*x.shape[:2], -1))


class Block(nnx.Module):
    """Attention, then the feed-forward; each behind a norm and beside a residual."""

    def __init__(
        self, config: ModelConfig, make_feed_forward: Callable[[nnx.Rngs], FeedForward], *, rngs: nnx.Rngs
    ) -> None:
        self.attention_norm = nnx.RMSNorm(config.hidden, dtype=config.dtype, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = nnx.RMSNorm(config.hidden, dtype=config.dtype, rngs=rngs)
        self.feed_forward: Any = make_feed_forward(rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Any]:
        x = x + self.attention(self.attention_norm(x))
        y, stats = self.feed_forward(self.feed_forward_norm(x))
        return x + y, stats


class LanguageModel(nnx.Module):
    """Bytes to the logits of the bytes that follow them.

    Args:
      config: its sizes.
      make_feed_forward: builds the feed-forward of a block from random keys.
      rngs: `nnx.Rngs` with a "params" stream.
    """

    def __init__(
        self, config: ModelConfig, make_feed_forward: Callable[[nnx.Rngs], FeedForward], *, rngs: nnx.Rngs
    ) -> None:
        self.dtype = config.dtype
        self.embed = nnx.Embed(VOCABULARY, config.hidden, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, make_feed_forward, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.hidden, dtype=config.dtype, rngs=rngs)
        self.head = nnx.Linear(config.hidden, VOCABULARY, use_bias=False, dtype=config.dtype, rngs=rngs)

    def embed_bytes(self, tokens: jax.Array) -> jax.Array:
        """By a matmul, whose gradient is one, too: a GPU is slow to add all tokens' cotangents up in 256 rows."""
        return jax.nn.one_hot(tokens, VOCABULARY, dtype=self.dtype) @ self.embed.embedding[...].astype(self.dtype)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, Any]:
        """Tokens [batch, sequence] to float32 logits [batch, sequence, 256], and statistics [layers, ...]."""
        x = self.embed_bytes(tokens)
        stats = []
        for block in self.blocks:
            x, of_block = block(x)
            stats.append(of_block)
        logits = self.head(self.norm(x)).astype(jnp.float32)
        return logits, jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats)
