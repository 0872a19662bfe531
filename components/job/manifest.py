"""The PyTorchJob of a job, as a pure function of its specification: names, labels, the pod, its security.

No API is called here. What each unusual field is for is said beside it.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from muster.config import RunConfig
from muster.errors import InvalidInput
from muster.job.spec import OUTCOME_VARIABLE, JobSpec

GROUP, VERSION, PLURAL, KIND = "kubeflow.org", "v1", "pytorchjobs", "PyTorchJob"
CONTAINER = "pytorch"
"""The operator refuses a job without a container of this name."""

RUN_LABEL, JOB_LABEL, ATTEMPT_LABEL, ROLE_LABEL = (f"muster.dev/{key}" for key in ("run", "job", "attempt", "role"))
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
HASH_ANNOTATION = "muster.dev/spec-hash"

USER_ID = 1000
"""The numeric user, group and file-system group of our images; restricted namespaces want it spelt out."""

RENDEZVOUS_PORT = 23456
JOIN_SECONDS = 1800
"""How long a pod waits for the others: image pulls on fresh nodes take their time."""

GRACE_SECONDS = 120
"""From SIGTERM to SIGKILL: enough for the ranks to stop together and write a checkpoint."""

LOG_SECONDS = 3600
"""How long an ended job stays, so that its logs can be read and its last metrics scraped."""

# The operator names pods and their services "<job>-worker-<n>"; a service name has at most 63 characters.
_NAME_LIMIT = 63 - len("-worker-9999")


@dataclass(frozen=True)
class Owner:
    """The Workflow that a job belongs to; deleting it deletes the job."""

    api_version: str
    kind: str
    name: str
    uid: str

    def reference(self) -> dict[str, str]:
        """As an entry of `metadata.ownerReferences`."""
        return {"apiVersion": self.api_version, "kind": self.kind, "name": self.name, "uid": self.uid}


def job_name(run_id: str, name: str, attempt: int) -> str:
    """The name of an attempt's PyTorchJob: the same for each launcher, a DNS-1035 label, short enough for its pods."""
    full = f"{run_id}-{name}-{attempt}"
    if not full[0].isalpha():
        full = f"m-{full}"
    if len(full) > _NAME_LIMIT:
        digest = hashlib.sha256(full.encode()).hexdigest()[:8]
        tail = f"-{digest}-{attempt}"
        full = full[: _NAME_LIMIT - len(tail)].rstrip("-") + tail
    return full


def labels(run_id: str, spec: JobSpec, attempt: int) -> dict[str, str]:
    """The labels of a job, its pods and its lease."""
    return {
        "app.kubernetes.io/name": "muster",
        "app.kubernetes.io/instance": run_id,
        "app.kubernetes.io/component": "trainer",
        "app.kubernetes.io/part-of": "muster",
        "app.kubernetes.io/managed-by": "muster",
        RUN_LABEL: run_id,
        JOB_LABEL: spec.name,
        ATTEMPT_LABEL: str(attempt),
        ROLE_LABEL: "trainer",
    }


def selector(run_id: str, spec: JobSpec) -> str:
    """Finds all attempts of a job, or their pods."""
    return f"{RUN_LABEL}={run_id},{JOB_LABEL}={spec.name}"


def manifest(spec: JobSpec, config: RunConfig, owner: Owner | None, attempt: int) -> dict[str, Any]:
    """The PyTorchJob of one attempt.

    It is worker-only (a Master brings an init container that restricted and air-gapped clusters refuse), of fixed size
    through an elastic policy (that is what makes the operator set up a c10d rendezvous), and never restarts a pod
    (single pods do not find back into a rendezvous; the whole job is launched again instead).

    Args:
        spec: the job.
        config: the run; `run`, `job`, and `storage` where a volume is mounted.
        owner: the Workflow in the same namespace, if known.
        attempt: from 0.

    Raises:
        InvalidInput: the configuration lacks something, or the outcome file would not be seen outside the pod.
    """
    config.require("run")
    if config.run is None or config.job.image is None or config.job.namespace is None:
        raise InvalidInput("job: backend pytorchjob needs image and namespace")
    _check_paths(spec, config)
    name = job_name(config.run.id, spec.name, attempt)
    marks = labels(config.run.id, spec, attempt)
    body = {
        "nprocPerNode": str(spec.nproc_per_node),
        "elasticPolicy": {
            "minReplicas": spec.replicas,
            "maxReplicas": spec.replicas,
            "maxRestarts": 0,
            "rdzvBackend": "c10d",
            "rdzvId": name,
            # A pod that starts before worker 0 retries its connection for read_timeout; the default is a minute.
            "rdzvConf": [
                {"key": "join_timeout", "value": str(JOIN_SECONDS)},
                {"key": "read_timeout", "value": str(JOIN_SECONDS)},
            ],
        },
        "runPolicy": {
            # Ends the ranks that wait for a failed one, and keeps failed pods for their logs. With an elastic policy
            # the first pod that completes ends the job too: torchrun's exit barrier makes all complete together.
            "cleanPodPolicy": "Running",
            "activeDeadlineSeconds": math.ceil(spec.timeout),
            "ttlSecondsAfterFinished": math.ceil(config.telemetry.linger_seconds) + LOG_SECONDS,
        },
        "pytorchReplicaSpecs": {
            "Worker": {
                "replicas": spec.replicas,
                "restartPolicy": "Never",
                "template": {
                    "metadata": {
                        # A sidecar keeps pods alive after the ranks have ended and stands between them.
                        "labels": {**marks, "sidecar.istio.io/inject": "false"},
                        "annotations": {
                            "sidecar.istio.io/inject": "false",
                            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                        },
                    },
                    "spec": _pod(spec, config, name),
                },
            }
        },
    }
    if config.job.queue is not None:
        marks = {**marks, QUEUE_LABEL: config.job.queue}
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": config.job.namespace,
        "labels": marks,
        "annotations": {HASH_ANNOTATION: spec_hash(body)},
    }
    if owner is not None:
        metadata["ownerReferences"] = [owner.reference()]
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": metadata, "spec": body}


def spec_hash(body: dict[str, Any]) -> str:
    """A short hash of a job's `spec`, by which a later launcher knows that a job does what it would do itself."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def _pod(spec: JobSpec, config: RunConfig, name: str) -> dict[str, Any]:
    ports = [{"name": "pytorchjob-port", "containerPort": RENDEZVOUS_PORT, "protocol": "TCP"}]
    if config.telemetry.port:
        ports.append({"name": "metrics", "containerPort": config.telemetry.port, "protocol": "TCP"})
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - in the pod
    volumes: list[dict[str, Any]] = [
        {"name": "tmp", "emptyDir": {}},
        # NCCL and data loaders need more than the 64 MiB that a pod gets; it counts against the memory limit.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if config.storage is not None and config.storage.pvc is not None:
        mounts.append({"name": "storage", "mountPath": str(config.storage.mount_path)})
        volumes.append({"name": "storage", "persistentVolumeClaim": {"claimName": config.storage.pvc}})
    resources: dict[str, Any] = dict(config.job.resources)
    if config.job.gpus:
        resources["nvidia.com/gpu"] = str(config.job.gpus)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": config.job.image,
        "command": ["python", "-m", "muster.job.guard"],
        # torchrun takes the rendezvous from PET_*, which the operator sets, and gives each rank its own RANK.
        "args": ["torchrun", "--tee=3", "--log-dir=/tmp/torchrun", *spec.arguments],
        "env": [{"name": key, "value": value} for key, value in sorted(_environment(spec, config, name).items())],
        "ports": ports,
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # Shows the end of the log in the pod's status when a process ends without a message of its own.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if resources:
        container["resources"] = {"limits": resources, "requests": dict(resources)}
    placement: dict[str, Any] = {
        "nodeSelector": config.job.node_selector,
        "tolerations": config.job.tolerations,
        "imagePullSecrets": [{"name": secret} for secret in config.job.image_pull_secrets],
        "priorityClassName": config.job.priority_class,
    }
    return {
        **{key: value for key, value in placement.items() if value},
        "serviceAccountName": config.job.service_account,
        "automountServiceAccountToken": True,  # the guard reads the job's lease, and may do nothing else
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "runAsGroup": USER_ID,
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def _environment(spec: JobSpec, config: RunConfig, name: str) -> dict[str, str]:
    """What the ranks see; the root file system is read-only, so all caches go to /tmp."""
    return {
        "HOME": "/tmp",  # noqa: S108
        "HF_HOME": "/tmp/huggingface",  # noqa: S108
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor",  # noqa: S108
        "TRITON_CACHE_DIR": "/tmp/triton",  # noqa: S108
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_SECONDS - 30),
        **config.job.env,
        **spec.env,
        OUTCOME_VARIABLE: str(spec.outcome),
        "MUSTER_LEASE": f"{config.job.namespace}/{name}",
    }


def _check_paths(spec: JobSpec, config: RunConfig) -> None:
    """The outcome file must lie where both the job's pods and this process see it."""
    if config.storage is None or config.storage.pvc is None:
        raise InvalidInput(
            "storage.pvc: backend pytorchjob needs a volume that the job's pods and this step share: the outcome file, "
            "weights and checkpoints go there"
        )
    mount = PurePosixPath(str(config.storage.mount_path))
    if mount not in PurePosixPath(str(spec.outcome)).parents:
        raise InvalidInput(
            f"job {spec.name}: its outcome file {spec.outcome} is not below storage.mount_path {mount}, where the pods "
            "could write it; set run.root to a folder below the mount path"
        )
