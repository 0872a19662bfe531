"""The policy as a Hugging Face directory that a server loads: weights, config.json, tokenizer, probe.json.

Embeddings are always exported untied: a vLLM server that reloads a tied model silently keeps its old output layer.
Optimizer state is `checkpoint`'s.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from muster.config import RunConfig
from muster.errors import InvalidInput
from muster.training.engine import Engine
from muster.training.files import appearing, write_tensors
from muster.training.model import read_config
from muster.training.probe import take
from muster.training.ranks import Ranks

_COPIED = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*.model",
    "*.tiktoken",
)


def export(engine: Engine, config: RunConfig, ranks: Ranks, *, version: int, directory: Path) -> None:
    """Writes the policy in `config.model.dtype`; the directory appears whole. Collective.

    Args:
        engine: holds the policy.
        config: `model.path` gives config.json and the tokenizer's files.
        ranks: this process among the others; rank 0 writes.
        version: what the policy is from now on.
        directory: the final name.

    Raises:
        InvalidInput: the policy in memory gives log-probs that are not finite.
        DependencyDied: the storage failed; nothing stands under the final name.
    """
    assert config.model is not None
    server = config.rollout.server if config.rollout else None
    longest = min(engine.positions, server.max_model_len if server else engine.positions)
    probe = take(
        engine,
        ranks,
        version=version,
        dtype=config.model.dtype,
        longest=longest,
        seed=config.data.seed if config.data else 0,
    )
    if not all(math.isfinite(value) for value in probe["logprobs"]):
        raise InvalidInput(
            f"{directory}: the policy's log-probs of the probe are not finite, so nothing was exported; the weights "
            "that the job started from are broken"
        )
    tensors = (tensor for _, tensor in engine.full("parameter"))
    if not ranks.first:
        for _ in tensors:
            pass
        return
    with appearing(directory) as part:
        whole = (tensor for tensor in tensors if tensor is not None)
        write_tensors(part / "model.safetensors", engine.shapes(), config.model.dtype, whole)
        described = {**read_config(config.model.path), **_description(config.model.dtype)}
        (part / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        for pattern in _COPIED:
            for source in config.model.path.glob(pattern):
                if source.is_file():
                    shutil.copyfile(source, part / source.name)
        (part / "probe.json").write_text(json.dumps(probe) + "\n", encoding="utf-8")


def _description(dtype: str) -> dict[str, Any]:
    return {"tie_word_embeddings": False, "dtype": dtype, "torch_dtype": dtype}
