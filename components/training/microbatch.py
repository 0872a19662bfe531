"""Micro-batches: which rows run together, the same number of runs on every rank, and their tensors.

The schedule is computed from lengths alone, identically on every rank. Which groups a rank has is `partition`'s matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from muster.training.batch import Row
from muster.training.partition import partition


@dataclass(frozen=True)
class MicroBatch:
    """Rows that run through the model together, padded on the right, and their loss tokens laid end to end.

    Padding needs no mask: attention is causal and every pad comes after every real token.

    Attributes:
        input_ids: `[rows, longest]` int64.
        positions: `[tokens]` int64, index into the flattened `[rows * longest]` of the token before each loss token.
        labels: `[tokens]` int64, the loss tokens.
        valid: `[tokens]` bool; false only for the stand-in token of a micro-batch without loss tokens.
        sequence: `[tokens]` int64, the row of each token.
        behave: `[tokens]` float32, log-probs under the policy that sampled them.
        advantages: `[tokens]` float32.
        rows: how many rows.
    """

    input_ids: Tensor
    positions: Tensor
    labels: Tensor
    valid: Tensor
    sequence: Tensor
    behave: Tensor
    advantages: Tensor
    rows: int


def pack(lengths: Sequence[int], cap: int, *, at_least: int = 1) -> list[list[int]]:
    """Packs rows into micro-batches whose padded size (rows x longest) stays within `cap` tokens.

    Rows of similar length share a micro-batch: longest first, each opened at its longest row.

    Args:
        lengths: tokens of each row, at least 1.
        cap: the most padded tokens in one micro-batch.
        at_least: split further until there are this many, or one row each.

    Returns:
        Lists of row indexes; together they hold every index exactly once.

    Raises:
        ValueError: a row is longer than `cap`.
    """
    packs: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[index] > cap:
            raise ValueError(f"lengths[{index}] is {lengths[index]}, more than the cap of {cap} tokens")
        if packs and (len(packs[-1]) + 1) * lengths[packs[-1][0]] <= cap:
            packs[-1].append(index)
        else:
            packs.append([index])
    while len(packs) < min(at_least, len(lengths)):
        widest = max((i for i in range(len(packs)) if len(packs[i]) > 1), key=lambda i: (len(packs[i]), -i))
        whole = packs[widest]
        packs[widest : widest + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return packs


def schedule(
    groups: Sequence[Sequence[int]], lengths: Sequence[int], world_size: int, *, cap: int, n_mbs: int = 1
) -> list[list[list[int]]]:
    """Places the groups of one update on ranks and packs each rank's rows, equally many micro-batches on every rank.

    Args:
        groups: row indexes of each group; a group stays on one rank.
        lengths: tokens of every row of the batch.
        world_size: number of ranks.
        cap: `training.max_tokens_per_mb`.
        n_mbs: fewest micro-batches, as far as the rank that needs most has rows for them.

    Returns:
        `[rank][micro-batch]` lists of row indexes; an empty list is a zero-weight micro-batch.

    Raises:
        ValueError: a row is longer than `cap`.
        RuntimeError: a row landed in no micro-batch or in two (a defect of ours).
    """
    parts = partition([sum(lengths[row] for row in group) for group in groups], world_size)
    placed = []
    for part in parts:
        mine = [row for group in part for row in groups[group]]
        placed.append([[mine[i] for i in one] for one in pack([lengths[r] for r in mine], cap, at_least=n_mbs)])
    count = max(len(packs) for packs in placed)
    plan = [packs + [[] for _ in range(count - len(packs))] for packs in placed]
    wanted = sorted(row for group in groups for row in group)
    if sorted(row for packs in plan for one in packs for row in one) != wanted:
        raise RuntimeError("the micro-batch schedule does not hold every row exactly once")
    return plan


def build(rows: Sequence[Row], device: torch.device | None = None) -> MicroBatch:
    """Makes the tensors of one micro-batch; without rows, or without loss tokens, a stand-in of weight zero."""
    if not rows:
        ids = np.zeros((1, 2), dtype=np.int64)
        positions = labels = sequence = np.zeros(0, dtype=np.int64)
        behave = advantages = np.zeros(0, dtype=np.float32)
    else:
        longest = max(row.length for row in rows)
        ids = np.zeros((len(rows), longest), dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : row.length] = row.ids
        inside = [np.flatnonzero(row.mask) + row.prompt_length for row in rows]
        positions = np.concatenate([where - 1 + i * longest for i, where in enumerate(inside)])
        labels = np.concatenate([row.ids[where] for row, where in zip(rows, inside, strict=True)])
        sequence = np.concatenate([np.full(len(where), i) for i, where in enumerate(inside)])
        behave = np.concatenate([row.logprobs[row.mask] for row in rows])
        advantages = np.concatenate([row.advantages[row.mask] for row in rows])
    valid = np.ones(len(positions), dtype=np.bool_)
    if len(positions) == 0:
        positions = labels = sequence = np.zeros(1, dtype=np.int64)
        behave = advantages = np.zeros(1, dtype=np.float32)
        valid = np.zeros(1, dtype=np.bool_)

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        input_ids=tensor(ids),
        positions=tensor(positions.astype(np.int64)),
        labels=tensor(labels.astype(np.int64)),
        valid=tensor(valid),
        sequence=tensor(sequence.astype(np.int64)),
        behave=tensor(behave),
        advantages=tensor(advantages),
        rows=max(1, len(rows)),
    )
