"""The PyTorchJob back end: creates a job or adopts it, follows it to its end, leaves or deletes it when interrupted.

The job's conditions are evidence, never success (`muster.job.run` reads the outcome file). What a PyTorchJob looks like
is `manifest`'s; how the API is called is `cluster`'s; why it does not run yet is `waiting`'s.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import urllib3
from kubernetes import client as k8s
from kubernetes.client.exceptions import ApiException

from muster.config import RunConfig
from muster.errors import DependencyDied, Interrupted, InvalidInput
from muster.job import manifest as m
from muster.job.cluster import Cluster, Identity, Lease, connect, identify, is_terminating, said
from muster.job.spec import Ended, JobEvent, JobSpec, Notify, read_outcome
from muster.job.waiting import Waiting, condition, is_finished, is_suspended

log = logging.getLogger("muster.job")

RBAC_RULES: list[dict[str, list[str]]] = [
    {
        "apiGroups": ["kubeflow.org"],
        "resources": ["pytorchjobs"],
        "verbs": ["create", "get", "list", "watch", "update", "delete"],
    },
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create", "get", "update"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
    {"apiGroups": ["argoproj.io"], "resources": ["workflows"], "verbs": ["get"]},
]
"""The Role, in the jobs' namespace, of the account that steps run as. Nothing else is asked for."""

JOB_RBAC_RULES: list[dict[str, list[str]]] = [
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get"]},
]
"""The Role of the account that job pods run as (`job.service_account`)."""

LAST_WORDS = 30
"""Lines of the failing pod's log that an error shows."""


@dataclass(frozen=True)
class Timings:
    """How long the back end waits for what, in seconds.

    Attributes:
        outage: the API server may be away.
        image: a pod may fail to get its image or its configuration.
        quiet: pods of an earlier attempt may take to end.
        look: between two looks at the pods of a job that is not running yet.
        report: between two progress reports that say the same.
        settle: the outcome file may take to be seen after the job has ended.
    """

    outage: float = 900.0
    image: float = 300.0
    quiet: float = 300.0
    look: float = 5.0
    report: float = 60.0
    settle: float = 30.0


class PyTorchJobBackend:
    """Runs jobs as PyTorchJobs of the training operator 1.9."""

    name = "pytorchjob"

    def __init__(self, config: RunConfig, cluster: Cluster, identity: Identity, timings: Timings | None = None) -> None:
        """Takes its surroundings; `connect` finds them."""
        config.require("run", "storage")
        if config.run is None:
            raise InvalidInput("run: this command needs the section run, which is absent")
        self._run_id, self._config, self._cluster, self._identity = config.run.id, config, cluster, identity
        self._timings = timings or Timings()
        self.max_restarts = config.job.max_restarts
        self.settle_seconds = self._timings.settle

    @classmethod
    def connect(cls, config: RunConfig) -> PyTorchJobBackend:
        """Connects with the pod's account, or with the kubeconfig outside a cluster.

        Raises:
            InvalidInput: there is no cluster to connect to.
            DependencyDied: it does not answer.
        """
        cluster = Cluster(connect(), config.job.namespace or "default", Timings().outage)
        return cls(config, cluster, identify(cluster))

    def first_attempt(self, spec: JobSpec) -> int:
        """The attempt to adopt if one is active or has just succeeded, else one after the last.

        Raises:
            InvalidInput: the active one does something else.
        """
        found = [(job["metadata"]["labels"].get(m.ATTEMPT_LABEL, ""), job) for job in self._list(spec)]
        attempts = {int(number): job for number, job in found if number.isdecimal()}
        if not attempts:
            return 0
        last = max(attempts)
        job = attempts[last]
        if is_finished(job) or job["metadata"].get("deletionTimestamp"):
            # The outcome file is removed before each launch: if it says done, it is this attempt that is.
            outcome = read_outcome(spec.outcome)
            same = job["metadata"].get("annotations", {}).get(m.HASH_ANNOTATION) == self._hash(spec, last)
            return last if outcome is not None and outcome.done and same else last + 1
        self._check_ours(job, spec, last)
        return last

    def run(self, spec: JobSpec, attempt: int, notify: Notify) -> Ended:
        """Creates or adopts an attempt and follows it to its end.

        Interrupted by Ctrl-C it deletes the job. Interrupted by SIGTERM it asks why: if the Workflow is being ended, it
        deletes the job; otherwise (a drained node) it leaves the job, and the next pod of the step adopts it.
        """
        name = m.job_name(self._run_id, spec.name, attempt)
        job: dict[str, Any] | None = None
        adopted = False
        try:
            job, adopted = self._launch(spec, attempt, notify)
            lease = Lease(self._cluster, name, self._identity.holder, self._config.job.lease_seconds)
            lease.take(_reference(job), m.labels(self._run_id, spec, attempt))
            if adopted:
                notify(JobEvent("adopted", f"attempt {attempt}: adopted PyTorchJob {self._at(name)}"))
            else:
                notify(JobEvent("launched", f"attempt {attempt}: created PyTorchJob {self._at(name)}"))
            return self._follow(spec, attempt, job, lease, notify)
        except KeyboardInterrupt:
            self._delete(name, job, "interrupted", notify)
            raise
        except Interrupted:
            self._part(name, job, notify)
            raise
        except InvalidInput:
            if job is not None and not adopted:
                self._delete(name, job, "it cannot be watched", notify)
            raise

    # --- beginning -------------------------------------------------------------------------------------------------

    def _launch(self, spec: JobSpec, attempt: int, notify: Notify) -> tuple[dict[str, Any], bool]:
        """The attempt's job, and whether it was there already."""
        body = m.manifest(spec, self._config, self._identity.owner, attempt)
        name = body["metadata"]["name"]
        found = self._get(name)
        if found is None:
            self._wait_until_quiet(spec, attempt, notify)
            spec.outcome.parent.mkdir(parents=True, exist_ok=True)
            spec.outcome.unlink(missing_ok=True)
            try:
                create = self._cluster.custom.create_namespaced_custom_object
                where = (m.GROUP, m.VERSION, self._cluster.namespace, m.PLURAL)
                return dict(self._cluster.call(f"create PyTorchJob {name}", create, *where, body)), False
            except ApiException as error:
                # A launcher that died, or an earlier try of this call whose answer was lost, may have created it.
                if error.status != 409:
                    raise self._refused(error, name) from error
            found = self._get(name)
            if found is None:
                raise DependencyDied(f"PyTorchJob {self._at(name)} was deleted by someone else while it was created")
        self._check_ours(found, spec, attempt)
        return self._own(found), True

    def _check_ours(self, job: dict[str, Any], spec: JobSpec, attempt: int) -> None:
        """Refuses a job that is not what we would have created."""
        name, labels = job["metadata"]["name"], job["metadata"].get("labels") or {}
        hint = f"delete it (kubectl -n {self._cluster.namespace} delete pytorchjob {name}) or change run.id"
        if labels.get(m.RUN_LABEL) != self._run_id:
            whose = labels.get(m.RUN_LABEL)
            owner = f"it belongs to run {whose}" if whose else f"it has no label {m.RUN_LABEL}"
            raise InvalidInput(f"PyTorchJob {self._at(name)} exists and is not of run {self._run_id}: {owner}; {hint}")
        theirs = (job["metadata"].get("annotations") or {}).get(m.HASH_ANNOTATION)
        ours = self._hash(spec, attempt)
        if theirs != ours:
            raise InvalidInput(
                f"PyTorchJob {self._at(name)} exists and does something else ({m.HASH_ANNOTATION} is {theirs}, wanted "
                f"{ours}): was the configuration changed while it ran? {hint}"
            )

    def _own(self, job: dict[str, Any]) -> dict[str, Any]:
        """Gives an adopted job our Workflow as its owner, in the place of an earlier one."""
        if self._identity.owner is None:
            return job
        wanted = self._identity.owner.reference()
        name = job["metadata"]["name"]
        call = self._cluster.custom.replace_namespaced_custom_object
        where = (m.GROUP, m.VERSION, self._cluster.namespace, m.PLURAL, name)
        for _ in range(5):
            owners = job["metadata"].get("ownerReferences") or []
            if any(all(owner.get(key) == wanted[key] for key in wanted) for owner in owners):
                return job
            body = {**job, "metadata": {**job["metadata"], "ownerReferences": [wanted]}}
            try:
                # A whole object with its resource version: nobody's change in between is lost.
                return dict(self._cluster.call(f"set the owner of PyTorchJob {name}", call, *where, body))
            except ApiException as error:
                if error.status != 409:
                    raise self._refused(error, name) from error
            found = self._get(name)
            if found is None:
                raise DependencyDied(f"PyTorchJob {self._at(name)} was deleted by someone else while it was adopted")
            job = found
        log.warning("PyTorchJob %s changes all the time: its owner stays as it is", self._at(name))
        return job

    def _wait_until_quiet(self, spec: JobSpec, attempt: int, notify: Notify) -> None:
        """Waits until no pod of another attempt runs: two would write the same checkpoints."""
        begun, told = time.monotonic(), False
        while True:
            pods = self._cluster.pods(m.selector(self._run_id, spec) + f",{m.ATTEMPT_LABEL}!={attempt}")
            names = [pod.metadata.name for pod in pods if pod.status.phase not in ("Succeeded", "Failed")]
            if not names:
                return
            waited = time.monotonic() - begun
            if waited > self._timings.quiet:
                raise DependencyDied(
                    f"pods of an earlier attempt of job {spec.name} are still there after {waited:.0f} s: "
                    f"{', '.join(names)}; if their node is off, delete them with --force"
                )
            if not told:
                notify(JobEvent("pending", f"waiting for pods of an earlier attempt to end: {', '.join(names)}"))
                told = True
            time.sleep(min(1.0, self._timings.look))

    def _refused(self, error: Any, name: str) -> Exception:
        """What it means that the API refused to create the job."""
        if error.status == 404:
            return InvalidInput(
                f"cannot create PyTorchJob {self._at(name)}: {said(error)}; job.namespace must name one that exists"
            )
        return InvalidInput(f"the Kubernetes API refused PyTorchJob {self._at(name)}: {said(error)}")

    # --- following -------------------------------------------------------------------------------------------------

    def _follow(self, spec: JobSpec, attempt: int, job: dict[str, Any], lease: Lease, notify: Notify) -> Ended:
        """Watches a job to its end."""
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        deleted = Ended(f"PyTorchJob {self._at(name)} was deleted by someone else while it ran", relaunch=False)
        waiting = Waiting(
            self._cluster,
            self._pods_of(spec, attempt),
            spec.replicas,
            spec.outcome,
            notify,
            image_seconds=self._timings.image,
            report_seconds=self._timings.report,
        )
        deadline = time.monotonic() + spec.timeout - _age(job)
        while True:
            if is_finished(job):
                return self._ended(spec, attempt, job)
            lease.renew()
            if time.monotonic() > deadline:
                words = self._last_words(spec, attempt)
                self._delete(name, job, f"it used up its timeout of {spec.timeout:g} s", notify)
                return Ended(f"not finished within its timeout of {spec.timeout:g} s", words, relaunch=False)
            hopeless = waiting.look(job)
            if hopeless is not None:
                self._delete(name, job, "it cannot start", notify)
                return hopeless
            seconds = min(lease.interval, deadline - time.monotonic() + 1, 1e9 if waiting.over else self._timings.look)
            begun, quiet = time.monotonic(), True
            for kind, seen in self._watch(job, max(1.0, seconds)):
                if seen["metadata"]["uid"] != uid or kind == "DELETED":
                    return deleted
                job, quiet = seen, False
                if is_finished(job) or is_suspended(job) or not waiting.over:
                    break
            if quiet:  # a watch that ends at once must not become a busy loop
                time.sleep(max(0.0, 0.5 - (time.monotonic() - begun)))
            # The watch is only the quick way to learn of a change: its version may have been forgotten (410), its
            # connection may be one that nobody closed.
            found = self._get(name)
            if found is None or found["metadata"]["uid"] != uid:
                return deleted
            job = found

    def _watch(self, job: dict[str, Any], seconds: float) -> Any:
        metadata = job["metadata"]
        return self._cluster.watch(m.GROUP, m.VERSION, m.PLURAL, metadata["name"], metadata["resourceVersion"], seconds)

    def _ended(self, spec: JobSpec, attempt: int, job: dict[str, Any]) -> Ended:
        """The evidence that a finished job leaves."""
        failed = condition(job, "Failed")
        words = self._last_words(spec, attempt)
        if failed is None:
            return Ended("the PyTorchJob's condition is Succeeded", words)
        message = failed.get("message") or failed.get("reason") or "without a message"
        # The operator has no reason of its own for the deadline.
        over = "longer than specified deadline" in message
        return Ended(f"the PyTorchJob failed: {message}", words, relaunch=not over)

    def _last_words(self, spec: JobSpec, attempt: int) -> str:
        """The end of the log of the pod that failed first, headed by its name; never fails itself."""
        try:
            pods = self._cluster.pods(self._pods_of(spec, attempt), patience=20.0)
        except (ApiException, InvalidInput, DependencyDied) as error:
            return f"(its pods cannot be listed: {error})"
        if not pods:
            return ""
        pod = min(pods, key=_failed_first)
        state = _terminated(pod)
        head = f"pod {pod.metadata.name}"
        if state is not None:
            head += f", exit code {state.exit_code}" + (f" ({state.reason})" if state.reason else "")
        if pod.status.reason or pod.status.message:
            head += f", {pod.status.reason}: {pod.status.message}"
        return f"{head}:\n{self._pod_log(pod.metadata.name) or (state.message if state else None) or 'it left no log'}"

    def _pod_log(self, pod: str) -> str:
        try:
            response = self._cluster.call(
                f"read the log of pod {pod}",
                self._cluster.core.read_namespaced_pod_log,
                pod,
                self._cluster.namespace,
                container=m.CONTAINER,
                tail_lines=LAST_WORDS,
                patience=3.0,
                _preload_content=False,
            )
            return str(response.data.decode("utf-8", errors="replace")).strip()
        except (ApiException, InvalidInput, DependencyDied, urllib3.exceptions.HTTPError) as error:
            log.warning("cannot read the log of pod %s: %s", pod, str(error).splitlines()[0])
            return ""

    # --- ending ----------------------------------------------------------------------------------------------------

    def _part(self, name: str, job: dict[str, Any] | None, notify: Notify) -> None:
        """SIGTERM came: delete the job if its Workflow is being ended, else leave it to be adopted."""
        owner = self._identity.owner
        ending, why = is_terminating(self._cluster, owner) if owner else (False, "this is no step of a Workflow")
        if ending:
            self._delete(name, job, why, notify)
            return
        if job is None and self._get_ours(name) is None:
            return
        lease = self._config.job.lease_seconds
        text = (
            f"left PyTorchJob {self._at(name)} running ({why}): the next launcher adopts it; if none comes within "
            f"{lease:g} s it ends itself; to end it now: kubectl -n {self._cluster.namespace} delete pytorchjob {name}"
        )
        notify(JobEvent("left", text))

    def _delete(self, name: str, job: dict[str, Any] | None, why: str, notify: Notify) -> None:
        """One delete call; failing is only told, for this happens on the way out."""
        job = job or self._get_ours(name)
        if job is None:
            return
        options = {
            "propagation_policy": "Background",
            "preconditions": k8s.V1Preconditions(uid=job["metadata"]["uid"]),  # this one, not its successor
        }
        call = self._cluster.custom.delete_namespaced_custom_object
        where = (m.GROUP, m.VERSION, self._cluster.namespace, m.PLURAL, name)
        body = k8s.V1DeleteOptions(**options)
        try:
            self._cluster.call(f"delete PyTorchJob {name}", call, *where, body=body, patience=5.0)
            notify(JobEvent("deleted", f"deleted PyTorchJob {self._at(name)}: {why}"))
        except ApiException as error:
            if error.status != 404:
                log.error("cannot delete PyTorchJob %s: %s", self._at(name), said(error))
        except (InvalidInput, DependencyDied) as error:
            log.error("cannot delete PyTorchJob %s: %s", self._at(name), error)

    def _get_ours(self, name: str) -> dict[str, Any] | None:
        """The job of that name, if a create whose answer never came has made it; never a foreign one."""
        try:
            found = self._cluster.get(m.GROUP, m.VERSION, m.PLURAL, name, patience=5.0)
        except (ApiException, InvalidInput, DependencyDied) as error:
            log.error("cannot see whether PyTorchJob %s was created: %s", self._at(name), str(error).splitlines()[0])
            return None
        labels = (found or {"metadata": {}})["metadata"].get("labels") or {}
        return found if labels.get(m.RUN_LABEL) == self._run_id else None

    # --- small calls -----------------------------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        return f"{self._cluster.namespace}/{name}"

    def _pods_of(self, spec: JobSpec, attempt: int) -> str:
        return m.selector(self._run_id, spec) + f",{m.ATTEMPT_LABEL}={attempt}"

    def _hash(self, spec: JobSpec, attempt: int) -> str:
        annotations = m.manifest(spec, self._config, None, attempt)["metadata"]["annotations"]
        return str(annotations[m.HASH_ANNOTATION])

    def _get(self, name: str) -> dict[str, Any] | None:
        return self._cluster.get(m.GROUP, m.VERSION, m.PLURAL, name)

    def _list(self, spec: JobSpec) -> list[dict[str, Any]]:
        call = self._cluster.custom.list_namespaced_custom_object
        where = (m.GROUP, m.VERSION, self._cluster.namespace, m.PLURAL)
        try:
            chosen = m.selector(self._run_id, spec)
            return list(self._cluster.call("list PyTorchJobs", call, *where, label_selector=chosen)["items"])
        except ApiException as error:
            raise self._refused(error, m.job_name(self._run_id, spec.name, 0)) from error


def _reference(job: dict[str, Any]) -> dict[str, str]:
    """A job as an owner reference."""
    owner = m.Owner(f"{m.GROUP}/{m.VERSION}", m.KIND, job["metadata"]["name"], job["metadata"]["uid"])
    return owner.reference()


def _age(job: dict[str, Any]) -> float:
    """Seconds since a job was created, 0 for one whose clock is ahead of ours."""
    created = datetime.strptime(job["metadata"]["creationTimestamp"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return max(0.0, (datetime.now(UTC) - created).total_seconds())


def _terminated(pod: Any) -> Any | None:
    """How a pod's training container ended, if it did."""
    for status in pod.status.container_statuses or []:
        if status.name == m.CONTAINER and status.state is not None and status.state.terminated is not None:
            return status.state.terminated
    return None


def _failed_first(pod: Any) -> tuple[int, str]:
    """Sorts pods: the one whose container failed first, then failed pods without one, then all others by name."""
    state = _terminated(pod)
    if state is not None and state.exit_code != 0:
        return 0, str(state.finished_at)
    return (1 if pod.status.phase == "Failed" else 2), str(pod.metadata.name)
