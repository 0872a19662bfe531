"""`muster quickstart` as a person sees it: what it makes, what it is doing, what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from muster.layout import RunDirectory
from muster.pipelines.local import run_local
from muster.pipelines.stages import claim
from muster.quickstart.run import ITERATIONS, prepare
from muster.telemetry import events
from muster.telemetry.progress import RunProgress


def run_quickstart(directory: Path, seed: int, failure_rate: float) -> None:
    """Runs the pipeline on the quickstart task and shows the result.

    Args:
        directory: of the run; an unfinished one is continued.
        seed: of the model, the data and the sampling.
        failure_rate: share of slots to lose.

    Raises:
        MusterError: as `run_local`.
    """
    screen = Console(stderr=True)
    files = RunDirectory(directory.resolve())
    with RunProgress(screen, ITERATIONS) as progress:
        progress.say(_greeting(files))
        config = prepare(
            files.root, seed, failure_rate, lambda done, total: progress.doing(f"warm start {done}/{total}")
        )
        if files.result.exists() and files.evaluation(ITERATIONS).exists():
            claim(config)  # the directory holds this very run, and it has ended
        else:
            run_local(
                "grpo",
                config,
                iterations=ITERATIONS,
                on_event=progress.on_event,
                on_wait=lambda seconds: progress.doing(f"starting vLLM ({seconds:.0f} s, about 30)"),
            )
    result = json.loads(files.result.read_text(encoding="utf-8"))
    Console().print(_table(result))
    print(f"report:  {files.report}")
    print(f"result:  {files.result}")
    print(f"again:   muster submit grpo --local --config {files.config}")


def _greeting(files: RunDirectory) -> str:
    """What the directory holds and what is done with it."""
    if not files.config.exists():
        return f"quickstart in {files.root}: a new run of {ITERATIONS} iterations"
    past, _ = events.read(files.root)
    done = 1 + max((event["iteration"] for event in past if event["kind"] == "trained"), default=-1)
    if done >= ITERATIONS:
        return f"quickstart in {files.root}: found a finished run; its results are shown again, nothing is trained"
    return f"quickstart in {files.root}: found a run with {done} of {ITERATIONS} iterations; going on from there"


def _table(result: dict[str, Any]) -> Table:
    table = Table(title="What came of it", show_header=False, title_justify="left")
    lost = result["slots_failed"] / result["slots_target"] if result["slots_target"] else 0.0
    rows = [
        ("held-out reward before", _number(result["reward_start"])),
        ("held-out reward after", _number(result["reward_end"])),
        ("iterations", str(result["iterations"])),
        ("optimizer steps", str(result["optimizer_steps"])),
        ("samples wanted", f"{result['slots_target']:,}"),
        ("samples lost", f"{result['slots_failed']:,} ({lost:.0%})"),
        ("groups below the minimum", str(result["groups_below_minimum"])),
        ("wall time", f"{result['wall_seconds']:.0f} s"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
