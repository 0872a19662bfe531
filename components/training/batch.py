"""The training batch as the trainer sees it: rows checked once at the edge, and cut into updates by group.

Each rank reads its own part of `batch.parquet`; an outline of all rows, told by the ranks to each other, is what the
updates are planned from. It computes no statistics and moves nothing between ranks: that is `transport`'s matter.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from muster.errors import InvalidInput, Stalled

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

_COLUMNS = ("group_id", "slot", "prompt_ids", "completion_ids", "loss_mask", "logprobs", "advantages")
_OPTIONAL = ("row", "reward", "versions")
_SHOWN = 20


@dataclass(frozen=True)
class Row:
    """One trained row.

    Attributes:
        group_id, slot, row: its identity.
        ids: prompt and completion token ids, `[prompt + completion]`.
        prompt_length: how many of them are the prompt, at least 1.
        mask, logprobs, advantages: per completion token, `[completion]`.
        reward: the row's reward; NaN when the file has none.
    """

    group_id: str
    slot: int
    row: int
    ids: Ints
    prompt_length: int
    mask: Bools
    logprobs: Floats
    advantages: Floats
    reward: float

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return len(self.mask)

    @property
    def valid(self) -> int:
        """Tokens that the loss is taken over."""
        return int(self.mask.sum())


@dataclass(frozen=True)
class RowOutline:
    """What every rank knows of a row that only one of them holds; attributes as `Row`'s."""

    group_id: str
    slot: int
    row: int
    length: int
    tokens: int
    valid: int
    reward: float


@dataclass(frozen=True)
class Batch:
    """Rows of one batch, in an order that does not depend on the file's.

    Attributes:
        rows: ordered by group, slot, row.
        groups: group id -> indexes of its rows.
        digest: SHA-256 of the file's bytes; empty for any part but the first.
    """

    rows: list[Row]
    groups: dict[str, list[int]]
    digest: str


@dataclass(frozen=True)
class Outline:
    """All rows of one batch in outline; rows and groups as in the `Batch` that would hold them all."""

    rows: list[RowOutline]
    groups: dict[str, list[int]]


def notes(batch: Batch) -> list[Any]:
    """What a rank tells the others about each group it has read, in JSON's terms, in the order of `batch.groups`."""
    return [
        [
            group,
            [
                [row.slot, row.row, row.length, row.tokens, row.valid, row.reward]
                for row in map(batch.rows.__getitem__, places)
            ],
        ]
        for group, places in batch.groups.items()
    ]


def outline(told: Sequence[Any]) -> Outline:
    """All rows, from the notes of all ranks.

    Raises:
        InvalidInput: two ranks have read the same group.
    """
    twice = [group for group, n in Counter(group for group, _ in told).items() if n > 1]
    if twice:
        raise InvalidInput(
            f"group {twice[0]!r} was read by two ranks: they do not see the same batch.parquet; the batch directory "
            "must be on storage that all ranks share"
        )
    rows = [RowOutline(group, *row) for group, group_rows in told for row in group_rows]
    rows.sort(key=_order)
    return Outline(rows, _grouped(rows))


def load(directory: Path, *, version: int, longest: int, part: tuple[int, int] = (0, 1)) -> Batch:
    """Reads and checks `directory/batch.parquet`, or one part of it.

    A part is a run of whole groups, in the order in which they first appear in the file; only the row groups (Parquet's
    term) that hold some of them are read.

    Args:
        directory: a training batch directory.
        version: the version that is about to be trained; no token may be newer.
        longest: the most tokens a row may have (`training.max_tokens_per_mb`).
        part: (k, n) for the k-th of n parts, from 0; a part is empty when there are fewer groups than parts.

    Raises:
        InvalidInput: the file cannot be read, or every broken row of this part, one line each (the first 20).
        Stalled: the file has no row.
    """
    path = directory / "batch.parquet"
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest() if part[0] == 0 else ""
            table, places = _read(pq.ParquetFile(file), path, part)
    except (OSError, pa.ArrowException) as error:
        raise InvalidInput(f"{path}: cannot read the training batch: {error}") from error
    columns = {name: table.column(name).to_pylist() for name in ("group_id", "slot")}
    columns["row"] = _optional(table, "row", 0)
    columns["reward"] = _optional(table, "reward", float("nan"))
    lists = {name: _lists(table, name, path) for name in _COLUMNS[2:]}
    lists["versions"] = _lists(table, "versions", path) if "versions" in table.column_names else []
    rows: list[Row] = []
    faults: list[str] = []
    for index in range(table.num_rows):
        each = {name: values[index] for name, values in lists.items() if values}
        fault = _fault(each, version, longest)
        if fault:
            name = f"group {columns['group_id'][index]!r}, slot {columns['slot'][index]}"
            faults.append(f"{path}: row {places[index]} ({name}): {fault}")
            continue
        reward = columns["reward"][index]
        rows.append(
            Row(
                group_id=str(columns["group_id"][index]),
                slot=int(columns["slot"][index]),
                row=int(columns["row"][index] or 0),
                ids=np.concatenate([each["prompt_ids"], each["completion_ids"]]).astype(np.int64),
                prompt_length=len(each["prompt_ids"]),
                mask=each["loss_mask"].astype(np.bool_),
                logprobs=each["logprobs"].astype(np.float32),
                advantages=each["advantages"].astype(np.float32),
                reward=float("nan") if reward is None else float(reward),
            )
        )
    counts = Counter((row.group_id, row.slot, row.row) for row in rows)
    faults += [
        f"{path}: group {group!r}, slot {slot}, row {row} is there {n} times; every row is trained on exactly once"
        for (group, slot, row), n in counts.items()
        if n > 1
    ]
    if faults:
        more = [f"{path}: and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise InvalidInput(faults[:_SHOWN] + more)
    rows.sort(key=_order)
    return Batch(rows, _grouped(rows), digest)


def cut(group_ids: list[str], updates: int, *, seed: int, version: int) -> list[list[str]]:
    """Cuts a batch into updates by group, the same for everyone who asks (semantics.md, "Loss").

    Groups are ordered by SHA-256 of (seed, version, group_id) and dealt out in runs whose lengths differ by <= 1.

    Args:
        group_ids: the trainable groups, each once, in any order.
        updates: how many updates are wanted.
        seed: `data.seed`.
        version: the version that the batch was collected for.

    Returns:
        Group ids of each update, none empty: fewer than `updates` when there are fewer groups.
    """
    ordered = sorted(group_ids, key=lambda group: (_hash(seed, version, group), group))
    count = min(updates, len(ordered))
    bounds = [len(ordered) * i // count for i in range(count + 1)] if count else [0]
    return [ordered[start:end] for start, end in itertools.pairwise(bounds)]


def _read(file: pq.ParquetFile, path: Path, part: tuple[int, int]) -> tuple[pa.Table, list[int]]:
    """The rows of one part, and their places in the file."""
    names = file.schema_arrow.names
    absent = [name for name in _COLUMNS if name not in names]
    if absent:
        raise InvalidInput([f"{path}: the column {name} is absent" for name in absent])
    if file.metadata.num_rows == 0:
        raise Stalled(f"{path}: nothing to train on: 0 rows, at least 1 is needed")
    groups = file.read(columns=["group_id"]).column(0).to_pylist()
    distinct = list(dict.fromkeys(groups))
    number, parts = part
    mine = set(distinct[len(distinct) * number // parts : len(distinct) * (number + 1) // parts])
    pieces, places, start = [], [], 0
    for index in range(file.num_row_groups):
        rows = file.metadata.row_group(index).num_rows
        kept = [row for row in range(rows) if groups[start + row] in mine]
        if kept:
            piece = file.read_row_group(index, columns=[name for name in (*_COLUMNS, *_OPTIONAL) if name in names])
            pieces.append(piece if len(kept) == rows else piece.take(kept))
            places += [start + row for row in kept]
        start += rows
    return pa.concat_tables(pieces) if pieces else file.schema_arrow.empty_table(), places


def _order(row: Row | RowOutline) -> tuple[str, int, int]:
    return row.group_id, row.slot, row.row


def _grouped(rows: Sequence[Row | RowOutline]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group_id, []).append(index)
    return groups


def _hash(seed: int, version: int, group_id: str) -> bytes:
    return hashlib.sha256(f"{seed}:{version}:{group_id}".encode()).digest()


def _optional(table: pa.Table, name: str, default: Any) -> list[Any]:
    return table.column(name).to_pylist() if name in table.column_names else [default] * table.num_rows


def _lists(table: pa.Table, name: str, path: Path) -> list[npt.NDArray[Any]]:
    """A list column as one numpy array a row."""
    column = table.column(name)
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise InvalidInput(f"{path}: the column {name} must hold lists, not {column.type}")
    if column.null_count:
        raise InvalidInput(f"{path}: the column {name} has {column.null_count} rows without a value")
    rows: list[npt.NDArray[Any]] = []
    for chunk in column.chunks:
        values = chunk.flatten()
        if values.null_count:
            raise InvalidInput(f"{path}: the column {name} has {values.null_count} elements without a value")
        offsets = chunk.offsets.to_numpy()
        if len(chunk):
            rows += np.split(values.to_numpy(zero_copy_only=False), offsets[1:-1] - offsets[0])
    return rows


def _fault(each: dict[str, npt.NDArray[Any]], version: int, longest: int) -> str | None:
    """What makes a row impossible to train on, or None."""
    tokens = len(each["completion_ids"])
    if len(each["prompt_ids"]) == 0:
        return "prompt_ids is empty; the first completion token needs a token before it"
    if tokens == 0:
        return "completion_ids is empty; such a slot is failed (empty_completion) and has no row here"
    for name in ("loss_mask", "logprobs", "advantages", "versions"):
        if name in each and len(each[name]) != tokens:
            return f"{name} has {len(each[name])} elements for {tokens} completion tokens"
    total = len(each["prompt_ids"]) + tokens
    if total > longest:
        return f"has {total} tokens, more than training.max_tokens_per_mb {longest}; raise that to at least {total}"
    mask = each["loss_mask"].astype(np.bool_)
    for name in ("logprobs", "advantages"):
        bad = np.flatnonzero(mask & ~np.isfinite(each[name]))
        if len(bad):
            return f"{name}[{bad[0]}] is {each[name][bad[0]]}; it must be finite where loss_mask is true"
    if "versions" in each and mask.any() and each["versions"][mask].max() > version:
        newest = int(each["versions"][mask].max())
        return f"has tokens of version {newest}, newer than version {version} that is trained"
    if min(each["prompt_ids"].min(), each["completion_ids"].min()) < 0:
        return "has a negative token id"
    return None
