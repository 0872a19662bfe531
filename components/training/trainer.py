"""One training job: a batch for version K -> the policy of version K + 1. Read `train` from top to bottom.

Every rank runs this file; what it says in the plural is done by all together. Collecting, advantages and serving are
elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.config import RunConfig
from muster.errors import InvalidInput, Stalled
from muster.layout import RunDirectory
from muster.training import batch as batches
from muster.training import checkpoint, engine, files, transport
from muster.training.batch import Batch, Outline, Row
from muster.training.export import export
from muster.training.loss import Counts, objective
from muster.training.microbatch import MicroBatch, build, pack, pack_padded, schedule
from muster.training.model import Layout, layout
from muster.training.partition import attention_costs
from muster.training.ranks import Ranks
from muster.training.schedule import learning_rate

log = logging.getLogger("muster.training")

Report = Callable[[Mapping[str, Any]], None]
"""Gets the metrics of each update, on rank 0, after reduction over all ranks."""


def train(config: RunConfig, version: int, batch_dir: Path, ranks: Ranks, report: Report) -> dict[str, Any] | None:
    """Trains version `version` on a batch and writes version `version + 1`: weights, checkpoint, train.json.

    Starting again with the same inputs gives the same version; if it is complete already, nothing is done.

    Args:
        config: the run.
        version: what the batch was collected for.
        batch_dir: a training batch directory.
        ranks: this process among the others.
        report: called on rank 0 after each update.

    Returns:
        On rank 0, what `train.json` says; None if there was nothing left to do.

    Raises:
        InvalidInput: the batch, the weights or the checkpoint cannot be used.
        Stalled: an update has no token to train on.
        DependencyDied: the storage failed.
    """
    assert config.run is not None
    places, clock, settings = RunDirectory(config.run.root), Clock(), config.training
    seed = config.data.seed if config.data else 0

    # 1. Load: the batch, read in parts, cut into updates and placed on ranks, then the policy and its optimizer.
    with clock("load"):
        with transport.raised_by_all(ranks.group):
            part = (ranks.rank, ranks.world_size)
            batch = batches.load(batch_dir, version=version, longest=settings.max_tokens_per_mb, part=part)
            inputs = _inputs(config, batch, places.weights(version))
            model = layout(places.weights(version))
        if ranks.from_first(int(_is_complete(places, version + 1, inputs))):
            log.info("version %d is complete already, from the same batch and settings", version + 1)
            return None
        updates, rows = share(batch, config, ranks, version=version, seed=seed, model=model)
        del batch
        policy = engine.build(config, places.weights(version), ranks)
        with transport.raised_by_all(ranks.group):
            _check_vocabulary(rows.values(), policy, batch_dir)
        applied = skipped = 0
        if version > 0:
            state = checkpoint.load(policy, places.checkpoint(version), version)
            applied, skipped = state.optimizer_steps, state.skipped
    total = settings.steps * settings.updates_per_batch

    # 2. The proximal policy, once per batch and before it changes: as sampled, or computed by ourselves.
    prox: dict[tuple[int, int], Tensor] = {}
    if settings.loss.prox == "recompute":
        with clock("prox"):
            for number, update in enumerate(updates):
                for slot, micro in enumerate(update.micro_batches(rows, ranks)):
                    prox[number, slot] = policy.logprobs(micro)

    # 3. Update by update: forward and backward over this rank's micro-batches, then one optimizer step by all.
    history: list[dict[str, Any]] = []
    for number, update in enumerate(updates):
        started = time.perf_counter()
        sums = Sums(ranks.device)
        with clock("forward_backward"):
            for slot, micro in enumerate(update.micro_batches(rows, ranks)):
                loss = objective(micro, prox.get((number, slot), micro.behave), update.counts, settings)
                sums.add(policy.forward_backward(micro, loss))
        with clock("optimizer"):
            lr = learning_rate(applied, total, settings.optimizer)
            norm, stepped = policy.step(lr)
        applied, skipped = applied + stepped, skipped + (not stepped)
        if not stepped:
            log.warning("update %d of version %d: the gradient is not finite, the step is skipped", number, version)
        totals = sums.reduced()
        metrics = update.metrics(totals) | {
            "update": number,
            "lr": lr,
            "grad_norm": norm,
            "applied": stepped,
            "optimizer_step": applied,
            "seconds": time.perf_counter() - started,
        }
        if number == 0:
            metrics["logprob_drift"] = update.drift(totals)
        history.append(_finite(metrics))
        if ranks.first:
            report(history[-1])

    # 4. Make it last: what servers load, what the next job continues from, and the word that both are there.
    with clock("export"):
        export(policy, config, ranks, version=version + 1, directory=places.weights(version + 1))
    with clock("checkpoint"):
        assert config.model is not None
        state = checkpoint.State(
            version=version + 1,
            optimizer_steps=applied,
            skipped=skipped,
            seed=seed,
            world_size=ranks.world_size,
            masters=config.model.dtype != "float32",
        )
        checkpoint.save(policy, state, ranks, places.checkpoint(version + 1))
    result: dict[str, Any] | None = None
    if ranks.first:
        result = {
            "version": version + 1,
            "updates": history,
            "optimizer_steps_total": applied,
            "skipped": sum(not item["applied"] for item in history),
            "skipped_total": skipped,
            "logprob_drift": history[0]["logprob_drift"],
            "seconds": clock.seconds,
            "tokens": {kind: sum(item["tokens"][kind] for item in history) for kind in ("total", "valid", "masked")},
            "world_size": ranks.world_size,
            "inputs": inputs,
        }
        files.write_json(places.training(version), result)
        checkpoint.collect_old(
            places.root / "weights",
            places.root / "checkpoints",
            version=version + 1,
            keep=settings.checkpoint.keep,
        )
    ranks.barrier()
    return result


def prepare(config: RunConfig, ranks: Ranks) -> None:
    """Exports `model.path` as version 0, untied and with its probe; nothing is trained.

    Raises:
        InvalidInput: the model cannot be trained.
        DependencyDied: the storage failed.
    """
    assert config.model is not None
    assert config.run is not None
    policy = engine.build(config, config.model.path, ranks)
    export(policy, config, ranks, version=0, directory=RunDirectory(config.run.root).weights(0))
    ranks.barrier()


@dataclass(frozen=True)
class Update:
    """One optimizer step's share of a batch.

    Attributes:
        placed: `[rank][micro-batch]` lists of row indexes, equally many micro-batches on every rank.
        padded: whether the rows of a micro-batch are padded, not laid end to end.
        counts: what its loss is divided by.
        tokens: completion tokens `total`, `valid` and `masked`.
        reward: mean reward over its slots; NaN when the file has none.
        imbalance: tokens of the fullest rank / mean tokens of a rank.
    """

    placed: list[list[list[int]]]
    padded: bool
    counts: Counts
    tokens: dict[str, int]
    reward: float
    imbalance: float

    def micro_batches(self, rows: Mapping[int, Row], ranks: Ranks) -> Iterator[MicroBatch]:
        """This rank's micro-batches, as tensors, from the rows that it holds."""
        for chosen in self.placed[ranks.rank]:
            yield build([rows[row] for row in chosen], ranks.device, padded=self.padded)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, Any]:
        """Means over the update's valid tokens, from sums over all ranks and micro-batches."""
        n = self.counts.tokens
        return {
            "loss": sums["loss"],
            "clip_ratio": sums["clipped"] / n,
            "rejected_ratio": sums["rejected"] / n,
            "entropy": sums["entropy"] / n,
            "approx_kl": sums["approx_kl"] / n,
            "importance_weight": sums["importance_weight"] / n,
            "behaviour_weight": sums["behaviour_weight"] / n,
            "reward": self.reward,
            "tokens": self.tokens,
            "load_imbalance": self.imbalance,
            "micro_batches": len(self.placed[0]),
        }

    def drift(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Trainer's minus sampler's log-prob, mean over valid tokens; drift only before the first step of a batch."""
        return {kind: sums[f"drift_{kind}"] / self.counts.tokens for kind in ("signed", "absolute")}


def share(
    batch: Batch, config: RunConfig, ranks: Ranks, *, version: int, seed: int, model: Layout
) -> tuple[list[Update], dict[int, Row]]:
    """Moves every group from the rank that has read it to the rank that trains on it. Collective.

    Args:
        batch: the part of the batch that this rank has read.
        config: the run.
        ranks: this process among the others.
        version: what the batch was collected for.
        seed: `data.seed`.
        model: how its rows are laid out.

    Returns:
        All updates, the same on every rank, and the rows that this rank holds for them, by their number in the plan.

    Raises:
        InvalidInput: the ranks do not see the same file.
        Stalled: an update has no valid token.
    """
    manifest = transport.announce(
        [[vars(batch.rows[row]) for row in group] for group in batch.groups.values()],
        group=ranks.group,
        costs=[sum(batch.rows[row].length for row in group) for group in batch.groups.values()],
        notes=batches.notes(batch),
    )
    outline = batches.outline(manifest.notes)
    updates = plan(outline, config, ranks.world_size, version=version, seed=seed, model=model)
    trains = {row: rank for one in updates for rank, mine in enumerate(one.placed) for chosen in mine for row in chosen}
    parts: list[list[int]] = [[] for _ in range(ranks.world_size)]
    for number, (name, _) in enumerate(manifest.notes):
        parts[trains[outline.groups[name][0]]].append(number)
    numbers = {(row.group_id, row.slot, row.row): number for number, row in enumerate(outline.rows)}
    held = [Row(**columns) for group in transport.deliver(manifest, parts) for columns in group]
    return updates, {numbers[row.group_id, row.slot, row.row]: row for row in held}


def plan(
    batch: Batch | Outline, config: RunConfig, world_size: int, *, version: int, seed: int, model: Layout
) -> list[Update]:
    """Cuts a batch into updates and places each on the ranks; the same answer on every rank.

    Raises:
        InvalidInput: `training.balance` asks for what the model does not tell.
        Stalled: an update has no valid token.
    """
    settings = config.training
    cuts = batches.cut(list(batch.groups), settings.updates_per_batch, seed=seed, version=version)
    if len(cuts) < settings.updates_per_batch:
        log.warning(
            "version %d: %d trainable groups make %d updates, not training.updates_per_batch %d",
            version,
            len(batch.groups),
            len(cuts),
            settings.updates_per_batch,
        )
    lengths = [row.length for row in batch.rows]
    costs = None
    if settings.balance == "compute":
        if model.hidden is None:
            raise InvalidInput(
                "training.balance: compute needs hidden_size in the model's config.json; set it to tokens"
            )
        costs = attention_costs(lengths, model.hidden)
    updates = []
    for number, names in enumerate(cuts):
        groups = [batch.groups[name] for name in names]
        rows = [batch.rows[i] for group in groups for i in group]
        total, valid = sum(row.tokens for row in rows), sum(row.valid for row in rows)
        slots: dict[tuple[str, int], list[float]] = defaultdict(list)
        for row in rows:
            slots[row.group_id, row.slot].append(row.reward)
        if valid == 0:
            raise Stalled(
                f"version {version}, update {number}: no token to train on: {len(groups)} groups with {len(slots)} "
                f"slots and {total} completion tokens, all masked; needed is at least 1 valid token"
            )
        placed = schedule(
            groups,
            lengths,
            world_size,
            cap=settings.max_tokens_per_mb,
            n_mbs=settings.n_mbs,
            packing=pack_padded if model.padded else pack,
            costs=costs,
        )
        loads = [sum(lengths[row] for one in mine for row in one) for mine in placed]
        updates.append(
            Update(
                placed=placed,
                padded=model.padded,
                counts=Counts(
                    tokens=valid,
                    sequences=sum(row.valid > 0 for row in rows),
                    slots=len(slots),
                    max_new_tokens=config.rollout.max_new_tokens if config.rollout else 1,
                ),
                tokens={"total": total, "valid": valid, "masked": total - valid},
                reward=sum(sum(values) / len(values) for values in slots.values()) / len(slots),
                imbalance=max(loads) * world_size / sum(loads),
            )
        )
    return updates


class Clock:
    """Seconds spent in each phase."""

    def __init__(self) -> None:
        """Starts with no phase."""
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to a phase."""
        started = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started


class Sums:
    """Metrics summed over micro-batches, then over ranks in one collective."""

    def __init__(self, device: torch.device) -> None:
        """Starts empty; `device` is the one that collectives use."""
        self._device = device
        self._sums: dict[str, Tensor] = {}

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Adds one micro-batch."""
        for name, value in parts.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def reduced(self) -> dict[str, float]:
        """The sums over all ranks. Collective."""
        names = sorted(self._sums)
        stacked = torch.stack([self._sums[name] for name in names]).to(self._device)
        dist.all_reduce(stacked)
        return dict(zip(names, stacked.tolist(), strict=True))


def _is_complete(places: RunDirectory, version: int, inputs: Mapping[str, str]) -> bool:
    """Whether a version was finished by an earlier job with the same inputs."""
    try:
        result = json.loads(places.training(version - 1).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    same = result.get("version") == version and result.get("inputs") == inputs
    return same and places.weights(version).is_dir() and places.checkpoint(version).is_dir()


def _inputs(config: RunConfig, batch: Batch, weights: Path) -> dict[str, str]:
    """What a version is made from, as SHA-256 digests: the batch, the settings, and the policy by its probe."""
    settings: dict[str, Any] = config.model_dump(mode="json", include={"model", "training"})
    for irrelevant in ("checkpoint", "process_group_timeout", "logprobs_chunk_size"):
        del settings["training"][irrelevant]
    if config.rollout:
        settings["rollout"] = [config.rollout.temperature, config.rollout.max_new_tokens]
    settings["seed"] = config.data.seed if config.data else 0
    probe = weights / "probe.json"
    return {
        "batch": batch.digest,
        "settings": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        "policy": hashlib.sha256(probe.read_bytes() if probe.exists() else b"").hexdigest(),
    }


def _check_vocabulary(rows: Iterable[Row], policy: engine.Engine, batch_dir: Path) -> None:
    for row in rows:
        name = f"{batch_dir / 'batch.parquet'}: group {row.group_id!r}, slot {row.slot}"
        if int(row.ids.max()) >= policy.vocabulary:
            raise InvalidInput(f"{name}: has token id {int(row.ids.max())}, the model knows 0..{policy.vocabulary - 1}")
        if row.length > policy.positions:
            raise InvalidInput(f"{name}: has {row.length} tokens, the model takes {policy.positions}")


def _finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: what is not finite becomes null."""
    result: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            result[name] = _finite(value)
        else:
            result[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return result
