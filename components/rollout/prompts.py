"""The prompt file: reading it, and in which order its prompts are used."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from muster.errors import InvalidInput

_FAULTS_SHOWN = 20


@dataclass(frozen=True)
class Prompt:
    """One record of the prompt file.

    Attributes:
        index: its position in the file, from 0.
        ids: its tokens.
        text: what rewards and people see.
        record: all its keys, as written.
    """

    index: int
    ids: tuple[int, ...]
    text: str
    record: Mapping[str, Any]


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[Prompt]:
    """Reads a prompt file: JSON Lines, each record with `prompt` (text) or `prompt_ids` (tokens).

    Args:
        path: the file.
        tokenizer: encodes `prompt`, and decodes `prompt_ids` for people.

    Raises:
        InvalidInput: the file is missing, empty or has bad records, one line each (the first 20, then a count).
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: cannot read the prompt file: {error}") from error
    prompts: list[Prompt] = []
    faults: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(len(prompts), json.loads(line), tokenizer))
        except ValueError as error:
            faults.append(f"{path}: line {number}: {error}")
    if len(faults) > _FAULTS_SHOWN:
        faults = [*faults[:_FAULTS_SHOWN], f"{path}: and {len(faults) - _FAULTS_SHOWN} more bad lines"]
    if not faults and not prompts:
        faults = [f'{path}: no prompts in it; each line is a record such as {{"prompt": "2+2="}}']
    if faults:
        raise InvalidInput(faults)
    return prompts


def order(count: int, seed: int, shuffle: bool, position: int) -> int:
    """The prompt used at a position of the endless stream: each epoch uses every prompt once.

    Args:
        count: prompts in the file.
        seed: with the epoch, fixes the order.
        shuffle: False keeps the order of the file.
        position: from 0.
    """
    epoch, offset = divmod(position, count)
    if not shuffle:
        return offset
    permutation = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(permutation)
    return permutation[offset]


def _prompt(index: int, record: Any, tokenizer: Tokenizer) -> Prompt:
    if not isinstance(record, dict):
        raise ValueError(f"is a {type(record).__name__}, expected a record with the key prompt or prompt_ids")
    text, ids = record.get("prompt"), record.get("prompt_ids")
    if ids is not None:
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError("prompt_ids must be a non-empty list of token ids")
        return Prompt(index, tuple(ids), text if isinstance(text, str) else tokenizer.decode(ids), record)
    if not isinstance(text, str) or not text:
        raise ValueError("has neither prompt (text) nor prompt_ids (tokens)")
    return Prompt(index, tuple(tokenizer.encode(text).ids), text, record)
