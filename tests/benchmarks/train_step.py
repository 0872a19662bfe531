"""What padding costs in a training step: `python -m tests.benchmarks.train_step`; one process, forward and backward.

The same rows, model and cap twice, in turns: laid end to end as the trainer does, and padded, in micro-batches of rows
of similar length. The difference of the two gradients is reported besides.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from typing import Any

import numpy as np
import torch
import transformers

from muster.config import parse
from muster.training.batch import Row
from muster.training.engine import attention
from muster.training.engine.fsdp import Policy
from muster.training.loss import Counts, objective
from muster.training.microbatch import build, pack, pack_padded

ROWS, CAP, TRIES = 64, 2048, 3


def rows() -> list[Row]:
    """Ragged rows, a prompt of 32 tokens each."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(4.6, 0.9, ROWS), 4, CAP - 32).astype(int)
    made = []
    for slot, tokens in enumerate(lengths.tolist()):
        made.append(
            Row(
                group_id=f"g{slot // 8}",
                slot=slot % 8,
                row=0,
                ids=random.integers(0, 1000, 32 + tokens),
                prompt_length=32,
                mask=np.ones(tokens, dtype=np.bool_),
                logprobs=np.full(tokens, -7.0, dtype=np.float32),
                advantages=np.full(tokens, random.standard_normal(), dtype=np.float32),
                reward=0.0,
            )
        )
    return made


def step(policy: Policy, batch: list[Row]) -> tuple[float, torch.Tensor]:
    """Seconds and gradient of one update."""
    settings = parse("{}").training
    counts = Counts(tokens=sum(row.valid for row in batch), sequences=ROWS, slots=ROWS, max_new_tokens=CAP)
    policy.zero_grad()
    began = time.perf_counter()
    packs = (pack_padded if policy.padded else pack)([row.length for row in batch], CAP)
    for chosen in packs:
        micro = build([batch[i] for i in chosen], padded=policy.padded)
        loss, _ = objective(micro, micro.behave, counts, settings)(*policy(micro))
        loss.backward()
    seconds = time.perf_counter() - began
    return seconds, torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def main() -> None:
    """Both, in turns."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=1000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        tie_word_embeddings=False,
    )
    model: Any = transformers.Qwen3ForCausalLM(config).float().eval()
    batch = rows()
    tokens = sum(row.length for row in batch)
    seconds: dict[str, list[float]] = {attention.NAME: [], "sdpa": []}
    gradients: dict[str, torch.Tensor] = {}
    for turn in range(TRIES + 1):
        for kind, times in seconds.items():
            model.set_attn_implementation(kind)
            took, gradients[kind] = step(Policy(model, temperature=1.0, chunk=512, fp32_head=False), batch)
            if turn > 0:  # the first warms up
                times.append(took / tokens)
    ours, padded = (statistics.median(times) for times in seconds.values())
    unpadded_gradient, padded_gradient = gradients.values()
    result = {
        "seconds_per_token": ours,
        "padded_seconds_per_token": padded,
        "ratio": ours / padded,
        "gradient_difference": float((unpadded_gradient - padded_gradient).norm() / padded_gradient.norm()),
        "rows": ROWS,
        "tokens": tokens,
        "padded_tokens": sum(
            len(one) * max(batch[i].length for i in one) for one in pack_padded([row.length for row in batch], CAP)
        ),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
        },
    }
    print(json.dumps(result | {"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
