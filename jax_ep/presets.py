"""The MoE blocks of published models, as configurations. Weights are yours, or random by `jax_ep.moe.init`."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_ep.moe import MoEConfig


def deepseek_v3(**changes: Any) -> MoEConfig:
    """DeepSeek-V3: 256 experts and one shared, 8 a token from 4 of 8 groups, sigmoid scores, balanced by a bias.

    Args:
      **changes: fields of `MoEConfig` to set otherwise, such as a smaller hidden size.

    Source: DeepSeek-AI 2024 (arXiv:2412.19437), sections 2.1.2 and 4.2.

    Example:
      >>> deepseek_v3(hidden=64, intermediate=32, shared_intermediate=32).top_k
      8
    """
    config = MoEConfig(
        hidden=7168,
        intermediate=2048,
        num_experts=256,
        top_k=8,
        score="sigmoid",
        num_groups=8,
        top_groups=4,
        scale=2.5,
        use_bias=True,
        shared_intermediate=2048,
    )
    return dataclasses.replace(config, **changes)


def qwen3_moe(**changes: Any) -> MoEConfig:
    """Qwen3-235B-A22B: 128 experts, 8 a token, softmax over all experts, weights of the chosen made to sum to one.

    For Qwen3-30B-A3B: `qwen3_moe(hidden=2048, intermediate=768)`.

    Args:
      **changes: fields of `MoEConfig` to set otherwise.

    Source: Qwen Team 2025 (arXiv:2505.09388), section 2, and the configurations published with the models.
    """
    config = MoEConfig(hidden=4096, intermediate=1536, num_experts=128, top_k=8, score="softmax", renormalize=True)
    return dataclasses.replace(config, **changes)


def mixtral_8x7b(**changes: Any) -> MoEConfig:
    """Mixtral 8x7B: 8 experts, 2 a token, softmax over the logits of the chosen.

    Args:
      **changes: fields of `MoEConfig` to set otherwise.

    Source: Jiang et al. 2024 (arXiv:2401.04088), section 2.1.
    """
    config = MoEConfig(hidden=4096, intermediate=14336, num_experts=8, top_k=2, score="softmax", pre_softmax=False)
    return dataclasses.replace(config, **changes)
