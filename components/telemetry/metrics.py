"""The Prometheus metrics of a run (the table in the contracts): what they are, serving them, carrying counters over.

One `Metrics` a process. Labels come from closed sets only. A stepwise run is many short processes: each starts from the
counters that the previous one left, so that a rate over the run makes sense.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from muster.errors import InvalidInput

SNAPSHOT_NAME = "metrics.json"

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series that is not in the contract
_DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """All metrics of one process of a run.

    Attributes:
        registry: all of them.
        launcher_registry: those that the launcher of a job serves meanwhile; the job's rank 0 serves the others.

    Args:
        run: `run.id`, the value of `muster_run_info`.
        carried: samples of counters and histograms that earlier processes left (`load_snapshot`).
    """

    def __init__(self, run: str, carried: Mapping[str, float] | None = None) -> None:
        own = CollectorRegistry()
        self._own, self._carried = own, dict(carried or {})
        self.registry = CollectorRegistry()
        self.registry.register(_Continued(own, self._carried))

        run_info = Gauge("muster_run_info", "The run this process belongs to.", ["run"], registry=own)
        run_info.labels(run).set(1)
        self.slots = Counter(
            "muster_rollout_slots_total",
            "Slots that ended, by reason where they failed.",
            ["outcome", "reason"],
            registry=own,
        )
        self.groups = Counter("muster_rollout_groups_total", "Groups that ended.", ["outcome"], registry=own)
        self.empty_rounds = Counter(
            "muster_rollout_empty_rounds_total", "Collection rounds that added no trainable group.", registry=own
        )
        self.stalls = Counter(
            "muster_rollout_stalls_total", "Times that work ended for want of progress.", ["stage"], registry=own
        )
        self.stall_rounds = Gauge(
            "muster_rollout_stall_rounds", "Rounds since the last that added a trainable group.", registry=own
        )
        self.stall_seconds = Gauge(
            "muster_rollout_stall_seconds", "Seconds since the last trainable group was added.", registry=own
        )
        self.request_seconds = Histogram(
            "muster_rollout_request_duration_seconds",
            "Duration of a slot.",
            ["outcome"],
            buckets=_DURATION_BUCKETS,
            registry=own,
        )
        self.staleness = Histogram(
            "muster_rollout_staleness_versions",
            "Age of a usable slot at batch cut: the trainer's version minus the smallest of its valid tokens.",
            buckets=(0, 1, 2, 4, 8, 16),
            registry=own,
        )
        self.last_progress = Gauge(
            "muster_last_progress_timestamp_seconds", "When the stage last made progress.", ["stage"], registry=own
        )
        self.policy_version = Gauge(
            "muster_policy_version", "Newest version trained, and served.", ["role"], registry=own
        )
        self.publishes = Counter("muster_weight_publish_total", "Weight publications.", ["outcome"], registry=own)
        self.publish_seconds = Histogram(
            "muster_weight_publish_duration_seconds",
            "Duration of a publication, proof included.",
            buckets=_DURATION_BUCKETS,
            registry=own,
        )
        self.tokens = Counter(
            "muster_training_tokens_total", "Completion tokens of trained rows.", ["kind"], registry=own
        )
        self.masked_ratio = Gauge(
            "muster_training_masked_token_ratio",
            "Share of the batch's completion tokens that add no loss.",
            registry=own,
        )
        self.steps = Counter("muster_training_steps_total", "Optimizer steps.", ["outcome"], registry=own)
        self.step_seconds = Histogram(
            "muster_training_step_duration_seconds",
            "Duration of training by phase.",
            ["phase"],
            buckets=_DURATION_BUCKETS,
            registry=own,
        )
        self.loss = Gauge("muster_training_loss", "Loss of the last update.", registry=own)
        self.grad_norm = Gauge("muster_training_grad_norm", "Global gradient norm before clipping.", registry=own)
        self.clip_ratio = Gauge(
            "muster_training_clip_ratio", "Share of valid tokens whose ratio was clipped.", registry=own
        )
        self.entropy = Gauge(
            "muster_training_entropy", "Mean entropy of the policy over valid tokens, in nats.", registry=own
        )
        self.approx_kl = Gauge(
            "muster_training_approx_kl", "Mean KL estimate to the sampling policy, in nats.", registry=own
        )
        self.logprob_drift = Gauge(
            "muster_training_logprob_drift",
            "Trainer's minus server's log-prob before the first step, mean.",
            ["kind"],
            registry=own,
        )
        self.importance_weight = Gauge("muster_training_importance_weight", "Mean importance weight.", registry=own)
        self.reward = Gauge("muster_training_reward", "Mean reward of usable slots of the batch.", registry=own)
        self.load_imbalance = Gauge(
            "muster_training_load_imbalance_ratio",
            "Largest over mean token count of data-parallel ranks.",
            registry=own,
        )
        self.job_terminations = Counter(
            "muster_job_terminations_total", "Training jobs that ended.", ["backend", "outcome"], registry=own
        )
        self.job_pending = Gauge("muster_job_pending_seconds", "Seconds that the job has waited to run.", registry=own)
        self.launcher_registry = CollectorRegistry()
        for metric in (run_info, self.job_pending):
            self.launcher_registry.register(metric)

    def progress(self, stage: str) -> None:
        """Notes that a stage made progress now."""
        self.last_progress.labels(stage).set(time.time())

    def record_update(self, update: Mapping[str, Any]) -> None:
        """Takes what the trainer measured in one update, reduced over its ranks; a value that was not finite is None.

        Args:
            update: as in `train.json`.
        """
        gauges = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "clip_ratio": self.clip_ratio,
            "entropy": self.entropy,
            "approx_kl": self.approx_kl,
            "importance_weight": self.importance_weight,
            "reward": self.reward,
            "load_imbalance": self.load_imbalance,
        }
        for key, gauge in gauges.items():
            if update[key] is not None:
                gauge.set(update[key])
        for kind, value in (update.get("logprob_drift") or {}).items():
            if value is not None:
                self.logprob_drift.labels(kind).set(value)
        for kind, count in update["tokens"].items():
            self.tokens.labels(kind).inc(count)
        self.masked_ratio.set(update["tokens"]["masked"] / max(1, update["tokens"]["total"]))
        self.steps.labels("applied" if update["applied"] else "skipped").inc()
        self.progress("train")

    def snapshot(self) -> dict[str, float]:
        """Every sample of counters and histograms, carried values included, by `name{label="value"}`."""
        return {
            _key(sample.name, sample.labels): sample.value
            for metric in self.registry.collect()
            if metric.type in _CARRIED_TYPES
            for sample in metric.samples
        }

    def save_snapshot(self, root: Path) -> None:
        """Leaves the counters for the run's next process; atomic.

        Args:
            root: run directory.
        """
        temporary = root / f".{SNAPSHOT_NAME}.{os.getpid()}"
        temporary.write_text(json.dumps(self.snapshot(), indent=0), encoding="utf-8")
        temporary.replace(root / SNAPSHOT_NAME)


def load_snapshot(root: Path) -> dict[str, float]:
    """The counters that the run's previous process left; empty for a new run.

    Args:
        root: run directory.
    """
    try:
        values = json.loads((root / SNAPSHOT_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {str(key): float(value) for key, value in values.items()}


@contextlib.contextmanager
def serve(metrics: Metrics, port: int, address: str, registry: CollectorRegistry | None = None) -> Iterator[None]:
    """Serves `/metrics` while the block runs.

    Args:
        metrics: what to serve.
        port: TCP port; 0 serves nothing.
        address: to listen on.
        registry: which of them; all by default.

    Raises:
        InvalidInput: the port is taken.
    """
    if port == 0:
        yield
        return
    try:
        server, thread = start_http_server(port, addr=address, registry=registry or metrics.registry)
    except OSError as error:
        raise InvalidInput(
            f"telemetry.port: cannot serve metrics on port {port}: {error.strerror}; free it, set another, or 0"
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_CARRIED_TYPES = ("counter", "histogram")


class _Continued(Collector):
    """A registry whose counters and histograms start from what earlier processes counted."""

    def __init__(self, own: CollectorRegistry, carried: Mapping[str, float]) -> None:
        self._own, self._carried = own, carried

    def collect(self) -> Iterator[Metric]:
        for metric in self._own.collect():
            if metric.type not in _CARRIED_TYPES or not self._carried:
                yield metric
                continue
            merged = Metric(metric.name, metric.documentation, metric.type)
            names = {sample.name for sample in metric.samples} | _sample_names(metric)
            left = {key: value for key, value in self._carried.items() if key.partition("{")[0] in names}
            for sample in metric.samples:
                value = sample.value + left.pop(_key(sample.name, sample.labels), 0.0)
                merged.add_sample(sample.name, sample.labels, value)
            for key, value in left.items():  # label values that this process has not met
                name, labels = _unkey(key)
                merged.add_sample(name, labels, value)
            yield merged


def _sample_names(metric: Metric) -> set[str]:
    suffixes = ("_total",) if metric.type == "counter" else ("_bucket", "_count", "_sum")
    return {metric.name + suffix for suffix in suffixes}


def _key(name: str, labels: Mapping[str, str]) -> str:
    return name + json.dumps(dict(sorted(labels.items())))


def _unkey(key: str) -> tuple[str, dict[str, Any]]:
    name, brace, labels = key.partition("{")
    return name, json.loads(brace + labels)
