"""What runs in the pods of a PyTorchJob: the container's own command with the environment that the operator adds, and
the guard's lease on a real API server."""

from __future__ import annotations

import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client as k8s

from muster.config import parse
from muster.job import JobSpec, read_outcome
from muster.job.guard import Watch, cluster_lease
from muster.job.manifest import manifest
from muster.job.pytorchjob import JOB_RBAC_RULES
from muster.process import Child, end_tree, free_port, spawn, tail

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]

RANKS = """
import os
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, (dist.get_rank(), os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"]))
print("all", ranks, flush=True)
dist.barrier()
if dist.get_rank() == 0:
    outcome = Path(os.environ["MUSTER_OUTCOME"])
    outcome.with_suffix(".part").write_text('{"outcome": "done"}')
    outcome.with_suffix(".part").rename(outcome)
dist.destroy_process_group()
"""


def operator_environment(body: dict[str, Any], endpoint: str) -> dict[str, str]:
    """What the operator 1.9 adds for a worker-only job with an elastic policy (envvar.go, elastic.go)."""
    policy = body["spec"]["elasticPolicy"]
    return {
        "PYTHONUNBUFFERED": "1",
        "PET_NPROC_PER_NODE": body["spec"]["nprocPerNode"],
        "PET_RDZV_ENDPOINT": endpoint,
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_RDZV_CONF": ",".join(f"{item['key']}={item['value']}" for item in policy["rdzvConf"]),
    }


def start_pod(body: dict[str, Any], folder: Path, index: int, port: int) -> Child:
    container = body["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    env = {item["name"]: item["value"] for item in container["env"]}
    added = operator_environment(body, f"127.0.0.1:{port}")
    # On one machine every pod's address is the endpoint's: say who hosts it, as host names do in a cluster.
    added["PET_RDZV_CONF"] += f",is_host={int(index == 0)}"
    argv = [word.replace("/tmp/torchrun", str(folder / f"torchrun-{index}")) for word in container["args"]]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    machine = {"PATH": path, "PYTHONPATH": str(folder), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    assert container["command"][0] == "python"
    return spawn(
        [sys.executable, *container["command"][1:], *argv],
        env={**env, **added, **machine, "MUSTER_LEASE": ""},
        log=folder / f"pod-{index}.log",
    )


def test_two_pods_with_two_ranks_each_meet_whichever_starts_first(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    settings = (
        f"run: {{id: r1, root: {tmp_path}}}\nstorage: {{pvc: p, mount_path: {tmp_path}}}\n"
        "job: {backend: pytorchjob, image: i, namespace: n}\n"
    )
    spec = JobSpec("train-0000", ("-m", "ranks"), 2, 2, tmp_path / "job" / "outcome.json", tmp_path / "job")
    spec.outcome.parent.mkdir()
    body = manifest(spec, parse(settings), None, attempt=0)
    port = free_port()
    pods = [start_pod(body, tmp_path, 1, port)]
    try:
        # Worker 1 waits for the host of the rendezvous and does not give up.
        with pytest.raises(Exception, match="timed out"):
            pods[0].wait(6)
        pods.append(start_pod(body, tmp_path, 0, port))
        codes = [pod.wait(90) for pod in pods]
    finally:
        for pod in pods:
            end_tree(pod, 1)
    logs = [tail(tmp_path / f"pod-{index}.log") for index in (0, 1)]
    assert codes == [0, 0], logs
    outcome = read_outcome(spec.outcome)
    assert outcome is not None
    assert outcome.done
    assert "[default0]:all [(0, '0', '0'), (1, '1', '0'), (2, '0', '1'), (3, '1', '1')]" in "".join(logs)


def test_the_guard_reads_its_lease_with_the_job_accounts_rights(
    apiserver: Any, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rbac = k8s.RbacAuthorizationV1Api(apiserver.client())
    rbac.create_namespaced_role(namespace, {"metadata": {"name": "muster-job"}, "rules": JOB_RBAC_RULES})
    body = {
        "metadata": {"name": "muster-job"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "muster-job"},
        "subjects": [{"kind": "ServiceAccount", "name": "muster-job", "namespace": namespace}],
    }
    rbac.create_namespaced_role_binding(namespace, body)
    core = k8s.CoreV1Api(apiserver.client())
    request = {"spec": {"audiences": ["https://kubernetes.default.svc"], "expirationSeconds": 3600}}
    token = core.create_namespaced_service_account_token("muster-job", namespace, request).status.token
    (tmp_path / "token").write_text(token)
    (tmp_path / "ca.crt").write_bytes(apiserver.certificate.read_bytes())
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(apiserver.port))

    read = cluster_lease(f"{namespace}/r1-train-0000-0", account=tmp_path)
    assert read() is None
    coordination = k8s.CoordinationV1Api(apiserver.client())
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    lease = {"holderIdentity": "launcher-1", "leaseDurationSeconds": 60, "renewTime": now}
    coordination.create_namespaced_lease(namespace, {"metadata": {"name": "r1-train-0000-0"}, "spec": lease})
    watch = Watch()
    assert not watch.look(read(), now=0)
    assert watch.look(read(), now=61)
    coordination.patch_namespaced_lease("r1-train-0000-0", namespace, {"spec": {"holderIdentity": "launcher-2"}})
    assert not watch.look(read(), now=62)


def test_sigterm_to_the_pod_reaches_the_ranks(tmp_path: Path) -> None:
    program = (
        "import signal, sys, time\n"
        "def end(*_):\n    print('checkpoint', flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('started', flush=True)\ntime.sleep(60)\n"
    )
    (tmp_path / "ranks.py").write_text(program)
    settings = (
        f"run: {{id: r1, root: {tmp_path}}}\nstorage: {{pvc: p, mount_path: {tmp_path}}}\n"
        "job: {backend: pytorchjob, image: i, namespace: n}\n"
    )
    spec = JobSpec("train-0000", ("-m", "ranks"), 1, 2, tmp_path / "job" / "outcome.json", tmp_path / "job")
    pod = start_pod(manifest(spec, parse(settings), None, attempt=0), tmp_path, 0, free_port())
    try:
        wait_for = sys.modules["muster_test_apiserver"].wait_for
        wait_for(lambda: tail(pod.log, 100).count("started") == 2, 60)
        pod.send_signal(signal.SIGTERM)
        pod.wait(40)
    finally:
        end_tree(pod, 1)
    assert tail(pod.log, 200).count("checkpoint") == 2
