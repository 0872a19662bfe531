"""Balanced placement: items with costs -> k parts of nearly equal load.

Pure and deterministic: every rank computes the same answer from the same costs, so nothing is exchanged. Not for
packing rows into micro-batches; that is `microbatch`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_CLOSE = 1e-5
"""The search ends when the heaviest part is within this share of the lower bound."""
_ROUNDS = 8
"""Exchanges tried, for each part."""
_PAIRS_UP_TO = 20
"""Parts of at most this many items may exchange two items for two, not only one for one."""

Values = npt.NDArray[np.float64]


def partition(
    costs: Sequence[float],
    k: int,
    *,
    cap: float | None = None,
    min_items: int | None = None,
    max_items: int | None = None,
) -> list[list[int]]:
    """Splits items over `k` parts so that the heaviest part is as light as this heuristic finds.

    Longest processing time first (Graham, 1969), then exchanges between the heaviest part and lighter ones while they
    help. The same arguments give the same answer on every machine.

    Args:
        costs: cost of each item, finite and not negative.
        k: number of parts, at least 1; parts stay empty only when there are fewer items than parts.
        cap: the most any part may carry; None for no limit.
        min_items: fewest items of a part; 1 when there are at least `k` items, else 0, unless told.
        max_items: most items of a part; None for no limit.

    Returns:
        `k` lists of item indexes, each ascending; together they hold every index exactly once.

    Raises:
        ValueError: `k` is below 1, a cost is negative or not finite, the count limits cannot be met, an item is larger
            than `cap`, or no placement under `cap` was found; the message names the item and the cap.
    """
    least, most = _check(costs, k, cap, min_items, max_items)
    parts = _longest_first(costs, k, least, most)
    _improve(parts, costs, least, most)
    if cap is not None and max(math.fsum(costs[i] for i in part) for part in parts) > cap:
        parts = _best_fit(costs, k, cap, least, most)
    return [sorted(part) for part in parts]


def attention_costs(lengths: Sequence[int], hidden: int) -> list[float]:
    """Tokens plus the quadratic term of causal attention, in units of one token's dense work.

    Of one layer's forward pass over s tokens, 24 s h^2 operations are dense and 4 s^2 h attention's (Narayanan et al.
    2021, appendix), half of those under a causal mask: s + s^2 / (12 h).

    Args:
        lengths: tokens of each sequence.
        hidden: hidden size h of the model.
    """
    return [length + length * length / (12 * hidden) for length in lengths]


def _check(
    costs: Sequence[float], k: int, cap: float | None, min_items: int | None, max_items: int | None
) -> tuple[int, int]:
    """Refuses senseless arguments; the count limits with their defaults."""
    if k < 1:
        raise ValueError(f"k is {k}; there must be at least one part")
    for index, cost in enumerate(costs):
        if not math.isfinite(cost) or cost < 0:
            raise ValueError(f"costs[{index}] is {cost}; a cost is finite and not negative")
        if cap is not None and cost > cap:
            raise ValueError(f"costs[{index}] is {cost}, more than the cap {cap}: it fits in no part")
    n = len(costs)
    least = min_items if min_items is not None else int(n >= k)
    most = max_items if max_items is not None else n
    if least < 0 or least > most:
        raise ValueError(f"min_items is {least} and max_items is {most}; needed is 0 <= min_items <= max_items")
    if not k * least <= n <= k * most:
        raise ValueError(f"{n} items cannot fill {k} parts with {least} to {most} items each")
    return least, most


def _longest_first(costs: Sequence[float], k: int, least: int, most: int) -> list[list[int]]:
    """Each item, largest first, to the lightest part that may take one (fewest items, lowest number on ties)."""
    parts: list[list[int]] = [[] for _ in range(k)]
    heap: list[tuple[float, int, int]] = [(0.0, 0, part) for part in range(k)]
    remaining, owed = len(costs), k * least
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        if remaining == owed:  # what is left is just enough for the parts that have too few
            heap = [entry for entry in heap if entry[1] < least]
            heapq.heapify(heap)
        load, size, part = heap[0]
        parts[part].append(item)
        remaining -= 1
        owed -= size < least
        if size + 1 < most:
            heapq.heapreplace(heap, (load + costs[item], size + 1, part))
        else:
            heapq.heappop(heap)
    return parts


def _improve(parts: list[list[int]], costs: Sequence[float], least: int, most: int) -> None:
    """Exchanges items between the heaviest and a lighter part while that lowers the heavier of the two."""
    k = len(parts)
    if k < 2 or len(costs) <= k:
        return
    values = [np.array([costs[i] for i in part], dtype=np.float64) for part in parts]
    loads = [math.fsum(part) for part in values]
    bound = max(math.fsum(costs) / k, float(max(costs)))
    for _ in range(_ROUNDS * k):
        heavy = max(range(k), key=lambda p: (loads[p], -p))
        if loads[heavy] <= bound * (1 + _CLOSE):
            return
        for light in sorted((p for p in range(k) if p != heavy), key=lambda p: (loads[p], p)):
            exchange = _exchange(values[heavy], values[light], loads[heavy] - loads[light], least, most)
            if exchange is not None:
                break
        else:
            return
        given, taken = ([parts[p][i] for i in chosen] for p, chosen in zip((heavy, light), exchange, strict=True))
        parts[heavy] = [item for item in parts[heavy] if item not in given] + taken
        parts[light] = [item for item in parts[light] if item not in taken] + given
        for part in (heavy, light):
            values[part] = np.array([costs[i] for i in parts[part]], dtype=np.float64)
            loads[part] = math.fsum(values[part])


def _exchange(heavy: Values, light: Values, gap: float, least: int, most: int) -> tuple[list[int], list[int]] | None:
    """What the heavy part gives for what it takes, as positions, so that about half the gap moves over.

    None if no exchange makes the heavier of the two lighter.
    """
    best, exchange = gap / 2 * (1 - 1e-12), None
    nothing = (np.zeros(1), np.zeros((1, 0), dtype=np.int64))
    takings = [(costs, chosen, np.argsort(costs, kind="stable")) for costs, chosen in (nothing, *_choices(light))]
    for gives, given in _choices(heavy):
        for takes, taken, order in takings:
            grown = given.shape[1] - taken.shape[1]  # items that the light part gains
            if not max(least - len(light), len(heavy) - most) <= grown <= min(most - len(light), len(heavy) - least):
                continue
            ascending = takes[order]
            above = np.searchsorted(ascending, gives - gap / 2)
            for nearest in (np.minimum(above, len(takes) - 1), np.maximum(above - 1, 0)):
                far = np.abs(gives - ascending[nearest] - gap / 2)
                i = int(far.argmin())
                if far[i] < best:
                    best, exchange = float(far[i]), (given[i].tolist(), taken[order[nearest[i]]].tolist())
    return exchange


def _choices(values: Values) -> list[tuple[Values, npt.NDArray[np.int64]]]:
    """What a part may put into an exchange, as costs and positions: any one item, any two of a small part."""
    choices = [(values, np.arange(len(values))[:, None])]
    if 2 <= len(values) <= _PAIRS_UP_TO:
        pairs = np.stack(np.triu_indices(len(values), 1), axis=1)
        choices.append((values[pairs].sum(axis=1), pairs))
    return choices


def _best_fit(costs: Sequence[float], k: int, cap: float, least: int, most: int) -> list[list[int]]:
    """Each item, largest first, to the fullest part that still takes it: finds tight packings that balance misses."""
    parts: list[list[int]] = [[] for _ in range(k)]
    loads = [0.0] * k
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        fits = [p for p in range(k) if loads[p] + costs[item] <= cap and len(parts[p]) < most]
        if not fits:
            raise ValueError(
                f"costs[{item}] is {costs[item]} and found no place in {k} parts of at most {cap} each: {len(costs)} "
                f"items cost {math.fsum(costs)} in total; raise the cap or k"
            )
        part = max(fits, key=lambda p: (loads[p], -p))
        parts[part].append(item)
        loads[part] += costs[item]
    for short in range(k):
        while len(parts[short]) < least:  # the smallest item of a part that can spare one
            donor = max((p for p in range(k) if len(parts[p]) > least), key=lambda p: (len(parts[p]), -p))
            item = parts[donor].pop()
            if loads[short] + costs[item] > cap:
                raise ValueError(f"no placement with {least} or more items in each of {k} parts of at most {cap} found")
            parts[short].append(item)
            loads[short] += costs[item]
            loads[donor] -= costs[item]
    return parts
