"""What the PyTorchJob back end needs of a Kubernetes API: patient calls, who we are there, leases.

Plain dictionaries go in and come out, except for pods and events. Nothing here knows about jobs.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client as k8s
from kubernetes import config as k8s_config
from kubernetes.client.exceptions import ApiException

from muster.errors import DependencyDied, InvalidInput
from muster.job.manifest import Owner

log = logging.getLogger("muster.job")

_AWAY = frozenset({0, 429, 500, 502, 503, 504})
"""Answers that say nothing about the request: the server is busy, restarting, or not there."""

_DISCOVERY_SECONDS = 30.0
"""How long a starting API server may not know custom resources; it says 404 then, as if the object were not there."""

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_REQUEST_SECONDS = 20.0


class Cluster:
    """One namespace of a Kubernetes API, reached with patience."""

    def __init__(self, client: Any, namespace: str, outage_seconds: float) -> None:
        """Takes a configured `kubernetes.client.ApiClient`.

        Args:
            client: the client.
            namespace: where jobs live.
            outage_seconds: how long the API may be away before a call gives up.
        """
        self.namespace, self.outage_seconds = namespace, outage_seconds
        self.custom, self.core = k8s.CustomObjectsApi(client), k8s.CoreV1Api(client)

    def call(
        self, what: str, function: Callable[..., Any], *args: Any, patience: float | None = None, **more: Any
    ) -> Any:
        """Calls the API, again and again while it is away.

        Args:
            what: for messages, such as "create PyTorchJob train-0-0".
            function: a method of the client.
            args: its arguments.
            patience: seconds to go on trying; None for `outage_seconds`.
            more: its keyword arguments.

        Raises:
            ApiException: the API refused; not for 401 and 403, which become InvalidInput.
            InvalidInput: the account may not do this, or the API has no such kind of object.
            DependencyDied: the API was away for too long.
        """
        limit = self.outage_seconds if patience is None else patience
        begun, delay = time.monotonic(), 0.25
        more.setdefault("_request_timeout", min(_REQUEST_SECONDS, max(1.0, limit)))
        while True:
            try:
                return function(*args, **more)
            except ApiException as error:
                unknown = _is_unknown_kind(error)
                if unknown and time.monotonic() - begun > min(limit, _DISCOVERY_SECONDS):
                    raise InvalidInput(
                        f"cannot {what}: the Kubernetes API has no such kind of object; is the training operator (1.9) "
                        "installed?"
                    ) from error
                if not unknown and (error.status or 0) not in _AWAY:
                    raise _allowed(error, what, self.namespace) from error
                reason = f"{error.status} {error.reason}"
            except (urllib3.exceptions.HTTPError, OSError) as error:
                reason = str(error)
            if time.monotonic() - begun > limit:
                raise DependencyDied(f"the Kubernetes API was away for {limit:g} s: cannot {what}", reason)
            log.warning("cannot %s yet, trying again: %s", what, reason)
            time.sleep(delay * random.uniform(0.5, 1))
            delay = min(2 * delay, 15)

    def get(self, group: str, version: str, plural: str, name: str, **more: Any) -> dict[str, Any] | None:
        """An object of any group, or None if there is none of that name."""
        call = self.custom.get_namespaced_custom_object
        try:
            found = self.call(f"get {plural} {name}", call, group, version, self.namespace, plural, name, **more)
        except ApiException as error:
            if error.status == 404:
                return None
            raise
        return dict(found)

    def pods(self, selector: str, **more: Any) -> list[Any]:
        """The pods that a label selector finds."""
        return list(
            self.call("list pods", self.core.list_namespaced_pod, self.namespace, label_selector=selector, **more).items
        )

    def newest_warning(self, name: str) -> str:
        """The newest warning event about an object; nothing if there is none, or events may not be read."""
        chosen = f"involvedObject.name={name},type=Warning"
        call = self.core.list_namespaced_event
        try:
            events = self.call("list events", call, self.namespace, field_selector=chosen, patience=5.0).items
        except (ApiException, InvalidInput, DependencyDied):
            return ""
        newest = max(events, key=lambda event: event.metadata.creation_timestamp, default=None)
        return str(newest.message) if newest is not None else ""

    def watch(
        self, group: str, version: str, plural: str, name: str, resource_version: str, seconds: float
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Events of one object after a resource version, for a while.

        Ends early and without a word when the connection breaks, when the server is away, or when the version is too
        old (410): whoever watches looks at the object itself between two watches.

        Raises:
            InvalidInput: the account may not watch.
        """
        try:
            response = self.custom.list_namespaced_custom_object(
                group,
                version,
                self.namespace,
                plural,
                field_selector=f"metadata.name={name}",
                resource_version=resource_version,
                watch=True,
                timeout_seconds=max(1, round(seconds)),
                _preload_content=False,
                _request_timeout=(_REQUEST_SECONDS, seconds + 15),
            )
        except ApiException as error:
            if error.status == 410 or (error.status or 0) in _AWAY or _is_unknown_kind(error):
                return
            raise _allowed(error, f"watch {plural}", self.namespace) from error
        except (urllib3.exceptions.HTTPError, OSError):
            return
        try:
            for line in _lines(response):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event["type"], event["object"]
        except (urllib3.exceptions.HTTPError, OSError, ValueError):
            return
        finally:
            response.close()
            response.release_conn()


@dataclass(frozen=True)
class Identity:
    """Who the caller is in the cluster.

    Attributes:
        holder: what it calls itself in leases.
        owner: the Workflow it is a step of, if it is one and it lives in the jobs' namespace.
    """

    holder: str
    owner: Owner | None = None


def connect() -> Any:
    """A client with the pod's own account inside a cluster, else with the kubeconfig.

    Raises:
        InvalidInput: neither is there.
    """
    settings = k8s.Configuration()
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            k8s_config.load_incluster_config(client_configuration=settings)
        else:
            k8s_config.load_kube_config(client_configuration=settings)
    except k8s_config.ConfigException as error:
        raise InvalidInput(
            f"job.backend pytorchjob: no cluster: neither inside one nor a usable kubeconfig (KUBECONFIG): {error}"
        ) from error
    settings.retries = False  # `Cluster.call` does it, with a limit
    return k8s.ApiClient(settings)


def identify(cluster: Cluster) -> Identity:
    """Finds out who we are: a step of a Workflow, a pod, or a process outside the cluster."""
    pod = os.environ.get("POD_NAME") or os.environ.get("KFP_POD_NAME")
    namespace = os.environ.get("POD_NAMESPACE") or os.environ.get("KFP_NAMESPACE")
    if _NAMESPACE_FILE.exists():
        namespace = namespace or _NAMESPACE_FILE.read_text(encoding="ascii").strip()
        pod = pod or socket.gethostname()
    if not pod:
        return Identity(f"{socket.gethostname()}-{os.getpid()}")
    if namespace != cluster.namespace:
        # An owner must live in the namespace of what it owns: the garbage collector deletes the job otherwise.
        log.info("this step runs in %s and the job in %s: no owner is set", namespace, cluster.namespace)
        return Identity(pod)
    try:
        found = cluster.call(f"get pod {pod}", cluster.core.read_namespaced_pod, pod, namespace)
    except (ApiException, InvalidInput) as error:
        log.warning("cannot read this step's own pod %s, so the job gets no owner: %s", pod, error)
        return Identity(pod)
    for reference in found.metadata.owner_references or []:
        if reference.kind == "Workflow":
            owner = Owner(reference.api_version, reference.kind, reference.name, reference.uid)
            return Identity(pod, owner)
    return Identity(pod)


def is_terminating(cluster: Cluster, owner: Owner) -> tuple[bool, str]:
    """Whether a Workflow is being ended by its user, and why we think so, in a few seconds at most."""
    group, _, version = owner.api_version.partition("/")
    try:
        workflow = cluster.get(group, version, "workflows", owner.name, patience=3.0)
    except (ApiException, InvalidInput, DependencyDied) as error:
        return False, f"cannot read Workflow {owner.name}: {str(error).splitlines()[0]}"
    if workflow is None or workflow["metadata"]["uid"] != owner.uid:
        return True, f"Workflow {owner.name} has been deleted"
    spec = workflow.get("spec") or {}
    if workflow["metadata"].get("deletionTimestamp"):
        return True, f"Workflow {owner.name} is being deleted"
    if spec.get("shutdown") or spec.get("activeDeadlineSeconds") == 0:
        return True, f"Workflow {owner.name} is being terminated"
    return False, f"Workflow {owner.name} goes on"


class Lease:
    """The sign that somebody waits for a job: renewed while the caller lives, read by the job's guard."""

    GROUP, VERSION, PLURAL = "coordination.k8s.io", "v1", "leases"

    def __init__(self, cluster: Cluster, name: str, holder: str, seconds: float) -> None:
        """Nothing is written before `take`."""
        self._cluster, self.name, self._holder, self._seconds = cluster, name, holder, seconds
        self._renewed_at = -1e9
        self._ours = False
        self._metadata: dict[str, Any] = {}

    @property
    def interval(self) -> float:
        """Seconds between renewals."""
        return min(60.0, max(1.0, self._seconds / 10))

    def take(self, owner: dict[str, str], labels: dict[str, str]) -> None:
        """Creates the lease, or takes it over from an earlier holder.

        Args:
            owner: the job, as an owner reference: the lease goes with it.
            labels: for `kubectl get lease -l`.
        """
        self._metadata = {
            "name": self.name,
            "namespace": self._cluster.namespace,
            "labels": labels,
            "ownerReferences": [owner],
        }
        self._ours = True
        self._write(takeover=True)
        self._renewed_at = time.monotonic()

    def renew(self) -> None:
        """Renews when it is time to; failing is only logged, the next time may work."""
        if not self._ours or time.monotonic() - self._renewed_at < self.interval:
            return
        try:
            self._write(takeover=False)
            self._renewed_at = time.monotonic()
        except (ApiException, InvalidInput, DependencyDied) as error:
            log.warning("cannot renew lease %s: %s", self.name, str(error).splitlines()[0])

    def _write(self, *, takeover: bool) -> None:
        """Creates or replaces the lease with the time of now."""
        where = (self.GROUP, self.VERSION, self._cluster.namespace, self.PLURAL)
        patience = None if takeover else 10.0
        for _ in range(5):
            try:
                found = self._cluster.get(self.GROUP, self.VERSION, self.PLURAL, self.name, patience=patience)
                if found is None:
                    kind = {"apiVersion": f"{self.GROUP}/{self.VERSION}", "kind": "Lease"}
                    body = {**kind, "metadata": self._metadata, "spec": self._spec()}
                    create = self._cluster.custom.create_namespaced_custom_object
                    self._cluster.call(f"create lease {self.name}", create, *where, body, patience=patience)
                    return
                holder = (found.get("spec") or {}).get("holderIdentity")
                if holder != self._holder and not takeover:
                    log.warning("lease %s was taken over by %s: leaving the renewals to it", self.name, holder)
                    self._ours = False
                    return
                # An earlier job of this name may still own it: the garbage collector must not take it with that one.
                metadata = {**found["metadata"], "ownerReferences": self._metadata["ownerReferences"]}
                body = {**found, "metadata": metadata, "spec": {**(found.get("spec") or {}), **self._spec()}}
                replace = self._cluster.custom.replace_namespaced_custom_object
                self._cluster.call(f"renew lease {self.name}", replace, *where, self.name, body, patience=patience)
                return
            except ApiException as error:
                if error.status not in (404, 409):  # created, changed or deleted by someone in between
                    raise

    def _spec(self) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {"holderIdentity": self._holder, "leaseDurationSeconds": max(1, round(self._seconds)), "renewTime": now}


def _allowed(error: Any, what: str, namespace: str) -> Any:
    """The error itself, or for 401 and 403 what the user must do about it."""
    if error.status not in (401, 403):
        return error
    return InvalidInput(
        f"the Kubernetes API does not let this account {what} in namespace {namespace}: {said(error)}; bind it the "
        "Role of muster's chart (muster.job.pytorchjob.RBAC_RULES)"
    )


def _is_unknown_kind(error: Any) -> bool:
    """Whether a 404 is about the kind of object and not about one object: then it is no Status, only a page."""
    if error.status != 404:
        return False
    try:
        return bool(json.loads(error.body)["kind"] != "Status")
    except (TypeError, ValueError, KeyError):
        return True


def said(error: Any) -> str:
    """What the API server said in an ApiException, without the headers."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def _lines(response: Any) -> Iterator[bytes]:
    """The lines of a response as they come in."""
    rest = b""
    for chunk in response.stream(amt=None, decode_content=False):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line)
