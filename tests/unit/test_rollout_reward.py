"""Rewards: weights, and what raises, hangs, dies or returns nonsense."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from muster.config import Reward
from muster.errors import InvalidInput
from muster.rollout.reward import RewardError, RewardPool, RewardTimeout

HERE = "tests.unit.reward_functions"


def score(*rewards: Reward, record: dict[str, Any] | None = None, timeout: float = 5.0, n: int = 1) -> list[Any]:
    async def all_of_them() -> list[Any]:
        calls = [pool.score("p", "c", record or {}) for _ in range(n)]
        return await asyncio.gather(*calls, return_exceptions=True)

    with RewardPool(rewards, timeout, 2) as pool:
        return asyncio.run(all_of_them())


def test_rewards_are_weighted_and_get_record_and_options() -> None:
    terms = (
        Reward(name=f"{HERE}:one", weight=2.0),
        Reward(name=f"{HERE}:record_value", weight=0.5, options={"factor": 10}),
    )
    assert score(*terms, record={"value": 3}) == [2.0 + 15.0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("raises", "KeyError: 'no such answer'"),
        ("dies", "died with exit code"),
        ("says_none", "returned None; a reward is a number"),
        ("says_true", "returned True; a reward is a number"),
    ],
)
def test_what_is_no_reward_is_an_error_with_its_own_text(name: str, text: str) -> None:
    (error,) = score(Reward(name=f"{HERE}:{name}"))
    assert isinstance(error, RewardError)
    assert text in str(error)


def test_nan_is_passed_on_for_the_slot_to_fail() -> None:
    (value,) = score(Reward(name=f"{HERE}:says_nan"))
    assert math.isnan(value)


def test_f34_a_time_limit_is_a_timeout_and_never_a_zero() -> None:
    start = time.monotonic()
    (error,) = score(Reward(name=f"{HERE}:hangs"), timeout=0.5)
    assert isinstance(error, RewardTimeout)
    assert time.monotonic() - start < 15


def test_f33_a_hanging_reward_does_not_hold_up_the_others() -> None:
    async def mixed() -> list[Any]:
        calls = [pool.score("p", completion, {}) for completion in ("x", *"abcdefgh")]
        return await asyncio.gather(*calls, return_exceptions=True)

    with RewardPool([Reward(name=f"{HERE}:hangs_on_x")], 3.0, 2) as pool:
        first, *others = asyncio.run(mixed())
    assert isinstance(first, RewardTimeout)
    assert others == [1.0] * 8


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no.such.module:f", "cannot import"),
        (f"{HERE}:no_such_function", "cannot import"),
        (f"{HERE}:not_callable", "is not callable"),
    ],
)
def test_functions_that_are_not_there_are_named_before_anything_starts(name: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        RewardPool([Reward(name=name)], 1.0, 1)


def test_no_reward_at_all_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"rollout\.reward"):
        RewardPool([], 1.0, 1)
