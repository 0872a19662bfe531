"""What holds for every rollout table, and agreement with a slow reference written from the formulae alone."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster import config, trajectory
from muster.assembly import TrainingBatch, assemble
from muster.errors import InvalidInput, Stalled

Row = dict[str, Any]
Settings = dict[str, Any]
REASONS = ("timeout", "aborted", "server_error", "reward_error", "stale")
REWARDS = st.sampled_from([0.0, 1.0, 0.5, -1.0, 2.0, 0.1, 0.3, 25.0])

moderate = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


# --- Rollout tables and configurations


@st.composite
def slot_rows(draw: st.DrawFn, base: Row, agreeing: bool) -> list[Row]:
    """The rows of one slot: none, one, or a few; usable or failed."""
    kind = draw(st.sampled_from(["usable"] * 6 + ["failed", "failed", "absent", "empty", "nan", "fan", "told"]))
    if kind == "absent":
        return []

    def row(number: int, reward: float | None, told: float | None = None, **changes: Any) -> Row:
        length = draw(st.integers(1, 6))
        mask = (
            draw(st.lists(st.booleans(), min_size=length, max_size=length)) if draw(st.booleans()) else [True] * length
        )
        made = {
            **base,
            "row": number,
            "status": "usable",
            "failure": None,
            "prompt_ids": [1, 2],
            "completion_ids": [draw(st.integers(0, 9)) for _ in range(length)],
            "loss_mask": mask,
            "logprobs": [-0.5] * length,
            "versions": [3] * length,
            "reward": reward,
            "rollout_reward": told,
            **changes,
        }
        if changes.get("completion_ids") == []:
            made |= {key: [] for key in ("loss_mask", "logprobs", "versions")}
        return made

    if kind == "failed":
        failed: Row = {"status": "failed", "failure": draw(st.sampled_from(REASONS))}
        if draw(st.booleans()):
            failed["completion_ids"] = []
        return [row(0, None, **failed)]
    if kind == "empty":
        return [row(0, draw(REWARDS), completion_ids=[])]
    if kind == "nan":
        return [row(0, draw(st.sampled_from([math.nan, math.inf, -math.inf])))]
    if kind == "fan":
        count, reward = draw(st.integers(2, 3)), draw(REWARDS)
        return [row(i, reward if agreeing else draw(REWARDS)) for i in range(count)]
    if kind == "told":
        told = draw(REWARDS)
        return [row(i, draw(REWARDS), told) for i in range(draw(st.integers(1, 3)))]
    return [row(0, draw(REWARDS))]


@st.composite
def tables(draw: st.DrawFn, agreeing: bool = True) -> tuple[int, list[Row]]:
    """A group size, and the rows of a few groups of it."""
    size = draw(st.integers(1, 5))
    rows: list[Row] = []
    for number in range(draw(st.integers(1, 5))):
        for slot in range(size):
            base = {"group_id": f"g{number}", "n_samples": size, "slot": slot}
            rows += draw(slot_rows(base, agreeing))
    return size, rows


norms = st.none() | st.fixed_dictionaries(
    {
        "mean_level": st.sampled_from(["group", "batch", None]),
        "std_level": st.sampled_from(["group", "batch", None]),
        "mean_leave1out": st.booleans(),
        "std_unbiased": st.booleans(),
    }
)


@st.composite
def configurations(draw: st.DrawFn, size: int) -> Settings:
    """Any estimator with any treatment of lost slots."""
    adv = draw(norms)
    estimator: Settings = {
        "reward_norm": draw(norms),
        "adv_norm": None if adv is None else {**adv, "mean_leave1out": False},
        "reward_bias": draw(st.sampled_from([0.0, 0.5])),
        "reward_scale": draw(st.sampled_from([1.0, 3.0])),
        "filter_zero_variance": draw(st.booleans()),
        "overlong": draw(st.sampled_from([None, {"buffer_tokens": 2, "factor": 0.5}])),
    }
    group: Settings = {
        "n_samples": size,
        "drop_incomplete_group": draw(st.sampled_from([False, False, True])),
        "failures": draw(st.sampled_from([{}, {"timeout": 0.0}, {"aborted": -1.0, "non_finite_reward": 0.0}])),
    }
    return {"group": group, "estimator": estimator, "rollout": {"max_new_tokens": 6}}


@st.composite
def runs(draw: st.DrawFn, agreeing: bool = True) -> tuple[list[Row], Settings]:
    """Rows with a configuration that fits them."""
    size, rows = draw(tables(agreeing).filter(lambda table: table[1]))
    return rows, draw(configurations(size))


def ours(rows: list[Row], given: Settings) -> TrainingBatch | str:
    """The batch, or how it ends otherwise."""
    try:
        return assemble(trajectory.from_rows(rows), config.parse(json.dumps(given)))
    except InvalidInput:
        return "invalid"
    except Stalled:
        return "nothing"


def same(one: TrainingBatch | str, other: TrainingBatch | str) -> bool:
    """Bit-identical batches (NaN equals itself), or the same other end."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return repr(one.table.to_pylist()) == repr(other.table.to_pylist()) and one.summary == other.summary


# --- The reference: plain loops over the formulae of semantics.md, nothing shared with the package


def reference(rows: list[Row], given: Settings) -> dict[tuple[str, int, int], float] | str:
    """Advantages by (group, slot, row), or how it ends otherwise."""
    group_settings, estimator = given["group"], given["estimator"]
    target, policy = group_settings["n_samples"], group_settings["failures"]
    norm, adv = estimator["reward_norm"], estimator["adv_norm"]

    def levels(n: Settings | None) -> set[str | None]:
        return set() if n is None else {n["mean_level"], n["std_level"]}

    minimum = min(2, target) if "group" in levels(norm) | levels(adv) else 1

    by_group: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        by_group.setdefault(row["group_id"], {}).setdefault(row["slot"], []).append(row)

    kept: dict[str, dict[int, list[Row]]] = {}
    contradiction = False
    for name, slots in by_group.items():
        usable: dict[int, list[Row]] = {}
        for slot, members in slots.items():
            members = [dict(m) for m in sorted(members, key=lambda m: m["row"])]
            raw = [m["reward"] for m in members]
            failure = members[0]["failure"]
            if failure is None and any(not m["completion_ids"] for m in members):
                failure = "empty_completion"
            if failure is None and not all(math.isfinite(r) for r in raw):
                failure = "non_finite_reward"
            told = {m["rollout_reward"] for m in members}
            if failure is not None:
                if failure not in policy or any(not m["completion_ids"] for m in members):
                    continue
                for m in members:
                    m["reward"] = policy[failure]
                told = {None}
            explicit = len(told) == 1 and None not in told
            values = {m["reward"] for m in members}
            for m in members:
                m["explicit"] = told.copy().pop() if explicit else None
                m["raw_reference"] = m["explicit"] if explicit else values.copy().pop() if len(values) == 1 else None
            if "group" in levels(norm) and members[0]["raw_reference"] is None:
                contradiction = True
            usable[slot] = members
        if len(usable) < target and group_settings["drop_incomplete_group"]:
            continue
        if len(usable) < minimum:
            continue
        raw_all = [
            value
            for members in usable.values()
            for value in (
                [members[0]["explicit"]] if members[0]["explicit"] is not None else [m["reward"] for m in members]
            )
        ]
        if estimator["filter_zero_variance"] and max(raw_all) == min(raw_all):
            continue
        kept[name] = usable
    if contradiction:
        return "invalid"
    if not any(any(m["loss_mask"]) for slots in kept.values() for members in slots.values() for m in members):
        return "nothing"

    def shape(value: float) -> float:
        return max(-20.0, min(20.0, (value + estimator["reward_bias"]) * estimator["reward_scale"]))

    def penalty(row: Row) -> float:
        over = estimator["overlong"]
        if over is None:
            return 0.0
        room = given["rollout"]["max_new_tokens"] - over["buffer_tokens"] - len(row["completion_ids"])
        return over["factor"] * min(0, room / over["buffer_tokens"])

    # One entry a slot: its group, its rows' shaped rewards, and what group statistics count for it.
    slots_in_batch = []
    for name, slots in kept.items():
        for members in slots.values():
            own = [shape(m["reward"] + penalty(m)) for m in members]
            told_reward = members[0]["explicit"]
            if told_reward is not None:
                ref = shape(told_reward)
            elif len(set(own)) == 1:
                ref = own[0]
            else:
                ref = math.nan if members[0]["raw_reference"] is None else shape(members[0]["raw_reference"])
            slots_in_batch.append({"group": name, "rows": members, "own": own, "ref": ref})

    def population(level: str, slot: Settings) -> list[Settings]:
        return [s for s in slots_in_batch if level == "batch" or s["group"] == slot["group"]]

    def item(level: str, slot: Settings) -> float:
        return float(sum(slot["own"]) / len(slot["own"])) if level == "batch" else float(slot["ref"])

    def centre(slot: Settings) -> float:
        if norm["mean_level"] is None:
            return 0.0
        items = [item(norm["mean_level"], s) for s in population(norm["mean_level"], slot)]
        x = item(norm["mean_level"], slot)
        if not norm["mean_leave1out"]:
            return math.fsum(items) / len(items)
        return x if len(items) == 1 else (math.fsum(items) - x) / (len(items) - 1)

    def sigma(slot: Settings) -> float:
        members = population(norm["std_level"], slot)
        if len(members) <= 1:
            return 1.0
        squares = 0.0
        for s in members:
            mu = centre(s)
            if norm["std_level"] == "group":
                squares += (s["ref"] - mu) ** 2
            else:
                squares += sum((x - mu) ** 2 for x in s["own"]) / len(s["own"])
        return math.sqrt(squares / (len(members) - (1 if norm["std_unbiased"] else 0)))

    found: list[tuple[str, Row, float]] = []
    for slot in slots_in_batch:
        for row, x in zip(slot["rows"], slot["own"], strict=True):
            y = x
            if norm is not None:
                y = x - centre(slot)
                if norm["std_level"] is not None:
                    deviation = sigma(slot)
                    y /= deviation + 1e-5 if deviation > 1e-5 else 1.0
            found.append((slot["group"], row, y))
    return _over_tokens(found, adv)


def _over_tokens(found: list[tuple[str, Row, float]], adv: Settings | None) -> dict[tuple[str, int, int], float]:
    tokens = [(group, value) for group, row, value in found for valid in row["loss_mask"] if valid]

    def of(level: str, group: str) -> list[float]:
        return [value for g, value in tokens if level == "batch" or g == group]

    means: dict[tuple[str, str], float] = {}

    def mean(group: str) -> float:
        assert adv is not None
        level = adv["mean_level"]
        if level is None:
            return 0.0
        if (level, group) not in means:
            values = of(level, group)
            means[level, group] = math.fsum(values) / len(values) if values else 0.0
        return means[level, group]

    result = {}
    for group, row, value in found:
        y = value
        if adv is not None:
            y = value - mean(group)
            if adv["std_level"] is not None:
                among = [(g, v) for g, v in tokens if adv["std_level"] == "batch" or g == group]
                deviation = 1.0
                if len(among) > 1:
                    squares = math.fsum((v - mean(g)) ** 2 for g, v in among)
                    deviation = math.sqrt(squares / (len(among) - (1 if adv["std_unbiased"] else 0)))
                y /= deviation + 1e-5 if deviation > 1e-5 else 1.0
        result[(group, row["slot"], row["row"])] = y
    return result


# --- Properties


@given(runs(agreeing=False) | runs())
@settings(parent=moderate, max_examples=400)
def test_advantages_equal_the_slow_reference(run: tuple[list[Row], Settings]) -> None:
    rows, given_settings = run
    expected, got = reference(rows, given_settings), ours(rows, given_settings)
    if isinstance(expected, str) or isinstance(got, str):
        assert got == expected
        return
    assert got.advantage is not None
    keys = list(zip(*(got.table[k].to_pylist() for k in ("group_id", "slot", "row")), strict=True))
    assert keys == sorted(expected)
    valid = np.array([any(mask) for mask in got.table["loss_mask"].to_pylist()])  # others carry no advantage
    want = np.array([expected[key] for key in keys])
    np.testing.assert_allclose(got.advantage[valid], want[valid], rtol=1e-9, atol=1e-9)


@given(runs(), st.integers(0, 2**32))
@moderate
def test_row_order_changes_nothing(run: tuple[list[Row], Settings], seed: int) -> None:
    rows, given_settings = run
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    assert same(ours(shuffled, given_settings), ours(rows, given_settings))


@given(runs(), st.integers(0, 2**32))
@settings(parent=moderate, max_examples=40)
def test_format_and_files_change_nothing(run: tuple[list[Row], Settings], seed: int) -> None:
    rows, given_settings = run
    expected = ours(rows, given_settings)
    source = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        parts: list[list[Row]] = [[] for _ in range(3)]
        for row in rows:
            source.choice(parts).append(row)
        for number, part in enumerate(p for p in parts if p):
            if source.random() < 0.5:
                (Path(folder) / f"{number}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
            else:
                pq.write_table(pa.Table.from_pylist(part, trajectory.SCHEMA), Path(folder) / f"{number}.parquet")
        try:
            got: TrainingBatch | str = assemble(trajectory.read(folder), config.parse(json.dumps(given_settings)))
        except Stalled:
            got = "nothing"
        assert same(got, expected)


@given(runs(agreeing=False))
@moderate
def test_every_survivor_is_there_exactly_once(run: tuple[list[Row], Settings]) -> None:
    rows, given_settings = run
    batch = ours(rows, given_settings)
    if isinstance(batch, str):
        return
    seen = Counter(zip(*(batch.table[k].to_pylist() for k in ("group_id", "slot", "row")), strict=True))
    assert set(seen.values()) == {1}
    groups = {group for group, _, _ in seen}
    assert len(groups) == batch.summary["groups"]["trainable"]
    healthy = [
        r
        for r in rows
        if r["group_id"] in groups and r["status"] == "usable" and r["completion_ids"] and math.isfinite(r["reward"])
    ]
    assert {(r["group_id"], r["slot"], r["row"]) for r in healthy} <= set(seen)
    assert len({(g, s) for g, s, _ in seen}) == batch.summary["slots"]["trainable"]


@given(runs(), tables())
@moderate
def test_rule_03_other_groups_change_nothing_under_group_statistics(
    run: tuple[list[Row], Settings], others: tuple[int, list[Row]]
) -> None:
    rows, given_settings = run
    group_level = {"mean_level": "group", "std_level": "group"}
    estimator = {**given_settings["estimator"], "reward_norm": group_level, "adv_norm": None}
    given_settings = {**given_settings, "estimator": estimator}
    alone = ours(rows, given_settings)
    if isinstance(alone, str):
        return
    size = given_settings["group"]["n_samples"]
    more = [{**r, "group_id": f"f{r['group_id']}", "n_samples": size} for r in others[1] if r["slot"] < size]
    together = ours(more + rows, given_settings)
    assert not isinstance(together, str)
    mine = [r for r in together.table.to_pylist() if not r["group_id"].startswith("f")]
    assert repr(mine) == repr(alone.table.to_pylist())


@given(runs(agreeing=False))
@moderate
def test_the_counts_add_up(run: tuple[list[Row], Settings]) -> None:
    batch = ours(*run)
    if isinstance(batch, str):
        return
    summary = batch.summary
    groups, slots = summary["groups"], summary["slots"]
    lost = sum(groups[name] for name in ("below_minimum", "dropped_incomplete", "empty", "stale", "filtered"))
    assert groups["trainable"] + lost == groups["target"]
    assert slots["usable"] + sum(summary["failures"].values()) == slots["target"]
    assert slots["trainable"] <= slots["usable"]
    assert slots["rows"] == len(batch) == batch.table.num_rows
    assert summary["tokens"]["total"] == sum(map(len, batch.table["completion_ids"].to_pylist()))
    assert summary["tokens"]["valid"] == sum(map(sum, batch.table["loss_mask"].to_pylist()))
    assert np.isfinite(np.concatenate([np.array(a) for a in batch.table["advantages"].to_pylist()])).all()
    json.dumps(summary, allow_nan=False)


@given(
    st.integers(2, 9).flatmap(
        lambda size: st.lists(
            st.lists(st.floats(-15, 15, allow_subnormal=False), min_size=size, max_size=size), min_size=1, max_size=12
        )
    )
)
@moderate
def test_rule_13_without_failures_it_is_plain_grpo_bit_for_bit(rewards: list[list[float]]) -> None:
    x, size = np.array(rewards), len(rewards[0])
    std = x.std(axis=1, ddof=1, keepdims=True)
    plain = (x - x.mean(axis=1, keepdims=True)) / np.where(std > 1e-5, std + 1e-5, 1.0)
    plain[x.min(axis=1) == x.max(axis=1)] = 0.0  # where NumPy's mean of equal values may miss them
    rows = [
        {
            "group_id": f"{i:03}",
            "n_samples": size,
            "slot": j,
            "status": "usable",
            "prompt_ids": [1],
            "completion_ids": [2],
            "logprobs": [-1.0],
            "versions": [0],
            "reward": value,
        }
        for i, group in enumerate(rewards)
        for j, value in enumerate(group)
    ]
    for more in ({}, {"failures": {"timeout": 0.0}, "drop_incomplete_group": True}):
        batch = ours(rows, {"group": {"n_samples": size, **more}})
        assert not isinstance(batch, str)
        assert batch.normalized_reward.tobytes() == (plain + 0.0).ravel().tobytes()


@pytest.mark.full
@given(runs(agreeing=False))
@settings(parent=moderate, max_examples=2500)
def test_advantages_equal_the_slow_reference_at_length(run: tuple[list[Row], Settings]) -> None:
    test_advantages_equal_the_slow_reference.hypothesis.inner_test(run)  # type: ignore[attr-defined]
