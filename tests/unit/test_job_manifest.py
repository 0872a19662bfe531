"""The PyTorchJob that a job becomes: valid for the operator, for Kubernetes, and for a restricted namespace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from muster.config import RunConfig, parse
from muster.errors import InvalidInput
from muster.job import JobSpec
from muster.job.manifest import Owner, job_name, manifest, spec_hash

CRD = Path(__file__).parents[1] / "cluster" / "crds" / "kubeflow.org_pytorchjobs.yaml.gz"
OWNER = Owner("argoproj.io/v1alpha1", "Workflow", "grpo-x", "5b92a28a-0f9c-4836-9cd5-aae1f3828d1a")


def config(**job: Any) -> RunConfig:
    settings = {
        "run": {"id": "r1", "root": "/muster/r1"},
        "storage": {"pvc": "muster", "mount_path": "/muster"},
        "job": {
            "backend": "pytorchjob",
            "image": "registry.example/muster-trainer:1",
            "namespace": "team-a",
            "gpus": 8,
            "resources": {"cpu": "32", "memory": "256Gi"},
            "queue": "gpus",
            "env": {"NCCL_DEBUG": "WARN"},
            **job,
        },
    }
    return parse(json.dumps(settings))


def spec(**more: Any) -> JobSpec:
    given: dict[str, Any] = {
        "name": "train-0003",
        "arguments": ("-m", "muster.training", "--config", "/muster/r1/run.yaml", "--version", "3"),
        "replicas": 4,
        "nproc_per_node": 8,
        "outcome": Path("/muster/r1/jobs/train-0003/outcome.json"),
        "log_dir": Path("/muster/r1/jobs/train-0003"),
        "env": {"EXTRA": "1"},
        "timeout": 3600.5,
    }
    return JobSpec(**{**given, **more})


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """The operator's schema, with fields that it does not know refused instead of silently dropped."""
    with gzip.open(CRD) as file:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        definition = yaml.load(file, Loader=loader)
    found = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    found["properties"]["metadata"] = {"type": "object"}
    return dict(strict(found))


def strict(node: Any) -> Any:
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    closed = {key: strict(value) for key, value in node.items()}
    if isinstance(node.get("properties"), dict) and node.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    if node.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    return closed


def worker(body: dict[str, Any]) -> dict[str, Any]:
    return dict(body["spec"]["pytorchReplicaSpecs"]["Worker"])


def test_what_the_operator_is_told() -> None:
    body = manifest(spec(), config(), OWNER, attempt=2)
    assert body["metadata"]["name"] == "r1-train-0003-2"
    assert body["metadata"]["ownerReferences"] == [
        {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "grpo-x", "uid": OWNER.uid}
    ]
    assert body["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    policy = body["spec"]["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"], policy["maxRestarts"]) == (4, 4, 0)
    assert policy["rdzvBackend"] == "c10d"
    assert body["spec"]["nprocPerNode"] == "8"
    assert list(body["spec"]["pytorchReplicaSpecs"]) == ["Worker"], "a Master brings an init container"
    assert worker(body)["restartPolicy"] == "Never"
    run = body["spec"]["runPolicy"]
    assert run["activeDeadlineSeconds"] == 3601
    assert run["ttlSecondsAfterFinished"] > config().telemetry.linger_seconds + 600
    assert "backoffLimit" not in run, "it counts restarts of running pods"


def test_the_pod() -> None:
    body = manifest(spec(), config(), OWNER, attempt=0)
    template = worker(body)["template"]
    assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
    assert template["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
    for labels in (body["metadata"]["labels"], template["metadata"]["labels"]):
        assert labels["muster.dev/run"] == "r1"
        assert labels["muster.dev/role"] == "trainer"
        assert labels["app.kubernetes.io/name"] == "muster"
    pod = template["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert container["args"][0] == "torchrun"
    assert container["args"][-6:] == ["-m", "muster.training", "--config", "/muster/r1/run.yaml", "--version", "3"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]}["metrics"] == 9464
    env = {item["name"]: item["value"] for item in container["env"]}
    assert env["MUSTER_OUTCOME"] == "/muster/r1/jobs/train-0003/outcome.json"
    assert env["HOME"] == "/tmp"
    assert env["NCCL_DEBUG"] == "WARN"
    assert env["EXTRA"] == "1"
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(env), "torchrun sets them for each rank"
    limits = container["resources"]["limits"]
    assert limits == {"cpu": "32", "memory": "256Gi", "nvidia.com/gpu": "8"}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert volumes[mounts["/muster"]]["persistentVolumeClaim"] == {"claimName": "muster"}
    assert "emptyDir" in volumes[mounts["/tmp"]]
    assert pod["serviceAccountName"] == "muster-job"


def test_where_the_pods_may_go() -> None:
    placed = config(
        node_selector={"gpu": "h200"},
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        image_pull_secrets=["registry"],
        priority_class="training",
    )
    pod = worker(manifest(spec(), placed, None, attempt=0))["template"]["spec"]
    assert pod["nodeSelector"] == {"gpu": "h200"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["priorityClassName"] == "training"
    plain = worker(manifest(spec(), config(), None, attempt=0))["template"]["spec"]
    assert not {"nodeSelector", "tolerations", "imagePullSecrets", "priorityClassName"} & set(plain)


def test_the_pod_is_allowed_in_a_restricted_namespace() -> None:
    """The Pod Security Standard "restricted", field by field."""
    pod = worker(manifest(spec(), config(), None, attempt=0))["template"]["spec"]
    for key in ("hostNetwork", "hostPID", "hostIPC", "initContainers"):
        assert key not in pod
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"])
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for context in (pod["securityContext"], pod["containers"][0]["securityContext"]):
        assert context["runAsNonRoot"] is True
        assert isinstance(context["runAsUser"], int)
        assert context["runAsUser"] > 0
    context = pod["containers"][0]["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["privileged"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert all("hostPort" not in port for port in pod["containers"][0]["ports"])


@pytest.mark.parametrize("owner", [OWNER, None])
def test_it_has_no_field_that_operator_or_kubernetes_do_not_know(schema: dict[str, Any], owner: Owner | None) -> None:
    body = manifest(spec(), config(), owner, attempt=0)
    jsonschema.validate(body, schema)
    template = worker(body)["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", **template["metadata"]},
        "spec": template["spec"],
    }
    kubernetes_validate.validate(pod, "1.37", strict=True)


def test_the_schema_would_refuse_a_misspelt_field(schema: dict[str, Any]) -> None:
    body = manifest(spec(), config(), None, attempt=0)
    worker(body)["template"]["spec"]["containers"][0]["securityContext"]["runAsNonroot"] = True
    with pytest.raises(jsonschema.ValidationError, match="runAsNonroot"):
        jsonschema.validate(body, schema)


def test_what_a_plain_job_leaves_out() -> None:
    body = manifest(spec(), config(queue=None, gpus=0, resources={}), None, attempt=0)
    assert "ownerReferences" not in body["metadata"]
    assert "kueue.x-k8s.io/queue-name" not in body["metadata"]["labels"]
    assert "resources" not in worker(body)["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"arguments": ("-m", "muster.training", "--version", "4")}},
        {"spec": {"nproc_per_node": 4}},
        {"spec": {"env": {"EXTRA": "2"}}},
        {"config": {"image": "registry.example/muster-trainer:2"}},
        {"config": {"gpus": 4}},
    ],
)
def test_the_hash_tells_jobs_apart_and_knows_equal_ones(change: dict[str, Any]) -> None:
    first = manifest(spec(), config(), OWNER, attempt=0)
    again = manifest(spec(), config(), None, attempt=0)
    other = manifest(spec(**change.get("spec", {})), config(**change.get("config", {})), OWNER, attempt=0)
    key = "muster.dev/spec-hash"
    assert first["metadata"]["annotations"][key] == again["metadata"]["annotations"][key] == spec_hash(first["spec"])
    assert first["metadata"]["annotations"][key] != other["metadata"]["annotations"][key]


@given(
    run=st.from_regex(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True),
    name=st.from_regex(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True),
    attempt=st.integers(0, 9999),
)
def test_names_are_dns_labels_that_leave_room_for_pods_and_do_not_clash(run: str, name: str, attempt: int) -> None:
    made = job_name(run, name, attempt)
    assert made == job_name(run, name, attempt)
    assert len(f"{made}-worker-9999") <= 63
    assert made[0].isalpha()
    assert made[-1].isalnum()
    assert made.replace("-", "a").isalnum()
    assert made != job_name(run, name, attempt + 1)


def test_an_outcome_that_nobody_outside_the_pod_could_read_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"/tmp/outcome\.json is not below storage\.mount_path /muster"):
        manifest(spec(outcome=Path("/tmp/outcome.json")), config(), None, attempt=0)
    alone = config().model_copy(update={"storage": None})
    with pytest.raises(InvalidInput, match=r"storage\.pvc"):
        manifest(spec(), alone, None, attempt=0)
