"""What each step of a stepwise run does, as plain functions over a run directory: the only place that joins the rooms.

Every stage can be run again: what is there in full is kept, what is half there is finished or made anew. Nothing here
knows KFP; `steps.py` calls `run` inside a pod or a local process, `cli.py` inside a command.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from muster import assembly, trajectory
from muster.config import RunConfig, parse
from muster.errors import Interrupted, InvalidInput, MusterError, Stalled, os_error
from muster.job import JobSpec, backend, run_job
from muster.layout import RunDirectory
from muster.rollout.collect import Collection, collect, load_tokenizer
from muster.rollout.evaluate import evaluate as evaluate_policy
from muster.rollout.prompts import read_prompts
from muster.rollout.reward import check_rewards
from muster.rollout.server import publish, replicas
from muster.telemetry import events
from muster.telemetry.metrics import Metrics, load_snapshot, serve
from muster.telemetry.report import write_report

LogMetric = Callable[[str, float], None]
log = logging.getLogger("muster.stages")


class Context:
    """One stage of one run at work.

    Attributes:
        config: the run's.
        files: where its files are.
        metrics: this process's, with the counters of the processes before it.
        log_metric: shows a number beside the step in the UI.
    """

    def __init__(self, config: RunConfig, log_metric: LogMetric = lambda *_: None) -> None:
        config.require("run")
        assert config.run
        self.config, self.run_id, self.log_metric = config, config.run.id, log_metric
        self.files = RunDirectory(config.run.root)
        self.files.root.mkdir(parents=True, exist_ok=True)
        self.metrics = Metrics(self.run_id, load_snapshot(self.files.root))

    def event(self, kind: str, **fields: Any) -> None:
        """Adds to the run's diary."""
        events.append(self.files.root, kind, **fields)


def run(stage: str, config_text: str, log_metric: LogMetric = lambda *_: None, **arguments: Any) -> None:
    """Runs one stage in a process of its own and ends it with the exit code of the contract.

    Args:
        stage: name of a function below.
        config_text: text of the `run.yaml`.
        log_metric: shows a number beside the step in the UI.
        **arguments: the stage's.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    context = None
    try:
        context = Context(parse(config_text, where="run_config"), log_metric)
        STAGES[stage](context, **arguments)
    except (MusterError, KeyboardInterrupt, OSError) as caught:
        error = _explained(caught)
        if context is not None:
            with contextlib.suppress(OSError):  # the disk may be what failed
                context.event("failed", stage=stage, exit_code=error.exit_code, error=str(error))
        print(f"{stage}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        sys.exit(error.exit_code)


def _explained(error: MusterError | KeyboardInterrupt | OSError) -> MusterError:
    if isinstance(error, MusterError):
        return error
    return os_error(error) if isinstance(error, OSError) else Interrupted("interrupted (Ctrl-C)")


def prepare(context: Context, first: int, iterations: int) -> None:
    """Checks everything that can be checked before the first request, and makes version 0 of the weights.

    Raises:
        InvalidInput: the configuration, prompts or rewards are unusable, or the directory holds another run.
    """
    config, files = context.config, context.files
    count = check(config)
    claim(config)
    found = iterations_done(files, first + iterations)
    if found < first:
        raise InvalidInput(f"first_iteration: is {first}, but {files.root} holds {found} finished iterations")
    context.event("prepared", prompts=count, iterations=first + iterations, finished_iterations=found)
    if not files.weights(0).exists():
        _train_job(context, "prepare", ("--version", "0", "--prepare"))


def rollout(context: Context, iteration: int) -> None:
    """Publishes version `iteration` with proof, then collects a batch of groups from it."""
    files = context.files
    if files.rollouts(iteration).exists():
        context.event("kept", stage="rollout", iteration=iteration)
        _log_collection(context, json.loads(files.collection(iteration).read_text(encoding="utf-8")))
        return
    position = 0
    if iteration > 0:
        before = json.loads(files.collection(iteration - 1).read_text(encoding="utf-8"))
        position = int(before["next_position"])
    last = 0.0

    def on_group(state: Collection) -> None:
        nonlocal last
        if time.monotonic() - last > 0.5:
            last = time.monotonic()
            context.event("collecting", iteration=iteration, trainable=state.trainable, target=state.target)

    with _served(context):
        config = _resolved(context.config)
        assert config.rollout
        start = time.monotonic()
        publish(config.rollout, files.weights(iteration), iteration, context.metrics)
        context.event("published", version=iteration, seconds=round(time.monotonic() - start, 3))
        state = collect(
            config,
            version=iteration,
            name=f"{iteration:04d}",
            position=position,
            out=files.rollouts(iteration),
            metrics=context.metrics,
            published=True,
            on_group=on_group,
        )
    counts = state.as_json()
    context.event("collected", iteration=iteration, **counts)
    _log_collection(context, counts)


def assemble(context: Context, iteration: int) -> None:
    """Turns the iteration's groups into a training batch."""
    files = context.files
    if files.batch(iteration).exists():
        context.event("kept", stage="assemble", iteration=iteration)
        summary = json.loads((files.batch(iteration) / "summary.json").read_text(encoding="utf-8"))
    else:
        try:
            batch = assembly.assemble(trajectory.read(files.rollouts(iteration)), context.config)
        except Stalled:
            context.metrics.stalls.labels("assembly").inc()
            context.metrics.save_snapshot(files.root)
            raise
        batch.write(files.batch(iteration))
        summary = batch.summary
        context.event("assembled", iteration=iteration, summary=summary)
    context.log_metric("groups trainable", summary["groups"]["trainable"])
    context.log_metric("groups incomplete", summary["groups"]["incomplete"])
    context.log_metric("groups below minimum", summary["groups"]["below_minimum"])
    context.log_metric("slots trained share", summary["yield"]["trainable"])
    context.log_metric("masked token ratio", summary["tokens"]["masked_ratio"])


def train(context: Context, iteration: int) -> None:
    """Trains version `iteration + 1` in a job of its own."""
    files = context.files
    if files.trained(iteration):
        context.event("kept", stage="train", iteration=iteration)
    else:
        start = time.monotonic()
        arguments = ("--version", str(iteration), "--batch", str(files.batch(iteration)))
        _train_job(context, f"train-{iteration:04d}", arguments)
        measured = json.loads(files.training(iteration).read_text(encoding="utf-8"))
        context.event("trained", iteration=iteration, seconds=round(time.monotonic() - start, 3), training=measured)
    measured = json.loads(files.training(iteration).read_text(encoding="utf-8"))
    for key in ("loss", "grad_norm", "entropy", "approx_kl", "clip_ratio"):
        values = [update[key] for update in measured["updates"] if update.get(key) is not None]
        if values:
            context.log_metric(key, sum(values) / len(values))
    context.log_metric("optimizer steps", measured["optimizer_steps_total"])


def evaluate(context: Context, version: int) -> None:
    """Scores a version on the held-out prompts, where the configuration names some."""
    config, files = context.config, context.files
    assert config.data
    held = config.data.held_prompts
    if held is None:
        return
    path = files.evaluation(version)
    if not path.exists():
        with _served(context):
            config = _resolved(config)
            assert config.rollout
            publish(config.rollout, files.weights(version), version, context.metrics)
            result = evaluate_policy(config, version=version, prompts=held)
        with trajectory.atomic_file(path) as temporary:
            temporary.write_text(json.dumps(result.as_json(), indent=1), encoding="utf-8")
        context.event("evaluated", **result.as_json())
    measured = json.loads(path.read_text(encoding="utf-8"))
    if measured["reward"] is not None:
        context.log_metric("held-out reward", measured["reward"])


def report(context: Context, page: str | None = None) -> None:
    """Writes `result.json` and `report.html`, and a copy of the page where the UI looks for it."""
    write_report(context.files.root)
    if page is not None:
        Path(page).parent.mkdir(parents=True, exist_ok=True)
        Path(page).write_text(context.files.report.read_text(encoding="utf-8"), encoding="utf-8")


STAGES: dict[str, Callable[..., None]] = {
    "prepare": prepare,
    "rollout": rollout,
    "assemble": assemble,
    "train": train,
    "evaluate": evaluate,
    "report": report,
}


def check(config: RunConfig) -> int:
    """Checks what a run needs and no schema can see: tokenizer, prompts, rewards.

    Returns:
        How many prompts there are.

    Raises:
        InvalidInput: one line per fault of the first thing that cannot be used.
    """
    config.require("run", "model", "data", "rollout")
    assert config.model
    assert config.data
    assert config.rollout
    tokenizer = load_tokenizer(config.model.path)
    count = len(read_prompts(config.data.prompts, tokenizer))
    if config.data.held_prompts is not None:
        read_prompts(config.data.held_prompts, tokenizer)
    check_rewards(config.rollout.reward)
    return count


def claim(config: RunConfig) -> None:
    """Writes `run.yaml` into a new run directory, or checks that it holds this run.

    What may differ on a later visit: where servers and jobs are. The file stays as it was first given.

    Raises:
        InvalidInput: it holds a run with another configuration; one line for each key that differs.
    """
    assert config.run
    path = RunDirectory(config.run.root).config
    if path.exists():
        old, new = (_identity(text) for text in (path.read_text(encoding="utf-8"), config.dump()))
        differ = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        if differ:
            raise InvalidInput(
                [
                    f"{key}: is {new.get(key)!r}, but {path.parent} holds a run with {old.get(key)!r}; "
                    "choose another directory, or delete that one"
                    for key in differ
                ]
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with trajectory.atomic_file(path) as temporary:
        temporary.write_text(config.dump(), encoding="utf-8")


def iterations_done(files: RunDirectory, most: int) -> int:
    """How many iterations are finished, counted from the first."""
    done = 0
    while done < most and files.trained(done):
        done += 1
    return done


_FREE = (
    "job",
    "telemetry",
    "storage",
    "rollout.endpoints",
    "rollout.server",
    "rollout.admin",
    "rollout.stall",
    "rollout.startup_timeout",
    "rollout.request_timeout",
    "rollout.max_concurrent",
    "training.checkpoint",
)
"""Keys that do not make a run another run: where it runs, and how patient it is."""


def _identity(text: str) -> dict[str, Any]:
    """The keys of a configuration that make a run the run it is, dotted."""

    def flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from flatten(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            yield prefix, value

    return {key: value for key, value in flatten("", yaml.safe_load(text)) if not key.startswith(_FREE)}


def _resolved(config: RunConfig) -> RunConfig:
    """The configuration with every replica of the fleet as an endpoint of its own."""
    assert config.rollout
    rollout = config.rollout.model_copy(update={"endpoints": replicas(config.rollout.endpoints)})
    return config.model_copy(update={"rollout": rollout})


@contextlib.contextmanager
def _served(context: Context) -> Iterator[None]:
    """Serves this process's metrics meanwhile, and leaves the counters for the next one, whatever happens."""
    config = context.config
    local = config.job.backend == "local"
    with serve(context.metrics, config.telemetry.port, "127.0.0.1" if local else "0.0.0.0"):  # noqa: S104
        try:
            yield
            if not local:
                time.sleep(config.telemetry.linger_seconds)  # for the last scrape
        finally:
            context.metrics.save_snapshot(context.files.root)


def _train_job(context: Context, name: str, arguments: tuple[str, ...]) -> None:
    """Runs the trainer to its outcome; while a job waits in a cluster, this process serves for how long."""
    config, folder = context.config, context.files.job(name)
    job = config.job
    prepare_only = name == "prepare"
    folder.mkdir(parents=True, exist_ok=True)
    given = folder / "run.yaml"
    given.write_text(config.dump(), encoding="utf-8")
    spec = JobSpec(
        name=name,
        arguments=("-m", "muster.training", "--config", str(given), *arguments),
        replicas=1 if prepare_only else job.replicas,
        nproc_per_node=1 if prepare_only else job.processes_per_replica,
        outcome=folder / "outcome.json",
        log_dir=folder,
        env=dict(job.env),
        timeout=job.timeout,
    )
    place = backend(config)
    here = context.metrics
    # A job on this machine does not wait, and its rank 0 takes the port.
    port = 0 if place.name == "local" else config.telemetry.port
    outcome = "failed"
    with serve(here, port, "0.0.0.0", here.launcher_registry):  # noqa: S104  # pods are scraped from outside
        try:
            run_job(place, spec, lambda event: here.job_pending.set(event.pending_seconds))
            outcome = "done"
        except (MusterError, KeyboardInterrupt) as error:
            if _explained(error).exit_code == Interrupted.exit_code:
                outcome = "interrupted"
            raise
        finally:
            # The job has left counters of its own meanwhile: go on from those.
            context.metrics = Metrics(context.run_id, load_snapshot(context.files.root))
            context.metrics.job_terminations.labels(place.name, outcome).inc()
            context.metrics.save_snapshot(context.files.root)


def _log_collection(context: Context, counts: dict[str, Any]) -> None:
    context.log_metric("slots", counts["slots"])
    context.log_metric("slots usable", counts["usable"])
    for reason, count in counts["failures"].items():
        context.log_metric(f"failed {reason}", count)
    if counts["reward"] is not None:
        context.log_metric("reward", counts["reward"])
