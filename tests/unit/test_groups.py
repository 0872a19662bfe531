"""The rules for one group, as the collector asks for them."""

from __future__ import annotations

import math

import pytest

from muster import config, groups
from muster.errors import InvalidInput
from muster.groups import SlotResult, judge


def run(text: str = "{}", n_samples: int = 4) -> config.RunConfig:
    return config.parse(f"{{group: {{n_samples: {n_samples}}}}}" if text == "{}" else text)


def ok(reward: float, length: int = 3) -> SlotResult:
    return SlotResult(rewards=(reward,), lengths=(length,))


def lost(reason: str = "timeout", length: int = 3) -> SlotResult:
    return SlotResult(failure=reason, lengths=(length,))


STRICT = "group: {n_samples: 4, drop_incomplete_group: true}"
FILTER = "{group: {n_samples: 4}, estimator: {filter_zero_variance: true}}"
ZERO = "group: {n_samples: 4, failures: {timeout: 0.0, missing: 0.0, empty_completion: 0.0}}"


@pytest.mark.parametrize(
    ("settings", "slots", "outcome", "usable"),
    [
        ("{}", [ok(1), ok(0), ok(1), ok(0)], "complete", 4),
        ("{}", [ok(1), ok(0), lost(), ok(0)], "incomplete", 3),
        ("{}", [ok(1), ok(0)], "incomplete", 2),
        ("{}", [ok(1), lost(), lost(), lost()], "below_minimum", 1),
        ("{}", [lost(), lost(), lost(), lost("aborted")], "empty", 0),
        ("{}", [], "empty", 0),
        ("{}", [lost("stale"), lost("stale"), lost(), lost()], "stale", 0),
        ("{}", [ok(1), lost("stale"), lost("stale"), lost("stale")], "below_minimum", 1),
        (STRICT, [ok(1), ok(0), ok(1), lost()], "dropped_incomplete", 3),
        (STRICT, [ok(1), lost(), lost(), lost()], "dropped_incomplete", 1),
        (STRICT, [ok(1), ok(0), ok(1), ok(1)], "complete", 4),
        (FILTER, [ok(0.4), ok(0.4), ok(0.4), ok(0.4)], "filtered", 4),
        (FILTER, [ok(0.4), ok(0.4), ok(0.6), lost()], "incomplete", 3),
        (FILTER, [ok(0.4), lost(), lost(), lost()], "below_minimum", 1),
        (ZERO, [ok(1), ok(1), lost(), ok(1)], "complete", 4),
        (ZERO, [ok(1), ok(1), lost(length=0), ok(1)], "incomplete", 3),
        (ZERO, [ok(1), ok(1), ok(1, length=0)], "incomplete", 2),
    ],
)
def test_rule_12_each_group_has_one_outcome(settings: str, slots: list[SlotResult], outcome: str, usable: int) -> None:
    verdict = judge(slots, run(settings))
    assert (verdict.outcome, verdict.usable) == (outcome, usable)
    assert verdict.trained == (outcome in ("complete", "incomplete"))
    assert sum(verdict.failed.values()) + verdict.usable == 4


def test_rule_10_what_is_no_reward_fails_its_slot_only() -> None:
    verdict = judge([ok(math.nan), ok(math.inf), ok(1), ok(0, length=0)], run())
    assert verdict.failures == ("non_finite_reward", "non_finite_reward", None, "empty_completion")
    assert verdict.failed == {"empty_completion": 1, "non_finite_reward": 2}


def test_rule_10_absent_slots_are_missing() -> None:
    assert judge([ok(1), lost("aborted")], run()).failed == {"aborted": 1, "missing": 2}


def test_rule_10_one_bad_row_fails_the_whole_slot() -> None:
    slots = [SlotResult(rewards=(1.0, math.nan), lengths=(3, 3)), SlotResult(rewards=(1.0, 1.0), lengths=(3, 0))]
    assert judge(slots, run()).failures == ("non_finite_reward", "empty_completion")


def test_rule_11_a_policy_may_also_rescue_a_slot_without_a_reward() -> None:
    settings = run("group: {n_samples: 4, failures: {non_finite_reward: -1.0}}")
    assert judge([ok(math.nan), ok(1), ok(1), ok(1)], settings).outcome == "complete"


def test_rule_11_drop_is_the_default_for_every_reason() -> None:
    for reason in groups.FAILURE_REASONS:
        assert judge([lost(reason), ok(1), ok(0), ok(1)], run()).failed == {reason: 1}
        assert judge([lost(reason), ok(1), ok(0), ok(1)], run(f"group: {{n_samples: 4, failures: {{{reason}: drop}}}}"))


def test_rule_09_and_12_a_contract_error_names_its_remedies() -> None:
    differing = SlotResult(rewards=(2.0, 1.0), lengths=(3, 3))
    with pytest.raises(InvalidInput, match=r"slot 1.*rollout_reward.*one row per slot.*batch"):
        judge([ok(1), differing], run())
    told = SlotResult(rewards=(2.0, 1.0), lengths=(3, 3), rollout_reward=2.0)
    assert judge([ok(1), told], run()).outcome == "incomplete"
    batch = "{group: {n_samples: 4}, estimator: {reward_norm: {mean_level: batch, std_level: batch}}}"
    assert judge([ok(1), differing], run(batch)).outcome == "incomplete"


def test_what_cannot_be_a_group_is_refused() -> None:
    with pytest.raises(InvalidInput, match="5 slots"):
        judge([ok(1)] * 5, run())
    with pytest.raises(InvalidInput, match="'bored'"):
        judge([lost("bored")], run())
    with pytest.raises(InvalidInput, match="2 rewards for 1 rows"):
        judge([SlotResult(rewards=(1.0, 2.0), lengths=(3,))], run())


@pytest.mark.parametrize(
    ("n_samples", "explicit", "statistics", "minimum"),
    [
        (8, None, True, 2),
        (8, None, False, 1),
        (1, None, True, 1),
        (1, None, False, 1),
        (8, 8, True, 8),
        (8, 2, True, 2),
        (8, 1, False, 1),
        (1, 1, True, 1),
    ],
)
def test_rule_05_and_07_the_minimum(n_samples: int, explicit: int | None, statistics: bool, minimum: int) -> None:
    assert groups.resolve_minimum(n_samples, explicit, statistics) == minimum


@pytest.mark.parametrize(
    ("n_samples", "explicit", "statistics", "allowed"),
    [(8, 0, False, "1..8"), (8, 9, False, "1..8"), (8, 1, True, "2..8"), (1, 2, True, "1..1"), (8, -1, True, "2..8")],
)
def test_rule_06_the_allowed_range_is_told(n_samples: int, explicit: int, statistics: bool, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"min_usable_group_size: is {explicit}, allowed is {allowed}"):
        groups.resolve_minimum(n_samples, explicit, statistics)
