"""Held-out evaluation: what a served policy scores on prompts it is not trained on, sampled as in training.

A sample that is lost is asked for again, a bounded number of times: an evaluation must not depend on the weather. What
stays lost is counted, never scored 0.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muster.config import RunConfig
from muster.rollout.client import Client
from muster.rollout.collect import load_tokenizer
from muster.rollout.group import CollectedGroup, run_group
from muster.rollout.prompts import Prompt, read_prompts
from muster.rollout.reward import RewardPool
from muster.rollout.watch import run_until_signal, watched
from muster.rollout.workflow import RolloutWorkflow, SingleTurn, Slot

_ATTEMPTS = 5


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        version: of the weights.
        prompts: prompts in the file.
        samples_per_prompt: k of pass@k.
        samples: graded samples.
        lost: samples that stayed lost after all attempts.
        reward: mean over graded samples; None without any.
        standard_error: of the mean, over prompts.
        pass_at_k: share of prompts with at least one sample of positive reward, over prompts with any graded.
        failures: lost attempts by reason, those that a later attempt made good included.
    """

    version: int
    prompts: int
    samples_per_prompt: int
    samples: int
    lost: int
    reward: float | None
    standard_error: float | None
    pass_at_k: float | None
    failures: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Its fields as JSON values."""
        return asdict(self)


def evaluate(
    config: RunConfig, *, version: int, prompts: Path, samples: int = 1, workflow: RolloutWorkflow | None = None
) -> Evaluation:
    """Samples each held-out prompt and averages the rewards.

    Args:
        config: `model`, `data` and `rollout` are needed; `version` must have been published to the endpoints.
        version: of the weights; with `data.seed` it seeds the samples.
        prompts: the held-out prompt file.
        samples: per prompt.
        workflow: what a slot does; one turn by default.

    Raises:
        InvalidInput: bad prompts or rewards.
        DependencyDied: a server stopped answering.
        Interrupted: SIGINT or SIGTERM.
    """
    config.require("model", "data", "rollout")
    assert config.model
    assert config.data
    assert config.rollout
    rollout, seed = config.rollout, config.data.seed
    tokenizer = load_tokenizer(config.model.path)
    held = read_prompts(prompts, tokenizer)
    failures: Counter[str] = Counter()

    async def sample_all() -> list[list[float]]:
        limit = asyncio.Semaphore(rollout.max_concurrent)
        async with Client(rollout, version, published=True) as client, watched(rollout.endpoints):

            async def one(prompt: Prompt) -> list[float]:
                rewards: list[float] = []
                for attempt in range(_ATTEMPTS):
                    group_id = f"evaluate-{version:04d}-{prompt.index:08d}-{attempt}"
                    slots = [
                        Slot(group_id, index, seed, prompt, client, pool, tokenizer)
                        for index in range(samples - len(rewards))
                    ]
                    group = await run_group(
                        workflow or SingleTurn(),
                        slots,
                        limit,
                        slot_timeout=rollout.slot_timeout,
                        max_staleness=0,  # older weights say nothing about these
                    )
                    failures.update(slot.failure for slot in group.slots if slot.failure is not None)
                    rewards.extend(_rewards(group))
                    if len(rewards) == samples:
                        break
                return rewards

            return await asyncio.gather(*map(one, held))

    with RewardPool(rollout.reward, rollout.reward_timeout, rollout.reward_workers) as pool:
        scored = run_until_signal(sample_all())
    means = [math.fsum(rewards) / len(rewards) for rewards in scored if rewards]
    graded = sum(map(len, scored))
    return Evaluation(
        version=version,
        prompts=len(held),
        samples_per_prompt=samples,
        samples=graded,
        lost=len(held) * samples - graded,
        reward=math.fsum(r for rewards in scored for r in rewards) / graded if graded else None,
        standard_error=_standard_error(means),
        pass_at_k=sum(max(rewards) > 0 for rewards in scored if rewards) / len(means) if means else None,
        failures=dict(sorted(failures.items())),
    )


def _rewards(group: CollectedGroup) -> list[float]:
    """One reward for each usable slot."""
    rewards = []
    for slot in group.slots:
        if slot.failure is None:
            told = slot.rows[0].rollout_reward
            each = [row.reward for row in slot.rows if row.reward is not None]
            rewards.append(math.fsum(each) / len(each) if told is None else told)
    return rewards


def _standard_error(means: list[float]) -> float | None:
    if len(means) < 2:
        return None
    mean = math.fsum(means) / len(means)
    return math.sqrt(math.fsum((m - mean) ** 2 for m in means) / (len(means) - 1) / len(means))
