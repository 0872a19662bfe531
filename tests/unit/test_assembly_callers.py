"""One `assemble`: whoever makes a training batch, and the collector that counts for it, follow the same rules.

A rule is broken in its one place, and every caller is seen to break with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muster import assembly, trajectory
from muster.assembly import command
from muster.config import RunConfig
from muster.groups import SlotResult
from muster.layout import RunDirectory
from muster.pipelines import stages
from muster.rollout.collect import Collection
from tests.unit.conftest import MakeConfig

GROUPS: dict[str, list[float | None]] = {"whole": [1.0, 0.0, 1.0, 0.0], "lone survivor": [1.0, None, None, None]}


def rows() -> list[dict[str, Any]]:
    found = []
    for group, rewards in GROUPS.items():
        for slot, reward in enumerate(rewards):
            usable = {"status": "usable", "failure": None, "completion_ids": [5, 6], "loss_mask": [True] * 2}
            usable |= {"logprobs": [-0.5] * 2, "versions": [0, 0]}
            lists = ("completion_ids", "loss_mask", "logprobs", "versions")
            failed = {"status": "failed", "failure": "timeout", **{name: [] for name in lists}}
            body = failed if reward is None else usable
            identity = {"group_id": group, "n_samples": 4, "slot": slot, "row": 0, "prompt_ids": [3]}
            found.append({**identity, **body, "reward": reward})
    return found


def by_library(config: RunConfig, _folder: Path) -> int:
    return int(assembly.assemble(trajectory.from_rows(rows()), config).summary["groups"]["trainable"])


def by_command(config: RunConfig, folder: Path) -> int:
    trajectory.write(rows(), folder / "rollouts.parquet")
    command.run(folder / "rollouts.parquet", config, folder / "batch", as_json=True)
    return int(json.loads((folder / "batch" / "summary.json").read_text(encoding="utf-8"))["groups"]["trainable"])


def by_pipeline_step(config: RunConfig, _folder: Path) -> int:
    assert config.run
    files = RunDirectory(config.run.root)
    files.rollouts(0).mkdir(parents=True)
    trajectory.write(rows(), files.rollouts(0) / "part-00000.parquet")
    stages.assemble(stages.Context(config), iteration=0)
    return int(json.loads((files.batch(0) / "summary.json").read_text(encoding="utf-8"))["groups"]["trainable"])


def by_collector(config: RunConfig, _folder: Path) -> int:
    state = Collection(version=0, target=2, next_position=0)
    for rewards in GROUPS.values():
        slots = [SlotResult("timeout") if r is None else SlotResult(None, [r], [2]) for r in rewards]
        state.add(slots, config)
    return state.trainable


CALLERS = [by_library, by_command, by_pipeline_step, by_collector]


@pytest.mark.parametrize("caller", CALLERS)
def test_a_rule_holds_for_every_caller(
    caller: Callable[[RunConfig, Path], int], make_config: MakeConfig, tmp_path: Path
) -> None:
    assert caller(make_config(), tmp_path) == 1


@pytest.mark.parametrize("caller", CALLERS)
def test_a_broken_rule_is_broken_for_every_caller(
    caller: Callable[[RunConfig, Path], int],
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RunConfig, "min_usable_group_size", property(lambda _self: 1))
    assert caller(make_config(), tmp_path) == 2
