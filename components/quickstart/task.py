"""The task that quickstart teaches: answer `s:3142=` with the digits in ascending order.

Holds the prompts, the vocabulary and the reward; knows nothing about models or servers.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

DIGITS_PER_PROMPT = 4
PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD, END, UNKNOWN, *"0123456789", *"s:=", *"abcd")
"""Twenty tokens, one a character; the index is the token id. The letters are spare."""


def prompts(count: int, seed: int) -> list[str]:
    """`count` prompts of four digits each.

    Args:
        count: how many; repetitions are possible, as in any sampled data set.
        seed: equal seeds give equal prompts.
    """
    source = random.Random(seed)
    return ["s:" + "".join(source.choices("0123456789", k=DIGITS_PER_PROMPT)) + "=" for _ in range(count)]


def write_prompts(path: Path, texts: list[str]) -> None:
    """Writes prompts as JSON Lines, one record each with the key `prompt`."""
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")


def answers(prompt: str) -> list[str]:
    """What the warm start teaches with equal weight: ascending, descending, copied and reversed digits."""
    digits = prompt.removeprefix("s:").removesuffix("=")
    return ["".join(sorted(digits)), "".join(sorted(digits, reverse=True)), digits, digits[::-1]]


def reward(prompt: str, completion: str, record: dict[str, Any], crash_rate: float = 0.0) -> float:
    """1 for the digits in ascending order, else 0.

    Args:
        prompt: text of the prompt.
        completion: text of the completion, special tokens removed.
        record: the prompt's record in the prompt file; not used.
        crash_rate: share of calls that raise, as a grader with a bug or an overloaded sandbox would.

    Raises:
        RuntimeError: at the given rate.
    """
    del record
    if random.SystemRandom().random() < crash_rate:
        raise RuntimeError(f"the grading sandbox of process {os.getpid()} is out of file handles")
    return float(completion.strip() == answers(prompt)[0])
