"""The errors a user can meet, each with the exit code of the command-line contract.

Not for defects of our own: those stay ordinary exceptions, end with a traceback and exit 1.
"""

from __future__ import annotations

import errno
import os
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


def os_error(error: OSError) -> MusterError:
    """What an error of the operating system means to a user who knows no more than that it came.

    A connection, the machine or the storage that failed is something we depend on (exit 4); a path that cannot be used
    is the user's to mend (exit 2). An error that names a path is never taken for one of a connection: network file
    systems time out, too.
    """
    text, where = _text(error), _where(error)
    if not where and (what := _connection(error)) is not None:
        return DependencyDied(f"{what} failed: {text}")
    if error.errno in _MACHINE or (not where and error.errno in _REMEDIES):
        return DependencyDied(f"{where}: the machine refused: {text}" if where else f"the machine refused: {text}")
    return storage_died(error)


def storage_died(error: OSError, path: Path | None = None) -> MusterError:
    """What storage that refused means to a user: mostly a full or unreachable disk, or a path that cannot be used.

    Args:
        error: the operating system's.
        path: what was being written, where the error does not say.
    """
    text, where = _text(error), str(path) if path is not None else _where(error)
    remedy = _REMEDIES.get(error.errno or 0)
    if where and remedy is not None:
        return InvalidInput(f"{where}: {text}; {remedy.format(user=os.geteuid())}")
    return DependencyDied(f"{where}: the storage failed: {text}" if where else f"the storage failed: {text}")


_REMEDIES = {
    errno.EACCES: "let user {user} read and write there, or name another path",
    errno.EPERM: "let user {user} read and write there, or name another path",
    errno.ENOENT: "name one that exists (if it did: is its volume mounted?)",
    errno.EISDIR: "name a file, not a folder",
    errno.ENOTDIR: "a file is where a folder must be; name another path",
    errno.EEXIST: "name one that does not exist yet, or remove it",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.ELOOP: "its symbolic links lead in a circle; name another path",
}
"""Errors about a path that someone chose, and what would be right. A read-only file system is not among them: that is
what a failing disk becomes."""

_MACHINE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.EADDRINUSE})
"""Limits and ports of the machine, whatever the path."""

_NETWORK = frozenset(
    {
        errno.EADDRNOTAVAIL,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.ETIMEDOUT,
    }
)
"""What a socket says beside the subclasses of ConnectionError."""


def _connection(error: OSError) -> str | None:
    """Which connection an error without a path is about; None if it is about none."""
    import socket
    import ssl

    if isinstance(error, socket.gaierror | socket.herror):
        return "looking up a host name"
    host, port = getattr(error, "host", None), getattr(error, "port", None)  # those of aiohttp have them
    known = isinstance(error, ConnectionError | TimeoutError | ssl.SSLError) or error.errno in _NETWORK
    if host:
        return f"the connection to {host}:{port}"
    return "a connection" if known else None


def _text(error: OSError) -> str:
    text = str(error.strerror or " ".join(str(error).split()))
    return text or ("timed out" if isinstance(error, TimeoutError) else type(error).__name__)


def _where(error: OSError) -> str:
    """The path or paths that an error names; nothing if it names none."""
    names = [os.fsdecode(n) for n in (error.filename, error.filename2) if isinstance(n, str | bytes | os.PathLike)]
    return " -> ".join(names)


class Interrupted(MusterError):
    """SIGINT or SIGTERM; what was collected is kept (exit 130)."""

    exit_code = 130
