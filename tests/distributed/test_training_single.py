"""Training jobs of one rank, inside this process: what is written, what it equals, and what is refused."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from muster.errors import DependencyDied, InvalidInput, NotBuilt
from muster.training.batch import cut
from muster.training.model import read_config
from muster.training.schedule import learning_rate

SIZES = [4, 3, 2, 4, 1, 3]


@pytest.fixture
def prepared(job: Callable[..., Any], lab: Any, model: Path) -> Callable[..., tuple[Any, Path]]:
    """A run directory with version 0, and a first batch for it."""

    def make(name: str = "run", noise: float = 0.1, **settings: Any) -> tuple[Any, Path]:
        one = job(name, **settings)
        one.inside(0, None)
        rows = lab.make_rows(model, SIZES, noise=noise)
        return one, lab.write_batch(one.root / "b0", rows)

    return make


def greatest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def test_the_export_loads_elsewhere_and_its_probe_is_the_trained_policy(prepared: Any) -> None:
    run, batch = prepared()
    run.inside(0, batch)
    for version in (0, 1):
        directory = run.root / f"weights/v{version:04d}"
        probe = json.loads((directory / "probe.json").read_text())
        assert (probe["version"], probe["dtype"], len(probe["prompt_ids"])) == (version, "float32", 400)
        ids = torch.tensor([probe["prompt_ids"]])
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)(ids).logits[0, :-1]
        true = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(probe["logprobs"]).double(), true, rtol=0, atol=1e-5)
        assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] is False
        assert (directory / "tokenizer.json").exists()
    assert greatest_difference(run.weights(0), run.weights(1)) > 1e-3
    assert not list(run.root.rglob(".*")), "something was left half written"


def test_a_tied_model_is_exported_untied_with_the_same_logits(job: Any, lab: Any, tmp_path: Path) -> None:
    tied = lab.make_model(tmp_path / "tied", tied=True)
    run = job(path=tied)
    run.inside(0, None)
    weights = run.weights(0)
    np.testing.assert_array_equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    ids = torch.arange(12)[None]
    with torch.no_grad():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (run.root / "weights/v0000", tied)
        )
    torch.testing.assert_close(ours, theirs)
    run.inside(0, lab.write_batch(run.root / "b0", lab.make_rows(tied, [2, 2])))
    trained = run.weights(1)
    assert np.abs(trained["lm_head.weight"] - trained["model.embed_tokens.weight"]).max() > 1e-4


def test_on_policy_the_drift_is_rounding_and_the_loss_is_minus_the_mean_advantage(prepared: Any, lab: Any) -> None:
    run, batch = prepared(noise=0.0)
    result = run.inside(0, batch, updates_per_batch=1)
    update = result["updates"][0]
    assert result["logprob_drift"]["absolute"] < 1e-5
    assert update["importance_weight"] == pytest.approx(1, abs=1e-5)
    assert update["clip_ratio"] == 0
    rows = lab.pq.read_table(batch / "batch.parquet").to_pylist()
    valid = [a for r in rows for a, m in zip(r["advantages"], r["loss_mask"], strict=True) if m]
    assert update["loss"] == pytest.approx(-np.mean(valid), abs=1e-5)
    assert update["tokens"]["valid"] == len(valid)
    assert result["tokens"]["total"] == sum(len(r["completion_ids"]) for r in rows)
    assert set(result["seconds"]) >= {"load", "forward_backward", "optimizer", "export", "checkpoint"}


def test_two_jobs_equal_one_reference_trainer(prepared: Any, lab: Any, model: Path) -> None:
    """Clip, schedule, moments and masters across a restart, against torch's AdamW on transformers' model in float64."""
    run, first = prepared(
        training={"optimizer": {"lr": 1e-3, "betas": [0.9, 0.99], "warmup_steps": 1, "schedule": "linear"}}
    )
    second = lab.write_batch(run.root / "b1", lab.make_rows(model, [3, 4, 2, 1], seed=7, version=1))
    results = [run.inside(0, first), run.inside(1, second)]

    from muster.config import load

    settings = load(run.root / "run.yaml").training
    reference = lab.reference_model(run.root / "weights/v0000")
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1.0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    step = 0
    for version, batch in enumerate((first, second)):
        rows = lab.pq.read_table(batch / "batch.parquet").to_pylist()
        cuts = cut(sorted({r["group_id"] for r in rows}), 2, seed=0, version=version)
        for number, groups in enumerate(cuts):
            optimizer.zero_grad()
            loss = lab.reference_loss(reference, [r for r in rows if r["group_id"] in groups])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = learning_rate(step, 8, settings.optimizer)
            optimizer.step()
            step += 1
            update = results[version]["updates"][number]
            assert update["loss"] == pytest.approx(loss.item(), abs=1e-5, rel=1e-5)
            assert update["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
            assert update["lr"] == optimizer.param_groups[0]["lr"]
    assert results[1]["optimizer_steps_total"] == step == 4
    for name, parameter in reference.named_parameters():
        np.testing.assert_allclose(run.weights(2)[name], parameter.detach().numpy(), rtol=1e-3, atol=2e-5, err_msg=name)


def test_padding_and_packing_change_nothing(prepared: Any) -> None:
    gradients = []
    for cap, n_mbs in ((24, 1), (4096, 1), (4096, 3)):
        run, batch = prepared(f"cap-{cap}-{n_mbs}")
        result = run.inside(0, batch, updates_per_batch=1, max_tokens_per_mb=cap, n_mbs=n_mbs)
        gradients.append(run.moments(1))
    assert result["updates"][0]["micro_batches"] == 3
    for other in gradients[1:]:
        assert greatest_difference(gradients[0], other) < 1e-7


def test_bfloat16_keeps_float32_masters_across_jobs(job: Any, lab: Any, model: Path) -> None:
    run = job(model={"dtype": "bfloat16"}, training={"optimizer": {"lr": 1e-5}})
    run.inside(0, None)
    for version in (0, 1):
        rows = lab.make_rows(model, SIZES, seed=version, version=version)
        result = run.inside(version, lab.write_batch(run.root / f"b{version}", rows))
    assert result["optimizer_steps_total"] == 4
    masters = run.moments(2, "parameter")
    before = run.moments(1, "parameter")
    name = "model.layers.0.mlp.up_proj.weight"
    moved = np.abs(masters[name] - before[name])
    assert 1e-7 < np.median(moved) < 1e-4, "a step far below bfloat16's resolution is kept"
    from safetensors.torch import load_file

    stored = load_file(run.root / "weights/v0002/model.safetensors")[name]
    assert stored.dtype == torch.bfloat16
    torch.testing.assert_close(stored, torch.from_numpy(masters[name]).bfloat16())
    probe = json.loads((run.root / "weights/v0002/probe.json").read_text())
    ids = torch.tensor([probe["prompt_ids"]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(run.root / "weights/v0002", dtype=torch.float32)(ids).logits[0]
    true = torch.log_softmax(logits[:-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
    assert (torch.tensor(probe["logprobs"]) - true).abs().max() < probe["tolerance"]


@pytest.mark.parametrize(
    "loss",
    [
        {"prox": "recompute"},
        {"prox": "recompute", "level": "sequence", "aggregation": "seq_mean"},
        {"aggregation": "fixed", "dual_clip": 3.0},
    ],
)
def test_every_loss_trains(prepared: Any, loss: dict[str, Any]) -> None:
    run, batch = prepared()
    rejection = {"metric": "ratio", "upper": 1.15}
    result = run.inside(0, batch, loss=loss, rejection=rejection, fp32_lm_head=True, logprobs_chunk_size=7)
    assert all(update["applied"] for update in result["updates"])
    assert sum(update["rejected_ratio"] for update in result["updates"]) > 0
    if loss.get("prox") == "recompute":
        assert result["updates"][0]["importance_weight"] == pytest.approx(1, abs=1e-5)
        assert result["updates"][0]["behaviour_weight"] != pytest.approx(1, abs=1e-3)


def test_starting_again_keeps_a_complete_version_and_replaces_another(prepared: Any, lab: Any, model: Path) -> None:
    run, batch = prepared()
    first = run.inside(0, batch)
    file = run.root / "weights/v0001/model.safetensors"
    stamp = file.stat().st_mtime_ns
    assert run.inside(0, batch, process_group_timeout=60) == first
    assert file.stat().st_mtime_ns == stamp
    other = lab.write_batch(run.root / "other", lab.make_rows(model, SIZES, seed=5))
    assert run.inside(0, other) != first
    assert file.stat().st_mtime_ns != stamp
    # a crash between export and checkpoint: the job runs again and gives the same weights
    again = {name: value.copy() for name, value in run.weights(1).items()}
    shutil.rmtree(run.root / "checkpoints/v0001")
    (run.root / "weights/.partial-v0001").mkdir()
    run.inside(0, other)
    assert greatest_difference(run.weights(1), again) == 0
    assert sorted(p.name for p in (run.root / "weights").iterdir()) == ["v0000", "v0001"]


def test_old_versions_are_collected(prepared: Any, lab: Any, model: Path) -> None:
    run, batch = prepared()
    for version in range(4):
        run.inside(version, batch, updates_per_batch=1, checkpoint={"keep": 2})
    assert sorted(p.name for p in (run.root / "weights").iterdir()) == ["v0000", "v0003", "v0004"]
    assert sorted(p.name for p in (run.root / "checkpoints").iterdir()) == ["v0003", "v0004"]


def test_wrong_arguments_are_recorded_as_invalid_input(tmp_path: Path) -> None:
    outcome = tmp_path / "outcome.json"
    ended = subprocess.run(
        [sys.executable, "-m", "muster.training", "--config", "run.yaml", "--version", "1", "--prepare"],
        env={**os.environ, "MUSTER_OUTCOME": str(outcome)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "--version 1: must not be negative, and 0 with --prepare" in ended.stderr
    assert json.loads(outcome.read_text())["exit_code"] == 2


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_storage_is_named_and_leaves_nothing_under_a_final_name(prepared: Any) -> None:
    run, batch = prepared()
    with (
        no_file_above(100_000),
        pytest.raises(DependencyDied, match=r"weights/v0001: the storage failed: File too large"),
    ):
        run.inside(0, batch)
    torch.distributed.destroy_process_group()
    assert sorted(p.name for p in (run.root / "weights").iterdir()) == ["v0000"]
    assert not (run.root / "iterations").exists()
    assert not (run.root / "checkpoints").exists()


def test_what_a_job_starts_from_is_checked(prepared: Any, lab: Any, model: Path, tmp_path: Path) -> None:
    run, batch = prepared()

    def refused(words: str, version: int, batch: Path | None, one: Any = run, **training: Any) -> None:
        with pytest.raises(InvalidInput, match=words):
            one.inside(version, batch, **training)
        torch.distributed.destroy_process_group()

    refused(r"weights/v0003/config\.json: cannot read", 3, batch)
    shutil.copytree(run.root / "weights/v0000", run.root / "weights/v0001")
    refused(r"checkpoints/v0001/state\.json: cannot read the checkpoint to train version 1", 1, batch)
    rows = lab.make_rows(model, [2])
    rows[0]["completion_ids"][0] = lab.VOCABULARY
    refused(r"has token id 20, the model knows 0\.\.19", 0, lab.write_batch(tmp_path / "high", rows))
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    text = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**text, "intermediate_size": 96}))
    one = type(run)(tmp_path / "elsewhere", broken)
    refused(r"up_proj\.weight is \[192, 64\], the model wants \[96, 64\]", 0, None, one)
    (broken / "config.json").write_text(json.dumps({**text, "quantization_config": {"quant_method": "fp8"}}))
    refused("the model is quantised", 0, None, one)
    assert not one.root.joinpath("weights").exists()


def test_a_batch_that_assembly_made_from_incomplete_groups_trains(job: Any, lab: Any, model: Path) -> None:
    from muster import config as configuration
    from muster import trajectory
    from muster.assembly import assemble

    run = job(training={"updates_per_batch": 1})
    run.inside(0, None)
    rows = [
        {name: value for name, value in row.items() if name not in ("advantages", "normalized_reward", "group_usable")}
        for row in lab.make_rows(model, [4, 1, 3])
    ]
    trajectory.write(rows, run.root / "rollouts.parquet")
    settings = configuration.load(run.config())
    batch = assemble(trajectory.read([run.root / "rollouts.parquet"]), settings)
    assert batch.summary["groups"]["below_minimum"] == 1
    batch.write(run.root / "batch")
    result = run.inside(0, run.root / "batch")
    assert result["tokens"]["valid"] == batch.summary["tokens"]["valid"]
    assert result["updates"][0]["applied"]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Olmo", {}),  # not known to take rows end to end: padded
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": 64}),
        (
            "Llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
    ],
)
def test_other_families_train_and_their_probe_holds(
    job: Any, lab: Any, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    run = job(path=lab.make_model(tmp_path / family, family=family, **changes))
    run.inside(0, None)
    run.inside(0, lab.write_batch(run.root / "b0", lab.make_rows(tmp_path / family, [2, 3])))
    probe = json.loads((run.root / "weights/v0001/probe.json").read_text())
    true = lab.logprobs_of(run.root / "weights/v0001", probe["prompt_ids"][:1], probe["prompt_ids"][1:])
    np.testing.assert_allclose(probe["logprobs"], true, atol=1e-5)


def test_models_that_scale_their_logits_are_not_built(job: Any, lab: Any, tmp_path: Path) -> None:
    run = job(path=lab.make_model(tmp_path / "gemma", family="Gemma2"))
    with pytest.raises(NotBuilt, match=r"final_logit_softcapping 30\.0"):
        run.inside(0, None)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "longrope"}},
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}},
    ],
)
def test_models_whose_positions_depend_on_what_runs_together_are_not_built(tmp_path: Path, rope: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **rope}))
    with pytest.raises(NotBuilt, match=r"config\.json: rope_\w+ of type (longrope|dynamic)"):
        read_config(tmp_path)
