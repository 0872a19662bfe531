"""What a job is, what a back end must do for it, and the outcome file by which a job says how it ended.

The outcome protocol: the back end sets `MUSTER_OUTCOME` to a path. The job's rank 0 writes `{"outcome": "done"}` there,
atomically and last; a rank that fails writes `{"outcome": "failed", "exit_code": N, "error": "text"}`, and the first
such writer wins. No file at the end means that the job died.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from muster.errors import InvalidInput

OUTCOME_VARIABLE = "MUSTER_OUTCOME"
EventKind = Literal[
    "launched", "adopted", "pending", "running", "relaunch", "done", "failed", "died", "left", "deleted"
]


@dataclass(frozen=True)
class JobSpec:
    """One job: the same program on `replicas * nproc_per_node` ranks.

    Attributes:
        name: what the job is, unique within the run and the same when the step is run again, such as `train-0003`:
            lower-case letters, digits and dashes.
        arguments: what follows torchrun's own options, starting with `-m`.
        replicas: pods (one machine runs them all as one group of processes).
        nproc_per_node: ranks in each replica.
        outcome: the outcome file, at one path for the job and for the caller.
        log_dir: where logs are kept that the place itself does not keep.
        env: added to the environment of each rank.
        timeout: seconds that one attempt may take, waiting for a place included.
    """

    name: str
    arguments: tuple[str, ...]
    replicas: int
    nproc_per_node: int
    outcome: Path
    log_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 86400.0

    def __post_init__(self) -> None:
        """Checks what no back end could run.

        Raises:
            InvalidInput: one line per fault.
        """
        faults = []
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", self.name):
            faults.append(f"job name {self.name!r}: must be 1 to 40 lower-case letters, digits and inner dashes")
        if not self.arguments or self.arguments[0] != "-m":
            faults.append(f"job {self.name}: arguments must start with -m and a module, not {list(self.arguments[:1])}")
        if self.replicas < 1 or self.nproc_per_node < 1:
            faults.append(
                f"job {self.name}: replicas {self.replicas} and nproc_per_node {self.nproc_per_node} must be at least 1"
            )
        if not self.timeout > 0:
            faults.append(f"job {self.name}: timeout is {self.timeout} s, must be above 0")
        if faults:
            raise InvalidInput(faults)


@dataclass(frozen=True)
class Ended:
    """An attempt is over. How it went stands in the outcome file; this is the evidence for when there is none.

    Attributes:
        how: one line, such as `torchrun exited with 1`.
        last_words: the end of the failing rank's own output.
        relaunch: whether launching it again could help; not after a timeout, a deletion, or an image that is not there.
    """

    how: str
    last_words: str = ""
    relaunch: bool = True


@dataclass(frozen=True)
class JobEvent:
    """Something happened to a job that a person who waits for it wants to know.

    Attributes:
        kind: what, from a closed set.
        text: one line for people.
        pending_seconds: for `pending`, how long the job has waited for a place.
    """

    kind: EventKind
    text: str
    pending_seconds: float = 0.0


Notify = Callable[[JobEvent], None]


class JobBackend(Protocol):
    """A place that jobs run in.

    Attributes:
        name: as in `job.backend`.
        max_restarts: how often a whole job is launched again after a death.
        settle_seconds: how long the outcome file may take to become visible after the job has ended.
    """

    name: str
    max_restarts: int
    settle_seconds: float

    def first_attempt(self, spec: JobSpec) -> int:
        """The number of the attempt to begin with: above 0 where earlier launchers have left attempts behind."""
        ...

    def run(self, spec: JobSpec, attempt: int, notify: Notify) -> Ended:
        """Launches one attempt, or adopts it where it is running already, and returns when it has ended.

        A launch removes the outcome file of earlier attempts first. On any exception that passes through (an interrupt
        too) the back end does what is right there: nothing is left running that nobody watches.
        """
        ...


@dataclass(frozen=True)
class Outcome:
    """What the outcome file says."""

    done: bool
    exit_code: int = 0
    error: str = ""


def read_outcome(path: Path, settle_seconds: float = 0.0) -> Outcome | None:
    """Reads an outcome file.

    Args:
        path: the file.
        settle_seconds: how long to look again when it is absent; shared file systems show new files late.

    Returns:
        None if the job wrote none, or nothing that can be read as one.
    """
    end = time.monotonic() + settle_seconds
    while True:
        try:
            # Listing the directory makes NFS clients look at the server and not into their cache.
            if path.name in os.listdir(path.parent):  # noqa: PTH208
                return _parse(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            pass
        if time.monotonic() >= end:
            return None
        time.sleep(0.25)


def _parse(said: object) -> Outcome | None:
    if not isinstance(said, dict):
        return None
    if said.get("outcome") == "done":
        return Outcome(done=True)
    if said.get("outcome") != "failed":
        return None
    code = said.get("exit_code")
    if not isinstance(code, int) or isinstance(code, bool) or not 0 < code < 256:
        code = 1
    return Outcome(done=False, exit_code=code, error=str(said.get("error", "")))
