"""Rows moved between real ranks over gloo: everything arrives where it was assigned, or everybody hears why not."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from muster.errors import DependencyDied, InvalidInput, MusterError, Stalled
from muster.training import transport
from muster.training.partition import partition
from tests.distributed.forked import Forked

pytestmark = pytest.mark.slow

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.int32, torch.uint8),
    *(torch.float16, torch.complex128, torch.float8_e4m3fn),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Forked]:
    with Forked() as forked:
        yield forked


# --- What runs on the ranks


def made(number: int, rows: int | None = None) -> list[dict[str, Any]]:
    """Group `number`: the same wherever it is made. Ragged, with columns that only some rows have."""
    random = torch.Generator().manual_seed(number)
    group = []
    for slot in range(number % 4 + 1 if rows is None else rows):
        tokens = int(torch.randint(1, 30, (), generator=random))
        dtype = DTYPES[(number + slot) % len(DTYPES)]
        row: dict[str, Any] = {
            "group_id": f"groupe-é-{number}",
            "slot": slot,
            "ids": torch.randint(0, 1000, (tokens,), generator=random),
            "mask": torch.rand(tokens, generator=random) < 0.5,
            "logprobs": torch.randn(tokens, generator=random),
            "reward": math.nan if slot == 1 else 0.1 + number,
            "failure": None,
            "tools": [{"name": "search", "strict": True}],
            "half": torch.randn(tokens, generator=random).to(torch.bfloat16),
            "array": np.arange(tokens, dtype=np.float32)[::-1],
            "scalar": torch.tensor(number),
        }
        if slot % 2:
            row[f"unknown-{number}"] = torch.randn(3, tokens, generator=random).to(dtype)
            row["empty"] = torch.zeros(0, 4, dtype=torch.int32)
        group.append(row)
    return group


def digest(group: list[dict[str, Any]]) -> str:
    """Everything about a group: column order, kinds, dtypes, shapes, bits."""
    said = hashlib.sha256()
    for row in group:
        for name, value in row.items():
            if isinstance(value, np.ndarray):
                said.update(f"{name} array {value.dtype} {value.shape}".encode() + value.tobytes())
            elif isinstance(value, torch.Tensor):
                flat = value.detach().contiguous().reshape(-1)
                said.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                said.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
            else:
                said.update(f"{name} {json.dumps(value)}".encode())
    return said.hexdigest()


def counted() -> dict[str, int]:
    """Counts the collectives from now on."""
    counts: dict[str, int] = {}
    for name in ("all_gather", "all_to_all_single", "broadcast", "all_reduce", "barrier", "all_gather_object"):
        whole = getattr(dist, name)

        def counting(*given: Any, _whole: Any = whole, _name: str = name, **named: Any) -> Any:
            counts[_name] = counts.get(_name, 0) + 1
            return _whole(*given, **named)

        setattr(dist, name, counting)
    return counts


def moved(sizes: list[int], lengths: list[int]) -> dict[str, Any]:
    """Rank r brings `sizes[r]` groups; what it holds afterwards."""
    rank = dist.get_rank()
    start = sum(sizes[:rank])
    mine = range(start, start + sizes[rank])
    batch = [made(number) for number in mine]
    before = [digest(group) for group in batch]
    counts = counted()
    held = transport.redistribute(batch, group=dist.group.WORLD, costs=[lengths[number] for number in mine])
    assert before == [digest(group) for group in batch]
    storages = {
        value.untyped_storage().data_ptr() for group in held for row in group for value in row.values()
        if isinstance(value, torch.Tensor) and value.numel()
    }  # fmt: skip
    bytes_held = sum(
        value.numel() * value.element_size() for group in held for row in group for value in row.values()
        if isinstance(value, torch.Tensor)
    )  # fmt: skip
    for group in held:
        for row in group:
            row["ids"] += 1  # a rank may write into what it holds
            row["ids"] -= 1
    storage_bytes = max((held[0][0]["ids"].untyped_storage().nbytes() if held else 0), 0)
    return {
        "held": {group[0]["group_id"]: digest(group) for group in held},
        "collectives": counts,
        "storages": len(storages),
        "bytes": [bytes_held, storage_bytes],
    }


def with_subgroups() -> dict[str, Any]:
    """Two process groups of two ranks, each moving its own rows at the same time."""
    pairs = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    which = dist.get_rank() % 2
    place = dist.get_rank(pairs[which])
    batch = [made(10 * which + number) for number in range(3)] if place == 1 else []
    held = transport.redistribute(batch, group=pairs[which], costs=[1] * len(batch))
    return {"held": {group[0]["group_id"]: digest(group) for group in held}}


def with_peers(fault: str = "") -> dict[str, Any]:
    """Two data-parallel heads (ranks 0 and 2), each with a tensor peer (1 and 3)."""
    models = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    counts = counted()
    batch = [made(number) for number in range(5)] if rank == 0 else []
    if fault and rank == 2:
        batch = [[{"x": object()}]]
    held = transport.redistribute(batch, group=data[rank % 2], costs=[3] * len(batch), model_group=models[rank // 2])
    return {"held": {group[0]["group_id"]: digest(group) for group in held}, "collectives": counts}


def failing(what: str) -> list[str]:
    """Something goes wrong on rank 1 alone; what each rank raises."""
    rank = dist.get_rank()
    batch: Any = [made(rank)]
    costs = [5.0]
    try:
        if what == "column" and rank == 1:
            batch[0][0]["weird"] = object()
        if what == "costs" and rank == 1:
            costs = []
        if what == "not a number":
            costs = [math.nan if rank == 1 else 1.0]
        if what == "memory" and rank == 1:
            transport._fill = broken(MemoryError("no room for the send buffer"))  # type: ignore[assignment]
        if what == "opening" and rank == 1:
            transport._rebuild = broken(KeyError("column"))  # type: ignore[assignment]
        if what == "none":
            batch, costs = [], []
        if what in ("input", "several", "died"):
            with transport.raised_by_all(dist.group.WORLD):
                if what == "input" and rank == 1:
                    raise InvalidInput(["file: row 3: broken", "file: row 5: broken"])
                if what == "several":
                    raise InvalidInput(["file: cannot be read", f"file: row {rank}: broken"])
                if what == "died" and rank == 1:
                    raise DependencyDied("the storage is gone", "EIO")
        transport.redistribute(batch, group=dist.group.WORLD, costs=costs)
    except Exception as error:
        code = error.exit_code if isinstance(error, MusterError) else None
        dist.barrier()  # nobody is left inside a collective
        return [type(error).__name__, str(error), str(code), str(isinstance(error, Stalled))]
    return ["nothing", "", "", ""]


def soak(rounds: int) -> dict[str, Any]:
    """Random holdings and costs, again and again; faults found, and how much memory each third of the rounds added."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    random = np.random.default_rng(0)  # the same on every rank
    true = [digest(made(number)) for number in range(30)]
    faults, memory = 0, []
    for number in range(rounds):
        groups = random.choice(30, int(random.integers(1, 30)), replace=False).tolist()
        holders = random.integers(0, ranks, len(groups)) if number % 3 else np.zeros(len(groups), dtype=int)
        costs = random.integers(0, 50, len(groups)).tolist()
        order = np.argsort(holders, kind="stable")
        mine = [i for i in order if holders[i] == rank]
        held = transport.redistribute(
            [made(groups[i]) for i in mine], group=dist.group.WORLD, costs=[costs[i] for i in mine]
        )
        part = partition([costs[i] for i in order], ranks)[rank]
        faults += [digest(group) for group in held] != [true[groups[order[i]]] for i in part]
        if number % (rounds // 3) == rounds // 3 - 1:
            memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    return {"faults": faults, "grown": memory[-1] - memory[0]}


def broken(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def killed(collective: int, victim: int, peers: bool = False) -> None:
    """The victim is killed inside the n-th collective, while the others have not come yet or wait."""
    rank, calls = dist.get_rank(), [0]
    models = [dist.new_group([0, 1]), dist.new_group([2, 3])] if peers else None
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])] if peers else None
    for name in ("all_gather", "all_to_all_single", "broadcast"):
        whole = getattr(dist, name)

        def deadly(*given: Any, _whole: Any = whole, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == collective and rank == victim:
                threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGKILL)).start()
            elif calls[0] == collective and rank == (victim + 1) % dist.get_world_size():
                time.sleep(0.3)  # the victim is inside and waits for this one
            return _whole(*given, **named)

        setattr(dist, name, deadly)
    batch = [made(number) for number in range(6)] if rank == 0 else []
    for _ in range(50):
        transport.redistribute(
            batch,
            group=data[rank % 2] if data else dist.group.WORLD,
            costs=[1] * len(batch),
            model_group=models[rank // 2] if models else None,
        )


# --- What must hold


def wanted(sizes: list[int], lengths: list[int]) -> list[dict[str, str]]:
    parts = partition(lengths, len(sizes))
    return [{made(number)[0]["group_id"]: digest(made(number)) for number in part} for part in parts]


@pytest.mark.parametrize(
    "sizes", [[2, 1], [0, 1], [0, 5, 0, 1], [1], [3, 3, 3], [7, 0]], ids=lambda sizes: "-".join(map(str, sizes))
)
def test_every_group_arrives_whole_where_partition_puts_it(ranks: Forked, sizes: list[int]) -> None:
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, 100, sum(sizes))]
    results = ranks.results(moved, len(sizes), sizes=sizes, lengths=lengths)
    assert [one["held"] for one in results] == wanted(sizes, lengths)
    assert all(one["storages"] <= 1 for one in results), "a rank's rows are views into one buffer of its own"
    assert all(storage < 1.5 * held + 4096 for held, storage in (one["bytes"] for one in results))


def test_f18_206_items_on_4_ranks_with_collectives_that_do_not_grow(ranks: Forked) -> None:
    lengths = [int(n) for n in np.random.default_rng(1).lognormal(5, 0.9, 206)]
    sizes = [6, 100, 0, 100]
    results = ranks.results(moved, 4, sizes=sizes, lengths=lengths)
    assert [one["held"] for one in results] == wanted(sizes, lengths)
    few = ranks.results(moved, 4, sizes=[1, 0, 0, 0], lengths=[5])
    for one in (*results, *few):
        assert one["collectives"] == {"all_gather": 4, "all_to_all_single": 1}


def test_f21_lengths_3_and_5_are_exchanged(ranks: Forked) -> None:
    results = ranks.results(moved, 2, sizes=[1, 1], lengths=[3, 5])
    assert [len(one["held"]) for one in results] == [1, 1]
    assert [one["held"] for one in results] == wanted([1, 1], [3, 5])


def test_any_process_group_will_do(ranks: Forked) -> None:
    results = ranks.results(with_subgroups, 4)
    for which, (first, second) in enumerate([(0, 2), (3, 1)]):
        held = {**results[first]["held"], **results[second]["held"]}
        assert held == {made(10 * which + n)[0]["group_id"]: digest(made(10 * which + n)) for n in range(3)}
        assert sorted(len(results[rank]["held"]) for rank in (first, second)) == [1, 2]


def test_only_heads_exchange_and_their_peers_get_the_same(ranks: Forked) -> None:
    results = ranks.results(with_peers, 4)
    assert results[0]["held"] == results[1]["held"]
    assert results[2]["held"] == results[3]["held"]
    assert results[0]["held"] | results[2]["held"] == {made(n)[0]["group_id"]: digest(made(n)) for n in range(5)}
    assert [one["collectives"].get("all_to_all_single", 0) for one in results] == [1, 0, 1, 0]


def test_a_failing_head_is_heard_by_every_peer(ranks: Forked) -> None:
    ended = ranks.run(with_peers, 4, fault="column")
    assert [one.code for one in ended] == [1] * 4
    assert all("a column holds what cannot be moved" in one.error for one in ended)
    assert all("RankFailed: rank 2: TypeError" in ended[rank].error for rank in (0, 1, 3))


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("column", "TypeError", "group 0: a column holds what cannot be moved"),
        ("costs", "ValueError", "0 costs for 1 groups; there must be one for each"),
        ("memory", "MemoryError", "no room for the send buffer"),
        ("opening", "KeyError", "column"),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_every_rank_with_its_text(
    ranks: Forked, what: str, kind: str, words: str
) -> None:
    results = ranks.results(failing, 3, what=what)
    assert results[1][0] == kind
    for rank in (0, 2):
        assert results[rank][0] == "RankFailed"
        assert f"rank 1: {kind}: " in results[rank][1]
    assert all(words in one[1] for one in results)


def test_user_errors_keep_their_kind_and_exit_code_everywhere(ranks: Forked) -> None:
    assert (
        ranks.results(failing, 3, what="input")
        == [["InvalidInput", "file: row 3: broken\nfile: row 5: broken", "2", "False"]] * 3
    )
    lines = ["file: cannot be read", "file: row 0: broken", "file: row 1: broken", "file: row 2: broken"]
    assert ranks.results(failing, 3, what="several") == [["InvalidInput", "\n".join(lines), "2", "False"]] * 3
    died = ranks.results(failing, 3, what="died")
    assert {(text, code) for _, text, code, _ in died} == {("the storage is gone\n--- its last words ---\nEIO", "4")}


def test_no_groups_anywhere_is_the_same_clear_error_on_every_rank(ranks: Forked) -> None:
    results = ranks.results(failing, 3, what="none")
    assert results[0] == results[1] == results[2]
    assert results[0][0] == "Stalled"
    assert "none of the 3 ranks holds a group" in results[0][1]


def test_a_cost_that_is_not_a_number_is_refused_alike(ranks: Forked) -> None:
    results = ranks.results(failing, 3, what="not a number")
    assert results == [["ValueError", "costs[1] is nan; a cost is finite and not negative", "None", "False"]] * 3


@pytest.mark.parametrize("collective", range(1, 6))
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_inside_a_collective_ends_all_others_in_time(ranks: Forked, collective: int, victim: int) -> None:
    """The collectives: two for lengths, one before and one after the rows, and the rows between them."""
    ended = ranks.run(killed, 3, collective=collective, victim=victim, limit=30, timeout=5)
    assert not any(one.late for one in ended)
    assert ended[victim].code == -signal.SIGKILL
    for rank, one in enumerate(ended):
        if rank != victim:
            assert one.code == 1
            assert "RuntimeError" in one.error or "DistBackendError" in one.error or "DistNetworkError" in one.error
            assert one.seconds < 5 + 3


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_thousand_rounds_lose_nothing_and_grow_nothing(ranks: Forked) -> None:
    for one in ranks.results(soak, 4, rounds=999, limit=500):
        assert one["faults"] == 0
        assert one["grown"] < 8e6


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("collective", range(1, 24))
def test_a_peer_or_head_killed_inside_any_collective_ends_all_others_in_time(
    ranks: Forked, collective: int, victim: int
) -> None:
    ended = ranks.run(killed, 4, collective=collective, victim=victim, peers=True, limit=40, timeout=5)
    assert not any(one.late for one in ended)
    assert ended[victim].code == -signal.SIGKILL
    # who does not talk to the victim directly may wait for somebody who has died of it
    assert all(one.code == 1 and one.seconds < 2 * 5 + 5 for rank, one in enumerate(ended) if rank != victim)
