"""Rule 14: nothing about layout changes the update. The trainer's data plane against an unpadded loop on one process.

Per case: groups read in parts from a file, moved between ranks, packed into micro-batches, and each update's gradient
summed over ranks, in float64 and in float32, on 1 to 4 ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401  # loaded once, before the ranks are forked

from muster.config import RunConfig, parse
from muster.training import batch as batches
from muster.training import microbatch, trainer
from muster.training.engine import attention
from muster.training.engine.fsdp import Policy
from muster.training.loss import objective
from muster.training.model import Layout
from muster.training.ranks import Ranks
from tests.distributed.forked import ROOT, Forked
from tests.property import invariance_reference as reference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

RANKS = 4
MAX_NEW_TOKENS = 16


# --- What runs on the ranks


class Some(Ranks):
    """The first few ranks of the job, as if they were all."""

    @property
    def group(self) -> dist.ProcessGroup:
        return GROUPS[self.world_size]


GROUPS: dict[int, dist.ProcessGroup] = {}


def run_cases(
    seeds: list[int], worlds: list[int], mutation: str = "", holding: list[int] | None = None
) -> list[dict[str, Any]]:
    """Every case on every world size; per update, errors, the gradient's norm, and the tokens this rank trained on."""
    logging.disable(logging.WARNING)  # there are cases with fewer groups than updates
    for world in range(1, RANKS + 1):
        GROUPS[world] = dist.new_group(list(range(world)))
    models = {dtype: reference.tiny_model(dtype) for dtype in (torch.float64, torch.float32)}
    alone = reference.tiny_model(torch.float64)
    found = []
    for seed in seeds:
        case = reference.make_case(seed, holding)
        wanted: list[torch.Tensor] | None = None
        for world in worlds:
            if dist.get_rank() >= world:
                continue
            ranks = Some(dist.get_rank(), world, torch.device("cpu"))
            gradients = {dtype: update_gradients(case, ranks, model, mutation) for dtype, model in models.items()}
            if wanted is None and dist.get_rank() == seed % world:
                wanted = [
                    reference.gradient(alone, rows, case, max_new_tokens=MAX_NEW_TOKENS)
                    for rows in reference.survivors(case)
                ]
            for number, (gradient, tokens) in enumerate(gradients[torch.float64]):
                one = {"seed": seed, "world": world, "update": number, "tokens": tokens}
                one["updates"] = len(gradients[torch.float64])
                if wanted is not None:
                    norm = float(wanted[number].norm())
                    one["norm"] = norm
                    one["error64"] = float((gradient - wanted[number]).norm()) / norm
                    one["error32"] = float((gradients[torch.float32][number][0] - wanted[number]).norm()) / norm
                found.append(one)
    return found


def update_gradients(
    case: dict[str, Any], ranks: Ranks, model: Any, mutation: str
) -> list[tuple[torch.Tensor, list[float]]]:
    """Each update's gradient, as the trainer gets it, and the log-probs that name the tokens of this rank."""
    config = settings(case)
    shape = Layout(case["padded"], model.config.hidden_size)
    model.set_attn_implementation("sdpa" if case["padded"] else attention.NAME)
    policy = Policy(model, temperature=case["temperature"], chunk=case["chunk"], fp32_head=False)
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(
            pa.Table.from_pylist(case["rows"]), Path(folder) / "batch.parquet", row_group_size=case["row_group_size"]
        )
        read = held(case, Path(folder), ranks)
    balanced = microbatch.partition
    if case["any_placement"]:
        places = np.random.default_rng(case["seed"])
        microbatch.partition = lambda costs, k: anyhow(places, len(costs), k)  # type: ignore[assignment]
    try:
        updates, rows = trainer.share(read, config, ranks, version=0, seed=case["seed"], model=shape)
    finally:
        microbatch.partition = balanced
    results = []
    for update in updates:
        model.zero_grad(set_to_none=True)
        tokens: list[float] = []
        micros = list(update.micro_batches(rows, ranks))
        counts = update.counts
        if mutation == "denominator":
            mine = sum(int(micro.valid.sum()) for micro in micros)
            counts = dataclasses.replace(counts, tokens=max(1, mine), sequences=len(micros), slots=len(micros))
        for micro in micros:
            logprobs, entropies = policy(micro)
            behave = micro.behave.to(logprobs.dtype)
            loss, _ = objective(micro, behave, counts, config.training)(logprobs, entropies)
            loss.backward()
            tokens += micro.behave[micro.valid].tolist()
        if mutation == "twice" and ranks.rank == 0:
            tokens += tokens[:1]
        parameters = list(model.parameters())
        gradient = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
        ).double()
        dist.all_reduce(gradient, group=ranks.group)
        results.append((gradient, tokens))
    return results


def held(case: dict[str, Any], folder: Path, ranks: Ranks) -> batches.Batch:
    """The groups that a rank brings: its part of the file, or any; maybe none."""
    if case["holding"] is None and not case["any_holding"]:
        return batches.load(folder, version=0, longest=case["cap"], part=(ranks.rank, ranks.world_size))
    whole = batches.load(folder, version=0, longest=case["cap"])
    if case["holding"] is not None:
        holders = np.repeat(np.arange(ranks.world_size), case["holding"])
    else:
        holders = np.random.default_rng(case["seed"]).integers(0, ranks.world_size, len(whole.groups))
    rows = [
        whole.rows[row]
        for places, holder in zip(whole.groups.values(), holders, strict=True)
        if holder == ranks.rank
        for row in places
    ]
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group_id, []).append(index)
    return batches.Batch(rows, groups, whole.digest)


def settings(case: dict[str, Any]) -> RunConfig:
    training = {
        "updates_per_batch": case["updates"],
        "max_tokens_per_mb": case["cap"],
        "n_mbs": case["n_mbs"],
        "balance": case["balance"],
        "loss": {"aggregation": case["aggregation"], "clip_low": 0.5, "clip_high": 0.5},
    }
    rollout = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": case["temperature"]}
    return parse(str({"training": training, "rollout": rollout}))


def anyhow(random: np.random.Generator, n: int, k: int) -> list[list[int]]:
    """Any placement at all."""
    places = random.integers(0, k, n)
    return [np.flatnonzero(places == part).tolist() for part in range(k)]


# --- What must hold


def check(results: list[list[dict[str, Any]]], holding: list[int] | None = None) -> dict[str, float]:
    """Errors, and that every token of every survivor was trained on by exactly one rank; the largest errors."""
    worst = {"error64": 0.0, "error32": 0.0}
    by_update: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for one in itertools.chain.from_iterable(results):
        by_update.setdefault((one["seed"], one["world"], one["update"]), []).append(one)
    for (seed, world, number), ranks in by_update.items():
        name = f"case {seed} on {world} ranks, update {number}"
        rows = reference.survivors(reference.make_case(seed, holding))
        assert len(ranks) == world, name
        assert ranks[0]["updates"] == len(rows), name
        sets = [set(one["tokens"]) for one in ranks]
        assert sum(map(len, sets)) == sum(len(one["tokens"]) for one in ranks), f"{name}: a rank has a token twice"
        for one, other in itertools.combinations(sets, 2):
            assert not one & other, f"{name}: two ranks have the same token"
        survived = [
            logprob
            for row in rows[number]
            for logprob, counted in zip(row["logprobs"], row["loss_mask"], strict=True)
            if counted
        ]
        assert len(set(survived)) == len(survived), f"{name}: the case cannot tell its tokens apart"
        assert set.union(*sets) == set(survived), f"{name}: not the survivors' tokens"
        compared = [one for one in ranks if "norm" in one]
        assert compared, name
        for one in compared:
            assert one["norm"] > 1e-8, f"{name}: no gradient to compare"  # one sure token has a small one
            assert one["error64"] <= 1e-10, f"{name}: float64 differs by {one['error64']:.3g}"
            assert one["error32"] <= 1e-5, f"{name}: float32 differs by {one['error32']:.3g}"
            worst = {kind: max(worst[kind], one[kind]) for kind in worst}
    return worst


@pytest.fixture(scope="module")
def ranks() -> Iterator[Forked]:
    with Forked() as forked:
        yield forked


def test_forty_cases_give_one_and_the_same_update_on_1_to_4_ranks(ranks: Forked) -> None:
    check(ranks.results(run_cases, RANKS, seeds=list(range(40)), worlds=[4, 3, 2, 1], limit=300))


@pytest.mark.full
def test_two_thousand_cases_give_one_and_the_same_update_on_1_to_4_ranks(ranks: Forked) -> None:
    for start in range(40, 2040, 100):
        seeds = list(range(start, start + 100))
        worst = check(ranks.results(run_cases, RANKS, seeds=seeds, worlds=[4, 3, 2, 1], limit=400, timeout=60))
        print(f"cases {start} to {start + 99}: largest errors {worst}", flush=True)


@pytest.mark.parametrize("holding", [[2, 1], [0, 1], [0, 5, 0, 1], [7, 0]], ids=lambda one: "-".join(map(str, one)))
def test_ranks_that_bring_different_numbers_of_groups_make_the_same_update(ranks: Forked, holding: list[int]) -> None:
    world = len(holding)
    check(ranks.results(run_cases, RANKS, seeds=[1, 2], worlds=[world], holding=holding, limit=60), holding)


def test_a_denominator_that_is_not_global_is_found_out(ranks: Forked) -> None:
    results = ranks.results(run_cases, RANKS, seeds=[0, 1], worlds=[2], mutation="denominator", limit=60)
    with pytest.raises(AssertionError, match="float64 differs by"):
        check(results)


def test_a_token_trained_on_twice_is_found_out(ranks: Forked) -> None:
    results = ranks.results(run_cases, RANKS, seeds=[0], worlds=[2], mutation="twice", limit=60)
    with pytest.raises(AssertionError, match="a rank has a token twice"):
        check(results)


def test_the_reference_imports_nothing_of_what_it_checks() -> None:
    code = (
        "import sys; from tests.property import invariance_reference as r; r.tiny_model(r.torch.float64); "
        "print([name for name in sys.modules if name.startswith('muster')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[]", done.stderr
