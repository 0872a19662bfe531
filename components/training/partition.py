"""Balanced placement: items with costs -> k parts of nearly equal load.

Pure and deterministic: every rank computes the same answer from the same costs, so nothing is exchanged. Not for
packing under a padded size; that is `microbatch`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

_ROUNDS = 64


def partition(costs: Sequence[float], k: int, *, cap: float | None = None) -> list[list[int]]:
    """Splits items over `k` parts so that the heaviest part is as light as this heuristic finds.

    Longest processing time first (Graham, 1969), then moves and swaps out of the heaviest part while they help.

    Args:
        costs: cost of each item, finite and not negative.
        k: number of parts, at least 1; parts may stay empty.
        cap: the most any part may carry; None for no limit.

    Returns:
        `k` lists of item indexes, each ascending; together they hold every index exactly once.

    Raises:
        ValueError: `k` is below 1, a cost is negative or not finite, an item is larger than `cap`, or no placement
            under `cap` was found.
    """
    if k < 1:
        raise ValueError(f"k is {k}; there must be at least one part")
    for index, cost in enumerate(costs):
        if not math.isfinite(cost) or cost < 0:
            raise ValueError(f"costs[{index}] is {cost}; a cost is finite and not negative")
        if cap is not None and cost > cap:
            raise ValueError(f"costs[{index}] is {cost}, more than the cap {cap}: it fits in no part")
    parts = _longest_first(costs, k)
    _improve(parts, costs)
    heaviest = max(sum(costs[i] for i in part) for part in parts)
    if cap is not None and heaviest > cap:
        raise ValueError(
            f"{len(costs)} items of total cost {sum(costs)} found no place in {k} parts of at most {cap} each "
            f"(best heaviest part: {heaviest}); raise the cap or k"
        )
    return [sorted(part) for part in parts]


def _longest_first(costs: Sequence[float], k: int) -> list[list[int]]:
    """Each item, largest first, to the lightest part (fewest items, lowest number on ties)."""
    parts: list[list[int]] = [[] for _ in range(k)]
    heap: list[tuple[float, int, int]] = [(0.0, 0, part) for part in range(k)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, size, part = heap[0]
        parts[part].append(item)
        heapq.heapreplace(heap, (load + costs[item], size + 1, part))
    return parts


def _improve(parts: list[list[int]], costs: Sequence[float]) -> None:
    """Moves or swaps items between the heaviest and the lightest part while that lowers the heavier of the two."""
    if len(parts) < 2:
        return
    loads = [float(sum(costs[i] for i in part)) for part in parts]
    for _ in range(_ROUNDS):
        heavy = max(range(len(parts)), key=lambda p: (loads[p], -p))
        light = min(range(len(parts)), key=lambda p: (loads[p], p))
        gap = loads[heavy] - loads[light]
        best: tuple[float, int, int | None] | None = None
        for mine in parts[heavy]:
            for theirs in [None, *parts[light]]:
                shift = costs[mine] - (costs[theirs] if theirs is not None else 0)
                if 0 < shift < gap and (best is None or abs(gap - 2 * shift) < best[0]):
                    best = (abs(gap - 2 * shift), mine, theirs)
        if best is None or best[0] >= gap:
            return
        _, mine, other = best
        parts[heavy].remove(mine)
        parts[light].append(mine)
        if other is not None:
            parts[light].remove(other)
            parts[heavy].append(other)
        for part in (heavy, light):
            loads[part] = float(sum(costs[i] for i in parts[part]))
