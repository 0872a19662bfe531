"""The rules that collecting and assembling share: reasons, outcomes, what a usable slot is, what becomes of a group.

Rules are named by their number in semantics.md. Each is decided here, once, over arrays of slots; `judge` applies the
same code to the one group that the collector has just finished. No statistics here: those are assembly's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from muster.errors import InvalidInput

if TYPE_CHECKING:  # config imports this module
    from muster.config import RunConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Codes = NDArray[np.int8]
Mask = NDArray[np.bool_]

FAILURE_REASONS = (
    "timeout",
    "aborted",
    "server_error",
    "workflow_error",
    "context_overflow",
    "empty_completion",
    "reward_error",
    "reward_timeout",
    "non_finite_reward",
    "stale",
    "missing",
)
"""Why a slot failed. A closed set: it is a metric label."""

GROUP_OUTCOMES = ("complete", "incomplete", "below_minimum", "dropped_incomplete", "empty", "filtered", "stale")
"""What became of a group; `complete` and `incomplete` are trained on. A closed set: it is a metric label."""

USABLE = -1
"""The code of a slot that did not fail; a failed one has the index of its reason in FAILURE_REASONS."""

CONTRACT_REMEDIES = (
    "set the same finite rollout_reward on every row of the slot, export one row per slot, or use batch-level "
    "normalisation (estimator.reward_norm levels: batch)"
)
"""What to do about a slot whose rows have different rewards, under group-level statistics (rule 12)."""


def reason_code(reason: str) -> int:
    """The index of a failure reason in FAILURE_REASONS."""
    return FAILURE_REASONS.index(reason)


def outcome_code(outcome: str) -> int:
    """The index of an outcome in GROUP_OUTCOMES."""
    return GROUP_OUTCOMES.index(outcome)


def resolve_minimum(n_samples: int, explicit: int | None, uses_group_statistics: bool) -> int:
    """The fewest usable slots a group may have and still be trained on (rules 5 to 7).

    Args:
        n_samples: group size G.
        explicit: `group.min_usable_group_size`, if set.
        uses_group_statistics: whether rewards or advantages use a group mean or a group standard deviation.

    Raises:
        ValueError: the explicit value is outside 1..G, or below 2 together with group statistics; the message names the
            field, its value and the allowed range.
    """
    if explicit is None:
        return min(2, n_samples) if uses_group_statistics else 1
    lowest = 2 if uses_group_statistics and n_samples > 1 else 1
    if not lowest <= explicit <= n_samples:
        why = " with group statistics (a lone survivor has none)" if lowest == 2 else ""
        raise ValueError(
            f"group.min_usable_group_size: is {explicit}, allowed is {lowest}..{n_samples} "
            f"for n_samples {n_samples}{why}"
        )
    return explicit


@dataclass(frozen=True)
class Settled:
    """Slots after rules 10 to 12: S slots made of R rows.

    Attributes:
        failure: [S] USABLE, or the code of the reason.
        counted: [S] the reason whose policy made the slot usable, or USABLE where no policy was needed.
        reward: [R] raw reward of each row; where a policy applied, the policy's.
        low, high: [S] smallest and largest raw reward of the slot's rows (of its reference, where it has one).
        reference: [S] the slot's own raw reward; NaN where its rows differ and name none.
        explicit: [S] whether the reference was written as `rollout_reward`.
    """

    failure: Codes
    counted: Codes
    reward: Floats
    low: Floats
    high: Floats
    reference: Floats
    explicit: Mask


def settle(
    first: Ints,
    failure: Codes,
    length: Ints,
    reward: Floats,
    rollout_reward: Floats,
    policy: Mapping[str, Literal["drop"] | float],
) -> Settled:
    """Says which slots are usable, and with which reward (rules 10, 11 and 12).

    Args:
        first: [S] index of each slot's first row; a slot's rows are adjacent, every slot has one at least.
        failure: [R] USABLE or the reason's code; equal within a slot.
        length: [R] completion tokens.
        reward: [R] raw reward, NaN where absent.
        rollout_reward: [R] the slot's reward as written on this row, NaN where absent.
        policy: `group.failures`.
    """
    slot_failure = failure[first].copy()
    rows_per_slot = np.diff(np.append(first, len(failure)))
    shortest = np.minimum.reduceat(length, first)
    low, high = np.minimum.reduceat(reward, first), np.maximum.reduceat(reward, first)
    told_low, told_high = np.minimum.reduceat(rollout_reward, first), np.maximum.reduceat(rollout_reward, first)

    # Rule 10: no completion, or a reward that is no number, fails the slot and nothing else.
    usable = slot_failure == USABLE
    slot_failure[usable & (shortest == 0)] = reason_code("empty_completion")
    usable = slot_failure == USABLE
    slot_failure[usable & ~(np.isfinite(low) & np.isfinite(high))] = reason_code("non_finite_reward")

    # Rule 12: the slot's reward is what it says it is, else what its rows agree on.
    explicit = np.isfinite(told_low) & (told_low == told_high)
    reference = np.where(explicit, told_low, np.where(low == high, low, np.nan))

    # Rule 11: the user may count a reason as a reward, where there are tokens to learn from.
    counted = np.full_like(slot_failure, USABLE)
    for reason, value in policy.items():
        if value == "drop":
            continue
        here = (slot_failure == reason_code(reason)) & (shortest > 0)
        if not here.any():
            continue
        counted[here] = reason_code(reason)
        reward = np.where(np.repeat(here, rows_per_slot), value, reward)
        low, high, reference = (np.where(here, value, x) for x in (low, high, reference))
        explicit = explicit & ~here
    slot_failure[counted != USABLE] = USABLE

    low, high = np.where(explicit, reference, low), np.where(explicit, reference, high)
    return Settled(slot_failure, counted, reward, low, high, reference, explicit)


def contradictory(settled: Settled, config: RunConfig) -> Mask:
    """[S] usable slots that group-level reward statistics cannot interpret: a contract error (rules 9 and 12)."""
    norm = config.estimator.reward_norm
    if norm is None or not norm.uses_group_statistics:
        return np.zeros(len(settled.failure), dtype=bool)
    unclear: Mask = (settled.failure == USABLE) & np.isnan(settled.reference)
    return unclear


@dataclass(frozen=True)
class Decided:
    """Groups after rules 4 to 8 and the filter: N groups.

    Attributes:
        outcome: [N] index into GROUP_OUTCOMES.
        usable: [N] usable slots.
        informative: [N] whether the raw rewards of the usable slots differ.
    """

    outcome: Codes
    usable: Ints
    informative: Mask

    @property
    def trained(self) -> Mask:
        """[N] whether the group is trained on."""
        trained: Mask = (self.outcome == outcome_code("complete")) | (self.outcome == outcome_code("incomplete"))
        return trained


def decide(first: Ints, settled: Settled, config: RunConfig) -> Decided:
    """Gives each group its one outcome: strict mode (rule 8), minimum (rules 4 to 7), filter, in this order.

    Args:
        first: [N] index of each group's first slot in `settled`; slots that are missing there count as failed.
        settled: the slots, those of a group adjacent.
        config: `group` and `estimator` are used.
    """
    target, minimum = config.group.n_samples, config.min_usable_group_size
    ok = settled.failure == USABLE
    usable = np.add.reduceat(ok.astype(np.int64), first)
    low = np.minimum.reduceat(np.where(ok, settled.low, np.inf), first)
    high = np.maximum.reduceat(np.where(ok, settled.high, -np.inf), first)
    stale = np.logical_or.reduceat(settled.failure == reason_code("stale"), first)
    informative = low < high

    rules: list[tuple[str, Mask]] = [
        ("stale", (usable == 0) & stale),
        ("empty", usable == 0),
        ("dropped_incomplete", (usable < target) & config.group.drop_incomplete_group),
        ("below_minimum", usable < minimum),
        ("filtered", ~informative & config.estimator.filter_zero_variance),
        ("incomplete", usable < target),
    ]
    outcome = np.full(len(first), outcome_code("complete"), dtype=np.int8)
    for name, applies in reversed(rules):
        outcome[applies] = outcome_code(name)
    return Decided(outcome, usable, informative)


@dataclass(frozen=True)
class SlotResult:
    """How one slot ended, as the collector knows it.

    Attributes:
        failure: the reason, or None for a slot that its workflow calls usable.
        rewards: raw reward of each exported row (may be empty for a failed slot).
        lengths: completion tokens of each exported row (may be empty for a failed slot).
        rollout_reward: the slot's own reward, where its rows differ.
    """

    failure: str | None = None
    rewards: Sequence[float] = ()
    lengths: Sequence[int] = ()
    rollout_reward: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What becomes of one group.

    Attributes:
        outcome: one of GROUP_OUTCOMES.
        failures: the reason each given slot failed for, None for a usable one.
        failed: failed slots by reason, the missing ones included.
        usable: usable slots.
        informative: whether the raw rewards of the usable slots differ.
    """

    outcome: str
    failures: tuple[str | None, ...]
    failed: Mapping[str, int]
    usable: int
    informative: bool

    @property
    def trained(self) -> bool:
        """Whether the group is trained on."""
        return self.outcome in ("complete", "incomplete")


def judge(slots: Sequence[SlotResult], config: RunConfig) -> Verdict:
    """Judges one finished group by the rules that assembly will apply to it.

    Args:
        slots: the slots that ended; those up to `group.n_samples` that are not given are `missing`.
        config: `group` and `estimator` are used.

    Raises:
        InvalidInput: more slots than `group.n_samples`, an unknown reason, or a contract error (rule 9).
    """
    target = config.group.n_samples
    if len(slots) > target:
        raise InvalidInput(f"a group has {len(slots)} slots; group.n_samples is {target}")
    given = list(slots) or [SlotResult(failure="missing")]
    first: list[int] = []
    failure: list[int] = []
    length: list[int] = []
    reward: list[float] = []
    told: list[float] = []
    for index, slot in enumerate(given):
        if slot.failure is not None and slot.failure not in FAILURE_REASONS:
            raise InvalidInput(
                f"slot {index}: failure is {slot.failure!r}, which is not one of {', '.join(FAILURE_REASONS)}"
            )
        rows = max(len(slot.rewards), len(slot.lengths), 1)
        if slot.failure is None and not len(slot.rewards) == len(slot.lengths) == rows:
            raise InvalidInput(
                f"slot {index}: has {len(slot.rewards)} rewards for {len(slot.lengths)} rows; give one for each row"
            )
        first.append(len(failure))
        failure += [USABLE if slot.failure is None else reason_code(slot.failure)] * rows
        length += [*slot.lengths, *[0] * (rows - len(slot.lengths))]
        reward += [*slot.rewards, *[np.nan] * (rows - len(slot.rewards))]
        told += [np.nan if slot.rollout_reward is None else slot.rollout_reward] * rows
    settled = settle(
        np.array(first, dtype=np.int64),
        np.array(failure, dtype=np.int8),
        np.array(length, dtype=np.int64),
        np.array(reward, dtype=np.float64),
        np.array(told, dtype=np.float64),
        config.group.failures,
    )
    unclear = np.flatnonzero(contradictory(settled, config))
    if len(unclear):
        raise InvalidInput(
            [
                f"slot {i}: its rows have different rewards {list(given[i].rewards)} and no rollout_reward, so the "
                f"group has no statistics; {CONTRACT_REMEDIES}"
                for i in unclear
            ]
        )
    decided = decide(np.zeros(1, dtype=np.int64), settled, config)
    failures = tuple(None if code == USABLE else FAILURE_REASONS[code] for code in settled.failure)[: len(slots)]
    return Verdict(
        outcome=GROUP_OUTCOMES[decided.outcome[0]],
        failures=failures,
        failed=count_failures(settled.failure if slots else settled.failure[:0], target - len(slots)),
        usable=int(decided.usable[0]),
        informative=bool(decided.informative[0]),
    )


def count_failures(failure: Codes, missing: int = 0) -> dict[str, int]:
    """Failed slots by reason; reasons that did not occur are left out.

    Args:
        failure: [S] codes as in `Settled.failure`.
        missing: slots that are absent from `failure`.
    """
    counts: Any = np.bincount(failure[failure != USABLE], minlength=len(FAILURE_REASONS))
    counts[reason_code("missing")] += missing
    return {reason: int(n) for reason, n in zip(FAILURE_REASONS, counts, strict=True) if n}
