"""The summary of a batch: counts, yields, and the evidence that slots are not lost at random.

Says what happened; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.assembly.advantage import trainer_computes
from muster.config import RunConfig
from muster.groups import FAILURE_REASONS, USABLE, Decided, Settled, count_failures, outcome_code

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ENOUGH = 8
"""Slots, or groups, on either side before a difference is warned about."""

LENGTH_RATIO = 1.25
"""Failed slots that are this much longer or shorter than usable ones, on average, are warned about."""

STANDARD_ERRORS = 4.0
"""A reward gap of this many standard errors is warned about."""


@dataclass(frozen=True)
class Slots:
    """What the summary needs of the slots that are in the input.

    Attributes:
        settled: the slots after the failure policy.
        decided: the groups they belong to.
        group: [S] index of each slot's group.
        tokens: [S] completion tokens of the slot, over its rows.
        reward: [S] raw reward of a usable slot (the mean of its rows where it names none).
    """

    settled: Settled
    decided: Decided
    group: Ints
    tokens: Ints
    reward: Floats

    @property
    def usable(self) -> NDArray[np.bool_]:
        """[S] whether the slot is usable."""
        usable: NDArray[np.bool_] = self.settled.failure == USABLE
        return usable


@dataclass(frozen=True)
class Trained:
    """What the summary needs of the rows trained on: how many, their completion tokens, and the valid ones of these."""

    rows: int
    tokens: int
    valid: int


def summarize(slots: Slots, trained: Trained, config: RunConfig) -> dict[str, Any]:
    """The contents of summary.json (contracts.md, "Training batch").

    Beyond the contract: `groups.complete` and `groups.stale`; `informative`, the groups whose rewards differ among
    those with enough usable slots; `counted`, failed slots that a policy made usable, by reason; `advantages`, whether
    they are final or the trainer's.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return _summarize(slots, trained, config)


def _summarize(slots: Slots, trained: Trained, config: RunConfig) -> dict[str, Any]:
    decided, target = slots.decided, config.group.n_samples
    groups = len(decided.outcome)
    outcomes = {name: int((decided.outcome == outcome_code(name)).sum()) for name in _OUTCOMES}
    usable = int(decided.usable.sum())
    trainable = int(decided.usable[decided.trained].sum())
    some_failed = (decided.usable < target) & (decided.usable > 0)
    judged = decided.trained | (decided.outcome == outcome_code("filtered"))
    informative = int((judged & decided.informative).sum())
    rewards = slots.reward[slots.usable]
    why_trainer = trainer_computes(config)
    bias, bias_warnings = _bias(slots, target)
    return {
        "groups": {
            "target": groups,
            "trainable": int(decided.trained.sum()),
            "below_minimum": outcomes["below_minimum"],
            "dropped_incomplete": outcomes["dropped_incomplete"],
            "empty": outcomes["empty"],
            "incomplete": int(some_failed.sum()),
            "filtered": outcomes["filtered"],
            "complete": outcomes["complete"],
            "stale": outcomes["stale"],
        },
        "slots": {"target": groups * target, "usable": usable, "trainable": trainable, "rows": trained.rows},
        "yield": {"usable": usable / (groups * target), "trainable": trainable / (groups * target)},
        "failures": count_failures(slots.settled.failure, groups * target - len(slots.settled.failure)),
        "tokens": {
            "total": trained.tokens,
            "valid": trained.valid,
            "masked": trained.tokens - trained.valid,
            "masked_ratio": (trained.tokens - trained.valid) / trained.tokens if trained.tokens else 0.0,
        },
        "min_usable_group_size": config.min_usable_group_size,
        "reward": {"mean": _mean(rewards), "std": _std(rewards)},
        "bias": bias,
        "informative": {"groups": informative, "share": informative / int(judged.sum()) if judged.any() else None},
        "counted": count_failures(slots.settled.counted),
        "advantages": "final" if why_trainer is None else "trainer",
        "warnings": [*_warnings(slots, config), *bias_warnings],
    }


_OUTCOMES = ("complete", "below_minimum", "dropped_incomplete", "empty", "filtered", "stale")


def _warnings(slots: Slots, config: RunConfig) -> list[str]:
    """What the configuration does to this batch that its author may not have meant."""
    warnings = []
    norm = config.estimator.reward_norm
    if config.group.n_samples == 1 and norm is not None and norm.mean_level == "group":
        warnings.append(
            "group.n_samples is 1 and estimator.reward_norm.mean_level is group: each reward is its own mean and is "
            "erased; use batch-level normalisation (mean_level: batch)"
        )
    elif norm is not None and norm.mean_level == "group" and not slots.decided.informative[slots.decided.trained].any():
        warnings.append(
            "the rewards of every trained group are all alike: nothing tells its samples apart, and with a group mean "
            "there is nothing to learn from this batch"
        )
    if config.algorithm == "dapo" and config.estimator.overlong is None and config.rollout is None:
        warnings.append(
            "algorithm dapo without a rollout section: rollout.max_new_tokens is not known, so no overlong penalty is "
            "applied"
        )
    for reason, count in count_failures(slots.settled.counted).items():
        warnings.append(
            f"{count} slots that failed with {reason} count as reward {config.group.failures[reason]:g} "
            "(group.failures): if the right answers are among them, the policy learns to avoid those"
        )
    return warnings


def _bias(slots: Slots, target: int) -> tuple[dict[str, float | None], list[str]]:
    """Lengths and rewards that lost and kept slots would share if slots were lost at random.

    The length of a failed slot is known where it left tokens; slots that left none are not averaged.
    """
    usable = slots.usable
    failed_lengths = slots.tokens[~usable & (slots.tokens > 0)]
    usable_length, failed_length = _mean(slots.tokens[usable]), _mean(failed_lengths)

    whole = slots.decided.usable == target
    in_whole = whole[slots.group]
    whole_mean, partial_mean = _mean(slots.reward[usable & in_whole]), _mean(slots.reward[usable & ~in_whole])
    gap = None if whole_mean is None or partial_mean is None else whole_mean - partial_mean

    warnings = []
    if usable_length and failed_length and len(failed_lengths) >= ENOUGH:
        ratio = failed_length / usable_length
        if ratio >= LENGTH_RATIO or ratio <= 1 / LENGTH_RATIO:
            longer = "longer" if ratio > 1 else "shorter"
            warnings.append(
                f"failed slots are {longer} than usable ones: {failed_length:.1f} against {usable_length:.1f} tokens "
                "on average; slots are not lost at random (see docs/lost-slots.md)"
            )
    if gap is not None and abs(gap) > STANDARD_ERRORS * _standard_error(slots, whole):
        side = "lower" if gap > 0 else "higher"
        warnings.append(
            f"groups that lost slots have {side} rewards: {partial_mean:.3g} against {whole_mean:.3g} on average; "
            "slots are not lost at random (see docs/lost-slots.md)"
        )
    bias = {"usable_mean_length": usable_length, "failed_mean_length": failed_length, "failure_reward_gap": gap}
    return bias, warnings


def _standard_error(slots: Slots, whole: NDArray[np.bool_]) -> float:
    """Of the gap between the two kinds of groups, a group's mean reward being one observation; infinite for few.

    The variance is that of all groups together: were slots lost at random, both kinds would share it, and that of a
    dozen groups alone is small by chance too often.
    """
    usable = slots.usable
    count = np.bincount(slots.group[usable], minlength=len(whole))
    total = np.bincount(slots.group[usable], weights=slots.reward[usable], minlength=len(whole))
    means = np.divide(total, count, out=np.zeros(len(whole)), where=count > 0)
    sides = [means[whole & (count > 0)], means[~whole & (count > 0)]]
    if min(len(side) for side in sides) < ENOUGH:
        return float("inf")
    variance = np.concatenate(sides).var(ddof=1)
    return float(np.sqrt(variance * sum(1 / len(side) for side in sides)))


def _mean(values: NDArray[Any]) -> float | None:
    return _finite(values.mean()) if len(values) else None


def _std(values: Floats) -> float | None:
    return _finite(values.std()) if len(values) else None


def _finite(value: float) -> float | None:
    """JSON has no infinity: rewards near the largest float may have one for a mean."""
    return float(value) if np.isfinite(value) else None


def describe_failures(failures: dict[str, int]) -> str:
    """Failed slots by reason, most frequent first, as text."""
    assert set(failures) <= set(FAILURE_REASONS)
    return ", ".join(f"{reason} {n}" for reason, n in sorted(failures.items(), key=lambda item: -item[1])) or "none"
