"""What `muster assemble` does: files in, batch and summary out. Parsing the command line is not its business."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster import config as configuration
from muster import trajectory
from muster.assembly.batch import assemble, check_target
from muster.assembly.evidence import describe_failures
from muster.config import RunConfig


def run(
    paths: str | Path | Sequence[str | Path], config: RunConfig | str | Path, out: str | Path, as_json: bool = False
) -> None:
    """Assembles rollout files into a training batch.

    Warnings go to stderr, the result to stdout.

    Args:
        paths: rollout files or directories.
        config: a configuration, or the file it is in.
        out: folder for `batch.parquet` and `summary.json`.
        as_json: print summary.json instead of a table.

    Raises:
        MusterError: with the exit code of the contract; nothing has been written.
    """
    resolved = config if isinstance(config, RunConfig) else configuration.load(config)
    check_target(Path(out))
    batch = assemble(trajectory.read(paths), resolved)
    batch.write(out)
    for warning in batch.summary["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    print(json.dumps(batch.summary, indent=1) if as_json else readable(batch.summary))


def readable(summary: dict[str, Any]) -> str:
    """A summary as a short table for people."""
    groups, slots, tokens, reward = (summary[key] for key in ("groups", "slots", "tokens", "reward"))
    lost = [
        f"{groups[name]} {name.replace('_', ' ')}"
        for name in ("below_minimum", "dropped_incomplete", "empty", "stale", "filtered")
        if groups[name]
    ]
    bias = summary["bias"]

    def number(value: float | None, digits: int = 3) -> str:
        return "-" if value is None else f"{value:.{digits}g}"

    lines = [
        (
            "groups",
            f"{groups['trainable']} of {groups['target']} trained on" + (f"; {', '.join(lost)}" if lost else ""),
        ),
        ("slots", f"{slots['trainable']} of {slots['target']} trained on, {slots['usable']} usable"),
        ("rows", f"{slots['rows']}"),
        ("tokens", f"{tokens['valid']} valid of {tokens['total']}"),
        ("reward", f"mean {number(reward['mean'])}, std {number(reward['std'])}"),
        ("failed slots", describe_failures(summary["failures"])),
        (
            "lengths",
            f"usable {number(bias['usable_mean_length'], 4)}, failed {number(bias['failed_mean_length'], 4)} tokens",
        ),
        ("reward gap", f"{number(bias['failure_reward_gap'])} (groups without failures minus groups with)"),
        ("minimum", f"{summary['min_usable_group_size']} usable slots a group"),
    ]
    return "\n".join(f"{name:<13} {text}" for name, text in lines)
