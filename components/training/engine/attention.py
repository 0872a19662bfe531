"""Attention over rows laid end to end: each row attends to itself alone, and no work is spent on padding.

Importing it tells transformers of it, under `NAME`; a model built with that name is given `lengths` besides its inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "muster_end_to_end"
"""As `attn_implementation`."""

FAMILIES = frozenset(
    {
        "gemma3_text",
        "glm4",
        "granite",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    }
)
"""Model types in which tokens meet in attention only, and positions are those given: each is tested against rows alone.

Others are padded: their rows would leak into each other (recurrent layers), or start at the wrong position.
"""


def end_to_end(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    lengths: Sequence[int],
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row; neighbours of one length are computed together.

    Args:
        module: the attention layer.
        query: `[1, heads, tokens, head]`, rows end to end.
        key: as `query`, with as many heads or fewer.
        value: as `key`.
        _attention_mask: None, as every row is masked here.
        lengths: tokens of each row, in order; they add up to `tokens`.
        scaling: of the scores.
        dropout: of the weights.
        sliding_window: how many tokens a token sees, itself and those before; None for its whole row.

    Returns:
        `[1, tokens, heads, head]`, and None for the weights.
    """
    runs = [(length, sum(1 for _ in alike)) for length, alike in itertools.groupby(lengths)]
    sizes = [length * rows for length, rows in runs]
    parts = [torch.split(one[0], sizes, dim=1) for one in (query, key, value)]
    outputs = []
    for (length, rows), q, k, v in zip(runs, *parts, strict=True):
        mask = None
        if sliding_window is not None and length > sliding_window:
            places = torch.arange(length, device=q.device)
            back = places[:, None] - places[None, :]
            mask = (back >= 0) & (back < sliding_window)
        # [heads, rows * length, head] -> [rows, heads, length, head], and back
        output, _none = sdpa_attention_forward(
            module,
            *(one.unflatten(1, (rows, length)).transpose(0, 1) for one in (q, k, v)),
            mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=True,
        )
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs)[None], None


AttentionInterface.register(NAME, end_to_end)
