"""PyTorchJobs against a real API server: launching, adopting, following, ending. The test plays the operator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from kubernetes import client as k8s
from kubernetes.client.exceptions import ApiException

from muster.errors import DependencyDied, Interrupted, InvalidInput
from muster.job import JobError
from muster.job.cluster import Cluster, Identity, identify
from muster.job.manifest import Owner
from muster.job.pytorchjob import RBAC_RULES

# The first test on a fresh machine builds the API server.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]

NAME = "r1-train-0000-0"


def wait_for(condition: Any, seconds: float = 30) -> Any:
    return sys.modules["muster_test_apiserver"].wait_for(condition, seconds)


def terminated(exit_code: int, reason: str = "Error", minute: int = 0, message: str | None = None) -> dict[str, Any]:
    ended = {
        "exitCode": exit_code,
        "reason": reason,
        "message": message,
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": f"2026-01-01T00:{minute:02}:00Z",
    }
    return {"phase": "Failed", "containerStatuses": [container(terminated=ended)]}


def container(**state: Any) -> dict[str, Any]:
    return {"name": "pytorch", "image": "i", "imageID": "i", "ready": False, "restartCount": 0, "state": state}


def owner_of(workflow: dict[str, Any]) -> Owner:
    return Owner("argoproj.io/v1alpha1", "Workflow", workflow["metadata"]["name"], workflow["metadata"]["uid"])


def gone(room: Any, name: str = NAME) -> bool:
    return all(job["metadata"]["name"] != name for job in room.operator.jobs())


# --- how it ends ---------------------------------------------------------------------------------------------------


def test_done_is_what_the_outcome_file_says(room: Any) -> None:
    room.write_outcome(outcome="failed", exit_code=3, error="of yesterday")
    launcher = room.launch()
    room.operator.job(NAME)
    assert not room.spec().outcome.exists(), "the stale outcome must be gone before the job exists"
    room.operator.pod(NAME, phase="Running")
    launcher.told("running")
    room.write_outcome(outcome="done")
    room.operator.condition(NAME, "Succeeded")
    assert launcher.end() is None
    assert launcher.kinds() == [
        "launched",
        *(["pending"] * launcher.kinds().count("pending")),
        "running",
        "done",
    ]


def test_a_succeeded_condition_without_the_marker_is_a_death(room: Any) -> None:
    launcher = room.launch()
    room.operator.job(NAME)
    room.operator.condition(NAME, "Running")
    room.operator.condition(NAME, "Succeeded", "all workers completed")
    error = launcher.end()
    assert isinstance(error, DependencyDied)
    assert error.exit_code == 4
    assert "condition is Succeeded; no outcome.json" in str(error)


def test_a_failure_has_the_exit_code_and_text_of_the_job_although_the_condition_says_succeeded(room: Any) -> None:
    launcher = room.launch(room.backend(config=room.config(max_restarts=3)))
    room.operator.job(NAME)
    room.write_outcome(outcome="failed", exit_code=3, error="nothing is trainable: 0 of 64 groups")
    room.operator.condition(NAME, "Succeeded")
    error = launcher.end()
    assert isinstance(error, JobError)
    assert error.exit_code == 3
    assert "nothing is trainable: 0 of 64 groups" in str(error)
    assert len(room.operator.jobs()) == 1


def test_a_death_comes_with_the_last_words_of_the_pod_that_failed_first(room: Any) -> None:
    launcher = room.launch(spec=room.spec(replicas=2))
    room.operator.job(NAME)
    logs = {f"{NAME}-worker-0": "connection closed by peer", f"{NAME}-worker-1": "step 3\nCUDA error: ECC"}
    room.operator.node = f"node-{room.namespace}"
    with room.apiserver.node(room.operator.node, logs):
        room.operator.pod(NAME, 0, **terminated(1, minute=2))
        room.operator.pod(NAME, 1, **terminated(-9 % 256, reason="OOMKilled", minute=1))
        room.operator.condition(NAME, "Failed", "2 Worker replica(s) failed.")
        error = launcher.end()
    assert isinstance(error, DependencyDied)
    assert "2 Worker replica(s) failed" in error.what
    assert error.last_words == f"pod {NAME}-worker-1, exit code 247 (OOMKilled):\nstep 3\nCUDA error: ECC"


def test_without_a_log_the_termination_message_speaks(room: Any) -> None:
    launcher = room.launch()
    room.operator.job(NAME)
    room.operator.pod(NAME, **terminated(1, message="ValueError: no such module"))
    room.operator.condition(NAME, "Failed", "failed")
    error = launcher.end()
    assert isinstance(error, DependencyDied)
    assert "ValueError: no such module" in error.last_words


def test_a_job_that_somebody_deletes_is_not_launched_again(room: Any) -> None:
    launcher = room.launch(room.backend(config=room.config(max_restarts=3)))
    room.operator.job(NAME)
    launcher.told("pending")
    room.operator.custom.delete_namespaced_custom_object(*room.operator.where, NAME)
    error = launcher.end()
    assert isinstance(error, DependencyDied)
    assert "deleted by someone else while it ran" in str(error)
    assert room.operator.jobs() == []


def test_a_job_replaced_under_its_name_is_not_mistaken_for_ours(room: Any) -> None:
    launcher = room.launch()
    job = room.operator.job(NAME)
    launcher.told("pending")
    room.operator.custom.delete_namespaced_custom_object(*room.operator.where, NAME)
    fresh = {key: job["metadata"][key] for key in ("name", "labels", "annotations")}
    room.operator.custom.create_namespaced_custom_object(*room.operator.where, {**job, "metadata": fresh})
    assert "deleted by someone else" in str(launcher.end())


def test_a_death_is_followed_by_a_relaunch_once_the_old_pods_are_gone(room: Any) -> None:
    launcher = room.launch(room.backend(config=room.config(max_restarts=1)))
    room.operator.job(NAME)
    pod = room.operator.pod(NAME, phase="Running")
    room.operator.condition(NAME, "Failed", "a node was lost")
    launcher.told("pending", f"earlier attempt to end: {pod}")
    assert len(room.operator.jobs()) == 1
    room.operator.pod_status(pod, **terminated(1))
    second = room.operator.job("r1-train-0000-1")
    assert second["metadata"]["labels"]["muster.dev/attempt"] == "1"
    room.write_outcome(outcome="done")
    room.operator.condition("r1-train-0000-1", "Succeeded")
    assert launcher.end() is None
    assert [kind for kind in launcher.kinds() if kind != "pending"] == [
        "launched",
        "died",
        "relaunch",
        "launched",
        "done",
    ]


def test_pods_that_never_end_forbid_a_relaunch(room: Any) -> None:
    launcher = room.launch(room.backend(config=room.config(max_restarts=1), quiet=0.5))
    room.operator.job(NAME)
    pod = room.operator.pod(NAME, phase="Running")
    room.operator.condition(NAME, "Failed", "a node was lost")
    error = launcher.end()
    assert isinstance(error, DependencyDied)
    assert pod in str(error)
    assert "--force" in str(error)


def test_the_time_is_bounded_also_when_nothing_ever_happens(room: Any) -> None:
    launcher = room.launch(room.backend(config=room.config(max_restarts=3)), room.spec(timeout=2))
    error = launcher.end()
    assert isinstance(error, DependencyDied)
    assert "not finished within its timeout of 2 s" in str(error)
    assert gone(room)


def test_the_operators_deadline_is_not_followed_by_a_relaunch(room: Any) -> None:
    launcher = room.launch(room.backend(config=room.config(max_restarts=3)))
    room.operator.job(NAME)
    room.operator.condition(
        NAME, "Failed", f"Job {NAME} has failed because it was active longer than specified deadline"
    )
    assert "longer than specified deadline" in str(launcher.end())
    assert len(room.operator.jobs()) == 1


# --- why it waits --------------------------------------------------------------------------------------------------


def test_progress_says_why_a_job_waits(room: Any) -> None:
    launcher = room.launch(spec=room.spec(replicas=2))
    room.operator.job(NAME)
    launcher.told("pending", "does the training operator run?")
    room.operator.core.create_namespaced_event(
        room.namespace,
        {
            "metadata": {"name": "e1"},
            "involvedObject": {"name": NAME, "namespace": room.namespace, "kind": "PyTorchJob"},
            "type": "Warning",
            "reason": "FailedCreatePod",
            "message": "exceeded quota: gpus",
        },
    )
    launcher.told("pending", "no pods: exceeded quota: gpus")
    room.operator.condition(NAME, "Suspended")
    launcher.told("pending", "suspended")
    job = room.operator.job(NAME)
    job["status"]["conditions"][0]["status"] = "False"
    room.operator.custom.replace_namespaced_custom_object_status(*room.operator.where, NAME, job)
    room.operator.pod(NAME, 0, phase="Running")
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/9 nodes"}
    pod = room.operator.pod(NAME, 1, phase="Pending", conditions=[unscheduled])
    launcher.told("pending", f"1 of 2 pods run; pod {pod}: Unschedulable: 0/9 nodes")
    room.operator.pod_status(pod, phase="Running")
    launcher.told("running", "all 2 pods run")
    room.write_outcome(outcome="done")
    room.operator.condition(NAME, "Succeeded")
    assert launcher.end() is None


def test_a_preempted_job_is_waited_for_and_its_pods_dying_words_do_not_count(room: Any) -> None:
    launcher = room.launch(room.backend(config=room.config(queue="gpus")))
    room.operator.job(NAME)
    pod = room.operator.pod(NAME, phase="Running")
    launcher.told("running")
    room.operator.condition(NAME, "Suspended")
    launcher.told("pending", "waiting for quota in queue gpus")
    room.write_outcome(outcome="failed", exit_code=130, error="interrupted by SIGTERM")
    room.operator.core.delete_namespaced_pod(pod, room.namespace, grace_period_seconds=0)
    wait_for(lambda: not room.spec().outcome.exists())
    job = room.operator.job(NAME)
    job["status"]["conditions"][0]["status"] = "False"
    room.operator.custom.replace_namespaced_custom_object_status(*room.operator.where, NAME, job)
    room.operator.pod(NAME, phase="Running")
    wait_for(lambda: launcher.kinds().count("running") == 2)
    room.write_outcome(outcome="done")
    room.operator.condition(NAME, "Succeeded")
    assert launcher.end() is None


@pytest.mark.parametrize("reason", ["InvalidImageName", "ImagePullBackOff"])
def test_an_image_that_is_not_there_ends_the_job(room: Any, reason: str) -> None:
    launcher = room.launch(room.backend(config=room.config(max_restarts=3), image=0.3))
    room.operator.job(NAME)
    waiting = container(waiting={"reason": reason, "message": "manifest unknown"})
    room.operator.pod(NAME, phase="Pending", containerStatuses=[waiting])
    error = launcher.end()
    assert isinstance(error, DependencyDied)
    assert f"{reason} i: manifest unknown" in str(error)
    assert gone(room)


# --- adoption ------------------------------------------------------------------------------------------------------


def test_the_next_launcher_adopts_a_running_job_with_lease_and_owner(room: Any) -> None:
    first_owner, second_owner = (owner_of(room.operator.workflow(name)) for name in ("run-a", "run-a-retry"))
    drained = Interrupted("terminated (SIGTERM)")
    first = room.launch(room.backend(identity=Identity("launcher-1", first_owner)), raise_at=("running", drained))
    room.operator.job(NAME)
    room.operator.pod(NAME, phase="Running")
    assert first.end() is drained
    assert "the next launcher adopts it" in first.told("left").text
    room.write_outcome(outcome="done")  # the job ends while nobody looks

    second = room.launch(room.backend(identity=Identity("launcher-2", second_owner)))
    second.told("adopted")
    lease = k8s.CoordinationV1Api(room.apiserver.client()).read_namespaced_lease(NAME, room.namespace)
    assert lease.spec.holder_identity == "launcher-2"
    job = room.operator.job(NAME)
    assert [reference["name"] for reference in job["metadata"]["ownerReferences"]] == ["run-a-retry"]
    assert lease.metadata.owner_references[0].uid == job["metadata"]["uid"]
    room.operator.condition(NAME, "Succeeded")
    assert second.end() is None
    assert len(room.operator.jobs()) == 1


def test_a_job_that_was_done_while_no_launcher_lived_is_not_run_again(room: Any) -> None:
    first = room.launch(raise_at=("launched", RuntimeError("kill -9")))
    assert isinstance(first.end(), RuntimeError)
    room.write_outcome(outcome="done")
    room.operator.condition(NAME, "Succeeded")
    second = room.launch()
    assert second.end() is None
    assert second.kinds() == ["adopted", "done"]


def test_a_retry_after_a_failed_job_begins_a_new_attempt(room: Any) -> None:
    first = room.launch()
    room.operator.job(NAME)
    room.operator.condition(NAME, "Failed", "out of memory")
    assert isinstance(first.end(), DependencyDied)
    second = room.launch()
    room.operator.job("r1-train-0000-1")
    room.write_outcome(outcome="done")
    room.operator.condition("r1-train-0000-1", "Succeeded")
    assert second.end() is None


def test_the_launcher_that_lost_the_lease_stops_renewing(room: Any) -> None:
    config = room.config(lease_seconds=10)
    first = room.launch(room.backend(config=config))
    room.operator.job(NAME)
    coordination = k8s.CoordinationV1Api(room.apiserver.client())

    def renewed() -> datetime:
        return coordination.read_namespaced_lease(NAME, room.namespace).spec.renew_time

    before = wait_for(lambda: renewed())
    wait_for(lambda: renewed() > before)
    assert datetime.now(UTC) - renewed() < (datetime.now(UTC) - before)
    second = room.launch(room.backend(identity=Identity("launcher-2"), config=config))
    second.told("adopted")
    taken = renewed()
    wait_for(lambda: renewed() > taken)
    assert coordination.read_namespaced_lease(NAME, room.namespace).spec.holder_identity == "launcher-2"
    room.write_outcome(outcome="done")
    room.operator.condition(NAME, "Succeeded")
    assert first.end() is None
    assert second.end() is None


def test_the_lease_of_an_earlier_job_of_that_name_is_taken_from_it(room: Any) -> None:
    lease = {
        "metadata": {
            "name": NAME,
            "ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap", "name": "earlier", "uid": "u"}],
        },
        "spec": {"holderIdentity": "launcher-0", "leaseDurationSeconds": 5},
    }
    earlier = room.operator.core.create_namespaced_config_map(room.namespace, {"metadata": {"name": "earlier"}})
    lease["metadata"]["ownerReferences"][0]["uid"] = earlier.metadata.uid
    coordination = k8s.CoordinationV1Api(room.apiserver.client())
    coordination.create_namespaced_lease(room.namespace, lease)
    launcher = room.launch()
    launcher.told("launched")
    room.operator.core.delete_namespaced_config_map("earlier", room.namespace)
    job = room.operator.job(NAME)
    found = coordination.read_namespaced_lease(NAME, room.namespace)
    assert [owner.uid for owner in found.metadata.owner_references] == [job["metadata"]["uid"]]
    assert found.spec.holder_identity == "launcher-1"
    assert found.spec.lease_duration_seconds == 1800


def test_a_lease_that_somebody_deletes_comes_back(room: Any) -> None:
    launcher = room.launch(room.backend(config=room.config(lease_seconds=10)))
    launcher.told("pending")
    coordination = k8s.CoordinationV1Api(room.apiserver.client())
    coordination.delete_namespaced_lease(NAME, room.namespace)
    wait_for(lambda: coordination.list_namespaced_lease(room.namespace).items)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), Interrupted("terminated (SIGTERM)")])
def test_an_interrupt_before_the_job_is_known_to_be_ours_deletes_nothing_foreign(
    room: Any, interrupt: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": NAME}}
    room.operator.custom.create_namespaced_custom_object(
        *room.operator.where, {**foreign, "spec": {"pytorchReplicaSpecs": {}}}
    )
    backend = room.backend()

    def interrupted(*_: Any) -> None:
        raise interrupt

    monkeypatch.setattr(backend, "_check_ours", interrupted)
    launcher = room.launch(backend)
    assert launcher.end() is interrupt
    assert launcher.kinds() == []
    assert not gone(room)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "has no label muster.dev/run"),
        ({"labels": {"muster.dev/run": "other"}}, "it belongs to run other"),
        (
            {"labels": {"muster.dev/run": "r1", "muster.dev/job": "train-0000", "muster.dev/attempt": "0"}},
            "does something else",
        ),
    ],
)
def test_a_foreign_job_of_the_same_name_is_refused_and_left_alone(
    room: Any, metadata: dict[str, Any], says: str
) -> None:
    foreign = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": NAME, **metadata}}
    room.operator.custom.create_namespaced_custom_object(
        *room.operator.where, {**foreign, "spec": {"pytorchReplicaSpecs": {}}}
    )
    error = room.launch().end()
    assert isinstance(error, InvalidInput)
    assert says in str(error)
    assert f"kubectl -n {room.namespace} delete pytorchjob {NAME}" in str(error)
    assert len(room.operator.jobs()) == 1


# --- an API server with bad days -----------------------------------------------------------------------------------


def test_an_api_server_that_is_away_for_a_while_is_waited_for(room: Any) -> None:
    launcher = room.launch()
    room.operator.job(NAME)
    launcher.told("pending")
    room.apiserver.stop_api()
    room.write_outcome(outcome="done")
    room.apiserver.start_api()
    assert launcher.thread.is_alive()
    room.operator.condition(NAME, "Succeeded")
    assert launcher.end() is None


def test_an_api_server_that_stays_away_is_a_death_and_the_job_is_left(room: Any) -> None:
    launcher = room.launch(room.backend(outage=1))
    room.operator.job(NAME)
    launcher.told("pending")
    room.apiserver.stop_api()
    try:
        error = launcher.end()
    finally:
        room.apiserver.start_api()
    assert isinstance(error, DependencyDied)
    assert "the Kubernetes API was away for 1 s" in str(error)
    assert not gone(room)


def test_a_watch_from_a_forgotten_version_begins_again(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    versions: list[str] = []
    watch = Cluster.watch

    def from_the_past(self: Cluster, *args: Any) -> Any:
        versions.append(args[4])
        return watch(self, *args[:4], "1" if len(versions) == 1 else args[4], args[5])

    monkeypatch.setattr(Cluster, "watch", from_the_past)
    launcher = room.launch(room.backend(look=5))
    room.operator.job(NAME)
    room.apiserver.compact()
    wait_for(lambda: len(versions) >= 2)
    room.write_outcome(outcome="done")
    room.operator.condition(NAME, "Succeeded")
    assert launcher.end() is None


# --- interrupts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "kind"),
    [({}, "left"), ({"activeDeadlineSeconds": 0}, "deleted"), ({"shutdown": "Terminate"}, "deleted")],
)
def test_sigterm_deletes_the_job_only_if_the_workflow_is_being_ended(
    room: Any, spec: dict[str, Any], kind: str
) -> None:
    workflow = room.operator.workflow()
    where = ("argoproj.io", "v1alpha1", room.namespace, "workflows")
    room.operator.custom.replace_namespaced_custom_object(
        *where, workflow["metadata"]["name"], {**workflow, "spec": spec}
    )
    backend = room.backend(identity=Identity("launcher-1", owner_of(workflow)))
    launcher = room.launch(backend, raise_at=("pending", Interrupted("terminated (SIGTERM)")))
    assert isinstance(launcher.end(), Interrupted)
    assert launcher.kinds()[-1] == kind
    assert gone(room) == (kind == "deleted")


def test_ctrl_c_deletes_the_job(room: Any) -> None:
    launcher = room.launch(raise_at=("pending", KeyboardInterrupt()))
    assert isinstance(launcher.end(), KeyboardInterrupt)
    assert gone(room)


CALLER = """
import sys
from pathlib import Path
from muster.config import load
from muster.errors import MusterError
from muster.job import JobSpec, backend, run_job
outcome = Path(sys.argv[2])
try:
    config = load(sys.argv[1])
    spec = JobSpec("train-0000", ("-m", "muster.training", "--config", "run.yaml"), 1, 2, outcome, outcome.parent)
    run_job(backend(config), spec, lambda event: print(event.kind, event.text, flush=True))
except MusterError as error:
    sys.exit(error.exit_code)
"""


def test_a_step_that_gets_a_real_sigterm_while_it_watches(room: Any) -> None:
    workflow = room.operator.workflow()
    owner = owner_of(workflow)
    step = {"name": "step-pod", "ownerReferences": [owner.reference()]}
    image = {"name": "main", "image": "i"}
    room.operator.core.create_namespaced_pod(room.namespace, {"metadata": step, "spec": {"containers": [image]}})
    (room.volume / "run.yaml").write_text(yaml.safe_dump(room.config().model_dump(mode="json")))
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, str(room.volume / "run.yaml"), str(room.spec().outcome)],
        env={
            **os.environ,
            "KUBECONFIG": str(room.apiserver.kubeconfig("admin")),
            "POD_NAME": "step-pod",
            "POD_NAMESPACE": room.namespace,
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert caller.stdout is not None
        assert caller.stdout.readline().startswith("launched")
        assert caller.stdout.readline().startswith("pending")
        job = room.operator.job(NAME)
        assert job["metadata"]["ownerReferences"] == [owner.reference()]
        assert (
            k8s.CoordinationV1Api(room.apiserver.client())
            .read_namespaced_lease(NAME, room.namespace)
            .spec.holder_identity
            == "step-pod"
        )
        caller.send_signal(signal.SIGTERM)
        rest, _ = caller.communicate(timeout=20)
    finally:
        caller.kill()
    assert caller.returncode == 130
    assert f"Workflow {owner.name} goes on" in rest
    assert not gone(room)


# --- rights and ownership ------------------------------------------------------------------------------------------


def bind_step(room: Any, rules: list[dict[str, list[str]]]) -> None:
    rbac = k8s.RbacAuthorizationV1Api(room.apiserver.client())
    rbac.create_namespaced_role(room.namespace, {"metadata": {"name": "muster-step"}, "rules": rules})
    body = {
        "metadata": {"name": "muster-step"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "muster-step"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "step"}],
    }
    rbac.create_namespaced_role_binding(room.namespace, body)


def test_the_role_is_enough_for_everything_a_step_does_and_nothing_else(
    room: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind_step(room, RBAC_RULES)
    workflow = room.operator.workflow()
    step = {"name": "step-pod", "ownerReferences": [owner_of(workflow).reference()]}
    image = {"name": "main", "image": "i"}
    room.operator.core.create_namespaced_pod(room.namespace, {"metadata": step, "spec": {"containers": [image]}})
    monkeypatch.setenv("POD_NAME", "step-pod")
    monkeypatch.setenv("POD_NAMESPACE", room.namespace)
    identity = identify(Cluster(room.apiserver.client("step"), room.namespace, 5))
    assert identity == Identity("step-pod", owner_of(workflow))

    def backend(**more: Any) -> Any:
        return room.backend(user="step", identity=more.get("identity", identity), config=room.config(lease_seconds=10))

    # created, then left when the step is drained; its lease is renewed meanwhile
    first = room.launch(backend(), raise_at=("running", Interrupted("terminated (SIGTERM)")))
    room.operator.job(NAME)
    coordination = k8s.CoordinationV1Api(room.apiserver.client())
    before = wait_for(lambda: coordination.read_namespaced_lease(NAME, room.namespace)).spec.renew_time
    wait_for(lambda: coordination.read_namespaced_lease(NAME, room.namespace).spec.renew_time > before)
    room.operator.pod(NAME, phase="Running")
    assert isinstance(first.end(), Interrupted)
    assert "goes on" in first.told("left").text
    # adopted by another step of another Workflow, and found dead, with its log
    other = Identity("step-pod-2", owner_of(room.operator.workflow("retry")))
    second = room.launch(backend(identity=other))
    second.told("adopted")
    room.operator.pod_status(f"{NAME}-worker-0", **terminated(1, message="boom"))
    room.operator.condition(NAME, "Failed", "failed")
    assert "boom" in str(second.end())
    # a new attempt, deleted by Ctrl-C
    third = room.launch(backend(), raise_at=("pending", KeyboardInterrupt()))
    assert isinstance(third.end(), KeyboardInterrupt)
    assert gone(room, "r1-train-0000-1")

    step_client = room.apiserver.client("step")
    core, custom = k8s.CoreV1Api(step_client), k8s.CustomObjectsApi(step_client)
    workflows = ("argoproj.io", "v1alpha1", room.namespace, "workflows")
    forbidden = [
        lambda: core.list_namespaced_secret(room.namespace),
        lambda: core.create_namespaced_pod(room.namespace, {"metadata": {"name": "x"}}),
        lambda: core.delete_namespaced_pod("step-pod", room.namespace),
        lambda: core.list_namespaced_pod("default"),
        lambda: core.list_namespaced_config_map(room.namespace),
        lambda: custom.list_namespaced_custom_object(*workflows),
        lambda: custom.delete_namespaced_custom_object(*workflows, workflow["metadata"]["name"]),
        lambda: k8s.CoordinationV1Api(step_client).delete_namespaced_lease(NAME, room.namespace),
        lambda: k8s.AppsV1Api(step_client).list_namespaced_deployment(room.namespace),
    ]
    for number, call in enumerate(forbidden):
        with pytest.raises(ApiException) as raised:
            call()
        assert raised.value.status == 403, number


@pytest.mark.parametrize(
    ("resource", "says"),
    [
        ("pytorchjobs", "list PyTorchJobs"),
        ("leases", "get leases"),
        ("pods", "list pods"),
    ],
)
def test_a_missing_right_is_named_and_leaves_no_job_behind(room: Any, resource: str, says: str) -> None:
    bind_step(room, [rule for rule in RBAC_RULES if rule["resources"] != [resource]])
    error = room.launch(room.backend(user="step")).end()
    assert isinstance(error, InvalidInput)
    assert f"does not let this account {says}" in str(error)
    assert "muster.job.pytorchjob.RBAC_RULES" in str(error)
    assert gone(room)


def test_without_the_right_to_read_workflows_the_job_is_left(room: Any) -> None:
    bind_step(room, [rule for rule in RBAC_RULES if rule["resources"] != ["workflows"]])
    identity = Identity("launcher-1", owner_of(room.operator.workflow()))
    backend = room.backend(user="step", identity=identity)
    launcher = room.launch(backend, raise_at=("pending", Interrupted("terminated (SIGTERM)")))
    assert isinstance(launcher.end(), Interrupted)
    assert "cannot read Workflow" in launcher.told("left").text


def test_deleting_the_workflow_deletes_job_and_lease(room: Any) -> None:
    workflow = room.operator.workflow()
    launcher = room.launch(room.backend(identity=Identity("launcher-1", owner_of(workflow))))
    room.operator.job(NAME)
    coordination = k8s.CoordinationV1Api(room.apiserver.client())
    wait_for(lambda: coordination.list_namespaced_lease(room.namespace).items)
    where = ("argoproj.io", "v1alpha1", room.namespace, "workflows")
    room.operator.custom.delete_namespaced_custom_object(*where, workflow["metadata"]["name"])
    wait_for(lambda: gone(room), 60)
    wait_for(lambda: not coordination.list_namespaced_lease(room.namespace).items, 60)
    assert "deleted by someone else" in str(launcher.end())


def test_a_namespace_that_is_not_there_is_named(room: Any) -> None:
    config = room.config(namespace="no-such-namespace")
    cluster = Cluster(room.apiserver.client(), "no-such-namespace", 5)
    backend = type(room.backend())(config, cluster, Identity("launcher-1"))
    error = room.launch(backend).end()
    assert isinstance(error, InvalidInput)
    assert "no-such-namespace" in str(error)
    assert "job.namespace" in str(error)
