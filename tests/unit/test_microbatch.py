"""Micro-batches: the same number on every rank, every row once, never above the cap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.training.batch import Row
from muster.training.microbatch import Packing, build, in_slots, in_step, pack, pack_padded, schedule

lengths_and_cap = st.lists(st.integers(1, 40), max_size=30).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.integers(max(lengths, default=1), 200))
)


def row(ids: list[int], prompt: int, mask: list[bool], logprob: float = -1.0) -> Row:
    n = len(ids) - prompt
    return Row(
        group_id="g",
        slot=0,
        row=0,
        ids=np.array(ids, dtype=np.int64),
        prompt_length=prompt,
        mask=np.array(mask, dtype=np.bool_),
        logprobs=np.full(n, logprob, dtype=np.float32),
        advantages=np.arange(n, dtype=np.float32),
        reward=0.0,
    )


@given(lengths_and_cap, st.integers(1, 8))
def test_packs_cover_every_row_within_the_padded_cap(case: tuple[list[int], int], at_least: int) -> None:
    lengths, cap = case
    packs = pack_padded(lengths, cap, at_least=at_least)
    assert sorted(i for one in packs for i in one) == list(range(len(lengths)))
    assert all(len(one) * max(lengths[i] for i in one) <= cap for one in packs)
    assert len(packs) >= min(at_least, len(lengths))


@given(lengths_and_cap, st.integers(1, 8))
def test_rows_end_to_end_fill_the_cap_and_no_two_packs_could_be_one(case: tuple[list[int], int], at_least: int) -> None:
    lengths, cap = case
    packs = pack(lengths, cap, at_least=at_least)
    assert sorted(i for one in packs for i in one) == list(range(len(lengths)))
    assert len(packs) >= min(at_least, len(lengths))
    sizes = sorted(sum(lengths[i] for i in one) for one in pack(lengths, cap))
    assert max(sizes, default=0) <= cap
    assert len(sizes) < 2 or sizes[0] + sizes[1] > cap


def test_real_lengths_are_packed_almost_without_waste() -> None:
    lengths = np.clip(np.random.RandomState(0).lognormal(7.5, 0.9, 4096), 16, 32768).astype(int).tolist()
    assert sum(lengths) / (32768 * len(pack(lengths, 32768))) >= 0.995


@pytest.mark.parametrize("packing", [pack, pack_padded])
def test_a_row_longer_than_the_cap_is_refused(packing: Packing) -> None:
    with pytest.raises(ValueError, match=r"lengths\[1\] is 9, more than the cap of 8 tokens"):
        packing([3, 9], 8)


def test_f15_one_micro_batch_against_four_gives_four_steps_on_both() -> None:
    # on rank 0 one row of 10 tokens, on rank 1 four, cap 10
    plan = in_step([[[0]], [[1], [2], [3], [4]]], [10] * 5)
    assert plan == [[[0], [], [], []], [[1], [2], [3], [4]]]


def test_f20_7_turns_on_2_ranks_take_equal_steps_one_of_weight_zero() -> None:
    plan = schedule([[i] for i in range(7)], [10] * 7, 2, cap=10)
    assert sorted(sum(bool(rows) for rows in packs) for packs in plan) == [3, 4]
    assert [len(packs) for packs in plan] == [4, 4]


@pytest.mark.parametrize("multiple", [1, 2, 4, 5])
def test_a_pipeline_s_multiple_is_met_with_real_rows_where_there_are_enough(multiple: int) -> None:
    groups = [[0, 1, 2, 3], [4]]
    plan = schedule(groups, [5, 5, 5, 5, 30], 2, cap=30, multiple=multiple)
    assert {len(packs) % multiple for packs in plan} == {0}
    assert max(sum(bool(rows) for rows in packs) for packs in plan) == min(4, len(plan[0]))
    assert sorted(row for packs in plan for rows in packs for row in rows) == [0, 1, 2, 3, 4]


def test_two_micro_batches_in_one_slot_fail_loudly() -> None:
    assert in_slots([[1], [2]], 3, rank=0) == [[1], [2], []]
    with pytest.raises(RuntimeError, match="rank 3: micro-batches 0 and 2 land in the same slot"):
        in_slots([[1], [2], [5]], 2, rank=3)


@pytest.mark.parametrize(("packing", "wanted"), [(pack, [[0, 1], [2]]), (pack_padded, [[], [0], [1], [2]])])
def test_padding_counts_towards_the_cap_only_where_there_is_some(packing: Packing, wanted: list[list[int]]) -> None:
    plan = schedule([[0, 1], [2]], [9, 3, 12], 2, cap=12, packing=packing)
    assert sorted(sorted(rows) for packs in plan for rows in packs) == wanted


def test_costs_decide_who_gets_what_and_tokens_what_fits() -> None:
    groups, lengths = [[0], [1], [2], [3]], [4, 2, 2, 2]
    by_tokens = schedule(groups, lengths, 2, cap=6)
    by_costs = schedule(groups, lengths, 2, cap=6, costs=[16, 4, 4, 4])
    assert sorted(sum(lengths[i] for one in packs for i in one) for packs in by_tokens) == [4, 6]
    assert sorted(sorted(i for one in packs for i in one) for packs in by_costs) == [[0], [1, 2, 3]]


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 5), st.integers(1, 4), st.data())
def test_every_rank_runs_the_same_number_and_every_row_once(
    sizes: list[int], ranks: int, n_mbs: int, data: st.DataObject
) -> None:
    groups, next_row = [], 0
    for size in sizes:
        groups.append(list(range(next_row, next_row + size)))
        next_row += size
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=next_row, max_size=next_row))
    plan = schedule(groups, lengths, ranks, cap=40, n_mbs=n_mbs)
    assert len(plan) == ranks
    assert len({len(packs) for packs in plan}) == 1
    assert sorted(i for packs in plan for one in packs for i in one) == list(range(next_row))
    for group in groups:
        assert sum(any(i in group for one in packs for i in one) for packs in plan) <= 1, "a group was split"
    assert plan == schedule(groups, lengths, ranks, cap=40, n_mbs=n_mbs)


def test_rows_are_laid_end_to_end_longest_first() -> None:
    micro = build([row([1, 2], 1, [True]), row([5, 6, 7, 8], 2, [True, False]), row([3, 4], 1, [False])])
    assert micro.input_ids.tolist() == [[5, 6, 7, 8, 1, 2, 3, 4]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1]]
    assert micro.lengths == (4, 2, 2)


def test_rows_of_a_model_that_cannot_take_them_end_to_end_are_padded() -> None:
    micro = build([row([1, 2], 1, [True]), row([5, 6, 7, 8], 2, [True, False])], padded=True)
    assert micro.input_ids.tolist() == [[5, 6, 7, 8], [1, 2, 0, 0]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("padded", [False, True])
def test_loss_tokens_are_predicted_from_the_position_before_them(padded: bool) -> None:
    rows = [row([1, 2], 1, [True]), row([5, 6, 7, 8], 2, [True, False]), row([3, 4, 9], 1, [True, True])]
    micro = build(rows, padded=padded)
    assert micro.labels.tolist() == [7, 4, 9, 2]
    flat = micro.input_ids.flatten()
    assert flat[micro.positions].tolist() == [6, 3, 4, 1]
    assert flat[micro.positions + 1].tolist() == micro.labels.tolist()
    assert micro.sequence.tolist() == [0, 1, 1, 2]
    assert micro.advantages.tolist() == [0, 0, 1, 0]
    assert micro.valid.all()
    assert micro.rows == 3


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rows", [[], [row([1, 2, 3], 1, [False, False])]])
def test_nothing_to_train_on_becomes_one_token_of_weight_zero(rows: list[Row], padded: bool) -> None:
    micro = build(rows, padded=padded)
    assert micro.valid.tolist() == [False]
    assert micro.input_ids.shape[0] == micro.rows == 1
    assert micro.input_ids.shape == micro.position_ids.shape
    assert micro.lengths == (micro.input_ids.shape[1],)
    assert len(micro.positions) == len(micro.labels) == len(micro.behave) == 1
