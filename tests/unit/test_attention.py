"""Rows laid end to end: every family that is run so gives what each row gives alone, and so do its gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.training.model import layout

pytestmark = pytest.mark.slow

LENGTHS = [9, 7, 7, 3, 1]
SMALL = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
CASES: dict[str, dict[str, Any]] = {
    "gemma3_text": {**WINDOWS, "head_dim": 8},
    "glm4": {"head_dim": 8},
    "granite": {},
    "llama": {},
    "ministral": {**WINDOWS, "head_dim": 8},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "olmo3": WINDOWS,
    "phi3": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "head_dim": 8},
    "smollm3": {},
    "starcoder2": {"sliding_window": 4},
}


def states_and_gradient(model: Any, rows: list[torch.Tensor], end_to_end: bool) -> tuple[torch.Tensor, torch.Tensor]:
    decoder = model.get_decoder()
    if end_to_end:
        places = torch.cat([torch.arange(len(row)) for row in rows])[None]
        lengths = tuple(map(len, rows))
        states = decoder(torch.cat(rows)[None], position_ids=places, use_cache=False, lengths=lengths).last_hidden_state
    else:
        states = torch.cat([decoder(row[None], use_cache=False).last_hidden_state for row in rows], dim=1)
    weights = torch.linspace(-1, 1, states.numel()).view_as(states)
    (states * weights).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in decoder.parameters() if p.grad is not None])
    return states.detach(), gradient


@pytest.mark.parametrize("family", sorted(CASES))
def test_a_row_among_others_gives_what_it_gives_alone(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from muster.training.engine import attention

    config = AutoConfig.for_model(family, **SMALL, **CASES[family])
    found = []
    for kind in (attention.NAME, "eager"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=kind).eval()
        rows = list(torch.randint(2, 20, (sum(LENGTHS),)).split(LENGTHS))
        found.append(states_and_gradient(model, rows, kind == attention.NAME))
    (states, gradient), (alone, wanted) = found
    torch.testing.assert_close(states, alone, rtol=0, atol=1e-5 * float(alone.abs().max()))
    assert (gradient - wanted).norm() <= 1e-5 * wanted.norm()


def test_every_family_that_is_not_padded_is_compared() -> None:
    from muster.training.engine import attention

    assert set(CASES) == attention.FAMILIES


@pytest.mark.parametrize("kind", ["opt", "mamba", "qwen3_next", "unheard_of"])
def test_other_families_are_padded(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert layout(tmp_path).padded
