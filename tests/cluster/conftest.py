"""A real API server for the tests of this folder, a namespace for each test, and a stand-in for the operator."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kubernetes import client as k8s

from muster.config import RunConfig, parse
from muster.job import JobEvent, JobSpec, run_job
from muster.job.cluster import Cluster, Identity
from muster.job.pytorchjob import PyTorchJobBackend, Timings


def _load_server() -> ModuleType:
    path = Path(__file__).parent / "apiserver" / "server.py"
    spec = importlib.util.spec_from_file_location("muster_test_apiserver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


server = _load_server()
wait_for: Callable[..., Any] = server.wait_for


@pytest.fixture(scope="session")
def apiserver() -> Iterator[Any]:
    """A running API server; the first time on a machine it is built: give tests that use it a limit of 1600 s."""
    running = server.ApiServer()
    try:
        running.start()
    except server.UnavailableError as error:
        pytest.skip(str(error))
    try:
        yield running
    finally:
        running.stop()


_numbers = itertools.count()


@pytest.fixture
def namespace(apiserver: Any) -> str:
    """A fresh namespace with the accounts of steps and jobs."""
    name = f"test-{next(_numbers)}"
    core = k8s.CoreV1Api(apiserver.client())
    core.create_namespace({"metadata": {"name": name}})

    core.create_namespaced_service_account(name, {"metadata": {"name": "muster-job"}})

    def usable() -> bool:
        # this old API server refuses pods of an account whose token the controllers have not made yet
        accounts = core.list_namespaced_service_account(name).items
        return {item.metadata.name for item in accounts if item.secrets} >= {"default", "muster-job"}

    wait_for(usable)
    return name


@dataclass
class Operator:
    """Plays the training operator and the kubelet for one namespace."""

    client: Any
    namespace: str
    node: str | None = None

    def __post_init__(self) -> None:
        self.custom, self.core = k8s.CustomObjectsApi(self.client), k8s.CoreV1Api(self.client)
        self.where = ("kubeflow.org", "v1", self.namespace, "pytorchjobs")

    def jobs(self) -> list[dict[str, Any]]:
        return list(self.custom.list_namespaced_custom_object(*self.where)["items"])

    def job(self, name: str, seconds: float = 30) -> dict[str, Any]:
        """Waits for a job to be created."""

        def created() -> Any:
            return next((job for job in self.jobs() if job["metadata"]["name"] == name), None)

        return dict(wait_for(created, seconds))

    def condition(self, name: str, kind: str, message: str = "") -> None:
        """Sets a condition of a job."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        job = self.custom.get_namespaced_custom_object(*self.where, name)
        status = job.get("status") or {"conditions": [], "replicaStatuses": {}}
        status["conditions"].append(
            {
                "type": kind,
                "status": "True",
                "reason": f"PyTorchJob{kind}",
                "message": message or kind,
                "lastTransitionTime": now,
                "lastUpdateTime": now,
            }
        )
        self.custom.replace_namespaced_custom_object_status(*self.where, name, {**job, "status": status})

    def pod(self, name: str, index: int = 0, **status: Any) -> str:
        """Creates a worker pod of a job from its template, as the operator does, and sets its status."""
        job = self.custom.get_namespaced_custom_object(*self.where, name)
        template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
        pod = f"{name}-worker-{index}"
        reference = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": name, "uid": job["metadata"]["uid"]}
        spec = {**template["spec"], "restartPolicy": "Never"}
        if self.node is not None:
            spec["nodeName"] = self.node
        metadata = {**template["metadata"], "name": pod, "ownerReferences": [reference]}
        self.core.create_namespaced_pod(self.namespace, {"metadata": metadata, "spec": spec})
        if status:
            self.pod_status(pod, **status)
        return pod

    def pod_status(self, pod: str, **status: Any) -> None:
        self.core.patch_namespaced_pod_status(pod, self.namespace, {"status": status})

    def workflow(self, name: str = "grpo-abc") -> dict[str, Any]:
        """Creates a Workflow."""
        body = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": name}, "spec": {}}
        where = ("argoproj.io", "v1alpha1", self.namespace, "workflows")
        return dict(self.custom.create_namespaced_custom_object(*where, body))


@pytest.fixture
def operator(apiserver: Any, namespace: str) -> Operator:
    return Operator(apiserver.client(), namespace)


@dataclass
class Launcher:
    """Runs a job in a thread, as a step would, and keeps what it told and how it ended."""

    backend: PyTorchJobBackend
    spec: JobSpec
    events: list[JobEvent] = field(default_factory=list)
    error: BaseException | None = None
    raise_at: tuple[str, BaseException] | None = None

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            run_job(self.backend, self.spec, self._notify)
        except BaseException as error:
            self.error = error

    def _notify(self, event: JobEvent) -> None:
        self.events.append(event)
        if self.raise_at is not None and event.kind == self.raise_at[0]:
            raise self.raise_at[1]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def told(self, kind: str, text: str = "", seconds: float = 30) -> JobEvent:
        """Waits until an event of a kind, with a text in it, was told."""

        def event() -> JobEvent | None:
            return next((event for event in self.events if event.kind == kind and text in event.text), None)

        try:
            return wait_for(event, seconds)
        except AssertionError:
            ended = f"{type(self.error).__name__}: {self.error}"
            raise AssertionError(f"no {kind} event with {text!r} in {self.events}; ended by {ended}") from None

    def end(self, seconds: float = 40) -> BaseException | None:
        """Waits for the end and returns the error, if any."""
        self.thread.join(seconds)
        assert not self.thread.is_alive(), f"the launcher has not ended; it told {self.events}"
        return self.error


@dataclass
class Room:
    """What most tests need: a namespace with an operator, a shared volume, and launchers in it."""

    apiserver: Any
    namespace: str
    operator: Operator
    volume: Path
    launchers: list[Launcher] = field(default_factory=list)

    def config(self, **job: Any) -> RunConfig:
        settings = {
            "run": {"id": "r1", "root": str(self.volume / "r1")},
            "storage": {"pvc": "muster", "mount_path": str(self.volume)},
            "job": {
                "backend": "pytorchjob",
                "image": "registry.example/muster-trainer:1",
                "namespace": self.namespace,
                "max_restarts": 0,
                **job,
            },
        }
        return parse(json.dumps(settings))

    def spec(self, **more: Any) -> JobSpec:
        folder = self.volume / "r1" / "jobs" / "train-0000"
        given: dict[str, Any] = {
            "name": "train-0000",
            "arguments": ("-m", "muster.training", "--config", "run.yaml"),
            "replicas": 1,
            "nproc_per_node": 2,
            "outcome": folder / "outcome.json",
            "log_dir": folder,
        }
        return JobSpec(**{**given, **more})

    def backend(
        self,
        *,
        user: str = "admin",
        identity: Identity | None = None,
        config: RunConfig | None = None,
        **timings: float,
    ) -> PyTorchJobBackend:
        given = {"outage": 30.0, "image": 300.0, "quiet": 20.0, "look": 0.2, "settle": 0.5, **timings}
        cluster = Cluster(self.apiserver.client(user), self.namespace, given["outage"])
        config = config or self.config()
        return PyTorchJobBackend(config, cluster, identity or Identity("launcher-1"), Timings(**given))

    def launch(
        self,
        backend: PyTorchJobBackend | None = None,
        spec: JobSpec | None = None,
        raise_at: tuple[str, BaseException] | None = None,
    ) -> Launcher:
        launcher = Launcher(backend or self.backend(), spec or self.spec(), raise_at=raise_at)
        self.launchers.append(launcher)
        return launcher

    def write_outcome(self, **said: Any) -> None:
        path = self.spec().outcome
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(said))
        part.rename(path)


@pytest.fixture
def room(apiserver: Any, namespace: str, operator: Operator, tmp_path: Path) -> Iterator[Room]:
    made = Room(apiserver, namespace, operator, tmp_path)
    yield made
    for job in operator.jobs():  # ends launchers that a failing test left waiting
        operator.custom.delete_namespaced_custom_object(*operator.where, job["metadata"]["name"])
    end = time.monotonic() + 10
    for launcher in made.launchers:
        launcher.thread.join(max(0.0, end - time.monotonic()))
