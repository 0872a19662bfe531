"""Child processes that never outlive their purpose: start one with its log in a file, end it with all it started.

Who starts a server or a launcher here gets its whole process tree ended, also the parts that moved to sessions of their
own or lost their parent. Nothing here knows what the processes are for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from muster.errors import DependencyDied, Interrupted

TREE_VARIABLE = "MUSTER_PROCESS_TREE"
"""Marks every process of a tree through its environment, so that orphans in other sessions are found."""

_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1
# Looked up before any fork: between fork and exec nothing may be imported or loaded.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Child(subprocess.Popen[bytes]):
    """A process started by `spawn`.

    Attributes:
        mark: the token that this process and all its descendants carry in `TREE_VARIABLE`.
        log: the file that takes its standard output and error.
    """

    mark: str
    log: Path


def spawn(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None, log: Path) -> Child:
    """Starts a process in a session of its own, with standard output and error appended to a file.

    On Linux it gets SIGTERM when the calling thread ends, even by kill -9 of the caller. So call this from a thread
    that outlives the child, best the main one.

    Args:
        argv: program and arguments.
        env: its whole environment.
        cwd: its working directory; None for the caller's.
        log: made with its parent directories.

    Raises:
        DependencyDied: the program cannot be started.
    """
    mark = uuid.uuid4().hex
    outer = env.get(TREE_VARIABLE)
    marked = {**env, TREE_VARIABLE: f"{outer}:{mark}" if outer else mark}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        try:
            child = Child(
                list(argv),
                env=marked,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent(os.getpid()),
            )
        except OSError as error:
            raise DependencyDied(f"cannot start {argv[0]}: {error.strerror or error}") from error
    child.mark, child.log = mark, log
    return child


def end_tree(process: subprocess.Popen[bytes], grace_seconds: float = 10.0) -> None:
    """Ends a process and everything it started, and returns when all of it is gone.

    SIGTERM goes to the process alone, which knows how to end its own children; what is left after the grace, or at once
    if it had ended already, gets SIGKILL. A second interruption during the grace cuts it short.

    Args:
        process: what `spawn` returned; another Popen works too, but orphans of one that has ended are then not found.
        grace_seconds: how long the process may take to end by itself.
    """
    members: set[psutil.Process] = set()
    try:
        _gather(process, members)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            waited = 0.0
            while process.poll() is None and waited < grace_seconds:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
                waited += _POLL_SECONDS
                _gather(process, members)
    finally:
        _kill(process, members)


def tail(path: Path, lines: int = 30) -> str:
    """The last lines of a text file, at most 64 KiB of it; nothing if it cannot be read."""
    limit = 64 * 1024
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            text = file.read(limit).decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now. Another process may take it before it is used: be ready to try again."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a listener could be bound to the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turns SIGTERM into `Interrupted` while the block runs, so that what it started is ended and not abandoned.

    Does nothing outside the main thread, or where the program has a SIGTERM handler of its own.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted("terminated (SIGTERM)")


def _end_with_parent(parent: int) -> Callable[[], None] | None:
    """What a child runs before exec so that it does not outlive its parent; None where the system cannot."""
    libc = _LIBC
    if libc is None:
        return None

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return before_exec


def _gather(process: subprocess.Popen[bytes], members: set[psutil.Process]) -> None:
    """Adds what descends from the process now; psutil tells a reused process id from the process it knew."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(process.pid)
        if process.returncode is None:
            members.update(root.children(recursive=True))


def _marked(mark: str) -> Iterator[psutil.Process]:
    """Processes of ours that carry the mark, whoever their parent is now."""
    for candidate in psutil.process_iter():
        if candidate.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if mark in candidate.environ().get(TREE_VARIABLE, "").split(":"):
                yield candidate


def _kill(process: subprocess.Popen[bytes], members: set[psutil.Process]) -> None:
    """SIGKILL to the process and to all members, until none is left (bounded)."""
    _gather(process, members)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    mark = getattr(process, "mark", None)
    for _ in range(5):  # a member may have forked between the search and the signal
        if mark is not None:
            members.update(_marked(mark))
        alive = [member for member in members if _alive(member)]
        if not alive:
            break
        for member in alive:
            with contextlib.suppress(psutil.Error):
                member.kill()
        _wait_until_gone(alive, seconds=2)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def _wait_until_gone(members: Sequence[psutil.Process], seconds: float) -> None:
    """Returns when all have ended; a zombie has, whether or not its new parent ever reaps it."""
    end = time.monotonic() + seconds
    while any(map(_alive, members)) and time.monotonic() < end:
        time.sleep(0.01)


def _alive(member: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(member.is_running() and member.status() != psutil.STATUS_ZOMBIE)
    return False
