"""What a run is doing, in a few lines, from its diary and its files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from muster.telemetry.report import read_run, result


def describe(root: Path) -> Iterator[str]:
    """Lines for people.

    Args:
        root: the run directory.

    Raises:
        InvalidInput: it is not a run directory.
    """
    record = read_run(root)
    outcome = result(record)
    name = record.config.run.id if record.config.run else root.name
    yield f"run {name} in {root}: {outcome['iterations']} iterations, {outcome['optimizer_steps']} optimizer steps"
    lost = outcome["slots_failed"]
    yield f"samples: {outcome['slots_target']} wanted, {lost} lost {dict(outcome['failures']) or ''}".rstrip()
    if outcome["failure"]:
        failure = outcome["failure"]
        yield f"failed in {failure['stage']} with exit code {failure['exit_code']}: {failure['error']}"
    if record.diary:
        last = record.diary[-1]
        where = f" iteration {last['iteration']}" if "iteration" in last else ""
        yield f"last event: {last['kind']}{where}, {time.time() - last['time']:.0f} s ago"
