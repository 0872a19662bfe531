"""Where the files of a run are: one name for each, below `run.root`.

Iteration k samples with version k of the weights and trains version k + 1. A thing is there in full or not at all:
everything is written under another name first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "run.yaml"

    @property
    def result(self) -> Path:
        """What the run came to."""
        return self.root / "result.json"

    @property
    def report(self) -> Path:
        """What the run came to, for people."""
        return self.root / "report.html"

    def weights(self, version: int) -> Path:
        """A Hugging Face model directory with `probe.json`."""
        return self.root / "weights" / f"v{version:04d}"

    def checkpoint(self, version: int) -> Path:
        """The training state of a version."""
        return self.root / "checkpoints" / f"v{version:04d}"

    def iteration(self, k: int) -> Path:
        """The folder of one iteration."""
        return self.root / "iterations" / f"{k:04d}"

    def rollouts(self, k: int) -> Path:
        """All groups that iteration k attempted."""
        return self.iteration(k) / "rollouts"

    def collection(self, k: int) -> Path:
        """Counts of the collection of iteration k."""
        return self.rollouts(k) / "_collection.json"

    def batch(self, k: int) -> Path:
        """The training batch of iteration k."""
        return self.iteration(k) / "batch"

    def training(self, k: int) -> Path:
        """What training on the batch of iteration k measured."""
        return self.iteration(k) / "train.json"

    @property
    def evaluations(self) -> Path:
        """Held-out results by version."""
        return self.root / "evaluations"

    def trained(self, k: int) -> bool:
        """Whether iteration k has been trained on: its measurements are written last, and old weights are collected."""
        return self.training(k).exists() and (self.weights(k + 1).exists() or self.training(k + 1).exists())

    def evaluation(self, version: int) -> Path:
        """Held-out results of a version."""
        return self.evaluations / f"v{version:04d}.json"

    def job(self, name: str) -> Path:
        """Outcome and logs of a training job."""
        return self.root / "jobs" / name
