"""Rewards -> normalised rewards: shaping, centre and scale, in float64 (semantics.md, "Normalisation").

Works on trained rows only, sorted by group, slot and row; which rows those are is not decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.config import Estimator, Norm

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """How R rows make S slots and N groups; each level's members are adjacent.

    Attributes:
        slot_first: [S] first row of each slot.
        group_first: [N] first slot of each group.
        rows: R.
    """

    slot_first: Ints
    group_first: Ints
    rows: int

    @property
    def rows_per_slot(self) -> Ints:
        """[S] rows of each slot."""
        return np.diff(np.append(self.slot_first, self.rows))

    @property
    def slots_per_group(self) -> Ints:
        """[N] slots of each group."""
        return np.diff(np.append(self.group_first, len(self.slot_first)))

    @property
    def rows_per_group(self) -> Ints:
        """[N] rows of each group."""
        return np.diff(np.append(self.slot_first[self.group_first], self.rows))


def shape_rewards(
    reward: Floats, estimator: Estimator, length: Ints | None = None, max_new_tokens: int | None = None
) -> Floats:
    """Overlong penalty, bias, scale and clip, in this order.

    Args:
        reward: raw rewards.
        estimator: the shaping to apply.
        length: completion tokens of each row; None for references, which get no length penalty.
        max_new_tokens: the budget; needed where there is a penalty and a length.

    Source: the penalty is equation 13 of DAPO (arXiv 2503.14476), times `factor`.
    """
    overlong = estimator.overlong
    if overlong is not None and length is not None:
        assert max_new_tokens is not None
        room = (max_new_tokens - overlong.buffer_tokens - length) / overlong.buffer_tokens
        reward = reward + overlong.factor * np.minimum(0.0, room)
    shaped = (reward + estimator.reward_bias) * estimator.reward_scale
    return np.clip(shaped, -estimator.reward_clip, estimator.reward_clip)


def normalize_rewards(reward: Floats, reference: Floats, layout: Layout, norm: Norm | None) -> Floats:
    """Centres and scales shaped rewards.

    Group level counts each slot once, through its reference; batch level weighs each of a slot's k rows 1/k (rule 12).
    Every row of a slot gets the slot's centre and scale.

    Args:
        reward: [R] shaped reward of each row.
        reference: [S] shaped reward of each slot; not looked at where no group statistic is taken.
        layout: rows, slots, groups.
        norm: `estimator.reward_norm`.

    Returns:
        [R] (x - mu) / divisor.
    """
    if norm is None:
        return reward
    per_slot = layout.rows_per_slot
    mean_of_rows = np.add.reduceat(reward, layout.slot_first) / per_slot

    centre = np.zeros(len(per_slot))
    if norm.mean_level == "group":
        centre = _centre(reference, layout.group_first, norm.mean_leave1out)
    elif norm.mean_level == "batch":
        centre = _centre(mean_of_rows, np.zeros(1, dtype=np.int64), norm.mean_leave1out)
    centred = reward - np.repeat(centre, per_slot)

    if norm.std_level is None:
        return centred
    if norm.std_level == "group":
        squares = segment_sums((reference - centre) ** 2, layout.group_first)
        sigma = np.repeat(deviation(squares, layout.slots_per_group, norm.std_unbiased), layout.slots_per_group)
    else:
        squares = np.array([(np.add.reduceat(centred**2, layout.slot_first) / per_slot).sum()])
        sigma = np.repeat(deviation(squares, np.array([len(per_slot)]), norm.std_unbiased), len(per_slot))
    return centred / np.repeat(divisor(sigma, norm.eps), per_slot)


def _centre(item: Floats, first: Ints, leave_one_out: bool) -> Floats:
    """Each item's mean: over its segment, or over the others of it; an item alone is its own baseline."""
    sizes = np.diff(np.append(first, len(item)))
    total, count = np.repeat(segment_sums(item, first), sizes), np.repeat(sizes, sizes)
    if leave_one_out:
        total, count = total - item, np.maximum(count - 1, 1)
    return np.where(constant(item, first), item, total / count)


def constant(values: Floats, first: Ints) -> NDArray[np.bool_]:
    """For each value whether its segment holds but one; its mean is then that value, which a rounded sum may miss."""
    same = np.minimum.reduceat(values, first) == np.maximum.reduceat(values, first)
    return np.repeat(same, np.diff(np.append(first, len(values))))


def deviation(squares: Floats, count: NDArray[Any], unbiased: bool) -> Floats:
    """sigma from the sum of squared distances to the mean, of `count` items; 1 for one item or none."""
    size = np.maximum(count - 1 if unbiased else count, 1)
    return np.where(count > 1, np.sqrt(squares / size), 1.0)


def divisor(sigma: Floats, eps: float) -> Floats:
    """sigma + eps; 1 where sigma does not exceed eps, so that a constant group gives zeros, not noise blown up."""
    return np.where(sigma > eps, sigma + eps, 1.0)


def segment_sums(values: Floats, first: Ints) -> Floats:
    """Sums of adjacent segments, none empty.

    Segments of one size are summed as the rows of one matrix: each sum is the one NumPy gives for the segment alone,
    bit for bit, whatever stands beside it (rules 3 and 13).
    """
    sizes = np.diff(np.append(first, len(values)))
    sums = np.empty(len(first))
    for size in np.unique(sizes):
        here = np.flatnonzero(sizes == size)
        sums[here] = values[first[here][:, None] + np.arange(size)].sum(axis=1)
    return sums
