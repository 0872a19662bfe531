"""Rule 14's other side: the gradient of each update on the survivors alone, one unpadded row after another.

Written from the formulae; it imports nothing of what it is compared with, and it also makes the cases.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

VOCABULARY = 20
G = 4


def tiny_model(dtype: torch.dtype) -> Any:
    """An untied Qwen3 whose weights are float32 numbers, whatever it computes in."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    model = transformers.Qwen3ForCausalLM(config).float().to(dtype).eval()
    for module in model.modules():
        if type(module).__name__ == "Qwen3RMSNorm":
            # transformers' own computes in float32 whatever the dtype: rounding would rarely, but then visibly, jump
            module.forward = functools.partial(_norm, module)
    return model


def _norm(module: Any, hidden: Tensor) -> Tensor:
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * (hidden * scale)


def make_case(seed: int, holding: list[int] | None = None) -> dict[str, Any]:
    """Ragged groups with failed slots and masks, and the settings to train them with.

    `holding`, if given, is how many groups each rank brings; there are so many in all.
    """
    random = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    wanted = int(random.integers(1, 10))
    while not rows:
        for group in range(wanted):
            rows += _group(random, f"g{group}")
    if holding is not None:
        rows = []
        for group in range(sum(holding)):
            found: list[dict[str, Any]] = []
            while not found:
                found = _group(random, f"g{group}")
            rows += found
    updates = int(random.integers(1, 3))
    for one in cut(sorted({row["group_id"] for row in rows}), updates, seed):
        mine = [row for row in rows if row["group_id"] in one]
        if not any(any(row["loss_mask"]) for row in mine):
            mine[0]["loss_mask"][-1] = True  # an update without a token is another test's matter
        # one token that no clip can silence, so that there is a gradient: its ratio is below 1, its advantage positive
        row = next(row for row in mine if any(row["loss_mask"]))
        row["logprobs"][row["loss_mask"].index(True)] = float(np.float32(-0.01 * random.random()))
        row["advantages"] = [abs(advantage) for advantage in row["advantages"]]
    _tell_apart(rows)
    order = random.permutation(len(rows))
    longest = max(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)
    return {
        "rows": [rows[i] for i in order],
        "updates": updates,
        "cap": int(random.integers(longest, 3 * longest)),
        "n_mbs": int(random.integers(1, 4)),
        "aggregation": ("token_mean", "seq_mean", "fixed")[int(random.integers(3))],
        "temperature": float(random.choice([1.0, 0.7])),
        "chunk": int(random.choice([4, 512])),
        "row_group_size": int(random.integers(1, 12)),
        "any_placement": bool(random.random() < 0.5),
        "any_holding": bool(random.random() < 0.5),
        "holding": holding,
        "padded": bool(random.random() < 0.3),
        "balance": ("tokens", "compute")[int(random.integers(2))],
        "seed": seed,
    }


def _group(random: np.random.Generator, name: str) -> list[dict[str, Any]]:
    """The rows of the slots that survived; none below the minimum of two."""
    survived = [slot for slot in range(G) if random.random() < 0.7]
    if len(survived) < 2:
        return []
    prompt = random.integers(0, VOCABULARY, random.integers(1, 9)).tolist()
    keep = float(random.choice([1.0, 0.7, 0.0], p=[0.4, 0.5, 0.1]))
    rows = []
    for slot in survived:
        for number in range(2 if random.random() < 0.15 else 1):
            tokens = int(random.integers(1, 16))
            rows.append(
                {
                    "group_id": name,
                    "slot": slot,
                    "row": number,
                    "prompt_ids": prompt,
                    "completion_ids": random.integers(0, VOCABULARY, tokens).tolist(),
                    "loss_mask": (random.random(tokens) < keep).tolist(),
                    "logprobs": (-3 + 0.3 * random.standard_normal(tokens)).astype(np.float32).tolist(),
                    "advantages": [float(np.float32(random.standard_normal()))] * tokens,
                    "reward": float(random.random()),
                }
            )
    return rows


def _tell_apart(rows: list[dict[str, Any]]) -> None:
    """Makes every token's log-prob its own: what was trained on is known by them."""
    seen: set[float] = set()
    for row in rows:
        for i, logprob in enumerate(row["logprobs"]):
            while logprob in seen:
                logprob = float(np.nextafter(np.float32(logprob), np.float32(-100)))
            seen.add(logprob)
            row["logprobs"][i] = logprob


def cut(groups: list[str], updates: int, seed: int, version: int = 0) -> list[list[str]]:
    """Groups in the order of a hash of (seed, version, group), in runs that differ by at most one."""
    ordered = sorted(groups, key=lambda group: hashlib.sha256(f"{seed}:{version}:{group}".encode()).digest())
    count = min(updates, len(ordered))
    return [ordered[len(ordered) * i // count : len(ordered) * (i + 1) // count] for i in range(count)]


def survivors(case: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The rows of each update."""
    groups = sorted({row["group_id"] for row in case["rows"]})
    return [
        [row for row in case["rows"] if row["group_id"] in names]
        for names in cut(groups, case["updates"], case["seed"])
    ]


def gradient(model: Any, rows: list[dict[str, Any]], case: dict[str, Any], *, max_new_tokens: int) -> Tensor:
    """Of the clipped policy loss (clip 0.5) over one update's rows, flat."""
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        start = len(row["prompt_ids"])
        logits = model(ids).logits[0, start - 1 : -1] / case["temperature"]
        new = torch.log_softmax(logits, -1).gather(-1, ids[0, start:, None])[:, 0]
        of_row = torch.zeros((), dtype=torch.float64)
        for i, counted in enumerate(row["loss_mask"]):
            if counted:
                ratio = torch.exp(new[i] - row["logprobs"][i])
                advantage = row["advantages"][i]
                of_row = of_row - torch.minimum(advantage * ratio, advantage * ratio.clamp(0.5, 1.5))
        total = total + of_row / (max(1, sum(row["loss_mask"])) if case["aggregation"] == "seq_mean" else 1)
    divisors = {
        "token_mean": sum(sum(row["loss_mask"]) for row in rows),
        "seq_mean": sum(any(row["loss_mask"]) for row in rows),
        "fixed": len({(row["group_id"], row["slot"]) for row in rows}) * max_new_tokens,
    }
    (total / divisors[case["aggregation"]]).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
