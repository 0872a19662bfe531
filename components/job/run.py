"""Runs a job to its outcome: chooses the back end, relaunches a bounded number of times, turns endings into errors.

The only reader of outcome files. It starts no process and calls no API itself: the back ends do.
"""

from __future__ import annotations

import logging

from muster.config import RunConfig
from muster.errors import DependencyDied, MusterError, NotBuilt
from muster.job.spec import Ended, EventKind, JobBackend, JobEvent, JobSpec, Notify, read_outcome
from muster.process import terminable

log = logging.getLogger("muster.job")

FINAL_EXIT_CODES = frozenset({2, 3})
"""Failures that the same command would meet again. Not 130: a rank that is told to end while nobody has interrupted the
caller was on a drained node, or another pod of its job had died."""


class JobError(MusterError):
    """A job said itself that it failed.

    Attributes:
        exit_code: the job's own, with the meaning of the command-line contract.
        error: the job's own text.
    """

    def __init__(self, spec: JobSpec, exit_code: int, error: str) -> None:
        """Takes what the outcome file said."""
        self.exit_code, self.error = exit_code, error.strip()
        super().__init__(f"job {spec.name} failed with exit code {exit_code}: {self.error or 'it gave no reason'}")


def backend(config: RunConfig) -> JobBackend:
    """The back end that `job.backend` names.

    Raises:
        NotBuilt: it names one that this version does not have.
        InvalidInput: the configuration lacks what the back end needs.
        DependencyDied: the back end cannot be reached.
    """
    if config.job.backend == "local":
        from muster.job.local import LocalBackend

        return LocalBackend(config)
    if config.job.backend == "pytorchjob":
        from muster.job.pytorchjob import PyTorchJobBackend

        return PyTorchJobBackend.connect(config)
    raise NotBuilt(f"job.backend {config.job.backend}", "use pytorchjob, or local on one machine")


def run_job(backend: JobBackend, spec: JobSpec, notify: Notify | None = None) -> None:
    """Runs a job until it is done.

    A job that died is launched again, at most `backend.max_restarts` times; so is one that failed with an exit code
    that a second try may change. It resumes by itself from its last checkpoint: the command is the same.

    Args:
        backend: where it runs.
        spec: what it is.
        notify: called with each event, besides the log.

    Raises:
        JobError: the job said that it failed; carries its exit code and text.
        DependencyDied: it ended without saying anything, or used up its timeout; carries its last words.
        Interrupted, KeyboardInterrupt: the caller was interrupted; the job has been ended or left as the back end does.
    """

    def tell(event: JobEvent) -> None:
        level = logging.WARNING if event.kind in {"failed", "died", "relaunch"} else logging.INFO
        log.log(level, "job %s: %s", spec.name, event.text)
        if notify is not None:
            notify(event)

    with terminable():
        first = attempt = backend.first_attempt(spec)
        while True:
            ended = backend.run(spec, attempt, tell)
            error, kind = _judge(backend, spec, ended)
            if error is None:
                tell(JobEvent("done", "done"))
                return
            tell(JobEvent(kind, str(error)))
            restarts = attempt - first
            if error.exit_code in FINAL_EXIT_CODES or not ended.relaunch or restarts >= backend.max_restarts:
                raise error
            attempt += 1
            text = (
                f"relaunching the whole job from its last checkpoint, restart {restarts + 1} of {backend.max_restarts}"
            )
            tell(JobEvent("relaunch", text))


def _judge(backend: JobBackend, spec: JobSpec, ended: Ended) -> tuple[MusterError | None, EventKind]:
    """What an ended attempt means: None for success."""
    outcome = read_outcome(spec.outcome, backend.settle_seconds)
    if outcome is not None and outcome.done:
        return None, "done"
    if outcome is not None:
        return JobError(spec, outcome.exit_code, outcome.error), "failed"
    how = f"died without saying how it went ({ended.how}; no {spec.outcome.name})"
    return DependencyDied(f"job {spec.name} {how}", ended.last_words), "died"
