"""The assembly cases: through the installed command, and in this process for the inner loop."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from muster import config
from muster.assembly.command import run
from muster.errors import MusterError
from tests.cases import run_assembly_cases as cases

CASES = cases.load()


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(case: cases.Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts, out = tmp_path / "rollouts.jsonl", tmp_path / "batch"
    rollouts.write_text("".join(json.dumps(row) + "\n" for row in cases.expand(case)))
    code, said = 0, ""
    try:
        run(rollouts, config.parse(json.dumps(case["config"])), out, as_json=True)
    except MusterError as error:
        code, said = error.exit_code, str(error)
    summary = json.loads(capsys.readouterr().out) if code == 0 else None
    rows = pq.read_table(out / "batch.parquet").to_pylist() if (out / "batch.parquet").exists() else None
    assert cases.compare(case, code, said, summary, rows) is None


@pytest.mark.slow
def test_every_case_through_the_command_line() -> None:
    command = [str(Path(sys.executable).with_name("muster"))]
    wrong = {case["name"]: fault for case in CASES if (fault := cases.check(case, command)) is not None}
    assert wrong == {}
