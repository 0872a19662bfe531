"""Compiling a pipeline for a cluster, and submitting a run of it with the kfp SDK."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from muster.config import RunConfig
from muster.errors import DependencyDied, InvalidInput, storage_died
from muster.pipelines.local import load_pipeline


@dataclass(frozen=True)
class Target:
    """Which Kubeflow Pipelines installation, and as whom.

    Attributes:
        host: address of the API; None lets kfp find it (inside a cluster, or its own environment variables).
        namespace: profile namespace of the run.
        experiment: experiment to file it under.
        service_account: account that its steps run as.
        token_file: file with a bearer token.
        ca_cert: certificate authority of the API.
    """

    host: str | None = None
    namespace: str | None = None
    experiment: str | None = None
    service_account: str | None = None
    token_file: Path | None = None
    ca_cert: Path | None = None


def compile_to(name: str, out: Path) -> None:
    """Writes a pipeline as KFP IR YAML.

    Raises:
        InvalidInput: no such pipeline, a file name that KFP does not take, or a path that cannot be used.
        DependencyDied: the storage failed.
    """
    from kfp import compiler

    pipeline = load_pipeline(name)
    if out.suffix not in (".yaml", ".yml", ".json"):
        raise InvalidInput(f"--out: {out} must end in .yaml")
    unfinished = out.with_name(f".{out.stem}.partial{out.suffix}")
    try:
        compiler.Compiler().compile(pipeline, str(unfinished))
        unfinished.replace(out)
    except OSError as error:
        raise storage_died(error, out) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def submit_to(name: str, config: RunConfig, iterations: int, target: Target, *, wait: bool = False) -> str:
    """Submits a run.

    Args:
        name: of the pipeline.
        config: becomes the parameter `run_config`; `run.root` must be below `storage.mount_path`.
        iterations: how many to run.
        target: where.
        wait: stay until it has ended.

    Returns:
        The run's address in the UI.

    Raises:
        InvalidInput: the configuration cannot run there.
        DependencyDied: the API refused, is away, or the run that was waited for failed.
    """
    import kfp

    from muster.pipelines.grpo import MAX_ITERATIONS

    config.require("run", "model", "data", "rollout", "storage")
    assert config.run
    assert config.storage
    assert config.rollout
    faults = []
    if config.storage.pvc is None:
        faults.append("storage.pvc: a pipeline on a cluster needs the volume claim that holds its run directory")
    if not config.run.root.is_relative_to(config.storage.mount_path):
        faults.append(f"run.root: is {config.run.root}, must be below storage.mount_path {config.storage.mount_path}")
    if config.rollout.server is not None:
        faults.append("rollout.server: is for local runs; on a cluster name the fleet in rollout.endpoints")
    if config.job.backend == "local":
        faults.append("job.backend: is local, which would train inside the launcher's pod; set pytorchjob")
    if iterations > MAX_ITERATIONS:
        faults.append(
            f"iterations: {iterations} is above the compiled maximum; submit {MAX_ITERATIONS} and go on "
            "with the parameter first_iteration"
        )
    if faults:
        raise InvalidInput(faults)
    token = _read(target.token_file, "--token-file")
    try:
        client = kfp.Client(
            host=target.host,
            namespace=target.namespace or "kubeflow",
            existing_token=token,
            ssl_ca_cert=str(target.ca_cert) if target.ca_cert else None,
        )
        run = client.create_run_from_pipeline_func(
            load_pipeline(name),
            arguments={"run_config": config.dump(), "iterations": iterations, "pvc": config.storage.pvc},
            run_name=config.run.id,
            experiment_name=target.experiment,
            namespace=target.namespace,
            service_account=target.service_account,
            enable_caching=False,
        )
        address = f"{client._get_url_prefix()}/#/runs/details/{run.run_id}"
        if wait:
            ended = run.wait_for_run_completion()
            if ended.state != "SUCCEEDED":
                raise DependencyDied(f"run {run.run_id} ended as {ended.state}; see {address}")
    except DependencyDied:
        raise
    except Exception as error:  # the SDK raises what its HTTP client, its auth and its own code raise
        where = target.host or "its default address"
        raise DependencyDied(f"Kubeflow Pipelines at {where} refused: {error}") from error
    return address


def _read(path: Path | None, option: str) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InvalidInput(f"{option}: cannot read {path}: {error.strerror}") from error
