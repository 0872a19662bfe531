"""Micro-batches: which rows run together, the same number of runs on every rank, and their tensors.

The schedule is computed from lengths alone, identically on every rank. Which groups a rank has is `partition`'s matter.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from muster.training.batch import Row
from muster.training.partition import partition


class Packing(Protocol):
    """How the rows of one rank become micro-batches: `pack`, or `pack_padded` for a model whose rows are padded."""

    def __call__(self, lengths: Sequence[int], cap: int, *, at_least: int = 1) -> list[list[int]]:
        """Lists of row indexes."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows that run through the model together, and their loss tokens laid end to end.

    The rows are laid end to end too, or padded on the right: that needs no mask, as attention is causal and every pad
    comes after every real token. A single row is the same either way.

    Attributes:
        input_ids: `[1, total]` int64, rows end to end; padded, `[rows, longest]`.
        position_ids: `[1, total]` int64, each token's place in its row; padded, `[1, longest]`.
        lengths: tokens of each row, in the order of `input_ids`.
        positions: `[tokens]` int64, index into the flattened `input_ids` of the token before each loss token.
        labels: `[tokens]` int64, the loss tokens.
        valid: `[tokens]` bool; false only for the stand-in token of a micro-batch without loss tokens.
        sequence: `[tokens]` int64, the row of each token.
        behave: `[tokens]` float32, log-probs under the policy that sampled them.
        advantages: `[tokens]` float32.
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    positions: Tensor
    labels: Tensor
    valid: Tensor
    sequence: Tensor
    behave: Tensor
    advantages: Tensor

    @property
    def rows(self) -> int:
        """How many rows, the stand-in included."""
        return len(self.lengths)


def pack(lengths: Sequence[int], cap: int, *, at_least: int = 1) -> list[list[int]]:
    """Packs rows into micro-batches of at most `cap` tokens, laid end to end without padding.

    Best fit decreasing (Johnson, 1973): each row, longest first, into the fullest micro-batch that still takes it.

    Args:
        lengths: tokens of each row, at least 1.
        cap: the most tokens in one micro-batch.
        at_least: split further until there are this many, or one row each.

    Returns:
        Lists of row indexes; together they hold every index exactly once.

    Raises:
        ValueError: a row is longer than `cap`.
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for index in _longest_first(lengths, cap):
        place = bisect.bisect_left(room, (lengths[index], -1))
        if place == len(room):
            left, chosen = cap, len(packs)
            packs.append([])
        else:
            left, chosen = room.pop(place)
        packs[chosen].append(index)
        bisect.insort(room, (left - lengths[index], chosen))
    return split(packs, lengths, at_least)


def pack_padded(lengths: Sequence[int], cap: int, *, at_least: int = 1) -> list[list[int]]:
    """Packs rows into micro-batches whose padded size (rows x longest) stays within `cap` tokens.

    Rows of similar length share a micro-batch: longest first, each opened at its longest row. Arguments, result and
    errors as `pack`.
    """
    packs: list[list[int]] = []
    for index in _longest_first(lengths, cap):
        if packs and (len(packs[-1]) + 1) * lengths[packs[-1][0]] <= cap:
            packs[-1].append(index)
        else:
            packs.append([index])
    return split(packs, lengths, at_least)


def split(packs: list[list[int]], lengths: Sequence[int], at_least: int) -> list[list[int]]:
    """Halves the micro-batch with the most tokens, in order, until there are `at_least`, or one row each."""
    packs = list(packs)
    while len(packs) < min(at_least, sum(map(len, packs))):
        widest = max((i for i in range(len(packs)) if len(packs[i]) > 1), key=lambda i: (_size(packs[i], lengths), -i))
        whole = packs[widest]
        packs[widest : widest + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return packs


def schedule(
    groups: Sequence[Sequence[int]],
    lengths: Sequence[int],
    world_size: int,
    *,
    cap: int,
    n_mbs: int = 1,
    multiple: int = 1,
    packing: Packing = pack,
    costs: Sequence[float] | None = None,
) -> list[list[list[int]]]:
    """Places the groups of one update on ranks and packs each rank's rows, equally many micro-batches on every rank.

    Args:
        groups: row indexes of each group; a group stays on one rank.
        lengths: tokens of every row of the batch.
        world_size: number of data-parallel ranks.
        cap: `training.max_tokens_per_mb`.
        n_mbs: fewest micro-batches, as far as the rank that needs most has rows for them.
        multiple: the number of micro-batches is a multiple of this (a pipeline schedule's need).
        packing: how a rank's rows become micro-batches.
        costs: what each row of the batch costs, for balance between ranks; its tokens unless told.

    Returns:
        `[rank][micro-batch]` lists of row indexes; an empty list is a zero-weight micro-batch.

    Raises:
        ValueError: a row is longer than `cap`.
        RuntimeError: a row landed in no micro-batch or in two (a defect of ours).
    """
    weights = lengths if costs is None else costs
    parts = partition([sum(weights[row] for row in group) for group in groups], world_size)
    placed = []
    for part in parts:
        mine = [row for group in part for row in groups[group]]
        packs = packing([lengths[row] for row in mine], cap, at_least=n_mbs)
        placed.append([[mine[i] for i in one] for one in packs])
    plan = in_step(placed, lengths, multiple=multiple)
    wanted = sorted(row for group in groups for row in group)
    if sorted(row for packs in plan for one in packs for row in one) != wanted:
        raise RuntimeError("the micro-batch schedule does not hold every row exactly once")
    return plan


def in_step(
    placed: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], *, multiple: int = 1
) -> list[list[list[int]]]:
    """Gives every rank the same number of micro-batches: that of the rank with most, rounded up to a multiple.

    Where that is more than a rank has, its micro-batches are split only as far as rounding up asks; the rest of its
    slots stay empty and run with weight zero, so that all ranks meet in every collective.

    Args:
        placed: `[rank]` lists of micro-batches (row indexes), as packed.
        lengths: tokens of every row.
        multiple: as in `schedule`.

    Raises:
        RuntimeError: two micro-batches fell into one slot, or one into none (a defect of ours, seen by all ranks).
    """
    if multiple < 1:
        raise ValueError(f"multiple is {multiple}; it must be at least 1")
    most = max(1, *(len(packs) for packs in placed))
    count = -(-most // multiple) * multiple
    plan: list[list[list[int]]] = []
    for rank, packs in enumerate(placed):
        # rounding up gives slots for nothing: real work, in smaller pieces, is better there than waiting
        real = [list(rows) for rows in packs]
        if len(packs) == most:
            real = split(real, lengths, count)
        plan.append(in_slots(real, count, rank))
    return plan


def in_slots(packs: Sequence[list[int]], count: int, rank: int) -> list[list[int]]:
    """Puts micro-batches into the first of `count` slots, one each; the other slots stay empty.

    Raises:
        RuntimeError: there are more micro-batches than slots, so that two would share one.
    """
    slots: list[list[int]] = [[] for _ in range(count)]
    for number, rows in enumerate(packs):
        slot = number % count
        if slots[slot]:
            raise RuntimeError(
                f"rank {rank}: micro-batches {slot} and {number} land in the same slot; {len(packs)} need as many "
                f"slots, the schedule has {count}"
            )
        slots[slot] = rows
    return slots


def _longest_first(lengths: Sequence[int], cap: int) -> list[int]:
    for index, length in enumerate(lengths):
        if length > cap:
            raise ValueError(f"lengths[{index}] is {length}, more than the cap of {cap} tokens")
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _size(rows: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[row] for row in rows)


def build(rows: Sequence[Row], device: torch.device | None = None, *, padded: bool = False) -> MicroBatch:
    """Makes the tensors of one micro-batch; without rows, or without loss tokens, a stand-in of weight zero.

    Args:
        rows: may be empty.
        device: where the tensors go.
        padded: rows in a rectangle instead of end to end.
    """
    rows = sorted(rows, key=lambda row: -row.length)  # rows of one length side by side: attention takes them at once
    lengths = tuple(row.length for row in rows) or (2,)
    if padded:
        ids = np.zeros((len(lengths), lengths[0]), dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : row.length] = row.ids
        starts = [i * lengths[0] for i in range(len(lengths))]
        places = np.arange(lengths[0])
    else:
        ids = np.concatenate([row.ids for row in rows])[None] if rows else np.zeros((1, 2), dtype=np.int64)
        starts = [0, *itertools.accumulate(lengths)][:-1]
        places = np.concatenate([np.arange(length) for length in lengths])
    inside = [np.flatnonzero(row.mask) for row in rows]
    counts = [len(where) for where in inside]
    if sum(counts) > 0:
        valid = np.ones(sum(counts), dtype=np.bool_)
        sequence = np.repeat(np.arange(len(rows)), counts)
        labels = np.concatenate([row.ids[where + row.prompt_length] for row, where in zip(rows, inside, strict=True)])
        positions = np.concatenate(
            [start + row.prompt_length + where - 1 for start, row, where in zip(starts, rows, inside, strict=True)]
        )
        behave = np.concatenate([row.logprobs[where] for row, where in zip(rows, inside, strict=True)])
        advantages = np.concatenate([row.advantages[where] for row, where in zip(rows, inside, strict=True)])
    else:
        valid = np.zeros(1, dtype=np.bool_)
        positions = labels = sequence = np.zeros(1, dtype=np.int64)
        behave = advantages = np.zeros(1, dtype=np.float32)

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        input_ids=tensor(ids),
        position_ids=tensor(places[None]),
        lengths=lengths,
        positions=tensor(positions.astype(np.int64)),
        labels=tensor(labels.astype(np.int64)),
        valid=tensor(valid),
        sequence=tensor(sequence),
        behave=tensor(behave),
        advantages=tensor(advantages),
    )
