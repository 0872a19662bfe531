"""The benchmark of assembly runs and reports what it promises; how fast is for the benchmark itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("io", [False, True])
def test_one_case(tmp_path: Path, io: bool) -> None:
    def case(file: str) -> str:
        command = [sys.executable, "-m", "tests.benchmarks.assembly", "800", "16", file]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout

    file = str(tmp_path / "r.parquet") if io else "-"
    if io:
        case(f"{file}.make")
    got = json.loads(case(file))
    assert {"rows", "tokens_per_row", "seconds", "tokens_per_second", "peak_bytes", "batch_bytes"} <= set(got)
    assert (got["rows"], got["tokens_per_row"], got["io"]) == (800, 16, io)
    assert got["tokens_per_second"] == pytest.approx(800 * 16 / got["seconds"])
