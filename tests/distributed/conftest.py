"""A tiny model, batches made by hand, and real torchrun launches of the training job, for the tests in this folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

os.environ.setdefault("OMP_NUM_THREADS", "1")

VOCABULARY = 20
LIMIT = 90


def make_model(directory: Path, *, seed: int = 0, family: str = "Qwen3", tied: bool = False, **changes: Any) -> Path:
    """A tiny model with random weights large enough that its log-probs are far from uniform."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 192,
            "max_position_embeddings": 512,
            "tie_word_embeddings": tied,
            "initializer_range": 0.1,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": None,
            **changes,
        }
    )
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


SCHEMA = pa.schema(
    [
        ("group_id", pa.string()),
        ("n_samples", pa.int32()),
        ("slot", pa.int32()),
        ("row", pa.int32()),
        ("status", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("reward", pa.float64()),
        ("advantages", pa.list_(pa.float32())),
        ("normalized_reward", pa.float64()),
        ("group_usable", pa.int32()),
    ]
)


def logprobs_of(directory: Path, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of a completion from transformers itself: one row, no padding, float64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = _MODELS.get(directory)
    if model is None:
        model = _MODELS[directory] = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()


_MODELS: dict[Path, Any] = {}


def make_rows(directory: Path, sizes: list[int], *, seed: int = 0, version: int = 0, noise: float = 0.1) -> list[dict]:
    """Groups of the given numbers of survivors (of 4 slots), ragged, some tokens masked, one row all masked.

    Log-probs are those of the model in `directory` plus noise, so that ratios differ from 1.
    """
    random = np.random.default_rng(seed)
    rows = []
    for group, usable in enumerate(sizes):
        prompt = random.integers(0, VOCABULARY, random.integers(2, 8)).tolist()
        for slot in sorted(random.choice(4, usable, replace=False).tolist()):
            tokens = int(random.integers(1, 14))
            completion = random.integers(0, VOCABULARY, tokens).tolist()
            mask = (random.random(tokens) < 0.8).tolist()
            if rows and not any(row["group_id"] == f"g{group}" for row in rows) and usable > 1 and group == 1:
                mask = [False] * tokens
            true = np.array(logprobs_of(directory, prompt, completion))
            rows.append(
                {
                    "group_id": f"g{group}",
                    "n_samples": 4,
                    "slot": slot,
                    "row": 0,
                    "status": "usable",
                    "prompt_ids": prompt,
                    "completion_ids": completion,
                    "loss_mask": mask,
                    "logprobs": (true + noise * random.standard_normal(tokens)).tolist(),
                    "versions": [version] * tokens,
                    "reward": float(random.random()),
                    "advantages": [float(random.standard_normal())] * tokens,
                    "normalized_reward": 0.0,
                    "group_usable": usable,
                }
            )
    return rows


def write_batch(directory: Path, rows: list[dict]) -> Path:
    """A training batch directory."""
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), directory / "batch.parquet")
    return directory


@dataclass
class Ended:
    """How a job ended."""

    outcome: dict[str, Any] | None
    code: int
    output: str
    seconds: float


@dataclass
class Job:
    """One run directory and the jobs in it."""

    root: Path
    model: Path
    settings: dict[str, Any] = field(default_factory=dict)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def config(self, **training: Any) -> Path:
        """Writes run.yaml."""
        merged = {
            "steps": 4,
            "updates_per_batch": 2,
            "max_tokens_per_mb": 64,
            "process_group_timeout": 30,
            "optimizer": {"lr": 1e-2, "betas": [0.9, 0.99], "warmup_steps": 1, "schedule": "linear"},
            **self.settings.get("training", {}),
            **training,
        }
        content = {
            "run": {"id": "test", "root": str(self.root)},
            "model": {"path": str(self.model), "dtype": "float32"},
            "rollout": {"max_new_tokens": 16, "temperature": 1.0},
            "group": {"n_samples": 4},
            "telemetry": {"port": 0},
            "training": merged,
        }
        for section, values in self.settings.items():
            if section != "training":
                content[section] = {**content.get(section, {}), **values} if isinstance(values, dict) else values
        path = self.root / "run.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content))
        return path

    def start(self, *arguments: str, ranks: int = 1, **training: Any) -> subprocess.Popen[str]:
        """Starts torchrun in a process group of its own."""
        outcome = self.root / "outcome.json"
        config = self.config(**training)
        outcome.unlink(missing_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        process = subprocess.Popen(
            [*command, "-m", "muster.training", "--config", str(config), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MUSTER_OUTCOME": str(outcome)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def end(self, process: subprocess.Popen[str], began: float) -> Ended:
        """Waits for a job's end."""
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"the job did not end within {LIMIT} s:\n{output[-4000:]}")
        path = self.root / "outcome.json"
        outcome = json.loads(path.read_text()) if path.exists() else None
        return Ended(outcome, process.returncode, output, time.monotonic() - began)

    def run(self, *arguments: str, ranks: int = 1, **training: Any) -> Ended:
        """A whole job."""
        began = time.monotonic()
        return self.end(self.start(*arguments, ranks=ranks, **training), began)

    def prepare(self) -> None:
        """Version 0, in place of a job (the model is untied already)."""
        ended = self.run("--version", "0", "--prepare")
        assert ended.outcome == {"outcome": "done"}, ended.output

    def train(self, version: int, batch: Path, *, ranks: int = 1, **training: Any) -> dict[str, Any]:
        """A whole training job that must end well; its train.json."""
        ended = self.run("--version", str(version), "--batch", str(batch), ranks=ranks, **training)
        assert ended.outcome == {"outcome": "done"}, ended.output
        return json.loads((self.root / f"iterations/{version:04d}/train.json").read_text())

    def inside(self, version: int, batch: Path | None, **training: Any) -> dict[str, Any] | None:
        """The same, as one rank inside this process; without a batch it prepares version 0."""
        from muster import config as configuration
        from muster.training.limits import check
        from muster.training.ranks import joined
        from muster.training.trainer import prepare, train

        config = configuration.load(self.config(**training))
        check(config, 1)
        with joined(30) as ranks:
            if batch is None:
                prepare(config, ranks)
                return None
            train(config, version, batch, ranks, lambda _: None)
        return json.loads((self.root / f"iterations/{version:04d}/train.json").read_text())

    def moments(self, version: int, kind: str = "exp_avg") -> dict[str, np.ndarray]:
        """A part of a checkpoint."""
        from safetensors.numpy import load_file

        found = load_file(self.root / f"checkpoints/v{version:04d}/optimizer.safetensors")
        return {n.removeprefix(f"{kind}."): v for n, v in found.items() if n.startswith(f"{kind}.")}

    def weights(self, version: int) -> dict[str, np.ndarray]:
        """Exported weights."""
        from safetensors.numpy import load_file

        return load_file(self.root / f"weights/v{version:04d}/model.safetensors")


def reference_loss(model: Any, rows: list[dict]) -> Any:
    """Token-mean clipped PPO on the survivors alone, one unpadded row after another, written out by hand."""
    import torch

    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        start = len(row["prompt_ids"])
        new = torch.log_softmax(model(ids).logits[0, start - 1 : -1], -1).gather(-1, ids[0, start:, None])[:, 0]
        for i, counted in enumerate(row["loss_mask"]):
            if counted:
                advantage = float(np.float32(row["advantages"][i]))
                ratio = torch.exp(new[i] - float(np.float32(row["logprobs"][i])))
                total = total - torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
                count += 1
    return total / count


def reference_model(directory: Path) -> Any:
    """transformers' own model, in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)


@pytest.fixture(scope="session")
def lab() -> Any:
    """The helpers of this file."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied tiny Qwen3."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(tmp_path: Path, model: Path) -> Iterator[Callable[..., Job]]:
    """Makes jobs; ends whatever a failed test left running."""
    made: list[Job] = []

    def make(name: str = "run", **settings: Any) -> Job:
        made.append(Job(tmp_path / name, settings.pop("path", model), settings))
        return made[-1]

    yield make
    for one in made:
        for process in one.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
