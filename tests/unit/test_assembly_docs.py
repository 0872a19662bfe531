"""docs/lost-slots.md shows what assembly does."""

from __future__ import annotations

from muster.groups import FAILURE_REASONS
from tests.cases import make_table


def test_the_table_is_not_stale() -> None:
    text = make_table.DOC.read_text(encoding="utf-8")
    assert make_table.renewed(text) == text, "run: python tests/cases/make_table.py"


def test_every_reason_has_its_advice() -> None:
    text = make_table.DOC.read_text(encoding="utf-8")
    assert [reason for reason in FAILURE_REASONS if f"| `{reason}` |" not in text] == []
