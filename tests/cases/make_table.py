"""Writes the table of docs/lost-slots.md from the assembly cases: python tests/cases/make_table.py [--check].

The table is what `assemble` answers, not what somebody remembers it to answer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from muster import config, trajectory
from muster.assembly import assemble

if __package__:
    from tests.cases.run_assembly_cases import Case, expand, load
else:
    from run_assembly_cases import Case, expand, load

DOC = Path(__file__).parents[2] / "docs" / "lost-slots.md"
BEGIN, END = "<!-- table begins: python tests/cases/make_table.py -->", "<!-- table ends -->"

CASES = {
    "survivors-kept-once": "a lost slot",
    "trailing-partial-group": "a lost slot beside a whole group",
    "unequal-sizes-own-means": "groups of different sizes",
    "lone-survivor-is-not-trained": "one survivor",
    "strict-mode-drops-incomplete": "`drop_incomplete_group: true`",
    "ungradable-is-not-zero": "an answer nobody could grade",
    "nan-reward-spares-siblings": "a reward that is NaN",
    "empty-completion-is-failed": "an empty answer with a reward",
    "timeout-counted-as-zero-on-request": "`failures: {timeout: 0.0}`",
    "fan-out-counts-a-rollout-once": "one slot of three rows",
}
SHORT = {"timeout": "T", "aborted": "A", "server_error": "E", "reward_error": "R"}


def table() -> str:
    """The Markdown table."""
    cases = {case["name"]: case for case in load()}
    lines = [
        "| what happened | group | trained on | advantages |",
        "|---|---|---|---|",
        *(line for name, said in CASES.items() for line in _lines(cases[name], said)),
    ]
    return "\n".join(lines)


def _lines(case: Case, said: str) -> list[str]:
    batch = assemble(trajectory.from_rows(expand(case)), config.parse(json.dumps(case["config"])))
    values: dict[str, dict[int, list[float]]] = {}
    for row in batch.table.to_pylist():
        values.setdefault(row["group_id"], {}).setdefault(row["slot"], []).append(row["advantages"][0])
    lines = []
    for group in case["groups"]:
        shown = " ".join(_slot(slot) for slot in group["slots"])
        kept = values.get(group["id"])
        trained = f"{len(kept)} of {group['n']}" if kept else "no"
        numbers = " ".join(_numbers(kept.get(i)) for i in range(group["n"])) if kept else ""
        lines.append(f"| {said} | `{shown}` | {trained} | {f'`{numbers}`' if numbers else ''} |")
        said = ""
    return lines


def _slot(slot: Any) -> str:
    if "fail" in slot:
        return SHORT[slot["fail"]]
    reward = "NaN" if isinstance(slot["r"], str) else f"{slot['r']:g}"
    if slot.get("len") == 0:
        return f"{reward}∅"
    return f"{reward}×{slot['rows']}" if slot.get("rows", 1) > 1 else reward


def _numbers(values: list[float] | None) -> str:
    if values is None:
        return "·"
    assert len(set(values)) == 1
    one = f"{float(np.round(values[0], 2)) + 0.0:.2f}"
    return one if len(values) == 1 else f"{one}×{len(values)}"


def renewed(text: str) -> str:
    """The document with its table made anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    """The command line."""
    text = DOC.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        return int(renewed(text) != text)
    DOC.write_text(renewed(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
