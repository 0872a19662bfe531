"""How well and how fast groups are placed on ranks: `python -m tests.benchmarks.partition`.

Beside ours: Karmarkar-Karp's largest differencing (k-way, as is common for balancing) and longest-first greedy, both
written here. Milliseconds are the best of several tries, the three taking turns.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence

import numpy as np

from muster.training.partition import partition

CASES = ((1024, 32), (1023, 32), (4096, 64), (512, 64), (64, 8))
TRIES = 5


def lengths(n: int) -> list[int]:
    """Token counts like those of real completions."""
    return np.clip(np.random.RandomState(0).lognormal(7.5, 0.9, n), 16, 32768).astype(int).tolist()


def greedy(costs: Sequence[int], k: int) -> list[list[int]]:
    """Longest processing time first."""
    parts: list[list[int]] = [[] for _ in range(k)]
    heap = [(0, part) for part in range(k)]
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, part = heap[0]
        parts[part].append(item)
        heapq.heapreplace(heap, (load + costs[item], part))
    return parts


def karmarkar_karp(costs: Sequence[int], k: int) -> list[list[int]]:
    """Largest differencing: the two most uneven partial partitions are joined, heaviest against lightest."""
    count = itertools.count()
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for item, cost in enumerate(costs):
        state = [(0, []) for _ in range(k - 1)] + [(cost, [item])]
        heapq.heappush(heap, (-cost, next(count), state))
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = sorted(
            ((a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)), key=lambda part: part[0]
        )
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], next(count), joined))
    return [items for _, items in heap[0][2]]


def imbalance(costs: Sequence[int], parts: Sequence[Sequence[int]]) -> float:
    """Heaviest part / the lower bound; checks the cover on the way."""
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(len(costs)))
    return max(sum(costs[i] for i in part) for part in parts) / max(sum(costs) / len(parts), max(costs))


def main() -> None:
    """All cases."""
    start = time.perf_counter()
    methods: dict[str, Callable[[Sequence[int], int], list[list[int]]]] = {
        "": partition,
        "kk_": karmarkar_karp,
        "greedy_": greedy,
    }
    cases = []
    for n, k in CASES:
        case: dict[str, float] = {"n": n, "k": k}
        best = dict.fromkeys(methods, float("inf"))
        for _, (name, method) in itertools.product(range(TRIES), methods.items()):
            costs = lengths(n)
            began = time.perf_counter()
            parts = method(costs, k)
            best[name] = min(best[name], time.perf_counter() - began)
            case[f"{name}imbalance"] = imbalance(costs, parts)
        cases.append(case | {f"{name}milliseconds": 1000 * seconds for name, seconds in best.items()})
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }
    print(json.dumps({"cases": cases, "machine": machine, "seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
