"""The probe: a fixed prompt and its log-probs under the policy in the trainer's memory.

Whoever serves the exported files must find the same numbers before the version counts as served. Nothing here reads a
file back: a fault in the export must show.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from muster.training.batch import Row
from muster.training.engine import Engine
from muster.training.microbatch import build
from muster.training.ranks import Ranks

LENGTH = 400
"""Tokens of the prompt: more than three cache blocks of 128, the largest default block size of vLLM."""

TOLERANCE = {"float32": 5e-4, "bfloat16": 0.5}
"""Largest absolute difference of a token's log-prob between trainer and server that is rounding, by dtype."""


def probe_ids(vocabulary: int, length: int, seed: int) -> list[int]:
    """Pseudo-random token ids in [0, vocabulary), the same for the same arguments on any machine."""
    source = random.Random(f"muster-probe:{vocabulary}:{length}:{seed}")
    return [source.randrange(vocabulary) for _ in range(length)]


def take(engine: Engine, ranks: Ranks, *, version: int, dtype: str, longest: int, seed: int) -> dict[str, Any]:
    """Runs the probe through the policy in memory. Collective.

    Args:
        engine: holds the policy.
        ranks: this process among the others.
        version: the version that the policy is exported as.
        dtype: what it is exported in.
        longest: the longest prompt that a server takes.
        seed: of the pseudo-random prompt.

    Returns:
        What `probe.json` holds: `logprobs[i]` belongs to `prompt_ids[i + 1]` given all before it, at temperature 1.
    """
    length = max(2, min(LENGTH, longest - 8))
    ids = probe_ids(engine.vocabulary, length, seed)
    rest = length - 1
    row = Row(
        group_id="probe",
        slot=0,
        row=0,
        ids=np.array(ids, dtype=np.int64),
        prompt_length=1,
        mask=np.ones(rest, dtype=np.bool_),
        logprobs=np.zeros(rest, dtype=np.float32),
        advantages=np.zeros(rest, dtype=np.float32),
        reward=0.0,
    )
    logprobs = engine.logprobs(build([row], ranks.device), temperature=1.0)
    return {
        "version": version,
        "dtype": dtype,
        "prompt_ids": ids,
        "logprobs": [float(value) for value in logprobs.cpu().tolist()],
        "tolerance": TOLERANCE[dtype],
    }
