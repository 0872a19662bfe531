"""How full micro-batches get: `python -m tests.benchmarks.packing`; beside ours first-fit-decreasing, written here."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence

from muster.training.microbatch import pack
from tests.benchmarks.partition import lengths

ROWS, CAP, TRIES = 4096, 32_768, 5


def first_fit_decreasing(rows: Sequence[int], cap: int) -> list[list[int]]:
    """Each row, longest first, into the first pack that still takes it."""
    packs: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(rows)), key=lambda i: -rows[i]):
        place = next((i for i, left in enumerate(room) if left >= rows[row]), None)
        if place is None:
            place = len(packs)
            packs.append([])
            room.append(cap)
        packs[place].append(row)
        room[place] -= rows[row]
    return packs


def utilisation(rows: Sequence[int], packs: Sequence[Sequence[int]]) -> float:
    """Tokens / (packs x cap); checks the cover and the cap on the way."""
    assert sorted(row for one in packs for row in one) == list(range(len(rows)))
    assert max(sum(rows[row] for row in one) for one in packs) <= CAP
    return sum(rows) / (len(packs) * CAP)


def _timed(
    method: Callable[[Sequence[int], int], list[list[int]]], rows: Sequence[int]
) -> tuple[list[list[int]], float]:
    """The packs, and the best time of several tries in milliseconds."""
    best = float("inf")
    for _ in range(TRIES):
        began = time.perf_counter()
        packs = method(rows, CAP)
        best = min(best, 1000 * (time.perf_counter() - began))
    return packs, best


def main() -> None:
    """Both, on the same rows."""
    start = time.perf_counter()
    rows = lengths(ROWS)
    (ours, milliseconds), (theirs, ffd_milliseconds) = (_timed(method, rows) for method in (pack, first_fit_decreasing))
    result = {
        "utilisation": utilisation(rows, ours),
        "milliseconds": milliseconds,
        "packs": len(ours),
        "ffd_utilisation": utilisation(rows, theirs),
        "ffd_milliseconds": ffd_milliseconds,
        "ffd_packs": len(theirs),
        "fewest_possible_packs": -(-sum(rows) // CAP),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
        },
    }
    print(json.dumps(result | {"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
