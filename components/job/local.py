"""The local back end: the whole job as processes of this machine, under torchrun.

All replicas become one group of processes. Several jobs may run on a machine at once: each has a rendezvous of its own
on a port that the system chooses. Not for several machines.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from muster.config import RunConfig
from muster.job.spec import OUTCOME_VARIABLE, Ended, JobEvent, JobSpec, Notify
from muster.process import Child, end_tree, spawn, tail

LAST_WORDS = 30
"""Lines of the failing rank's log that an error shows."""


class LocalBackend:
    """Runs jobs as processes of this machine."""

    name = "local"
    settle_seconds = 0.0

    def __init__(self, config: RunConfig, *, grace_seconds: float = 10.0) -> None:
        """Takes what it needs from the configuration.

        Args:
            config: the run.
            grace_seconds: how long ranks may take to end after SIGTERM before they are killed.
        """
        self.max_restarts = config.job.max_restarts
        self._env = dict(config.job.env)
        self._grace_seconds = grace_seconds

    def first_attempt(self, spec: JobSpec) -> int:  # noqa: ARG002 - the interface's
        """Always 0: local jobs do not outlive their caller."""
        return 0

    def run(self, spec: JobSpec, attempt: int, notify: Notify) -> Ended:
        """Runs one attempt; whatever way this returns or raises, no process of it is left."""
        folder = (spec.log_dir / f"attempt-{attempt}").absolute()
        if folder.exists():
            shutil.rmtree(folder)
        spec.outcome.parent.mkdir(parents=True, exist_ok=True)
        spec.outcome.unlink(missing_ok=True)
        ranks = spec.replicas * spec.nproc_per_node
        agent: Child | None = None
        try:
            agent = spawn(command(spec, folder), env=self._environment(spec), log=folder / "agent.log")
            notify(JobEvent("launched", f"attempt {attempt}: {ranks} local processes, logs in {folder}"))
            exit_code = _wait(agent, spec.timeout)
        finally:
            if agent is not None:
                end_tree(agent, self._grace_seconds)
        if exit_code is None:
            how = f"still running after its timeout of {spec.timeout:g} s"
            return Ended(how, last_words(folder), relaunch=False)
        how = f"torchrun exited with {exit_code}"
        if exit_code < 0:
            how = f"torchrun was ended by {signal.Signals(-exit_code).name}"
        return Ended(how, last_words(folder) if exit_code else "")

    def _environment(self, spec: JobSpec) -> dict[str, str]:
        defaults: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if sys.platform == "linux":
            # One machine: do not depend on whether and to what its host name resolves.
            defaults = {**defaults, "GLOO_SOCKET_IFNAME": "lo"}
        return {**defaults, **os.environ, **self._env, **spec.env, OUTCOME_VARIABLE: str(spec.outcome.absolute())}


def command(spec: JobSpec, folder: Path) -> list[str]:
    """The torchrun command of a job whose ranks log below `folder`."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={spec.replicas * spec.nproc_per_node}",
        "--nnodes=1",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",  # port 0: the system chooses, so two jobs never meet
        f"--rdzv-id={spec.name}",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
        "--redirects=3",
        f"--log-dir={folder}",
        *spec.arguments,
    ]


def last_words(folder: Path, lines: int = LAST_WORDS) -> str:
    """The end of the output of the rank that failed first, headed by its name; of the agent where no rank is known."""
    agent = tail(folder / "agent.log", 2 * lines)
    found = re.search(r"Root Cause.*?rank\s*:\s*(\d+)\b.*?exitcode\s*:\s*(-?\d+)", agent, re.DOTALL)
    ranks = {path.name: path for path in sorted(folder.glob("*/attempt_0/*")) if path.is_dir()}
    if found and found[1] in ranks:
        path, head = ranks[found[1]], f"rank {found[1]}, exit code {found[2]}"
    else:
        # The agent itself was killed or a timeout struck: the rank that spoke last knows most.
        speaking = [path for path in ranks.values() if _said(path, lines)]
        if not speaking:
            return "\n".join(agent.splitlines()[-lines:])
        path = max(speaking, key=lambda p: max(file.stat().st_mtime for file in p.glob("std*.log")))
        head = f"rank {path.name}"
    return f"{head} ({path}):\n{_said(path, lines) or 'it wrote nothing'}"


def _said(rank: Path, lines: int) -> str:
    """What a rank wrote, standard error before standard output."""
    return tail(rank / "stderr.log", lines) or tail(rank / "stdout.log", lines)


def _wait(agent: Child, timeout: float) -> int | None:
    """The agent's exit code, or None when the time is over."""
    end = time.monotonic() + timeout
    while True:
        try:
            return agent.wait(max(0.0, min(1.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end:
                return None
