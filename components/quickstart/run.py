"""Quickstart's run: makes the task's files and the configuration that the shipped pipeline is run with.

The `run.yaml` it leaves runs without quickstart: `muster submit grpo --local --config DIR/run.yaml`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster import config
from muster.config import RunConfig
from muster.errors import InvalidInput
from muster.quickstart import task

ITERATIONS = 16
PROMPTS, HELD_PROMPTS = 4096, 512
REQUEST_TIMEOUT, DELAY = 2.0, 5.0
_MARKER = ".quickstart"


def settings(folder: Path, seed: int, failure_rate: float) -> dict[str, Any]:
    """What differs from Muster's defaults in the quickstart run.

    Args:
        folder: of the run.
        seed: of data and sampling.
        failure_rate: share of slots to lose, a third each to dropped connections, time-outs and rewards that raise.
    """
    each = 1 - (1 - failure_rate) ** (1 / 3)
    return {
        "run": {"id": "quickstart", "root": str(folder)},
        "algorithm": "grpo",
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {
            "prompts": str(folder / "prompts.jsonl"),
            "held_prompts": str(folder / "held-prompts.jsonl"),
            "seed": seed,
            "groups_per_batch": 128,
        },
        "group": {"n_samples": 8},
        "rollout": {
            "server": {
                "max_model_len": 512,
                # One process instead of two: vLLM's worker process spins on a core while it waits, and there are two.
                "args": ["--enforce-eager", "--distributed-executor-backend", "uni"],
                "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                "faults": {"drop": round(each, 4), "delay": round(each, 4), "delay_seconds": DELAY},
            },
            "temperature": 1.0,
            "max_new_tokens": 8,
            "request_timeout": REQUEST_TIMEOUT,
            "slot_timeout": 2 * REQUEST_TIMEOUT,
            "reward": [{"name": "muster.quickstart.task:reward", "options": {"crash_rate": round(each, 4)}}],
            "reward_timeout": 5,
            "max_concurrent": 128,
            "startup_timeout": 300,
            "stall": {"min_rounds": 8, "min_seconds": 60},
        },
        "training": {
            "steps": ITERATIONS,
            "updates_per_batch": 8,
            "optimizer": {
                "lr": 6e-4,
                "betas": [0.9, 0.99],
                "warmup_steps": 10,
                "schedule": "linear",
                "min_lr_ratio": 0.2,
                "grad_clip": 1.0,
            },
            "process_group_timeout": 120,
        },
        "job": {"backend": "local", "replicas": 1, "nproc_per_node": 2},
        "telemetry": {"port": 0},
    }


def prepare(
    folder: Path, seed: int, failure_rate: float, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> RunConfig:
    """Makes the run's files, or takes those of an earlier attempt, and returns its configuration.

    Args:
        folder: of the run; made if absent.
        seed: of everything.
        failure_rate: share of slots to lose.
        progress: called with steps done and in all while the model is warm-started.

    Raises:
        InvalidInput: the folder holds something else.
    """
    if not 0 <= failure_rate < 0.9:
        raise InvalidInput(f"--failure-rate: is {failure_rate}, allowed is 0 up to 0.9")
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"{folder}: is a file; choose another directory")
    run_yaml = folder / "run.yaml"
    marker = folder / _MARKER
    if folder.exists() and not (marker.exists() or run_yaml.exists()) and any(folder.iterdir()):
        found = min(entry.name for entry in folder.iterdir())
        raise InvalidInput(f"{folder}: is not empty and holds no quickstart run ({found}); choose another directory")
    wanted = config.parse(json.dumps(settings(folder, seed, failure_rate)), where="quickstart")
    if run_yaml.exists():
        return wanted  # the pipeline checks that the directory holds this very run
    folder.mkdir(parents=True, exist_ok=True)
    marker.write_text("The files beside this one were made by muster quickstart.\n", encoding="utf-8")
    task.write_prompts(folder / "prompts.jsonl", task.prompts(PROMPTS, seed))
    task.write_prompts(folder / "held-prompts.jsonl", task.prompts(HELD_PROMPTS, seed + 1_000_003))
    from muster.quickstart import model  # torch: only here

    unfinished = folder / "model.partial"
    for leftover in (unfinished, folder / "model"):
        shutil.rmtree(leftover, ignore_errors=True)
    model.make(unfinished, seed, progress)
    unfinished.rename(folder / "model")
    return wanted
