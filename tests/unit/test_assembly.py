"""Assembly as a user meets it: rollout files and a configuration in; rows, advantages, summary or an error out.

Tests are named after the rules of semantics.md (`test_rule_NN_`) and the fault catalogue (`test_fNN_`).
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from muster import config, trajectory
from muster.assembly import TrainingBatch, assemble, read_batch
from muster.assembly.command import run
from muster.errors import InvalidInput, MusterError, Stalled

F = "timeout"
Slot = Any  # a reward, a failure reason, None for an absent slot, or a dict of columns
Key = tuple[str, int, int]


def rows_of(groups: dict[str, list[Slot]], n_samples: int) -> list[dict[str, Any]]:
    rows = []
    for group, slots in groups.items():
        for index, slot in enumerate(slots):
            if slot is None:
                continue
            for number, one in enumerate(slot if isinstance(slot, list) else [slot]):
                changes = (
                    one if isinstance(one, dict) else {"failure": one} if isinstance(one, str) else {"reward": one}
                )
                length = changes.get("length", 2 + index % 3)
                row = {
                    "group_id": group,
                    "n_samples": n_samples,
                    "slot": index,
                    "row": number,
                    "status": "failed" if changes.get("failure") else "usable",
                    "failure": None,
                    "reward": None,
                    "prompt_ids": [3, 1, 4],
                    "completion_ids": list(range(5, 5 + length)),
                    "loss_mask": [True] * length,
                    "logprobs": [-0.5] * length,
                    "versions": [0] * length,
                }
                rows.append(row | {key: value for key, value in changes.items() if key != "length"})
    return rows


def make(groups: dict[str, list[Slot]], settings: dict[str, Any] | None = None, n_samples: int = 4) -> TrainingBatch:
    given = dict(settings or {})
    given["group"] = {"n_samples": n_samples, **given.get("group", {})}
    return assemble(trajectory.from_rows(rows_of(groups, n_samples)), config.parse(json.dumps(given)))


def advantages(batch: TrainingBatch) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for row in batch.table.to_pylist():
        key = (row["group_id"], row["slot"], row["row"])
        assert key not in found
        assert len(row["advantages"]) == len(row["completion_ids"])
        valid = [a for a, m in zip(row["advantages"], row["loss_mask"], strict=True) if m]
        assert len(set(valid)) <= 1
        assert all(a == 0 for a, m in zip(row["advantages"], row["loss_mask"], strict=True) if not m)
        found[key] = valid[0] if valid else 0.0
    return found


def close(batch: TrainingBatch, expect: dict[Key, float]) -> None:
    got = advantages(batch)
    assert got.keys() == expect.keys()
    assert [got[k] for k in expect] == pytest.approx(list(expect.values()), rel=1e-5, abs=1e-7)


MEAN_ONLY = {"estimator": {"reward_norm": {"mean_level": "group", "std_level": None}}}
BATCH_LEVEL = {"estimator": {"reward_norm": {"mean_level": "batch", "std_level": "batch"}}}
NO_NORM = {"estimator": {"reward_norm": None}}


# --- The fault catalogue


@pytest.mark.parametrize("lost", range(4))
def test_f01_a_partial_group_shifts_no_other_group(lost: int) -> None:
    slots: list[Slot] = [1, 0, 1]
    slots.insert(lost, F)
    got = advantages(make({"a": slots, "b": [5, 5, 5, 5]}))
    assert [value for (group, _, _), value in got.items() if group == "b"] == [0, 0, 0, 0]
    assert [v for (g, _, _), v in got.items() if g == "a"] == pytest.approx([0.57734, -1.154681, 0.57734], rel=1e-5)


def test_f02_a_lone_survivor_is_counted_and_not_trained() -> None:
    batch = make({"a": [1, F, F, F], "b": [1, 0, 1, 0]})
    assert {group for group, _, _ in advantages(batch)} == {"b"}
    assert batch.summary["groups"]["below_minimum"] == 1
    assert batch.summary["slots"] == {"target": 8, "usable": 5, "trainable": 4, "rows": 4}
    assert np.isfinite(batch.normalized_reward).all()


def test_f03_survivors_are_kept_once_each() -> None:
    batch = make({"a": [1, F, 0]}, n_samples=3)
    assert list(advantages(batch)) == [("a", 0, 0), ("a", 2, 0)]
    assert batch.summary["yield"] == {"usable": pytest.approx(2 / 3), "trainable": pytest.approx(2 / 3)}


def test_f04_no_advantage_exceeds_its_exact_z_score() -> None:
    batch = make({"a": [1, 0, 0, 1], "b": [5, 5, 5, F]})
    assert max(map(abs, advantages(batch).values())) <= 0.8660255


def test_f05_unequal_groups_keep_their_own_means() -> None:
    batch = make({"a": [1, 2, 3, 4], "b": [10, 12, F, F], "c": [5, 6, 7, F]}, MEAN_ONLY)
    sums: dict[str, float] = {}
    for (group, _, _), value in advantages(batch).items():
        sums[group] = sums.get(group, 0.0) + value
    assert sums == {"a": 0, "b": 0, "c": 0}


def test_f06_a_constant_group_gets_zeros() -> None:
    for value in (5, 0.1, 1 / 3, 1e300):
        batch = make({"a": [1, 0, 0, 1], "b": [value, value, value, F], "c": [0, 0, 1, 0]})
        assert [a for (g, _, _), a in advantages(batch).items() if g == "b"] == [0, 0, 0]


def test_f07_a_singleton_beside_a_pair_is_finite() -> None:
    close(
        make({"a": [1, 3, F, F], "b": [5, F, F, F]}, BATCH_LEVEL),
        {("a", 0, 0): -0.999995, ("a", 1, 0): 0, ("b", 0, 0): 0.999995},
    )


def test_f08_a_rollout_of_three_rows_counts_once() -> None:
    batch = make({"a": [[1, 1, 1], 0]}, MEAN_ONLY, n_samples=2)
    close(batch, {("a", 0, 0): 0.5, ("a", 0, 1): 0.5, ("a", 0, 2): 0.5, ("a", 1, 0): -0.5})


def test_f09_an_ungraded_sample_is_no_zero() -> None:
    batch = make({"a": ["reward_error", 1, 0, 1]}, MEAN_ONLY)
    close(batch, {("a", 1, 0): 1 / 3, ("a", 2, 0): -2 / 3, ("a", 3, 0): 1 / 3})
    assert batch.summary["reward"]["mean"] == pytest.approx(2 / 3)


def test_f10_one_reward_that_is_no_number_fails_one_slot() -> None:
    """Two rewards, of which one gave nothing: their sum is NaN."""
    batch = make({"a": [1.0 + math.nan, 1.5, 0.5, 2.0], "b": [1, 0, 1, 0]})
    assert len(batch) == 7
    assert all(math.isfinite(a) for a in advantages(batch).values())
    assert batch.summary["failures"] == {"non_finite_reward": 1}


def test_f11_an_empty_response_leaks_no_reward() -> None:
    batch = make({"a": [{"reward": 10, "length": 0}, 0, 0]}, n_samples=3)
    close(batch, {("a", 1, 0): 0, ("a", 2, 0): 0})
    assert batch.summary["failures"] == {"empty_completion": 1}
    assert batch.summary["reward"] == {"mean": 0, "std": 0}


def test_f12_constant_groups_of_any_value_are_filtered() -> None:
    settings = {"estimator": {"filter_zero_variance": True}}
    batch = make({"a": [0.4] * 4, "b": [0.4, 0.6, 0.4, 0.4]}, settings)
    assert {group for group, _, _ in advantages(batch)} == {"b"}
    assert batch.summary["groups"]["filtered"] == 1


def test_f13_a_lost_slot_does_not_take_its_siblings_along() -> None:
    source, groups, slots = np.random.default_rng(0), 10_000, 8
    rows = groups * slots
    lost = source.random(rows) < 0.05
    table = pa.table(
        {
            "group_id": pa.array(np.arange(rows) // slots).cast(pa.string()),
            "n_samples": pa.array(np.full(rows, slots)),
            "slot": pa.array(np.arange(rows) % slots),
            "status": np.where(lost, "failed", "usable"),
            "failure": pa.array(np.where(lost, "server_error", None), pa.string()),
            "reward": source.random(rows),
            **dict.fromkeys(("prompt_ids", "completion_ids", "versions", "logprobs"), pa.array([[1]] * rows)),
        }
    )
    batch = assemble(trajectory.from_table(table), config.parse("group: {n_samples: 8}"))
    assert batch.summary["yield"]["trainable"] == pytest.approx(0.95, abs=0.01)
    assert batch.summary["groups"]["trainable"] == groups


@pytest.mark.parametrize("slots", [2, 8])
def test_f14_the_share_of_informative_groups_is_reported(slots: int) -> None:
    """Rewards in their exact proportions: p = 0.18 of a hundred, every pattern as often as its probability says."""
    p, source = 0.18, random.Random(0)
    expected = 1 - p**slots - (1 - p) ** slots
    groups = {str(i): [float(source.random() < p) for _ in range(slots)] for i in range(6000)}
    summary = make(groups, n_samples=slots).summary
    exact = sum(len(set(rewards)) > 1 for rewards in groups.values())
    assert summary["informative"] == {"groups": exact, "share": exact / 6000}
    assert summary["informative"]["share"] == pytest.approx(
        expected, abs=4 * math.sqrt(expected * (1 - expected) / 6000)
    )


# --- The rules


def test_rule_01_usable_slots_are_neither_repeated_nor_invented() -> None:
    batch = make({"a": [1, F, 0, None], "b": [F, F, 1, 0]})
    assert list(advantages(batch)) == [("a", 0, 0), ("a", 2, 0), ("b", 2, 0), ("b", 3, 0)]
    assert batch.summary["failures"] == {"timeout": 3, "missing": 1}


def test_rule_02_a_failed_slot_contributes_to_nothing() -> None:
    whatever = {"failure": F, "reward": 1e6, "length": 50}
    one, other = make({"a": [1, 0, 1, whatever]}), make({"a": [1, 0, 1, None]})
    assert one.table.equals(other.table)
    for key in ("reward", "tokens", "slots", "yield", "groups"):
        assert one.summary[key] == other.summary[key]


def test_rule_03_groups_are_found_by_their_id() -> None:
    interleaved = rows_of({"a": [1, 0, 1, 0], "b": [10, 30, 20, 40]}, 4)
    random.Random(1).shuffle(interleaved)
    mixed = assemble(trajectory.from_rows(interleaved), config.parse("group: {n_samples: 4}"))
    assert mixed.table.equals(make({"a": [1, 0, 1, 0], "b": [10, 30, 20, 40]}).table)


def test_rule_03_two_copies_of_a_prompt_are_two_groups() -> None:
    batch = make({"a": [1, 0], "b": [3, 9]}, n_samples=2)
    close(
        batch,
        {("a", 0, 0): 0.707097, ("a", 1, 0): -0.707097, ("b", 0, 0): -0.7071051, ("b", 1, 0): 0.7071051},
    )


def test_rule_04_and_05_below_the_minimum_nothing_is_trained() -> None:
    batch = make({"a": [1, 0, F, F], "b": [1, 0, 1, F]}, {"group": {"min_usable_group_size": 3}})
    assert {group for group, _, _ in advantages(batch)} == {"b"}
    assert batch.summary["groups"] == {
        "target": 2,
        "trainable": 1,
        "below_minimum": 1,
        "dropped_incomplete": 0,
        "empty": 0,
        "incomplete": 2,
        "filtered": 0,
        "complete": 0,
        "stale": 0,
    }
    assert batch.summary["min_usable_group_size"] == 3


def test_rule_05_batch_level_statistics_need_one() -> None:
    batch = make({"a": [1, F, F, F], "b": [1, 0, 1, 0]}, BATCH_LEVEL)
    assert batch.summary["min_usable_group_size"] == 1
    assert ("a", 0, 0) in advantages(batch)


def test_rule_05_group_level_advantage_statistics_need_two() -> None:
    settings = {"estimator": {"reward_norm": None, "adv_norm": {"mean_level": "group", "std_level": None}}}
    batch = make({"a": [1, F, F, F], "b": [{"reward": 1, "length": 1}, {"reward": 0, "length": 3}, F, F]}, settings)
    assert batch.summary["groups"]["below_minimum"] == 1
    close(batch, {("b", 0, 0): 0.75, ("b", 1, 0): -0.25})


@pytest.mark.parametrize("minimum", [0, 1, 5])
def test_rule_06_an_impossible_minimum_is_refused(minimum: int) -> None:
    with pytest.raises(InvalidInput, match=r"min_usable_group_size.*2\.\.4"):
        make({"a": [1, 0, 1, 0]}, {"group": {"min_usable_group_size": minimum}})


def test_rule_07_a_group_of_one_is_complete_and_warned_about_once() -> None:
    batch = make({"a": [1], "b": [0]}, n_samples=1)
    assert list(advantages(batch).values()) == [0, 0]
    assert batch.summary["groups"]["complete"] == 2
    assert [w for w in batch.summary["warnings"] if "batch-level" in w and "erased" in w] == batch.summary["warnings"]
    assert len(batch.summary["warnings"]) == 1
    assert make({"a": [1], "b": [0]}, BATCH_LEVEL, n_samples=1).summary["warnings"] == []


def test_rule_08_strict_mode_comes_before_the_minimum() -> None:
    batch = make({"a": [1, F, F, F], "b": [1, 0, 1, 0]}, {"group": {"drop_incomplete_group": True}})
    assert batch.summary["groups"]["dropped_incomplete"] == 1
    assert batch.summary["groups"]["below_minimum"] == 0


def test_rule_09_a_contract_error_stops_and_names_the_remedies(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        make({"a": [[2.0, 1.0], 0], "b": [1, 0]}, n_samples=2)
    assert "group 'a', slot 0" in str(caught.value)
    for remedy in ("rollout_reward", "one row per slot", "batch-level"):
        assert remedy in str(caught.value)


def test_rule_10_absent_slots_are_missing() -> None:
    batch = make({"a": [1, None, 0, None]})
    assert batch.summary["failures"] == {"missing": 2}


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_rule_10_a_reward_that_is_no_number_spares_the_siblings(reward: float) -> None:
    batch = make({"a": [1, reward, 0, 0]})
    assert batch.table.equals(make({"a": [1, "non_finite_reward", 0, 0]}).table)
    assert batch.summary["failures"] == {"non_finite_reward": 1}


def test_rule_11_a_reason_counts_as_what_the_user_says() -> None:
    batch = make({"a": [1, 1, F, 1]}, {"group": {"failures": {F: 0.0}}})
    expected = {("a", 0, 0): 0.49999, ("a", 1, 0): 0.49999, ("a", 2, 0): -1.49997, ("a", 3, 0): 0.49999}
    close(batch, expected)
    assert batch.summary["failures"] == {}
    assert batch.summary["counted"] == {F: 1}
    assert batch.summary["groups"]["incomplete"] == 0
    assert any("timeout" in w and "avoid" in w for w in batch.summary["warnings"])
    row = batch.table.to_pylist()[2]
    assert (row["status"], row["failure"], row["reward"]) == ("usable", F, 0.0)


def test_rule_11_without_a_token_there_is_nothing_to_count() -> None:
    settings = {"group": {"failures": {F: 0.0, "missing": 0.0}}}
    batch = make({"a": [1, 0, {"failure": F, "length": 0}, None]}, settings)
    assert batch.summary["failures"] == {F: 1, "missing": 1}
    assert len(batch) == 2


def test_rule_12_rows_share_their_slots_centre_and_scale() -> None:
    told = [{"reward": 4.0, "rollout_reward": 4.0}, {"reward": 2.0, "rollout_reward": 4.0}]
    batch = make({"a": [told, 2]}, MEAN_ONLY, n_samples=2)
    close(batch, {("a", 0, 0): 1.0, ("a", 0, 1): -1.0, ("a", 1, 0): -1.0})


def test_rule_12_a_row_may_leave_its_reward_to_the_slot() -> None:
    batch = make({"a": [[{"rollout_reward": 4.0}, {"rollout_reward": 4.0}], 2]}, MEAN_ONLY, n_samples=2)
    close(batch, {("a", 0, 0): 1.0, ("a", 0, 1): 1.0, ("a", 1, 0): -1.0})


@pytest.mark.parametrize("told", [(4.0, 5.0), (4.0, None), (math.inf, math.inf), (math.nan, math.nan)])
def test_rule_12_a_reference_must_be_finite_and_equal(told: tuple[float | None, float | None]) -> None:
    slot = [{"reward": r, "rollout_reward": t} for r, t in zip((4.0, 2.0), told, strict=True)]
    with pytest.raises(InvalidInput, match="rollout_reward"):
        make({"a": [slot, 2]}, MEAN_ONLY, n_samples=2)


def test_rule_12_at_batch_level_a_slot_weighs_as_one() -> None:
    batch = make({"a": [[1.0, 0.5], 0], "b": [3, 1]}, BATCH_LEVEL, n_samples=2)
    close(
        batch,
        {
            ("a", 0, 0): -0.145463,
            ("a", 0, 1): -0.533365,
            ("a", 1, 0): -0.921267,
            ("b", 0, 0): 1.406144,
            ("b", 1, 0): -0.145463,
        },
    )


def test_rule_12_the_filter_sees_raw_rewards() -> None:
    settings = {
        "estimator": {"filter_zero_variance": True, "overlong": {"buffer_tokens": 4, "factor": 1.0}},
        "rollout": {"max_new_tokens": 8},
    }
    constant = [{"reward": 1, "length": n} for n in (4, 8, 6)]
    batch = make({"a": constant, "b": [1, 0, 1]}, settings, n_samples=3)
    assert batch.summary["groups"]["filtered"] == 1


def test_rule_12_a_reference_takes_no_length_penalty() -> None:
    """Slot 0 says 1; slot 1's rows agree on 1 and are set apart by their length only; slot 2 is penalised by 1/2."""
    settings = {
        "estimator": {
            "reward_norm": {"mean_level": "group", "std_level": None},
            "overlong": {"buffer_tokens": 4, "factor": 1.0},
        },
        "rollout": {"max_new_tokens": 8},
    }
    slots = [
        [{"reward": 1.0, "length": 8, "rollout_reward": 1.0}],
        [{"reward": 1.0, "length": 4}, {"reward": 1.0, "length": 8}],
        {"reward": 1.0, "length": 6},
    ]
    mean = (1.0 + 1.0 + 0.5) / 3
    batch = make({"a": slots}, settings, n_samples=3)
    close(
        batch,
        {("a", 0, 0): 0 - mean, ("a", 1, 0): 1 - mean, ("a", 1, 1): 0 - mean, ("a", 2, 0): 0.5 - mean},
    )


def test_rule_13_without_failures_it_is_plain_grpo_bit_for_bit() -> None:
    rewards = np.random.default_rng(3).normal(size=(50, 8))
    groups = {f"{i:02}": list(map(float, row)) for i, row in enumerate(rewards)}
    plain = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-5)
    batch = make(groups, n_samples=8)
    assert batch.normalized_reward.tolist() == plain.ravel().tolist()
    ready = {"group": {"failures": {F: 0.0}, "drop_incomplete_group": True, "min_usable_group_size": 8}}
    assert make(groups, ready, n_samples=8).table.equals(batch.table)


# --- Estimators


def test_leave_one_out() -> None:
    rloo = make({"a": [1, 0, 0, 0]}, {"algorithm": "rloo"})
    close(rloo, {("a", 0, 0): 1.0, ("a", 1, 0): -1 / 3, ("a", 2, 0): -1 / 3, ("a", 3, 0): -1 / 3})


def test_leave_one_out_at_batch_level_leaves_out_the_whole_slot() -> None:
    settings = {"estimator": {"reward_norm": {"mean_level": "batch", "std_level": None, "mean_leave1out": True}}}
    batch = make({"a": [[3.0, 1.0], 0], "b": [4, F]}, settings, n_samples=2)
    close(batch, {("a", 0, 0): 3 - 2.0, ("a", 0, 1): 1 - 2.0, ("a", 1, 0): 0 - 3.0, ("b", 0, 0): 4 - 1.0})


def test_the_only_item_is_its_own_baseline() -> None:
    settings = {"estimator": {"reward_norm": {"mean_level": "batch", "std_level": None, "mean_leave1out": True}}}
    assert list(advantages(make({"a": [5, F]}, settings, n_samples=2)).values()) == [0]


@pytest.mark.parametrize("mean_level", ["group", "batch", None])
@pytest.mark.parametrize("std_level", ["group", "batch", None])
@pytest.mark.parametrize("unbiased", [True, False])
def test_the_std_is_about_the_chosen_mean(mean_level: str | None, std_level: str | None, unbiased: bool) -> None:
    norm = {"mean_level": mean_level, "std_level": std_level, "std_unbiased": unbiased}
    batch = make({"a": [1, 2, 6], "b": [0, 5, F]}, {"estimator": {"reward_norm": norm}}, n_samples=3)
    x, group = np.array([1.0, 2, 6, 0, 5]), np.array([0, 0, 0, 1, 1])
    own = [group == g for g in group]
    mean = {"group": np.array([x[o].mean() for o in own]), "batch": np.full(5, x.mean()), None: np.zeros(5)}[mean_level]
    square = (x - mean) ** 2
    spread = {
        "group": np.array([np.sqrt(square[o].sum() / (o.sum() - unbiased)) for o in own]) + 1e-5,
        "batch": np.full(5, np.sqrt(square.sum() / (5 - unbiased))) + 1e-5,
        None: np.ones(5),
    }[std_level]
    assert list(advantages(batch).values()) == pytest.approx(list((x - mean) / spread), rel=1e-6)


def test_bias_scale_and_clip_come_in_this_order() -> None:
    settings = {"estimator": {"reward_norm": None, "reward_bias": 1, "reward_scale": 10, "reward_clip": 15}}
    batch = make({"a": [0, 1, -2, -9]}, settings)
    assert list(advantages(batch).values()) == [10, 15, -10, -15]
    assert batch.table["reward"].to_pylist() == [0, 1, -2, -9]


def test_a_length_penalty_needs_a_budget() -> None:
    settings = {"estimator": {"overlong": {"buffer_tokens": 4, "factor": 1.0}}}
    with pytest.raises(InvalidInput, match=r"rollout\.max_new_tokens"):
        make({"a": [1, 0, 1, 0]}, settings)


def test_dapo_penalises_the_last_fifth_of_the_budget() -> None:
    slots = [{"reward": r, "length": n} for r, n in ((1, 8), (1, 9), (1, 10), (0, 4))]
    settings = {"algorithm": "dapo", "rollout": {"max_new_tokens": 10}}
    shaped = np.array([1, 0.5, 0, 0])
    expected = (shaped - shaped.mean()) / (shaped.std(ddof=1) + 1e-5)
    close(make({"a": slots}, settings), {("a", i, 0): value for i, value in enumerate(expected)})
    without_budget = make({"a": slots}, {"algorithm": "dapo"})
    assert any("rollout.max_new_tokens" in w for w in without_budget.summary["warnings"])


def test_advantages_are_normalised_over_valid_tokens() -> None:
    settings = {"estimator": {"reward_norm": None, "adv_norm": {"mean_level": "batch", "std_level": "batch"}}}
    masked = {"reward": 0, "length": 5, "loss_mask": [True, False, True, False, True]}
    groups = {"a": [{"reward": 1, "length": 1}, masked], "b": [{"reward": 2, "length": 2}, {"reward": 2, "length": 2}]}
    close(
        make(groups, settings, n_samples=2),
        {("a", 0, 0): -0.12613, ("a", 1, 0): -1.13517, ("b", 0, 0): 0.88291, ("b", 1, 0): 0.88291},
    )


def test_a_masked_slot_counts_in_statistics_and_adds_no_loss() -> None:
    masked = {"reward": 0, "length": 2, "loss_mask": [False, False]}
    batch = make({"a": [1, masked]}, MEAN_ONLY, n_samples=2)
    assert batch.table["advantages"].to_pylist() == [[0.5, 0.5], [0.0, 0.0]]
    assert batch.summary["tokens"] == {"total": 4, "valid": 2, "masked": 2, "masked_ratio": 0.5}


@pytest.mark.parametrize(
    "settings",
    [{"algorithm": "reinforce_pp"}, {"algorithm": "ppo"}, {"estimator": {"gamma": 0.9}}, {"estimator": {"lam": 0.9}}],
)
def test_the_trainer_computes_advantages_where_it_must(settings: dict[str, Any], tmp_path: Path) -> None:
    batch = make({"a": [1, 0, 1, F]}, settings)
    assert batch.table["advantages"].null_count == 3
    assert batch.table["normalized_reward"].null_count == 0
    assert batch.summary["advantages"] == "trainer"
    batch.write(tmp_path / "b")
    assert read_batch(tmp_path / "b").equals(batch.table)


# --- Nothing to train on, disagreement, evidence


def test_nothing_trainable_is_said_with_counts() -> None:
    with pytest.raises(Stalled) as caught:
        make({"a": [F, F, F, "aborted"], "b": [1, F, F, None]})
    assert caught.value.exit_code == 3
    assert caught.value.failures == {F: 5, "aborted": 1, "missing": 1}
    for words in ("2 groups with 8 slots", "1 usable", "1 empty", "1 below_minimum", "timeout 5"):
        assert words in str(caught.value)


def test_all_filtered_is_nothing_trainable() -> None:
    with pytest.raises(Stalled, match="2 filtered"):
        make({"a": [1] * 4, "b": [0] * 4}, {"estimator": {"filter_zero_variance": True}})


def test_all_masked_is_nothing_trainable() -> None:
    masked = {"reward": 0, "length": 2, "loss_mask": [False, False]}
    with pytest.raises(Stalled, match="mask is false on all 4 tokens"):
        make({"a": [masked, {**masked, "reward": 1}]}, n_samples=2)


def test_file_and_configuration_must_agree_on_the_group_size() -> None:
    with pytest.raises(InvalidInput, match=r"n_samples is 4, but group\.n_samples in the configuration is 8"):
        assemble(trajectory.from_rows(rows_of({"a": [1, 0, 1, 0]}, 4)), config.parse("group: {n_samples: 8}"))


def test_the_evidence_of_bias() -> None:
    slow = {"failure": F, "length": 40}
    groups: dict[str, list[Slot]] = {f"w{i}": [1, 0.5, 1, 1.0 - i % 2] for i in range(12)}
    groups |= {f"p{i}": [0, 0, 0.125 * (i % 2), slow] for i in range(12)}
    summary = make(groups).summary
    assert summary["bias"] == {
        "usable_mean_length": pytest.approx((12 * (2 + 3 + 4 + 2) + 12 * (2 + 3 + 4)) / 84),
        "failed_mean_length": 40,
        "failure_reward_gap": pytest.approx((1 + 0.5 + 1 + 0.5) / 4 - 0.0625 / 3),
    }
    assert len(summary["warnings"]) == 2
    assert any("longer" in w for w in summary["warnings"])
    assert any("lower rewards" in w for w in summary["warnings"])


def test_chance_is_not_called_bias() -> None:
    """Slots lost by lot, over many batches like those of a run whose rewards are nearly all 1: no warning at all."""
    source = np.random.default_rng(0)
    for _ in range(60):
        groups: dict[str, list[Slot]] = {}
        for number in range(128):
            share = source.beta(9, 1)
            rewards = [float(source.random() < share) for _ in range(8)]
            groups[f"g{number}"] = [F if source.random() < 0.25 else reward for reward in rewards]
        assert not [w for w in make(groups, n_samples=8).summary["warnings"] if "at random" in w]


def test_evidence_that_cannot_be_had_is_null() -> None:
    bias = make({"a": [1, 0, 1, 0]}).summary["bias"]
    assert bias["failed_mean_length"] is None
    assert bias["failure_reward_gap"] is None
    assert make({"a": [1, 0, None, None]}).summary["bias"]["failed_mean_length"] is None


def test_a_constant_batch_is_warned_about() -> None:
    assert any("nothing to learn" in w for w in make({"a": [1] * 4}).summary["warnings"])


# --- Writing


def test_the_batch_on_disk_is_the_batch(tmp_path: Path) -> None:
    batch = make({"a": [1, F, 0, 1], "b": [1, 0, 1, 0]})
    batch.write(tmp_path / "deep" / "b")
    table = read_batch(tmp_path / "deep" / "b")
    assert table.equals(batch.table)
    assert table["group_usable"].to_pylist() == [3, 3, 3, 4, 4, 4, 4]
    assert json.loads((tmp_path / "deep" / "b" / "summary.json").read_text()) == batch.summary
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["b"]


def test_a_large_batch_is_written_in_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.trajectory.stretches.__defaults__", (7,))
    batch = make({f"{i:03}": [1, F, 0, 1] for i in range(50)})
    batch.write(tmp_path / "b")
    assert pq.ParquetFile(tmp_path / "b" / "batch.parquet").num_row_groups > 10
    assert read_batch(tmp_path / "b").equals(batch.table)


def test_unknown_columns_reach_the_batch() -> None:
    batch = make({"a": [{"reward": 1, "source": "x"}, 0, 1, F]})
    assert batch.table["source"].to_pylist() == ["x", None, None]


def test_assembling_a_batch_again_gives_the_same_batch(tmp_path: Path) -> None:
    make({"a": [1, F, 0, 1]}).write(tmp_path / "b")
    once = read_batch(tmp_path / "b")
    again = assemble(trajectory.read(tmp_path / "b" / "batch.parquet"), config.parse("group: {n_samples: 4}"))
    assert again.table.equals(once)


def test_an_earlier_batch_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    first, second = make({"a": [1, 0, 0, 1]}), make({"b": [1, F, 0, 1]})
    first.write(tmp_path / "b")
    second.write(tmp_path / "b")
    assert read_batch(tmp_path / "b").equals(second.table)
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInput, match=r"notes\.txt"):
        first.write(tmp_path / "b")
    assert read_batch(tmp_path / "b").equals(second.table)


def test_a_failed_write_keeps_the_earlier_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make({"a": [1, 0, 0, 1]}), make({"b": [1, F, 0, 1]})
    first.write(tmp_path / "b")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("muster.assembly.batch.sync", full)
    with pytest.raises(MusterError, match="No space left on device") as caught:
        second.write(tmp_path / "b")
    assert caught.value.exit_code == 4
    assert read_batch(tmp_path / "b").equals(first.table)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_half_a_batch_is_not_read(tmp_path: Path) -> None:
    make({"a": [1, 0, 0, 1]}).write(tmp_path / "b")
    (tmp_path / "b" / "summary.json").unlink()
    with pytest.raises(InvalidInput, match=r"summary\.json"):
        read_batch(tmp_path / "b")
    with pytest.raises(InvalidInput):
        read_batch(tmp_path / "absent")


# --- The command


def test_the_command_prints_a_table_or_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trajectory.write(rows_of({"a": [1, F, 0, 1], "b": [1, F, F, F]}, 4), tmp_path / "r.parquet")
    (tmp_path / "run.yaml").write_text("group: {n_samples: 4}")
    run([tmp_path / "r.parquet"], tmp_path / "run.yaml", tmp_path / "b")
    shown = capsys.readouterr()
    assert "1 of 2 trained on; 1 below minimum" in shown.out
    assert "timeout 4" in shown.out
    run([tmp_path / "r.parquet"], config.parse("group: {n_samples: 4}"), tmp_path / "b", as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "b" / "summary.json").read_text())


def test_the_command_writes_nothing_when_it_refuses(tmp_path: Path) -> None:
    trajectory.write(rows_of({"a": [[1, 0], 0]}, 2), tmp_path / "r.parquet")
    with pytest.raises(InvalidInput):
        run(tmp_path / "r.parquet", config.parse("group: {n_samples: 2}"), tmp_path / "b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.parquet"]


def test_the_command_keeps_results_and_warnings_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trajectory.write(rows_of({"a": [1]}, 1), tmp_path / "r.parquet")
    run(tmp_path / "r.parquet", config.parse("group: {n_samples: 1}"), tmp_path / "b", as_json=True)
    shown = capsys.readouterr()
    json.loads(shown.out)
    assert shown.err.startswith("warning: ")


def test_an_interrupted_write_keeps_the_earlier_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at the worst moment: the earlier batch has made room, the new one has not taken its place."""
    first, second = make({"a": [1, 0, 0, 1]}), make({"b": [1, F, 0, 1]})
    first.write(tmp_path / "b")
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        second.write(tmp_path / "b")
    assert read_batch(tmp_path / "b").equals(first.table)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
