"""Reading, checking and writing rollout files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from muster import trajectory
from muster.errors import InvalidInput

Row = dict[str, Any]


def row(group: str = "a", slot: int = 0, **changes: Any) -> Row:
    made = {
        "group_id": group,
        "n_samples": 2,
        "slot": slot,
        "row": 0,
        "status": "usable",
        "failure": None,
        "prompt_ids": [1, 2],
        "completion_ids": [5, 6, 7],
        "loss_mask": [True, True, True],
        "logprobs": [-0.5, -0.25, -1.0],
        "versions": [0, 0, 1],
        "reward": 1.0,
        "finish_reason": "stop",
    }
    return {key: value for key, value in {**made, **changes}.items() if value != "absent"}


def lines(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def faults(rows: list[Row]) -> list[str]:
    with pytest.raises(InvalidInput) as caught:
        trajectory.from_rows(rows)
    assert caught.value.exit_code == 2
    return caught.value.faults


def test_written_rows_are_read_back(tmp_path: Path) -> None:
    rows = [row(slot=0), row(slot=1, status="failed", failure="timeout", reward=None)]
    trajectory.write(rows, tmp_path / "deep" / "r.parquet")
    table = trajectory.read(tmp_path / "deep" / "r.parquet").table
    assert table.schema.names == trajectory.SCHEMA.names
    assert table.schema.types == trajectory.SCHEMA.types
    assert [{k: v for k, v in got.items() if k in rows[0]} for got in table.to_pylist()] == rows
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["r.parquet"]


def test_json_lines_and_parquet_give_the_same_table(tmp_path: Path) -> None:
    rows = [row(slot=0, reward=float("nan")), row(slot=1, reward=None, rollout_reward=2)]
    trajectory.write(rows, tmp_path / "r.parquet")
    ours = trajectory.read(tmp_path / "r.parquet").table
    theirs = trajectory.read(lines(tmp_path / "r.jsonl", rows)).table
    assert repr(ours.to_pylist()) == repr(theirs.to_pylist())
    assert ours.schema == theirs.schema


def test_files_and_directories_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "d" / "part").mkdir(parents=True)
    trajectory.write([row("a", 0)], tmp_path / "d" / "part" / "0.parquet")
    lines(tmp_path / "d" / "1.jsonl", [row("a", 1)])
    lines(tmp_path / "d" / "_unfinished.jsonl", [row("a", 1)])
    lines(tmp_path / "d" / ".hidden.jsonl", [row("a", 1)])
    lines(tmp_path / "more", [row("b", 0)])
    read = trajectory.read([tmp_path / "d", tmp_path / "more"])
    assert sorted(zip(*(read.table[k].to_pylist() for k in ("group_id", "slot")), strict=True)) == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
    ]


def test_columns_left_out_get_their_defaults(tmp_path: Path) -> None:
    short = row(row="absent", loss_mask="absent", failure="absent", finish_reason="absent")
    got = trajectory.read(lines(tmp_path / "r.jsonl", [short])).table.to_pylist()[0]
    assert got["row"] == 0
    assert got["loss_mask"] == [True] * 3
    assert got["failure"] is got["finish_reason"] is got["rollout_reward"] is None


def test_a_mask_absent_on_some_rows_is_all_true_there() -> None:
    got = trajectory.from_rows([row(slot=0, loss_mask=[True, False, True]), row(slot=1, loss_mask=None)])
    assert got.table["loss_mask"].to_pylist() == [[True, False, True], [True, True, True]]


def test_unknown_columns_are_carried_through(tmp_path: Path) -> None:
    rows = [row(slot=0, difficulty=3, tags={"x": ["2024-01-01"]}), row(slot=1)]
    read = trajectory.read(lines(tmp_path / "r.jsonl", rows))
    assert read.table["difficulty"].to_pylist() == [3, None]
    assert read.table["tags"].to_pylist() == [{"x": ["2024-01-01"]}, None]


def test_a_failed_slot_may_have_no_lists() -> None:
    empty = dict.fromkeys(("completion_ids", "logprobs", "versions", "loss_mask", "reward"))
    read = trajectory.from_rows([row(slot=0), row(slot=1, status="failed", failure="aborted", **empty)])
    assert read.table["completion_ids"].to_pylist()[1] == []


def test_types_are_cast_where_nothing_is_lost(tmp_path: Path) -> None:
    table = pa.table(
        {
            "group_id": pa.array([7, 7], pa.int64()),
            "n_samples": pa.array([2.0, 2.0]),
            "slot": pa.array([0, 1], pa.uint8()),
            "status": pa.array(["usable", "usable"]).dictionary_encode(),
            "prompt_ids": pa.array([[1], [1]], pa.large_list(pa.int64())),
            "completion_ids": pa.array([[2], [3]], pa.list_(pa.int64(), 1)),
            "loss_mask": pa.array([[1], [0]], pa.list_(pa.int8())),
            "logprobs": pa.array([[-0.1], [-0.2]], pa.list_(pa.float64())),
            "versions": pa.array([[0.0], [1.0]], pa.list_(pa.float64())),
            "reward": pa.array([1, 0], pa.int64()),
        }
    )
    pq.write_table(table, tmp_path / "r.parquet")
    got = trajectory.read(tmp_path / "r.parquet").table
    assert got.schema.types == trajectory.SCHEMA.types
    assert got["group_id"].to_pylist() == ["7", "7"]
    assert got["loss_mask"].to_pylist() == [[True], [False]]
    assert got["versions"].to_pylist() == [[0], [1]]


def test_non_finite_rewards_are_no_fault_of_the_file() -> None:
    rewards = [float("nan"), float("inf")]
    read = trajectory.from_rows([row(slot=i, reward=r) for i, r in enumerate(rewards)])
    assert not np.isfinite(read.column("reward")).any()


@pytest.mark.parametrize(
    ("changes", "column", "told"),
    [
        ({"logprobs": [-0.5]}, "logprobs", "1 values, completion_ids 3"),
        ({"versions": [0]}, "versions", "1 values, completion_ids 3"),
        ({"loss_mask": [True]}, "loss_mask", "1 values, completion_ids 3"),
        ({"slot": 2}, "slot", "must be in 0..1"),
        ({"slot": -1}, "slot", "must be in 0..1"),
        ({"n_samples": 0}, "n_samples", "at least 1"),
        ({"row": -1}, "row", "count from 0"),
        ({"status": "ok"}, "status", "'usable' or 'failed'"),
        ({"status": "failed"}, "failure", "timeout"),
        ({"status": "failed", "failure": "bored"}, "failure", "'bored'"),
        ({"failure": "timeout"}, "failure", "status is 'usable'"),
        ({"reward": None}, "reward", "both absent"),
        ({"logprobs": [-0.5, float("nan"), -1.0]}, "logprobs[1]", "finite"),
        ({"logprobs": [-0.5, float("-inf"), -1.0]}, "logprobs[1]", "finite"),
        ({"logprobs": [-0.5, None, -1.0]}, "logprobs[1]", "finite"),
        ({"completion_ids": [5, -1, 6]}, "completion_ids[1]", "token id"),
        ({"completion_ids": [5, None, 6]}, "completion_ids[1]", "token id"),
        ({"loss_mask": [True, None, True]}, "loss_mask[1]", "true or false"),
        ({"group_id": None}, "group_id", "absent"),
        ({"slot": None}, "slot", "absent"),
        ({"slot": 0.5}, "slot", "int32"),
        ({"slot": 2**40}, "slot", "int32"),
        ({"slot": "0"}, "slot", "int32"),
        ({"reward": "1.0"}, "reward", "double"),
        ({"completion_ids": [5, "x", 6]}, "completion_ids", "list<int32>"),
        ({"completion_ids": [5, 6.5, 6]}, "completion_ids", "list<int32>"),
        ({"completion_ids": 5}, "completion_ids", "list<int32>"),
        ({"loss_mask": [0, 1, 2]}, "loss_mask", "list<bool>"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, changes: Row, column: str, told: str) -> None:
    good = [row("good", 0), row("good", 1)]
    path = lines(tmp_path / "r.jsonl", [*good, row("bad", **changes)] if "slot" not in changes else [row(**changes)])
    with pytest.raises(InvalidInput) as caught:
        trajectory.read(path)
    text = str(caught.value)
    assert column in text
    assert told in text
    assert str(path) in text
    if "type" not in text:
        assert f"line {1 if 'slot' in changes else 3}" in text


def test_lines_are_counted_as_an_editor_does(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("\n" + json.dumps(row()) + "\n\n" + json.dumps(row(slot=1, status="bad")) + "\n")
    with pytest.raises(InvalidInput, match=r"r\.jsonl line 4 \(group 'a', slot 1, row 0\): status is 'bad'"):
        trajectory.read(path)


def test_parquet_rows_are_named_by_file_and_place(tmp_path: Path) -> None:
    trajectory.write([row("a", 0), row("a", 1)], tmp_path / "1.parquet")
    good = trajectory.read(tmp_path / "1.parquet").table
    bad = good.set_column(4, "status", pa.array(["usable", "nope"])).set_column(0, "group_id", pa.array(["b", "b"]))
    pq.write_table(bad, tmp_path / "2.parquet")
    with pytest.raises(InvalidInput, match=r"2\.parquet row 1 \(group 'b', slot 1, row 0\)"):
        trajectory.read(tmp_path)


def test_a_repeated_row_is_named_in_both_places() -> None:
    found = faults([row(slot=0), row(slot=1), row(slot=0)])
    assert len(found) == 1
    assert "row 2 (group 'a', slot 0, row 0)" in found[0]
    assert "already, at rollout rows row 0" in found[0]


def test_rows_of_a_group_must_agree_on_its_size() -> None:
    found = faults([row(slot=0), row(slot=1, n_samples=3)])
    assert len(found) == 1
    assert "n_samples is 3, but another row of this group says 2" in found[0]


def test_rows_of_a_slot_must_agree_on_its_end() -> None:
    found = faults([row(row=0), row(row=1, status="failed", failure="timeout", reward=None)])
    assert "ends differently" in found[0]


def test_every_fault_is_counted_and_twenty_are_shown() -> None:
    found = faults([row(f"g{i}", status="bad") for i in range(30)] + [row("z", logprobs=[])])
    assert len(found) == 21
    assert found[-1] == "... and 11 more faults"
    assert "group 'g0'" in found[0]


def test_lossy_values_are_counted_too(tmp_path: Path) -> None:
    path = lines(tmp_path / "r.jsonl", [row(f"g{i}", slot=0.5) for i in range(30)])
    with pytest.raises(InvalidInput) as caught:
        trajectory.read(path)
    assert caught.value.faults[-1] == "... and 10 more faults"


def test_missing_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"r\.jsonl: lacks the columns slot, versions"):
        trajectory.read(lines(tmp_path / "r.jsonl", [row(slot="absent", versions="absent")]))


def test_truncated_parquet_is_refused(tmp_path: Path) -> None:
    trajectory.write([row(f"g{i}") for i in range(1000)], tmp_path / "r.parquet")
    whole = (tmp_path / "r.parquet").read_bytes()
    (tmp_path / "r.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidInput, match=r"r\.parquet: is not a readable Parquet file"):
        trajectory.read(tmp_path / "r.parquet")


def test_corrupt_parquet_pages_are_refused(tmp_path: Path) -> None:
    trajectory.write([row(f"g{i}") for i in range(1000)], tmp_path / "r.parquet")
    damaged = bytearray((tmp_path / "r.parquet").read_bytes())
    damaged[50 : len(damaged) // 2] = bytes(len(damaged) // 2 - 50)
    (tmp_path / "r.parquet").write_bytes(damaged)
    with pytest.raises(InvalidInput, match=r"r\.parquet"):
        trajectory.read(tmp_path / "r.parquet")


@pytest.mark.parametrize("content", [b"\x80\x04K\x01.", b"not json\n", b"[1, 2]\n", b"{}\n", b""])
def test_foreign_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r.jsonl").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"r\.jsonl"):
        trajectory.read(tmp_path / "r.jsonl")


def test_a_parquet_file_about_something_else_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "r.parquet")
    with pytest.raises(InvalidInput, match="lacks the columns group_id"):
        trajectory.read(tmp_path / "r.parquet")


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    for paths in ([tmp_path / "absent.parquet"], [tmp_path], []):
        with pytest.raises(InvalidInput):
            trajectory.read(paths)


def test_faults_of_all_files_are_reported_together(tmp_path: Path) -> None:
    lines(tmp_path / "1.jsonl", [{"x": 1}])
    (tmp_path / "2.parquet").write_bytes(b"PAR1")
    with pytest.raises(InvalidInput) as caught:
        trajectory.read(tmp_path)
    assert [("1.jsonl" in line, "2.parquet" in line) for line in caught.value.faults] == [(True, False), (False, True)]


def test_writing_checks_first(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        trajectory.write([row(status="bad")], tmp_path / "r.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A file-size limit stands in for the full disk: the same call fails in the same place."""
    script = """
import resource, signal, sys
from muster import trajectory
from muster.errors import MusterError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
rows = [dict(group_id=str(i), n_samples=1, slot=0, status="usable", prompt_ids=[1], completion_ids=[i, 2 * i, i + 7],
             logprobs=[-0.1 * i, -0.7, -i / 3], versions=[0, 0, 0], reward=i / 7) for i in range(3000)]
table = trajectory.from_rows(rows)
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
try:
    trajectory.write(table, sys.argv[1])
except MusterError as error:
    print(error)
    sys.exit(error.exit_code)
"""
    target = tmp_path / "full" / "r.parquet"
    done = subprocess.run(
        [sys.executable, "-c", script, str(target)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 4, done.stderr
    assert str(target) in done.stdout
    assert "File too large" in done.stdout
    assert list(target.parent.iterdir()) == []


def test_an_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trajectory.write([row("old")], tmp_path / "r.parquet")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trajectory, "write_parquet", stop)
    with pytest.raises(KeyboardInterrupt):
        trajectory.write([row("new")], tmp_path / "r.parquet")
    assert [p.name for p in tmp_path.iterdir()] == ["r.parquet"]
    assert trajectory.read(tmp_path).table["group_id"].to_pylist() == ["old"]
