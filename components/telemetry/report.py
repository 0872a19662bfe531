"""The run report: `result.json` for programs and `report.html` for people, made anew from the files of a run directory.

Works for a run that has not finished or has failed: it shows what is there. The page is one file without scripts.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from muster import config as configuration
from muster.config import RunConfig
from muster.errors import InvalidInput
from muster.layout import RunDirectory
from muster.telemetry import charts, events


@dataclass(frozen=True)
class Iteration:
    """What one iteration left: counts of the collection, summary of the batch, measurements of training."""

    number: int
    collection: dict[str, Any] | None
    summary: dict[str, Any] | None
    training: dict[str, Any] | None


@dataclass(frozen=True)
class RunRecord:
    """All that a report needs of a run directory."""

    files: RunDirectory
    config: RunConfig
    iterations: Sequence[Iteration]
    evaluations: Sequence[dict[str, Any]]
    diary: Sequence[dict[str, Any]]


def write_report(root: Path) -> Path:
    """Writes `result.json` and `report.html` into a run directory.

    Args:
        root: the run directory.

    Returns:
        The path of the page.

    Raises:
        InvalidInput: it is not a run directory.
    """
    record = read_run(root)
    outcome = result(record)
    _replace(record.files.result, json.dumps(outcome, indent=1) + "\n")
    _replace(record.files.report, render(record, outcome))
    return record.files.report


def read_run(root: Path) -> RunRecord:
    """Reads what a run has left so far.

    Raises:
        InvalidInput: it is not a run directory.
    """
    files = RunDirectory(root)
    if not files.config.is_file():
        raise InvalidInput(f"{root}: is not a run directory; it has no run.yaml")
    iterations: list[Iteration] = []
    while files.iteration(len(iterations)).is_dir():
        k = len(iterations)
        paths = (files.collection(k), files.batch(k) / "summary.json", files.training(k))
        iterations.append(Iteration(k, *(_json(path) for path in paths)))
    evaluations = sorted(
        (found for path in files.evaluations.glob("v*.json") if (found := _json(path))), key=lambda e: int(e["version"])
    )
    diary, _ = events.read(root)
    return RunRecord(files, configuration.load(files.config), iterations, evaluations, diary)


def result(record: RunRecord) -> dict[str, Any]:
    """The run in numbers; rewards are null where nothing was measured."""
    finished = [it for it in record.iterations if it.training is not None]
    collected = [it.collection for it in record.iterations if it.collection is not None]
    held = [e["reward"] for e in record.evaluations]
    sampled = [c["reward"] for c in collected]
    return {
        "reward_start": held[0] if held else (sampled[0] if sampled else None),
        "reward_end": held[-1] if len(held) > 1 else (sampled[-1] if sampled and not held else None),
        "rewards_measured_on": "held prompts" if held else "training rollouts",
        "iterations": len(finished),
        "optimizer_steps": finished[-1].training["optimizer_steps_total"] if finished and finished[-1].training else 0,
        "slots_target": sum(c["slots"] for c in collected),
        "slots_failed": sum(c["slots"] - c["usable"] for c in collected),
        "groups_below_minimum": sum(c["groups"].get("below_minimum", 0) for c in collected),
        "failures": dict(_failures(record)),
        "wall_seconds": round(_wall_seconds(record.diary), 1),
        "seed": record.config.data.seed if record.config.data else None,
        "failure": _failure(record),
    }


def render(record: RunRecord, outcome: dict[str, Any]) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("muster.telemetry", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("report.html.j2").render(
        run=record.config.run,
        config=record.config,
        outcome=outcome,
        charts={name: draw(record) for name, draw in charts.ALL.items()},
        failures=_failures(record).most_common(),
        evaluations=record.evaluations,
        groups=_groups(record),
        bias=_bias(record),
        warnings=_warnings(record),
        configuration=record.config.dump(),
    )


def _failures(record: RunRecord) -> Counter[str]:
    total: Counter[str] = Counter()
    for iteration in record.iterations:
        if iteration.collection is not None:
            total.update(iteration.collection["failures"])
    return total


def _groups(record: RunRecord) -> Counter[str]:
    total: Counter[str] = Counter()
    for iteration in record.iterations:
        if iteration.collection is not None:
            total.update(iteration.collection["groups"])
    return total


def _bias(record: RunRecord) -> dict[str, float | None]:
    """The evidence of all batches, each batch with equal weight."""
    names = ("usable_mean_length", "failed_mean_length", "failure_reward_gap")
    found: dict[str, float | None] = {}
    for name in names:
        values = [it.summary["bias"][name] for it in record.iterations if it.summary is not None]
        known = [value for value in values if value is not None]
        found[name] = sum(known) / len(known) if known else None
    return found


def _warnings(record: RunRecord) -> list[str]:
    """What the batches warned of, each with the first iteration it came up in."""
    seen: dict[str, int] = {}
    for iteration in record.iterations:
        for warning in iteration.summary["warnings"] if iteration.summary is not None else ():
            seen.setdefault(warning, iteration.number)
    return [f"iteration {number}: {warning}" for warning, number in seen.items()]


def _failure(record: RunRecord) -> dict[str, Any] | None:
    """The failure that the newest attempt ended with."""
    newest: dict[str, Any] | None = None
    for event in record.diary:
        if event["kind"] == "started":
            newest = None
        elif event["kind"] == "failed" and newest is None:
            newest = {key: event[key] for key in ("stage", "exit_code", "error")}
    return newest


def _wall_seconds(diary: Sequence[dict[str, Any]]) -> float:
    """Time at work: over all attempts, from each one's first event to its last."""
    total = 0.0
    first: float | None = None
    last = 0.0
    for event in diary:
        if event["kind"] == "started":
            total += 0.0 if first is None else last - first
            first = event["time"]
        first = event["time"] if first is None else first
        last = event["time"]
    return total + (0.0 if first is None else last - first)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found if isinstance(found, dict) else None


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
