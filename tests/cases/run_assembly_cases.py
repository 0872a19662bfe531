"""Runs assembly cases through the command line and compares.

Usage: python tests/cases/run_assembly_cases.py [CASES.json ...] [--muster CMD]

A case is a few groups written short, a configuration, and the right answer. It is expanded into a rollout file, `muster
assemble` is run on it, and exit code, rows, advantages and summary are compared. A slot is {"r": reward} (usable;
"rows": k exports it as k rows, "len": n sets its completion length), {"fail": reason} (failed; with tokens unless "len"
is 0) or "absent". `expand` and `compare` are also used by the tests that call `assemble` in their own process.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

FILE = Path(__file__).with_name("assembly.json")
Case = dict[str, Any]


def load(path: Path = FILE) -> list[Case]:
    """The cases of a file."""
    return json.loads(path.read_text())


def expand(case: Case) -> list[dict[str, Any]]:
    """A case's groups as rollout rows."""
    rows = []
    for group in case["groups"]:
        for index, slot in enumerate(group["slots"]):
            if slot != "absent":
                rows.extend(_slot_rows(group, index, slot))
    if "shuffle" in case:
        random.Random(case["shuffle"]).shuffle(rows)
    return rows


def _slot_rows(group: dict[str, Any], index: int, slot: dict[str, Any]) -> list[dict[str, Any]]:
    length = slot.get("len", 2 + index % 3)
    base = {
        "group_id": group["id"],
        "n_samples": slot.get("n", group["n"]),
        "slot": index,
        "prompt_ids": group.get("prompt", [3, 1, 4]),
        "completion_ids": list(range(5, 5 + length)),
        "loss_mask": [True] * length,
        "logprobs": [-0.5] * (length - bool(slot.get("logprobs_short"))),
        "versions": [0] * (length - bool(slot.get("versions_short"))),
    }
    if "fail" in slot:
        return [
            {**base, "row": 0, "status": "failed", "failure": slot["fail"], "reward": None, "finish_reason": "abort"}
        ]
    rows = []
    for number, reward in enumerate(slot.get("row_rewards") or [slot["r"]] * slot.get("rows", 1)):
        row = {**base, "row": number, "status": "usable", "failure": None, "finish_reason": "stop"}
        row["reward"] = float(reward) if isinstance(reward, str) else reward
        if "rollout_reward" in slot:
            row["rollout_reward"] = slot["rollout_reward"]
        rows.append(row)
    return rows + [dict(rows[-1])] * (group.get("dup") == index)


def compare(
    case: Case, code: int, stderr: str, summary: dict[str, Any] | None, rows: list[dict[str, Any]] | None
) -> str | None:
    """What is wrong with an answer; None when it is right.

    Args:
        case: as in the file.
        code: exit code.
        stderr: what was said.
        summary: what was printed, when the exit code is 0.
        rows: the batch's rows; None when no batch was written.
    """
    want = case["expect"]
    if code != want["exit"]:
        return f"exit {code}, expected {want['exit']}: {stderr.strip()[-300:]}"
    if "Traceback" in stderr:
        return "printed a traceback"
    for word in want.get("stderr_has", []):
        if word not in stderr:
            return f"stderr does not name {word!r}: {stderr.strip()[-300:]}"
    if want["exit"]:
        return f"wrote output in spite of exit {code}" if rows is not None else None
    assert summary is not None
    assert rows is not None
    for path, value in want.get("summary", {}).items():
        got: Any = summary
        for key in path.split("."):
            got = got.get(key) if isinstance(got, dict) else None
        if got is None or not math.isclose(got, value, rel_tol=1e-9):
            return f"summary {path} is {got}, expected {value}"
    if want.get("warns") and not summary.get("warnings"):
        return "no warning"
    return _compare_rows(want, rows)


def _compare_rows(want: dict[str, Any], rows: list[dict[str, Any]]) -> str | None:
    got: dict[tuple[str, int, int], float] = {}
    for row in rows:
        key = (row["group_id"], row["slot"], row["row"])
        if key in got:
            return f"row {key} appears twice"
        values = [a for a, valid in zip(row["advantages"], row["loss_mask"], strict=True) if valid]
        if not values or len(row["advantages"]) != len(row["completion_ids"]) or max(values) - min(values) > 1e-6:
            return f"advantages of {key} are not one value per completion token: {row['advantages']}"
        got[key] = values[0]
    if not all(math.isfinite(value) for value in got.values()):
        return "non-finite advantage"
    if "max_abs_advantage" in want and max(map(abs, got.values()), default=0) > want["max_abs_advantage"]:
        return f"largest advantage {max(map(abs, got.values()))}"
    if "rows" in want:
        expect = {(group, slot, row): value for group, slot, row, value in want["rows"]}
        if set(expect) != set(got):
            return f"rows {sorted(set(got) ^ set(expect))} differ"
        for key, value in expect.items():
            if abs(got[key] - value) > 1e-4 * max(1, abs(value)):
                return f"advantage of {key} is {got[key]}, expected {value}"
    return None


def check(case: Case, command: list[str]) -> str | None:
    """Runs one case through the command line; says what is wrong with the answer."""
    with tempfile.TemporaryDirectory() as folder:
        rollouts, config, out = Path(folder, "rollouts.jsonl"), Path(folder, "run.yaml"), Path(folder, "batch")
        rollouts.write_text("".join(json.dumps(row) + "\n" for row in expand(case)))
        config.write_text(json.dumps(case["config"]))
        done = subprocess.run(
            [*command, "assemble", str(rollouts), "--config", str(config), "--out", str(out), "--json"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        written = out / "batch.parquet"
        rows = pq.read_table(written).to_pylist() if written.exists() else None
        summary = json.loads(done.stdout) if done.returncode == 0 else None
        return compare(case, done.returncode, done.stderr, summary, rows)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", type=Path, default=[FILE])
    parser.add_argument("--muster", default="muster")
    args = parser.parse_args()
    faults = [
        (case, fault)
        for path in args.cases
        for case in load(path)
        if (fault := check(case, shlex.split(args.muster))) is not None
    ]
    for case, fault in faults:
        print(f"{case['name']} ({case['source']}): {fault}")
    total = sum(len(load(path)) for path in args.cases)
    print(f"{total - len(faults)} passed, {len(faults)} failed")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
