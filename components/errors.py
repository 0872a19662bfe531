"""The errors a user can meet, each with the exit code of the command-line contract.

Not for defects of our own: those stay ordinary exceptions, end with a traceback and exit 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


class MusterError(Exception):
    """Base of all errors that are explained to the user instead of traced.

    Attributes:
        exit_code: what the process ends with.
    """

    exit_code = 1


class InvalidInput(MusterError):
    """Invalid input or configuration: one line per fault, nothing written (exit 2)."""

    exit_code = 2

    def __init__(self, faults: Sequence[str] | str) -> None:
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(self.faults))


class NotBuilt(InvalidInput):
    """A documented option that this version does not implement yet (exit 2)."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{what} is not built yet; {instead}")


class Stalled(MusterError):
    """Collection stalled or nothing is trainable (exit 3).

    Args:
        message: what was wanted and did not come.
        failures: failed slots by reason, shown in the message.
    """

    exit_code = 3

    def __init__(self, message: str, failures: Mapping[str, int] | None = None) -> None:
        self.failures = dict(failures or {})
        counts = ", ".join(f"{reason} {n}" for reason, n in sorted(self.failures.items())) or "none"
        super().__init__(f"{message}; failed slots by reason: {counts}")


class DependencyDied(MusterError):
    """Something we depend on died: a server, a job, storage (exit 4).

    Args:
        what: which dependency, and what it was doing.
        last_words: the end of its own output, if any.
    """

    exit_code = 4

    def __init__(self, what: str, last_words: str = "") -> None:
        self.what, self.last_words = what, last_words.strip()
        super().__init__(f"{what}\n--- its last words ---\n{self.last_words}" if self.last_words else what)


def storage_died(error: OSError, path: Path | None = None) -> DependencyDied:
    """What storage that refused means to a user: mostly a full or unreachable disk.

    Args:
        error: the operating system's.
        path: what was being written, where the error does not say.
    """
    where = path or error.filename
    text = error.strerror or " ".join(str(error).split())
    return DependencyDied(f"{where}: the storage failed: {text}" if where else f"the storage failed: {text}")


class Interrupted(MusterError):
    """SIGINT or SIGTERM; what was collected is kept (exit 130)."""

    exit_code = 130
