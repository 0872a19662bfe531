"""The rules that collecting and assembling share: reasons, outcomes, the minimum of usable slots (semantics.md).

Rules are named by their number in semantics.md. No statistics here: those are assembly's.
"""

from __future__ import annotations

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
            f"group.min_usable_group_size: is {explicit}, allowed is {lowest}..{n_samples} for n_samples {n_samples}{why}"
        )
    return explicit
