"""Each rank reads its own part of the batch file, and what the ranks tell each other adds up to the whole."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from muster.errors import InvalidInput
from muster.training import batch as batches

GROUPS = [3, 1, 4, 1, 5, 2]


def write(directory: Path, *, shuffled: bool, row_group_size: int, **changes: Any) -> Path:
    rows = [
        {
            "group_id": f"g{group}",
            "slot": slot,
            "prompt_ids": [1, 2],
            "completion_ids": [3] * (slot + 1),
            "loss_mask": [True] * (slot + 1),
            "logprobs": [-1.0] * (slot + 1),
            "advantages": [1.0] * (slot + 1),
            "reward": float(group),
            "unknown": "anything",
        }
        for group, size in enumerate(GROUPS)
        for slot in range(size)
    ]
    rows[-1].update(changes)
    if shuffled:
        random.Random(0).shuffle(rows)
    pq.write_table(pa.Table.from_pylist(rows), directory / "batch.parquet", row_group_size=row_group_size)
    return directory


def load(directory: Path, number: int = 0, parts: int = 1) -> batches.Batch:
    return batches.load(directory, version=0, longest=20, part=(number, parts))


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("row_group_size", [1, 4, 100])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_parts_hold_every_group_whole_and_once(tmp_path: Path, shuffled: bool, row_group_size: int, parts: int) -> None:
    directory = write(tmp_path, shuffled=shuffled, row_group_size=row_group_size)
    whole = load(directory)
    read = [load(directory, number, parts) for number in range(parts)]
    groups = list(itertools.chain.from_iterable(one.groups for one in read))
    assert sorted(groups) == sorted(whole.groups)
    assert len(set(groups)) == len(groups)
    rows = sorted((row.group_id, row.slot, row.ids.tolist()) for one in read for row in one.rows)
    assert rows == [(row.group_id, row.slot, row.ids.tolist()) for row in whole.rows]
    assert [one.digest for one in read] == [whole.digest] + [""] * (parts - 1)

    outline = batches.outline([note for one in reversed(read) for note in batches.notes(one)])
    assert outline.groups == whole.groups
    for told, row in zip(outline.rows, whole.rows, strict=True):
        for name in ("group_id", "slot", "row", "length", "tokens", "valid", "reward"):
            assert getattr(told, name) == getattr(row, name)


def test_a_part_reads_only_where_its_groups_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write(tmp_path, shuffled=False, row_group_size=4)
    seen: list[int] = []
    whole = pq.ParquetFile.read_row_group

    def watched(self: Any, index: int, **named: Any) -> Any:
        seen.append(index)
        return whole(self, index, **named)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", watched)
    assert list(load(directory, 1, 2).groups) == ["g3", "g4", "g5"]
    assert seen == [2, 3]


def test_a_fault_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    directory = write(tmp_path, shuffled=False, row_group_size=4, logprobs=[float("nan")] * 2)
    load(directory, 0, 2)
    with pytest.raises(InvalidInput, match=r"row 15 \(group 'g5', slot 1\): logprobs\[0\] is nan"):
        load(directory, 1, 2)


def test_ranks_that_see_different_files_are_found_out(tmp_path: Path) -> None:
    note = batches.notes(load(write(tmp_path, shuffled=False, row_group_size=4)))
    with pytest.raises(InvalidInput, match="group 'g0' was read by two ranks"):
        batches.outline(note + note[:1])
