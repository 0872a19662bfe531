"""The run's diary, `events.jsonl`: one line for each thing that happened, appended by every step.

Progress displays, `muster status` and the report read it; nothing is decided from it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_NAME = "events.jsonl"


def append(root: Path, kind: str, **fields: Any) -> None:
    """Adds one event.

    Args:
        root: run directory.
        kind: what happened, such as `collected`.
        **fields: JSON values.
    """
    line = json.dumps({"time": round(time.time(), 3), "kind": kind, **fields}, allow_nan=False) + "\n"
    descriptor = os.open(root / FILE_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())  # one write: lines of several processes do not mix
    finally:
        os.close(descriptor)


def read(root: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Events from a byte offset on, and the offset to continue from; a line half-written by a killed process is left.

    Args:
        root: run directory.
        offset: what an earlier call returned.
    """
    try:
        with (root / FILE_NAME).open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    complete = data[: data.rfind(b"\n") + 1]
    return list(_parse(complete)), offset + len(complete)


def _parse(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the rest of a line that a full disk cut
        if isinstance(event, dict) and "kind" in event:
            yield event
