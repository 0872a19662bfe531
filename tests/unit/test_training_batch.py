"""Reading a training batch, cutting it into updates, the learning rate, and what is refused before anything starts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.config import Optimizer, RunConfig, parse
from muster.errors import InvalidInput, NotBuilt, Stalled
from muster.training import batch as batches
from muster.training.limits import check
from muster.training.model import Layout
from muster.training.probe import probe_ids
from muster.training.schedule import learning_rate
from muster.training.trainer import plan


def row(group: str = "g", slot: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "group_id": group,
        "slot": slot,
        "row": 0,
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4, 5],
        "loss_mask": [True, False, True],
        "logprobs": [-1.0, -2.0, -3.0],
        "versions": [0, 0, 0],
        "reward": 0.5,
        "advantages": [1.0, 1.0, 1.0],
        **changes,
    }


def write(directory: Path, rows: list[dict[str, Any]]) -> Path:
    columns = {name: [r[name] for r in rows] for name in row()}
    pq.write_table(pa.table(columns), directory / "batch.parquet", row_group_size=2)
    return directory


def config(**training: Any) -> RunConfig:
    text = {
        "run": {"id": "r", "root": "/nowhere"},
        "model": {"path": "/nowhere"},
        "rollout": {"max_new_tokens": 8},
        "training": training,
    }
    return parse(str(text))


def test_rows_are_read_in_an_order_of_their_own(tmp_path: Path) -> None:
    rows = [row("b", 1), row("a", 3), row("b", 0), row("a", 2)]
    read = batches.load(write(tmp_path, rows), version=0, longest=5)
    assert [(r.group_id, r.slot) for r in read.rows] == [("a", 2), ("a", 3), ("b", 0), ("b", 1)]
    assert read.groups == {"a": [0, 1], "b": [2, 3]}
    assert read.rows[0].ids.tolist() == [1, 2, 3, 4, 5]
    assert (read.rows[0].length, read.rows[0].valid) == (5, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": [-1.0, -2.0, float("nan")]}, r"slot 7\): logprobs\[2\] is nan; it must be finite"),
        ({"advantages": [float("inf")] * 3}, r"advantages\[0\] is inf"),
        ({"loss_mask": [True]}, "loss_mask has 1 elements for 3 completion tokens"),
        ({"completion_ids": [], "logprobs": [], "loss_mask": [], "advantages": [], "versions": []}, "is empty"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [1] * 8}, "has 11 tokens, more than training.max_tokens_per_mb 10; raise that to at least 11"),
        ({"versions": [3, 4, 5]}, "tokens of version 5, newer than version 4"),
        ({"completion_ids": [3, -1, 5]}, "negative token id"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        batches.load(write(tmp_path, [row("a"), row("g", 7, **changes)]), version=4, longest=10)


def test_a_nan_where_the_mask_is_false_is_nobody_s_business(tmp_path: Path) -> None:
    batches.load(write(tmp_path, [row(logprobs=[-1.0, float("nan"), -1.0])]), version=0, longest=10)


def test_a_row_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="slot 1, row 0 is there 2 times"):
        batches.load(write(tmp_path, [row("a", 1), row("a", 1)]), version=0, longest=10)


def test_an_empty_batch_and_a_masked_one_have_nothing_to_train_on(tmp_path: Path) -> None:
    pq.write_table(pa.table({name: pa.array([], pa.list_(pa.int32())) for name in row()}), tmp_path / "batch.parquet")
    with pytest.raises(Stalled, match="0 rows"):
        batches.load(tmp_path, version=0, longest=10)
    masked = batches.load(write(tmp_path, [row(loss_mask=[False] * 3)]), version=0, longest=10)
    with pytest.raises(Stalled, match="1 groups with 1 slots and 3 completion tokens, all masked"):
        plan(masked, config(), 2, version=0, seed=0, model=Layout(padded=False))


def test_missing_file_and_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"batch\.parquet: cannot read"):
        batches.load(tmp_path, version=0, longest=10)
    pq.write_table(pa.table({"group_id": ["a"]}), tmp_path / "batch.parquet")
    with pytest.raises(InvalidInput, match="the column advantages is absent"):
        batches.load(tmp_path, version=0, longest=10)


@given(st.sets(st.text(max_size=6), max_size=30), st.integers(1, 9), st.integers(0, 3), st.integers(0, 3), st.randoms())
def test_cut_is_an_exact_even_cover_that_depends_on_no_order(
    groups: set[str], updates: int, seed: int, version: int, random: Any
) -> None:
    ordered = sorted(groups)
    cuts = batches.cut(ordered, updates, seed=seed, version=version)
    assert sorted(g for one in cuts for g in one) == ordered
    assert len(cuts) == min(updates, len(groups))
    assert all(cuts)
    assert max(map(len, cuts), default=0) - min(map(len, cuts), default=0) <= 1
    random.shuffle(ordered)
    assert batches.cut(ordered, updates, seed=seed, version=version) == cuts


def test_cut_differs_between_versions_and_seeds() -> None:
    groups = [f"g{i}" for i in range(20)]
    cuts = [batches.cut(groups, 4, seed=s, version=v) for s in (0, 1) for v in (0, 1)]
    assert all(a != b for i, a in enumerate(cuts) for b in cuts[:i])


def test_plan_counts_over_the_whole_update_whatever_the_ranks(tmp_path: Path) -> None:
    rows = [row("a", 0), row("a", 2), row("a", 2, row=1), row("b", 1, loss_mask=[False] * 3)]
    read = batches.load(write(tmp_path, rows), version=0, longest=10)
    for ranks in (1, 2, 3):
        (update,) = plan(read, config(updates_per_batch=1), ranks, version=0, seed=0, model=Layout(padded=False))
        assert (update.counts.tokens, update.counts.sequences, update.counts.slots) == (6, 3, 3)
        assert update.counts.max_new_tokens == 8
        assert update.tokens == {"total": 12, "valid": 6, "masked": 6}
        assert len(update.placed) == ranks


def test_ranks_are_balanced_by_tokens_or_by_compute(tmp_path: Path) -> None:
    """18 tokens against three times 10: attention makes the long row cost as much as two of the others and a half."""
    long = {name: 5 * values for name, values in row().items() if isinstance(values, list)} | {"prompt_ids": [1] * 3}
    rows = [row("a", **long), *(row(group, prompt_ids=[1] * 7) for group in "bcd")]
    read = batches.load(write(tmp_path, rows), version=0, longest=64)
    beside = {}
    for balance in ("tokens", "compute"):
        settings = config(updates_per_batch=1, balance=balance)
        (update,) = plan(read, settings, 2, version=0, seed=0, model=Layout(padded=False, hidden=2))
        beside[balance] = sorted(sum(map(len, packs)) for packs in update.placed)
    assert beside == {"tokens": [2, 2], "compute": [1, 3]}
    with pytest.raises(InvalidInput, match=r"training\.balance: compute needs hidden_size"):
        plan(read, config(balance="compute"), 2, version=0, seed=0, model=Layout(padded=False))


def test_fewer_groups_than_updates_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read = batches.load(write(tmp_path, [row("a"), row("b")]), version=0, longest=10)
    assert len(plan(read, config(updates_per_batch=5), 1, version=0, seed=0, model=Layout(padded=False))) == 2
    assert "2 trainable groups make 2 updates, not training.updates_per_batch 5" in caplog.text


@pytest.mark.parametrize(
    ("schedule", "step", "wanted"),
    [
        ("constant", 0, 0.25),
        ("constant", 3, 1.0),
        ("constant", 999, 1.0),
        ("linear", 4, 1.0),
        ("linear", 12, 0.2 + 0.8 * 0.5),
        ("linear", 20, 0.2),
        ("linear", 500, 0.2),
        ("cosine", 4, 1.0),
        ("cosine", 8, 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2),
        ("cosine", 20, 0.2),
    ],
)
def test_learning_rate(schedule: str, step: int, wanted: float) -> None:
    settings = Optimizer(lr=1.0, warmup_steps=4, schedule=schedule, min_lr_ratio=0.2)
    assert learning_rate(step, 20, settings) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": {"engine": "megatron"}}, "training.engine: megatron is not built yet; set it to fsdp"),
        ({"training": {"lora": {"r": 1, "alpha": 1, "target_modules": []}}}, "training.lora"),
        ({"training": {"loss": {"prox": "interpolate"}}}, "set it to recompute or rollout"),
        ({"training": {"parallel": {"tp": 2}}}, "training.parallel.tp: 2"),
        ({"training": {"parallel": {"pp": 2}}}, "training.parallel.pp: 2"),
        ({"estimator": {"kl_coef": 0.1}}, "estimator.kl_coef: 0.1"),
        ({"algorithm": "ppo"}, "critic"),
    ],
)
def test_what_is_not_built_says_so_and_what_to_set(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NotBuilt, match=words) as caught:
        check(parse(str({"run": {"id": "r", "root": "/r"}, "model": {"path": "/m"}, **changes})), 1)
    assert caught.value.exit_code == 2


def test_all_faults_are_told_together() -> None:
    bad = config(
        engine="megatron", parallel={"dp": 3}, rejection={"action": "clamp", "metric": "k3", "lower": 9, "upper": 5}
    )
    with pytest.raises(InvalidInput) as caught:
        check(bad, 2)
    assert len(caught.value.faults) == 5
    check(config(), 4)


def test_probe_ids_are_fixed_and_in_range() -> None:
    ids = probe_ids(20, 400, 0)
    assert len(ids) == 400
    assert set(ids) == set(range(20))
    assert ids == probe_ids(20, 400, 0) != probe_ids(20, 400, 1)
    assert ids[:6] == [1, 2, 10, 18, 9, 10]
