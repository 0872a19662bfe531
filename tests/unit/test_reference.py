"""docs/reference.md says what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_is_what_the_code_gives() -> None:
    code = "import make_reference; print(make_reference.main(), end='')"
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=DOCS, capture_output=True, text=True, timeout=60, check=True
    )
    assert (DOCS / "reference.md").read_text(encoding="utf-8") == made.stdout, "write it anew: docs/make_reference.py"
