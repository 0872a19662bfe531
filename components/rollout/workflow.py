"""What one slot does: the protocol that users implement, and the plain one-turn workflow.

A workflow turns one prompt into the rows of one slot. It knows nothing about its siblings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

from muster.errors import InvalidInput
from muster.rollout.client import Client, Completion, SlotFailure, slot_seed
from muster.rollout.prompts import Prompt
from muster.rollout.reward import RewardError, RewardPool, RewardTimeout


class ContractError(InvalidInput):
    """A workflow returned rows that no rule can interpret: the run stops, nothing is retried (semantics, rule 9)."""


@dataclass(frozen=True)
class Row:
    """One exported row of a slot, as in the rollout table; lists have one entry a completion token."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    loss_mask: Sequence[bool]
    logprobs: Sequence[float]
    versions: Sequence[int]
    reward: float | None
    rollout_reward: float | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class Slot:
    """Which slot of which group is wanted, and everything a workflow may use for it."""

    group_id: str
    index: int
    seed: int
    prompt: Prompt
    client: Client
    rewards: RewardPool
    tokenizer: Tokenizer

    def segment_seed(self, segment: int = 0) -> int:
        """A sampler's seed for one request of this slot."""
        return slot_seed(self.seed, self.group_id, self.index, segment)


class RolloutWorkflow(Protocol):
    """What one slot does. Implementations are shared by all slots and must not keep state between calls."""

    async def run(self, slot: Slot) -> Sequence[Row]:
        """Returns the rows of the slot, at least one.

        Raises:
            SlotFailure: the slot failed with a reason of the closed set.
            ContractError: a mistake in the workflow itself; stops the run.
        """
        ...


class SingleTurn:
    """One request, one completion, one reward."""

    async def run(self, slot: Slot) -> Sequence[Row]:
        """Samples a completion and grades it."""
        done = await slot.client.generate(slot.prompt.ids, group_id=slot.group_id, seed=slot.segment_seed())
        text = slot.tokenizer.decode(list(done.ids), skip_special_tokens=True)
        try:
            reward = await slot.rewards.score(slot.prompt.text, text, slot.prompt.record)
        except RewardTimeout as error:
            raise SlotFailure("reward_timeout", str(error), partial=done) from error
        except RewardError as error:
            raise SlotFailure("reward_error", str(error), partial=done) from error
        if not math.isfinite(reward):
            raise SlotFailure("non_finite_reward", f"the reward is {reward}", partial=done)
        return (row_of(slot.prompt.ids, done, reward),)


def row_of(prompt_ids: Sequence[int], done: Completion, reward: float | None) -> Row:
    """The row of a completion that is trained on in full."""
    return Row(
        prompt_ids=tuple(prompt_ids),
        completion_ids=done.ids,
        loss_mask=(True,) * len(done.ids),
        logprobs=done.logprobs,
        versions=done.versions,
        reward=reward,
        finish_reason=done.finish_reason,
    )
