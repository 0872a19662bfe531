"""Placement: an exact cover, deterministic, and balanced as far as the items allow."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.training.partition import attention_costs, partition

costs_and_k = st.tuples(st.lists(st.integers(0, 10_000), max_size=40), st.integers(1, 9))


@given(costs_and_k)
def test_every_item_lands_in_exactly_one_part_and_always_the_same(case: tuple[list[int], int]) -> None:
    costs, k = case
    parts = partition(costs, k)
    assert len(parts) == k
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    assert partition(costs, k) == parts


@given(costs_and_k)
def test_no_part_is_heavier_than_the_mean_plus_one_item(case: tuple[list[int], int]) -> None:
    costs, k = case
    heaviest = max(sum(costs[i] for i in part) for part in partition(costs, k))
    assert heaviest <= sum(costs) / k + max(costs, default=0)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_small_cases_are_within_lpt_s_bound_of_the_optimum(costs: list[int], k: int) -> None:
    best = min(
        max(sum(c for c, p in zip(costs, places, strict=True) if p == part) for part in range(k))
        for places in itertools.product(range(k), repeat=len(costs))
    )
    heaviest = max(sum(costs[i] for i in part) for part in partition(costs, k))
    assert heaviest <= (4 / 3 - 1 / (3 * k)) * best + 1e-9


def test_swaps_repair_what_longest_first_gets_wrong() -> None:
    # longest first ends with 8 and 10
    parts = partition([5, 4, 3, 3, 3], 2)
    assert sorted(sum([5, 4, 3, 3, 3][i] for i in part) for part in parts) == [9, 9]


def test_more_parts_than_items_leaves_parts_empty() -> None:
    assert sorted(map(len, partition([3, 1], 5))) == [0, 0, 0, 1, 1]


@given(costs_and_k)
def test_no_part_is_empty_when_there_are_enough_items(case: tuple[list[int], int]) -> None:
    costs, k = case
    filled = sum(bool(part) for part in partition(costs, k))
    assert filled == min(k, len(costs))


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=40), st.integers(1, 9), st.integers(0, 3))
def test_count_limits_are_kept(costs: list[int], k: int, slack: int) -> None:
    least, most = max(0, len(costs) // k - slack), -(-len(costs) // k) + slack
    parts = partition(costs, k, min_items=least, max_items=most)
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(len(costs)))
    assert all(least <= len(part) <= most for part in parts)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=25), st.integers(1, 5), st.data())
def test_a_cap_that_a_known_placement_meets_is_met_or_refused_by_name(
    costs: list[int], k: int, data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, k - 1), min_size=len(costs), max_size=len(costs)))
    cap = max(sum(c for c, p in zip(costs, places, strict=True) if p == part) for part in range(k))
    with contextlib.suppress(ValueError):
        assert max(sum(costs[i] for i in part) for part in partition(costs, k, cap=cap)) <= cap
        return
    refusal = rf"costs\[\d+\] is \d+ and found no place in {k} parts of at most {cap}|no placement with 1 or more items"
    with pytest.raises(ValueError, match=refusal):
        partition(costs, k, cap=cap)


def drawn(n: int) -> list[int]:
    return np.clip(np.random.RandomState(0).lognormal(7.5, 0.9, n), 16, 32768).astype(int).tolist()


@pytest.mark.parametrize(
    ("n", "k", "limit"), [(1024, 32, 1.0001), (1023, 32, 1.0001), (4096, 64, 1.0001), (512, 64, 1.002), (64, 8, 1.002)]
)
def test_real_lengths_are_balanced_almost_perfectly(n: int, k: int, limit: float) -> None:
    costs = drawn(n)
    heaviest = max(sum(costs[i] for i in part) for part in partition(costs, k))
    assert heaviest <= limit * max(sum(costs) / k, max(costs))


def test_f18_206_items_on_4_ranks_differ_by_one_in_count_and_balance_in_tokens() -> None:
    costs = drawn(206)
    parts = partition(costs, 4, min_items=51, max_items=52)
    assert sorted(map(len, parts)) == [51, 51, 52, 52]
    assert max(sum(costs[i] for i in part) for part in parts) <= 1.001 * sum(costs) / 4


def test_f19_1023_items_on_32_ranks_are_placed() -> None:
    parts = partition(drawn(1023), 32)
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(1023))
    assert all(parts)


def test_attention_makes_one_long_sequence_cost_more_than_its_halves() -> None:
    long, half = attention_costs([4096, 2048], hidden=1024)
    assert half == pytest.approx(2048 + 2048**2 / (12 * 1024))
    assert long > 2 * half
    lengths = [4096, 2048, 2048, 2048, 2048, 1024, 1024]
    costs = attention_costs(lengths, hidden=64)
    assert len(partition(costs, 2)) == 2


def test_cap_is_kept_or_refused() -> None:
    assert max(sum([4, 4, 4, 4][i] for i in p) for p in partition([4, 4, 4, 4], 2, cap=8)) == 8
    with pytest.raises(ValueError, match=r"costs\[1\] is 9, more than the cap 8"):
        partition([1, 9], 2, cap=8)
    with pytest.raises(ValueError, match=r"costs\[2\] is 6 and found no place in 2 parts of at most 8"):
        partition([6, 6, 6], 2, cap=8)
    # balance alone would end at 12 and 11 here
    assert max(sum([4, 4, 4, 6, 5][i] for i in p) for p in partition([4, 4, 4, 6, 5], 2, cap=12)) == 12


def test_count_limits_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(ValueError, match="7 items cannot fill 2 parts with 4 to 7 items each"):
        partition([1] * 7, 2, min_items=4)
    with pytest.raises(ValueError, match="min_items is 3 and max_items is 2"):
        partition([1] * 7, 2, min_items=3, max_items=2)


@pytest.mark.parametrize(
    ("costs", "k", "words"), [([1], 0, "k is 0"), ([-1], 1, "not negative"), ([float("nan")], 1, "finite")]
)
def test_senseless_arguments_are_named(costs: list[float], k: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        partition(costs, k)
