"""Groups of rollouts -> training batch: the one `assemble` that command line, pipeline step and trainer call.

The order of decisions is that of semantics.md, rule 12: failure policy, strict mode, minimum, filter, normalisation.
Nothing here knows about ranks: a batch is the same however it is placed.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from muster.assembly.advantage import normalize_advantages, trainer_computes
from muster.assembly.evidence import Slots, Trained, summarize
from muster.assembly.normalize import Layout, normalize_rewards, shape_rewards
from muster.config import RunConfig
from muster.errors import InvalidInput, Stalled, storage_died
from muster.groups import (
    CONTRACT_REMEDIES,
    FAILURE_REASONS,
    USABLE,
    Settled,
    contradictory,
    decide,
    settle,
)
from muster.trajectory import SCHEMA, SHOWN, RolloutTable, list_lengths, stretches, sync, write_parquet

BATCH, SUMMARY = "batch.parquet", "summary.json"

ADDED = pa.schema(
    [("advantages", pa.list_(pa.float32())), ("normalized_reward", pa.float64()), ("group_usable", pa.int32())]
)
"""What a batch has beyond the rollout columns (contracts.md)."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """The rows to train on, sorted by group, slot and row.

    Attributes:
        rollouts: where the rows come from.
        rows: [T] indices into it.
        reward: [T] raw reward of each row; a policy's where one applied.
        normalized_reward: [T].
        advantage: [T] the value on every valid token of a row; None when the trainer computes advantages.
        group_usable: [T] usable slots of the row's group.
        summary: the contents of summary.json.
    """

    rollouts: RolloutTable
    rows: Ints
    reward: Floats
    normalized_reward: Floats
    advantage: Floats | None
    group_usable: Ints
    summary: dict[str, Any]

    def __len__(self) -> int:
        """Rows."""
        return len(self.rows)

    @cached_property
    def table(self) -> pa.Table:
        """The whole batch in memory: the rollout's columns and `advantages`, `normalized_reward`, `group_usable`.

        `advantages` has one value per completion token, 0 where the loss mask is false; it is null on every row when
        the trainer computes advantages.
        """
        return pa.concat_tables(list(self.stretches()))

    def stretches(self) -> Iterator[pa.Table]:
        """The batch in stretches of a few million tokens, so that no second copy of it is needed to write it."""
        lengths = list_lengths(self.rollouts.table["completion_ids"])[self.rows]
        for start, stop in stretches(lengths):
            yield self._rows(start, stop)

    def write(self, out_dir: str | Path) -> None:
        """Writes `batch.parquet` and `summary.json` into a folder: both or none.

        The folder is made whole under another name and then given its own. An existing folder is replaced when it is
        empty or holds nothing but these two files (a step that is run again); any other is refused. Killed between the
        two renames, the earlier batch is left beside it, under a name that begins with a dot.

        Raises:
            InvalidInput: `out_dir` is something else than that.
            DependencyDied: storage failed.
        """
        out = Path(out_dir).resolve()
        check_target(out)
        temporary = out.with_name(f".{out.name}.{secrets.token_hex(6)}.tmp")
        old = out.with_name(f".{out.name}.{secrets.token_hex(6)}.old")
        try:
            temporary.mkdir(parents=True)
            first = next(parts := self.stretches())
            write_parquet(_chain(first, parts), first.schema, temporary / BATCH)
            (temporary / SUMMARY).write_text(
                json.dumps(self.summary, indent=1, allow_nan=False) + "\n", encoding="utf-8"
            )
            for path in (temporary / BATCH, temporary / SUMMARY, temporary):
                sync(path)
            if out.exists():
                out.rename(old)
            temporary.rename(out)
            sync(out.parent)
        except OSError as error:
            raise storage_died(error, out) from error
        finally:
            if old.exists() and not out.exists():
                old.rename(out)
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)

    def _rows(self, start: int, stop: int) -> pa.Table:
        """The batch's rows from `start` to `stop`."""
        rows = self.rows[start:stop]
        whole = self.rollouts.table
        if rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
            table = whole.slice(rows[0], len(rows))  # adjacent: nothing is copied
        else:
            table = whole.take(pa.array(rows))
        table = table.drop_columns([n for n in ADDED.names if n in table.column_names])
        usable = pa.array(np.full(len(rows), "usable", dtype=object), pa.string())
        table = table.set_column(table.column_names.index("status"), SCHEMA.field("status"), usable)
        reward = pa.array(self.reward[start:stop])
        table = table.set_column(table.column_names.index("reward"), SCHEMA.field("reward"), reward)
        added = [
            self._advantages(table["completion_ids"], table["loss_mask"], start, stop),
            pa.array(self.normalized_reward[start:stop]),
            pa.array(self.group_usable[start:stop], pa.int32()),
        ]
        for column, values in zip(ADDED, added, strict=True):
            table = table.append_column(column, values)
        return table

    def _advantages(self, completions: pa.ChunkedArray, mask: pa.ChunkedArray, start: int, stop: int) -> pa.Array:
        kind = ADDED.field("advantages").type
        if self.advantage is None:
            return pa.nulls(stop - start, kind)
        lengths = list_lengths(completions)
        values = np.repeat(self.advantage[start:stop].astype(np.float32), lengths)
        values *= np.concatenate([_flat(chunk) for chunk in mask.chunks])
        offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)).cast(kind)


def assemble(table: RolloutTable, config: RunConfig) -> TrainingBatch:
    """Makes the training batch of a rollout table.

    Args:
        table: as `muster.trajectory.read` gives it.
        config: `group`, `estimator`, `algorithm` and, for a length penalty, `rollout.max_new_tokens` are used.

    Raises:
        InvalidInput: file and configuration disagree on `n_samples`; a contract error (rules 9 and 12); a length
            penalty without a budget.
        Stalled: nothing is trainable; says what became of groups and slots.
    """
    budget = _budget(config)
    _check_group_size(table, config)

    # Rows, sorted; each slot's rows adjacent, each group's slots adjacent.
    order = table.order
    group_of_row, slot_of_row = table.group[order], table.column("slot")[order]
    new_group = np.append(True, group_of_row[1:] != group_of_row[:-1])
    new_slot = new_group | np.append(True, slot_of_row[1:] != slot_of_row[:-1])
    slot_first = np.flatnonzero(new_slot)
    group_of_slot = group_of_row[slot_first]
    group_first = np.flatnonzero(new_group[slot_first])

    # Failure policy, strict mode, minimum, filter.
    length = list_lengths(table.table["completion_ids"])[order]
    reward = pc.coalesce(table.table["reward"], table.table["rollout_reward"]).to_numpy()[order]
    told = table.column("rollout_reward")[order]
    settled = settle(slot_first, _failure_codes(table)[order], length, reward, told, config.group.failures)
    _check_references(table, order, slot_first, settled, config)
    decided = decide(group_first, settled, config)

    # What is trained on: the usable slots of the trained groups.
    keep_slot = (settled.failure == USABLE) & decided.trained[group_of_slot]
    rows_per_slot = np.diff(np.append(slot_first, len(order)))
    keep = np.flatnonzero(np.repeat(keep_slot, rows_per_slot))
    valid = _valid_tokens(table, order[keep], length[keep])

    with np.errstate(invalid="ignore", over="ignore"):  # failed slots may hold anything
        row_means = np.add.reduceat(settled.reward, slot_first) / rows_per_slot
    slots = Slots(
        settled=settled,
        decided=decided,
        group=group_of_slot,
        tokens=np.add.reduceat(length, slot_first),
        reward=np.where(np.isnan(settled.reference), row_means, settled.reference),
    )
    trained = Trained(len(keep), int(length[keep].sum()), int(valid.sum()))
    summary = summarize(slots, trained, config)
    if not trained.valid:
        raise _nothing(summary)

    # Normalisation.
    layout = _layout(rows_per_slot[keep_slot], group_of_slot[keep_slot])
    shaped = shape_rewards(settled.reward[keep], config.estimator, length[keep], budget)
    reference = _shaped_references(shaped, settled, keep_slot, layout, config)
    normalized = normalize_rewards(shaped, reference, layout, config.estimator.reward_norm)
    final = trainer_computes(config) is None
    return TrainingBatch(
        rollouts=table,
        rows=order[keep],
        reward=settled.reward[keep],
        normalized_reward=normalized,
        advantage=normalize_advantages(normalized, valid, layout, config.estimator.adv_norm) if final else None,
        group_usable=decided.usable[group_of_row[keep]],
        summary=summary,
    )


def read_batch(directory: str | Path) -> pa.Table:
    """Reads a training batch that `TrainingBatch.write` made.

    Raises:
        InvalidInput: the folder holds no such batch; names what is wrong.
    """
    path = Path(directory) / BATCH
    try:
        if not (Path(directory) / SUMMARY).is_file():
            raise InvalidInput(f"{directory}: has no {SUMMARY}; give a folder that muster assemble wrote")
        table = pq.read_table(path, memory_map=True)
    except (OSError, pa.ArrowException) as error:
        raise InvalidInput(f"{path}: cannot be read as a training batch: {' '.join(str(error).split())}") from error
    for column in [*SCHEMA, *ADDED]:
        if column.name not in table.column_names or table.schema.field(column.name).type != column.type:
            raise InvalidInput(f"{path}: column {column.name} must be there as {column.type}; assemble the batch again")
    return table


def check_target(out: Path) -> None:
    """Checks that a batch may be written to this folder, before work is spent on it.

    Raises:
        InvalidInput: it exists and is neither empty nor a batch of ours.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise InvalidInput(f"{out}: is a file; give a folder for the batch")
    others = sorted(p.name for p in out.iterdir() if p.name not in (BATCH, SUMMARY))
    if others:
        raise InvalidInput(
            f"{out}: holds {', '.join(others[:3])}{' and more' if len(others) > 3 else ''}, which is no training batch "
            "and would be lost; give an empty or a new folder"
        )


def _budget(config: RunConfig) -> int | None:
    """`rollout.max_new_tokens`, where it is needed."""
    if config.estimator.overlong is None:
        return None
    if config.rollout is None:
        raise InvalidInput(
            "rollout.max_new_tokens: is absent, and estimator.overlong counts from it; set the budget that the samples "
            "were drawn with"
        )
    return config.rollout.max_new_tokens


def _check_group_size(table: RolloutTable, config: RunConfig) -> None:
    """File and configuration must agree on the group size."""
    sizes, target = table.column("n_samples"), config.group.n_samples
    wrong = table.order[(sizes != target)[table.order]]
    if len(wrong):
        row = int(wrong[0])
        raise InvalidInput(
            f"{table.where(row)}: n_samples is {sizes[row]}, but group.n_samples in the configuration is {target}; "
            f"they must agree ({len(wrong)} of {len(table)} rows differ)"
        )


def _check_references(table: RolloutTable, order: Ints, slot_first: Ints, settled: Settled, config: RunConfig) -> None:
    """Rows that no rule can interpret stop the run (rules 9 and 12)."""
    unclear = np.flatnonzero(contradictory(settled, config))
    if not len(unclear):
        return
    lines = [
        f"{table.where(int(order[slot_first[slot]]))}: the rows of this slot have different rewards "
        f"({settled.low[slot]:g} to {settled.high[slot]:g}) and no finite, equal rollout_reward, so the group has no "
        f"statistics; {CONTRACT_REMEDIES}"
        for slot in unclear[:SHOWN]
    ]
    more = len(unclear) - len(lines)
    raise InvalidInput([*lines, f"... and {more} more faults"] if more else lines)


def _failure_codes(table: RolloutTable) -> NDArray[np.int8]:
    """[R] the failure of each row as a code."""
    index = pc.index_in(table.table["failure"], pa.array(FAILURE_REASONS))
    codes: NDArray[np.int8] = pc.fill_null(index, USABLE).to_numpy().astype(np.int8)
    return codes


def _layout(rows_per_slot: Ints, group_of_slot: Ints) -> Layout:
    """The layout of the rows that are left."""
    first = np.cumsum(rows_per_slot) - rows_per_slot
    new = np.append(True, group_of_slot[1:] != group_of_slot[:-1])
    return Layout(first, np.flatnonzero(new), int(rows_per_slot.sum()))


def _shaped_references(
    shaped: Floats, settled: Settled, keep_slot: NDArray[np.bool_], layout: Layout, config: RunConfig
) -> Floats:
    """[S] what group statistics count for each slot (rule 12).

    A `rollout_reward` gets bias, scale and clip. Without one it is what the slot's rows agree on: their shaped reward,
    or, where a length penalty has set them apart, their raw reward with bias, scale and clip.
    """
    low = np.minimum.reduceat(shaped, layout.slot_first)
    agree = low == np.maximum.reduceat(shaped, layout.slot_first)
    told = shape_rewards(settled.reference[keep_slot], config.estimator)
    return np.where(agree & ~settled.explicit[keep_slot], low, told)


def _valid_tokens(table: RolloutTable, rows: Ints, length: Ints) -> Ints:
    """[rows] completion tokens whose loss mask is true."""
    counts = np.empty(len(table), dtype=np.int64)
    start = 0
    for chunk in table.table["loss_mask"].chunks:
        for begin in range(0, len(chunk), 16384):
            part = chunk.slice(begin, 16384)
            ends = np.zeros(len(part) + 1, dtype=np.int64)
            np.cumsum(pc.list_value_length(part).to_numpy(), out=ends[1:])
            running = np.zeros(int(ends[-1]) + 1, dtype=np.int32)
            np.cumsum(_flat(part), out=running[1:], dtype=np.int32)
            counts[start + begin : start + begin + len(part)] = np.diff(running[ends])
        start += len(chunk)
    assert (counts[rows] <= length).all()
    return counts[rows]


def _flat(lists: pa.ListArray) -> NDArray[Any]:
    return np.asarray(lists.flatten().to_numpy(zero_copy_only=False))


def _chain(first: pa.Table, rest: Iterator[pa.Table]) -> Iterator[pa.Table]:
    yield first
    yield from rest


def _nothing(summary: dict[str, Any]) -> Stalled:
    """The error for a batch without a trainable token."""
    groups, slots = summary["groups"], summary["slots"]
    outcomes = ("empty", "stale", "below_minimum", "dropped_incomplete", "filtered")
    why = ", ".join(f"{groups[name]} {name}" for name in outcomes if groups[name])
    if groups["trainable"]:
        why = f"the loss mask is false on all {summary['tokens']['total']} tokens of {groups['trainable']} groups"
    return Stalled(
        f"nothing is trainable: {groups['target']} groups with {slots['target']} slots, {slots['usable']} usable; "
        f"{why}; a group needs {summary['min_usable_group_size']} usable slots",
        summary["failures"],
    )
