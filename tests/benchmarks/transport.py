"""What moving groups between ranks costs: `python -m tests.benchmarks.transport`.

Four ranks on this machine over gloo, about 64 MB of rows of which one rank holds 70 %. Beside ours, padded all-gathers
written here: `padded_gather` pads every rank's rows to the longest row and the largest number of rows, one collective a
column, as trainers do that need equal ranks; `flat_gather` is kinder to them: rows end to end, padded only to the
largest rank. All times are from groups of rows to groups of rows, best of several tries in turns, slowest rank.

Bytes received count whatever a collective wrote on a rank, its own part included, lengths too. Peak memory is that of
the process beyond what it held before the call (`VmHWM`).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from muster.training import transport
from muster.training.partition import partition
from tests.distributed.forked import Forked

RANKS, SLOTS, TRIES = 4, 8, 5
GROUPS = 184
LONGEST = 4096
COLUMNS = {
    "ids": torch.int64,
    "mask": torch.bool,
    "logprobs": torch.float32,
    "advantages": torch.float32,
    "versions": torch.int32,
}

Groups = list[list[dict[str, Any]]]


def lengths(groups: int) -> np.ndarray:
    """Tokens of every row, `[groups, SLOTS]`."""
    drawn = np.random.RandomState(0).lognormal(7.5, 0.9, groups * SLOTS)
    return np.clip(drawn, 16, LONGEST).astype(int).reshape(groups, SLOTS)


def owners(groups: int) -> np.ndarray:
    """The rank that holds each group: 70 % on rank 0."""
    return np.searchsorted([0.7, 0.8, 0.9], np.arange(groups) / groups, side="right")


def made(groups: int, rank: int) -> tuple[Groups, list[int]]:
    """What a rank holds at first, and the tokens of each of its groups."""
    sizes = lengths(groups)[owners(groups) == rank]
    random = torch.Generator().manual_seed(rank)
    batch = [
        [
            {
                "slot": slot,
                **{
                    name: torch.randint(0, 2, (int(tokens),), generator=random).to(dtype)
                    for name, dtype in COLUMNS.items()
                },
            }
            for slot, tokens in enumerate(group)
        ]
        for group in sizes
    ]
    return batch, sizes.sum(1).tolist()


def ours(batch: Groups, costs: list[int]) -> Groups:
    """The transport."""
    return transport.redistribute(batch, group=dist.group.WORLD, costs=costs)


def padded_gather(batch: Groups, costs: list[int]) -> Groups:
    """Every column as `[rows, longest]`, equally many rows on every rank, gathered by everybody."""
    sizes = [[len(row["ids"]) for row in group] for group in batch]
    told = _told(sizes)
    rows = max(sum(map(len, one)) for one in told)
    longest = max(n for one in told for group in one for n in group)
    mine = [row for group in batch for row in group]
    gathered = {}
    for name, dtype in COLUMNS.items():
        padded = torch.zeros(rows, longest, dtype=dtype)
        for index, row in enumerate(mine):
            padded[index, : len(row[name])] = row[name]
        parts = [torch.empty_like(padded) for _ in range(RANKS)]
        dist.all_gather(parts, padded)
        gathered[name] = parts
    held = []
    for rank, first, group in _assigned(told):
        columns = {
            name: [parts[rank][first + i, :n].clone() for i, n in enumerate(group)] for name, parts in gathered.items()
        }
        held.append([{name: column[i] for name, column in columns.items()} for i in range(len(group))])
    return held


def flat_gather(batch: Groups, costs: list[int]) -> Groups:
    """Every column end to end, padded to the rank with most tokens, gathered by everybody."""
    sizes = [[len(row["ids"]) for row in group] for group in batch]
    told = _told(sizes)
    most = max(sum(map(sum, one)) for one in told)
    gathered = {}
    for name, dtype in COLUMNS.items():
        flat = torch.zeros(most, dtype=dtype)
        if batch:
            whole = torch.cat([row[name] for group in batch for row in group])
            flat[: len(whole)] = whole
        parts = [torch.empty_like(flat) for _ in range(RANKS)]
        dist.all_gather(parts, flat)
        gathered[name] = [
            part[: sum(map(sum, one))].split([n for group in one for n in group])
            for part, one in zip(parts, told, strict=True)
        ]
    return [
        [{name: parts[rank][first + i].clone() for name, parts in gathered.items()} for i in range(len(group))]
        for rank, first, group in _assigned(told)
    ]


def _told(sizes: list[list[int]]) -> list[list[list[int]]]:
    """Row lengths of all ranks."""
    told: list[Any] = [None] * RANKS
    dist.all_gather_object(told, sizes)
    return told


def _assigned(told: list[list[list[int]]]) -> list[tuple[int, int, list[int]]]:
    """(holder, its first row there, row lengths) of the groups that this rank gets."""
    all_groups = []
    for rank, one in enumerate(told):
        first = 0
        for group in one:
            all_groups.append((rank, first, group))
            first += len(group)
    return [all_groups[g] for g in partition([sum(group) for _, _, group in all_groups], RANKS)[dist.get_rank()]]


# --- Measuring


def measure(groups: int) -> dict[str, Any]:
    """One rank's figures."""
    batch, costs = made(groups, dist.get_rank())
    methods: dict[str, Callable[[Groups, list[int]], Groups]] = {
        "": ours,
        "padded_gather_": padded_gather,
        "flat_gather_": flat_gather,
    }
    ours(*made(RANKS, dist.get_rank()))  # loads what is loaded late, before memory is watched
    best = dict.fromkeys(methods, float("inf"))
    result: dict[str, Any] = {"own": _bytes(batch)}
    for attempt in range(TRIES):
        for name, method in methods.items():
            if attempt == 0:
                before = _watch_memory()
                with _watched() as seen:
                    held = method(batch, costs)
                result[f"{name}peak"] = _memory("VmHWM") - before
                result[f"{name}received"], result[f"{name}collectives"] = seen["bytes"], seen["collectives"]
                result["assigned"] = _bytes(held)
            else:
                dist.barrier()
                began = time.perf_counter()
                held = method(batch, costs)
                best[name] = min(best[name], time.perf_counter() - began)
            del held
    return result | {f"{name}seconds": seconds for name, seconds in best.items()}


def count(groups: int) -> int:
    """Collectives of our transport for so many groups."""
    batch, costs = made(groups, dist.get_rank())
    with _watched() as seen:
        ours(batch, costs)
    return int(seen["collectives"])


def _bytes(batch: Groups) -> int:
    return sum(v.nbytes for group in batch for row in group for v in row.values() if isinstance(v, torch.Tensor))


@contextlib.contextmanager
def _watched() -> Any:
    """Counts collectives, and the bytes that they write here."""
    seen = {"collectives": 0, "bytes": 0}
    whole = {
        name: getattr(dist, name) for name in ("all_gather", "all_to_all_single", "broadcast", "all_gather_object")
    }

    def watched(name: str) -> Callable[..., Any]:
        def call(output: Any, *given: Any, **named: Any) -> Any:
            seen["collectives"] += 1
            if name != "all_gather_object":
                seen["bytes"] += sum(one.nbytes for one in output) if isinstance(output, list) else output.nbytes
            return whole[name](output, *given, **named)

        return call

    for name in whole:
        setattr(dist, name, watched(name))
    try:
        yield seen
    finally:
        for name, original in whole.items():
            setattr(dist, name, original)


def _watch_memory() -> int:
    """Lets the peak start anew from now; bytes held now."""
    with contextlib.suppress(OSError):  # where that is not allowed, earlier peaks count too
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main() -> None:
    """All ranks, and what they say together."""
    start = time.perf_counter()
    with Forked() as forked:
        ranks = forked.results(measure, RANKS, groups=GROUPS, limit=300, timeout=120)
        counts = {groups: forked.results(count, RANKS, groups=groups)[0] for groups in (1, 20, GROUPS)}
    received = [one["received"] for one in ranks]
    assigned = [one["assigned"] for one in ranks]
    seconds = max(one["seconds"] for one in ranks)
    padded = max(one["padded_gather_seconds"] for one in ranks)
    result = {
        "ranks": RANKS,
        "groups": GROUPS,
        "bytes": sum(one["own"] for one in ranks),
        "share_on_one_rank": max(one["own"] for one in ranks) / sum(one["own"] for one in ranks),
        "bytes_assigned": assigned,
        "bytes_received": received,
        "received_over_assigned": max(a / b for a, b in zip(received, assigned, strict=True)),
        "collectives": ranks[0]["collectives"],
        "collectives_by_groups": counts,
        "seconds": seconds,
        "padded_gather_seconds": padded,
        "padded_gather_ratio": padded / seconds,
        "flat_gather_seconds": max(one["flat_gather_seconds"] for one in ranks),
        "flat_gather_ratio": max(one["flat_gather_seconds"] for one in ranks) / seconds,
        "peak_bytes": [one["peak"] for one in ranks],
        "own_plus_assigned_bytes": [one["own"] + one["assigned"] for one in ranks],
        "peak_over_own_plus_assigned": max(one["peak"] / (one["own"] + one["assigned"]) for one in ranks),
        "padded_gather_peak_bytes": [one["padded_gather_peak"] for one in ranks],
        "padded_gather_bytes_received": [one["padded_gather_received"] for one in ranks],
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
        },
        "benchmark_seconds": time.perf_counter() - start,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
