"""Why a PyTorchJob does not run yet: quota, scheduling, images, an operator that is not there.

Looks at the job, its pods and its events, tells the caller what changed, and knows when there is no hope. Ends nothing.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from muster.job.cluster import Cluster
from muster.job.manifest import QUEUE_LABEL
from muster.job.spec import Ended, JobEvent, Notify, read_outcome

log = logging.getLogger("muster.job")

# Waiting reasons of a container that no amount of waiting mends, and those that time may mend.
_HOPELESS = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_DOUBTFUL = frozenset({"ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError", "CreateContainerError"})


class Waiting:
    """The wait for all pods of one job to run.

    Attributes:
        over: whether all of them ran when last looked at.
    """

    def __init__(
        self,
        cluster: Cluster,
        pods: str,
        replicas: int,
        outcome: Path,
        notify: Notify,
        *,
        image_seconds: float,
        report_seconds: float,
    ) -> None:
        """Takes what to look at.

        Args:
            cluster: where.
            pods: label selector of the job's pods.
            replicas: how many there should be.
            outcome: the job's outcome file.
            notify: gets `pending` and `running` events.
            image_seconds: how long a container may fail to start for its image or configuration.
            report_seconds: after how long the same reason is told again.
        """
        self._cluster, self._pods, self._replicas, self._outcome, self._notify = (
            cluster,
            pods,
            replicas,
            outcome,
            notify,
        )
        self._image_seconds, self._report_seconds = image_seconds, report_seconds
        self._begun = time.monotonic()
        self._told, self._told_at = "", -1e9
        self._doubt_since: float | None = None
        self.over = False

    def look(self, job: dict[str, Any]) -> Ended | None:
        """Takes one look; returns how the job ended if it can never start."""
        suspended = is_suspended(job)
        if self.over and not suspended:
            return None
        if self.over:  # preempted: the wait begins again
            self.over, self._begun = False, time.monotonic()
        if suspended:
            self._tell(self._suspended(job))
            return None
        pods = self._cluster.pods(self._pods)
        started = sum(pod.status.phase in ("Running", "Succeeded", "Failed") for pod in pods)
        if started >= self._replicas:
            self.over = True
            self._notify(JobEvent("running", f"all {self._replicas} pods run"))
            return None
        if not pods:
            complaint = self._cluster.newest_warning(job["metadata"]["name"])
            self._tell(f"no pods: {complaint}" if complaint else "no pods yet; does the training operator run?")
            return None
        problems = [problem for pod in pods if (problem := _problem(pod)) is not None]
        count = f"{started} of {self._replicas} pods run"
        self._tell(f"{count}; {problems[0][1]}" if problems else count)
        return self._judge([(reason, text) for reason, text in problems if reason])

    def _tell(self, text: str) -> None:
        now = time.monotonic()
        if text != self._told or now - self._told_at >= self._report_seconds:
            self._told, self._told_at = text, now
            self._notify(JobEvent("pending", text, now - self._begun))

    def _suspended(self, job: dict[str, Any]) -> str:
        """Why it is suspended. What its pods said while they were being ended is no outcome of the job."""
        said = read_outcome(self._outcome)
        if said is not None and not said.done and not self._cluster.pods(self._pods):
            log.info("removing %s: pods wrote it while the job was being suspended", self._outcome)
            self._outcome.unlink(missing_ok=True)
        queue = (job["metadata"].get("labels") or {}).get(QUEUE_LABEL)
        return f"suspended: waiting for quota in queue {queue}" if queue else "suspended by someone"

    def _judge(self, doubtful: list[tuple[str, str]]) -> Ended | None:
        """Whether pods that cannot start have had their time."""
        if not doubtful:
            self._doubt_since = None
            return None
        now = time.monotonic()
        self._doubt_since = self._doubt_since if self._doubt_since is not None else now
        hopeless = any(reason in _HOPELESS for reason, _ in doubtful)
        if not hopeless and now - self._doubt_since <= self._image_seconds:
            return None
        return Ended(f"it cannot start: {doubtful[0][1]}", relaunch=False)


def condition(job: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """A condition of the job, if it is true."""
    for item in (job.get("status") or {}).get("conditions") or []:
        if item.get("type") == kind and item.get("status") == "True":
            return dict(item)
    return None


def is_finished(job: dict[str, Any]) -> bool:
    """Whether the operator says that the job has ended, well or not."""
    return condition(job, "Succeeded") is not None or condition(job, "Failed") is not None


def is_suspended(job: dict[str, Any]) -> bool:
    """Whether the job waits for someone, mostly a queue, to let it run."""
    return condition(job, "Suspended") is not None or bool((job["spec"].get("runPolicy") or {}).get("suspend"))


def _problem(pod: Any) -> tuple[str, str] | None:
    """A pod's (reason, text), if it has a problem; the reason is empty for one that time alone mends."""
    for status in pod.status.container_statuses or []:
        waiting = status.state.waiting if status.state else None
        if waiting is not None and waiting.reason in _HOPELESS | _DOUBTFUL:
            text = f"{waiting.reason} {status.image}: {waiting.message or 'without a message'}"
            return waiting.reason, f"pod {pod.metadata.name}: {text}"
    for item in pod.status.conditions or []:
        if item.type == "PodScheduled" and item.status == "False":
            return "", f"pod {pod.metadata.name}: {item.reason}: {item.message}"
    return None
