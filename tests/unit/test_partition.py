"""Placement: an exact cover, deterministic, and balanced as far as the items allow."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.training.partition import partition

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


def test_cap_is_kept_or_refused() -> None:
    assert max(sum([4, 4, 4, 4][i] for i in p) for p in partition([4, 4, 4, 4], 2, cap=8)) == 8
    with pytest.raises(ValueError, match=r"costs\[1\] is 9, more than the cap 8"):
        partition([1, 9], 2, cap=8)
    with pytest.raises(ValueError, match="found no place in 2 parts of at most 8"):
        partition([6, 6, 6], 2, cap=8)


@pytest.mark.parametrize(
    ("costs", "k", "words"), [([1], 0, "k is 0"), ([-1], 1, "not negative"), ([float("nan")], 1, "finite")]
)
def test_senseless_arguments_are_named(costs: list[float], k: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        partition(costs, k)
