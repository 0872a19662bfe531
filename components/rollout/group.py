"""G slots at once -> the rows of one group, each slot usable or failed with one reason."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from typing import Any

from muster.groups import SlotResult
from muster.rollout.client import SlotFailure
from muster.rollout.workflow import ContractError, RolloutWorkflow, Row, Slot, row_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotOutcome:
    """How a slot ended.

    Attributes:
        rows: its rows; those of a failed slot are what had been sampled by then, often nothing.
        failure: the reason of a failed slot.
        seconds: from its start to its end.
    """

    rows: Sequence[Row]
    failure: str | None
    seconds: float

    def result(self) -> SlotResult:
        """What the rules of groups look at."""
        unknown = math.nan
        return SlotResult(
            failure=self.failure,
            rewards=[unknown if row.reward is None else row.reward for row in self.rows],
            lengths=[len(row.completion_ids) for row in self.rows],
            rollout_reward=self.rows[0].rollout_reward if self.rows else None,
        )


@dataclass(frozen=True)
class CollectedGroup:
    """A group with all its slots ended.

    Attributes:
        group_id: its identity.
        slots: one outcome a slot, in slot order.
    """

    group_id: str
    slots: Sequence[SlotOutcome]

    def records(self) -> list[dict[str, Any]]:
        """Its rows in the rollout schema; a failed slot that sampled nothing is one row without tokens."""
        records: list[dict[str, Any]] = []
        for index, slot in enumerate(self.slots):
            for number, row in enumerate(slot.rows or (_NOTHING,)):
                records.append(
                    {
                        "group_id": self.group_id,
                        "n_samples": len(self.slots),
                        "slot": index,
                        "row": number,
                        "status": "usable" if slot.failure is None else "failed",
                        "failure": slot.failure,
                        **asdict(row),
                    }
                )
        return records


_NOTHING = Row((), (), (), (), (), None)


def oldest_version(rows: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> int | None:
    """The smallest version of a slot's valid tokens, from the versions and the loss mask of each row."""
    return min((version for versions, mask in rows for version in compress(versions, mask)), default=None)


async def run_group(
    workflow: RolloutWorkflow,
    slots: Sequence[Slot],
    limit: asyncio.Semaphore,
    *,
    slot_timeout: float,
    max_staleness: int,
) -> CollectedGroup:
    """Runs all slots of one group concurrently.

    Args:
        workflow: what each slot does.
        slots: the G slots of the group, in order.
        limit: bounds the slots in flight over all groups; a slot's time runs from when it is let in.
        slot_timeout: seconds for one slot. The tokens of a request that is in flight then are kept, for which the slot
            may take the client's `grace` longer; it has timed out all the same.
        max_staleness: versions by which a slot's oldest valid token may be behind the client's; an older slot fails.

    Raises:
        ContractError: from the workflow, after the group's other slots were stopped.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(_run_slot(workflow, slot, limit, slot_timeout, max_staleness)) for slot in slots
            ]
    except* ContractError as errors:
        raise errors.exceptions[0] from None
    return CollectedGroup(slots[0].group_id, [task.result() for task in running])


async def _run_slot(
    workflow: RolloutWorkflow, slot: Slot, limit: asyncio.Semaphore, slot_timeout: float, max_staleness: int
) -> SlotOutcome:
    """Runs one slot; what goes wrong in it stays in it (semantics, rule 9)."""
    async with limit:
        clock = asyncio.get_running_loop().time
        start = clock()
        end = start + slot_timeout
        partial: Sequence[Row] = ()
        try:
            async with asyncio.timeout_at(end + slot.client.grace):
                rows = tuple(await workflow.run(replace(slot, client=slot.client.until(end))))
            _check(rows, slot)
            oldest = oldest_version((row.versions, row.loss_mask) for row in rows)
            age = 0 if oldest is None else slot.client.version - oldest
            if clock() >= end:
                reason, text = "timeout", f"exceeded slot_timeout {slot_timeout:g} s"
            elif age > max_staleness:
                reason, text = "stale", f"a valid token is {age} versions old, rollout.max_staleness is {max_staleness}"
            else:
                return SlotOutcome(rows, None, clock() - start)
            partial = tuple(replace(row, reward=None, rollout_reward=None) for row in rows)
        except ContractError:
            raise
        except SlotFailure as error:
            reason, text = error.reason, str(error)
            if error.partial is not None:
                prompt_ids = slot.prompt.ids if error.prompt_ids is None else error.prompt_ids
                partial = (row_of(prompt_ids, error.partial, None),)
        except TimeoutError:
            reason, text = "timeout", f"exceeded slot_timeout {slot_timeout:g} s"
        except Exception as error:
            reason, text = "workflow_error", f"{type(error).__name__}: {error}"
            log.warning("group %s slot %d: the workflow raised", slot.group_id, slot.index, exc_info=True)
        if clock() >= end:
            reason = "timeout"  # whatever became of it in the client's grace
        log.info("group %s slot %d failed: %s: %s", slot.group_id, slot.index, reason, text)
        return SlotOutcome(partial, reason, clock() - start)


def _check(rows: Sequence[Row], slot: Slot) -> None:
    """Rows that no rule can interpret are the workflow's mistake."""
    where = f"group {slot.group_id} slot {slot.index}"
    if not rows:
        raise ContractError(f"{where}: the workflow returned no row; raise SlotFailure for a slot that failed")
    for number, row in enumerate(rows):
        length = len(row.completion_ids)
        for name in ("loss_mask", "logprobs", "versions"):
            if len(getattr(row, name)) != length:
                raise ContractError(
                    f"{where} row {number}: {name} has {len(getattr(row, name))} entries for {length} completion "
                    "tokens; give one a token"
                )
        if (newest := max(row.versions, default=-1)) > slot.client.version:
            raise ContractError(
                f"{where} row {number}: a token of version {newest}, but the servers sample from version "
                f"{slot.client.version}; record the versions that Completion.versions tells"
            )
    if any(not row.completion_ids for row in rows):
        raise SlotFailure("empty_completion", "a row has no completion token")
