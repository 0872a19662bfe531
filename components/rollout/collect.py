"""Collecting a batch: groups in flight at once, rounds until enough are trainable, the stall bound, nothing lost.

What has been collected is on disk within seconds and is picked up by the next attempt, so that a killed step costs
little. Every group that was attempted is written, rejected and all-failed ones too: otherwise yields lie.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from muster import trajectory
from muster.config import Data, Rollout, RunConfig
from muster.errors import Interrupted, InvalidInput, Stalled
from muster.groups import SlotResult, judge
from muster.rollout.client import Client
from muster.rollout.group import CollectedGroup, oldest_version, run_group
from muster.rollout.prompts import Prompt, order, read_prompts
from muster.rollout.reward import RewardPool
from muster.rollout.watch import run_until_signal, until_healthy, watched
from muster.rollout.workflow import RolloutWorkflow, SingleTurn, Slot
from muster.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

COUNTS_NAME = "_collection.json"
"""The counts of a collection, beside its rollout files; the underscore keeps it from being read as one."""

_FLUSH_SECONDS = 2.0


@dataclass
class Collection:
    """What a collection came to.

    Attributes:
        version: of the weights it sampled from.
        target: trainable groups wanted.
        trainable: groups that will be trained on.
        groups: attempted groups by outcome.
        slots: slots of all attempted groups.
        usable: slots that carry a trajectory and a finite reward.
        failures: failed slots by reason.
        ages: usable slots by the age of their oldest valid token, in versions; slots without valid tokens have none.
        reward_sum: over usable slots.
        tokens: completion tokens of usable slots.
        rounds: attempts to fill the batch.
        next_position: where in the stream of prompts the next collection starts.
        resumed_groups: groups that an earlier, interrupted attempt had left.
        seconds: wall time of this attempt.
    """

    version: int
    target: int
    next_position: int
    trainable: int = 0
    groups: Counter[str] = field(default_factory=Counter)
    slots: int = 0
    usable: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    ages: Counter[int] = field(default_factory=Counter)
    reward_sum: float = 0.0
    tokens: int = 0
    rounds: int = 0
    resumed_groups: int = 0
    seconds: float = 0.0

    @property
    def reward(self) -> float | None:
        """Mean reward over usable slots."""
        return self.reward_sum / self.usable if self.usable else None

    def add(self, slots: Sequence[SlotResult], config: RunConfig, oldest: Sequence[int | None] | None = None) -> str:
        """Counts one finished group and returns its outcome.

        Args:
            slots: its slots.
            config: `group` and `estimator` are used.
            oldest: for each slot, the smallest version of its valid tokens, if it has any.
        """
        verdict = judge(slots, config)
        self.groups[verdict.outcome] += 1
        self.trainable += verdict.trained
        self.slots += config.group.n_samples
        self.usable += verdict.usable
        self.failures.update(verdict.failed)
        for slot, first, failure in zip(slots, oldest or [None] * len(slots), verdict.failures, strict=True):
            if failure is None:
                if first is not None:
                    self.ages[self.version - first] += 1
                policy = "drop" if slot.failure is None else config.group.failures[slot.failure]
                told = slot.rollout_reward if isinstance(policy, str) else policy
                self.reward_sum += sum(slot.rewards) / len(slot.rewards) if told is None else told
                self.tokens += sum(slot.lengths)
        return verdict.outcome

    def as_json(self) -> dict[str, Any]:
        """Its counts as JSON values."""
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**counts, "groups": dict(self.groups), "failures": dict(self.failures), "reward": self.reward}


def collect(
    config: RunConfig,
    *,
    version: int,
    name: str,
    position: int,
    out: Path,
    metrics: Metrics,
    published: bool = False,
    workflow: RolloutWorkflow | None = None,
    on_group: Callable[[Collection], None] = lambda _: None,
) -> Collection:
    """Collects groups until `data.groups_per_batch` of them are trainable (or attempted, with `data.dynamic_batch`).

    Args:
        config: `model`, `data` and `rollout` are needed; `rollout.endpoints` must serve `version` already.
        version: recorded for every token.
        name: starts the identity of each group; unique within the run.
        position: where in the stream of prompts to start.
        out: folder for the rollout files; must not exist. `out` + `.partial` is used until all are there.
        metrics: counts slots and groups.
        published: whether the servers were given `version` by `publish`; then their label must say so.
        workflow: what a slot does; one turn by default.
        on_group: called after each finished group.

    Raises:
        InvalidInput: bad prompts or rewards, or a workflow that broke its contract.
        Stalled: both stall bounds passed, or all prompts were retired.
        DependencyDied: a server stopped answering, or the disk refused.
        Interrupted: SIGINT or SIGTERM; finished groups are kept.
    """
    config.require("model", "data", "rollout")
    assert config.model
    assert config.data
    assert config.rollout
    if out.exists():
        raise InvalidInput(f"{out}: exists; rollouts are never overwritten, choose another folder")
    tokenizer = load_tokenizer(config.model.path)
    prompts = read_prompts(config.data.prompts, tokenizer)
    state = Collection(version=version, target=config.data.groups_per_batch, next_position=position)
    partial = Partial(out.with_name(out.name + ".partial"))
    done = partial.restore(config, state)
    start = time.monotonic()
    try:
        with RewardPool(config.rollout.reward, config.rollout.reward_timeout, config.rollout.reward_workers) as rewards:
            task = _Collector(
                config,
                config.data,
                config.rollout,
                prompts,
                tokenizer,
                rewards,
                workflow or SingleTurn(),
                state,
                partial,
                metrics,
                on_group,
                name,
                done,
                published,
            )
            run_until_signal(task.run())
    except Interrupted as error:
        kept = sum(state.groups.values())
        raise Interrupted(
            f"{error}; {kept} finished groups are kept in {partial.folder} and used by the next attempt"
        ) from None
    finally:
        state.seconds = time.monotonic() - start
        partial.flush()
    with trajectory.atomic_file(partial.folder / COUNTS_NAME) as temporary:
        temporary.write_text(json.dumps(state.as_json(), indent=1), encoding="utf-8")
    partial.folder.rename(out)
    # Here the batch is cut: not before, or an attempt that is resumed would be counted again.
    for age, count in state.ages.items():
        for _ in range(count):
            metrics.staleness.observe(age)
    return state


def load_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model directory, without transformers.

    Raises:
        InvalidInput: it has no readable `tokenizer.json`.
    """
    file = model / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise InvalidInput(f"model.path: cannot read {file}: {error}") from error


class Partial:
    """Groups of a collection that has not ended, in part files of some seconds' work each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows: list[dict[str, Any]] = []
        self._last = time.monotonic()

    def restore(self, config: RunConfig, state: Collection) -> set[str]:
        """Counts the groups that an earlier attempt left; files it left broken are removed.

        Returns:
            Their ids.
        """
        if not self.folder.exists():
            return set()
        tables: list[pa.Table] = []
        for file in sorted(self.folder.glob("*.parquet")):
            try:
                table = pq.read_table(file)
            except (OSError, pa.ArrowException) as error:
                log.warning("%s is broken (%s) and was removed; its groups are collected again", file, error)
                file.unlink()
                continue
            versions = {version for row in table["versions"].to_pylist() for version in row}
            if versions - {state.version}:
                log.warning("%s was sampled from version %s, not %d, and was removed", file, versions, state.version)
                file.unlink()
                continue
            tables.append(table)
        groups: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for row in pa.concat_tables(tables).to_pylist() if tables else []:
            groups.setdefault(row["group_id"], {}).setdefault(row["slot"], []).append(row)
        for slots in groups.values():
            ended = [slots[index] for index in sorted(slots)]
            oldest = [oldest_version((row["versions"], row["loss_mask"]) for row in rows) for rows in ended]
            state.add([_result(rows) for rows in ended], config, oldest)
        state.resumed_groups = len(groups)
        if groups:
            log.info("%s: %d finished groups of an earlier attempt are used", self.folder, len(groups))
        return set(groups)

    def add(self, group: CollectedGroup) -> None:
        """Takes a finished group; it is on disk within seconds."""
        self._rows.extend(group.records())
        if time.monotonic() - self._last > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes what has not been written."""
        self._last = time.monotonic()
        if self._rows:
            self.folder.mkdir(parents=True, exist_ok=True)
            number = 1 + max(
                (int(file.stem.rpartition("-")[2]) for file in self.folder.glob("part-*.parquet")), default=-1
            )
            trajectory.write(self._rows, self.folder / f"part-{number:05d}.parquet")
            self._rows = []


@dataclass
class _Collector:
    """One collection in progress."""

    config: RunConfig
    data: Data
    rollout: Rollout
    prompts: Sequence[Prompt]
    tokenizer: Tokenizer
    rewards: RewardPool
    workflow: RolloutWorkflow
    state: Collection
    partial: Partial
    metrics: Metrics
    on_group: Callable[[Collection], None]
    name: str
    done: set[str]
    published: bool
    attempts: Counter[int] = field(default_factory=Counter)

    async def run(self) -> None:
        """Rounds until the batch is full, beside a watch on the servers."""
        limit = asyncio.Semaphore(self.rollout.max_concurrent)
        async with (
            Client(self.rollout, self.state.version, published=self.published) as client,
            watched(self.rollout.endpoints),
        ):
            last_progress, empty_rounds = time.monotonic(), 0
            while (missing := self._missing()) > 0:
                before = self.state.trainable
                await self._round(missing, client, limit)
                self.state.rounds += 1
                if self.state.trainable > before:
                    last_progress, empty_rounds = time.monotonic(), 0
                else:
                    empty_rounds += 1
                    self.metrics.empty_rounds.inc()
                    # A server that is away makes quick failures: they must not use up prompts before it is found dead.
                    await until_healthy(self.rollout.endpoints)
                self._check_stall(empty_rounds, time.monotonic() - last_progress)

    def _missing(self) -> int:
        got = sum(self.state.groups.values()) if self.data.dynamic_batch else self.state.trainable
        return self.state.target - got

    async def _round(self, count: int, client: Client, limit: asyncio.Semaphore) -> None:
        """Attempts `count` groups at once."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            for group_id, prompt in self._next_groups(count):
                slots = [
                    Slot(group_id, index, self.data.seed, prompt, client, self.rewards, self.tokenizer)
                    for index in range(self.config.group.n_samples)
                ]
                tasks.add(asyncio.create_task(self._group(prompt, slots, limit)))
            for task in asyncio.as_completed(tasks):
                await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _group(self, prompt: Prompt, slots: Sequence[Slot], limit: asyncio.Semaphore) -> None:
        group = await run_group(
            self.workflow,
            slots,
            limit,
            slot_timeout=self.rollout.slot_timeout,
            max_staleness=self.rollout.max_staleness,
        )
        oldest = [oldest_version((row.versions, row.loss_mask) for row in slot.rows) for slot in group.slots]
        outcome = self.state.add([slot.result() for slot in group.slots], self.config, oldest)
        self.partial.add(group)
        if outcome == "empty":
            self.attempts[prompt.index] += 1
        self.metrics.groups.labels(outcome).inc()
        for slot in group.slots:
            ended = "usable" if slot.failure is None else "failed"
            self.metrics.slots.labels(ended, slot.failure or "").inc()
            self.metrics.request_seconds.labels(ended).observe(slot.seconds)
        self.metrics.progress("rollout")
        self.on_group(self.state)

    def _next_groups(self, count: int) -> Iterator[tuple[str, Prompt]]:
        """The next prompts of the stream, without retired ones and groups that an earlier attempt finished."""
        while count:
            if len(retired := self._retired()) == len(self.prompts):
                raise Stalled(
                    f"every prompt was retired after {self.data.max_attempts_per_prompt} attempts without a usable "
                    "sample: "
                    f"collected {self.state.trainable}, required {self.state.target}, prompts {retired[:20]}",
                    self.state.failures,
                )
            position = self.state.next_position
            self.state.next_position += 1
            index = order(len(self.prompts), self.data.seed, self.data.shuffle, position)
            group_id = f"{self.name}-{position:08d}"
            if group_id in self.done or index in retired:
                continue
            count -= 1
            yield group_id, self.prompts[index]

    def _retired(self) -> list[int]:
        limit = self.data.max_attempts_per_prompt
        return sorted(index for index, failed in self.attempts.items() if failed >= limit)

    def _check_stall(self, rounds: int, seconds: float) -> None:
        """Both bounds must be passed (semantics, "Stall bound")."""
        self.metrics.stall_rounds.set(rounds)
        self.metrics.stall_seconds.set(seconds if rounds else 0)
        bound = self.rollout.stall
        if rounds >= bound.min_rounds and seconds >= bound.min_seconds:
            self.metrics.stalls.labels("rollout").inc()
            raise Stalled(
                f"collection stalled: collected {self.state.trainable}, required {self.state.target}, "
                f"no trainable group in {rounds} rounds and {seconds:.0f} s",
                self.state.failures,
            )


def _result(rows: Sequence[dict[str, Any]]) -> SlotResult:
    """A slot as the rules see it, from its rows in a part file."""
    sampled = [row for row in rows if row["completion_ids"]]
    return SlotResult(
        failure=rows[0]["failure"],
        rewards=[float("nan") if row["reward"] is None else row["reward"] for row in sampled],
        lengths=[len(row["completion_ids"]) for row in sampled],
        rollout_reward=rows[0]["rollout_reward"],
    )
