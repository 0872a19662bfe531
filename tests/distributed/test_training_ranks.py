"""Training jobs under a real torchrun: the same update on any number of ranks, and how jobs end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZES = [4, 3, 2, 4, 1, 3]
OPTIMIZER = {"lr": 1e-2, "betas": [0.5, 0.99], "eps": 1e-4, "grad_clip": 1e6}


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], what: str) -> None:
    assert one.keys() == other.keys()
    for name in one:
        scale = float(np.abs(one[name]).max())
        worst = float(np.abs(one[name] - other[name]).max())
        assert worst <= 1e-5 * scale, f"{what}: {name} differs by {worst:.3g} where the largest value is {scale:.3g}"


def test_one_update_whatever_the_layout_and_a_checkpoint_moves_between_layouts(
    job: Callable[..., Any], lab: Any, model: Path
) -> None:
    """Rule 14, end to end: ranks 1, 2 and 3, then a second batch whose updates have one group each, on other ranks."""
    runs = {ranks: job(f"ranks-{ranks}", training={"optimizer": OPTIMIZER}) for ranks in (1, 2, 3)}
    rows = lab.make_rows(model, SIZES)
    second = lab.make_rows(model, [3, 2], seed=3, version=1)
    first_results = {}
    for ranks, run in runs.items():
        run.inside(0, None)
        batch = lab.write_batch(run.root / "b0", rows)
        train = run.train if ranks > 1 else run.inside
        options = {"ranks": ranks} if ranks > 1 else {}
        first_results[ranks] = train(0, batch, updates_per_batch=1, **options)
        assert first_results[ranks]["world_size"] == ranks

    # the gradient is exp_avg / (1 - beta1) after the first step, and equals the one on the survivors alone
    reference = lab.reference_model(model)
    lab.reference_loss(reference, rows).backward()
    wanted = {name: parameter.grad.numpy() for name, parameter in reference.named_parameters()}
    for ranks, run in runs.items():
        assert_same(wanted, {name: 2 * value for name, value in run.moments(1).items()}, f"gradient on {ranks} ranks")
        assert_same(runs[1].weights(1), run.weights(1), f"weights on {ranks} ranks")
        for key in ("loss", "entropy", "approx_kl", "clip_ratio", "importance_weight", "grad_norm", "reward"):
            assert first_results[ranks]["updates"][0][key] == pytest.approx(
                first_results[1]["updates"][0][key], rel=1e-4, abs=1e-6
            )

    # one group an update: on two ranks one of them idles
    results = {}
    for before, after in ((1, 2), (2, 1)):
        run = runs[before]
        batch = lab.write_batch(run.root / "b1", second)
        train = run.train if after > 1 else run.inside
        options = {"ranks": after} if after > 1 else {}
        results[before] = train(1, batch, updates_per_batch=2, **options)
        assert_same(runs[1].weights(2), run.weights(2), f"weights on {before}, then {after} ranks")
        assert results[before]["optimizer_steps_total"] == 3
    assert results[1]["updates"][0]["load_imbalance"] == pytest.approx(2.0)


def test_a_broken_batch_is_refused_and_an_infinite_gradient_is_skipped_on_every_rank(
    job: Callable[..., Any], lab: Any, model: Path
) -> None:
    run = job()
    run.inside(0, None)
    rows = lab.make_rows(model, [2, 2])
    rows[0]["logprobs"][0] = float("nan")
    rows[0]["loss_mask"][0] = True
    refused = run.run("--version", "0", "--batch", str(lab.write_batch(run.root / "nan", rows)), ranks=2)
    assert refused.outcome is not None
    assert refused.outcome["exit_code"] == 2
    assert "logprobs[0] is nan" in refused.outcome["error"]
    assert refused.code != 0
    assert not (run.root / "weights/v0001").exists()

    rows = lab.make_rows(model, [2, 2])
    for row in rows:
        if row["group_id"] == "g0":
            row["advantages"] = [3e38] * len(row["advantages"])
            row["loss_mask"] = [True] * len(row["advantages"])
    result = run.train(0, lab.write_batch(run.root / "huge", rows), ranks=2)
    assert [update["applied"] for update in result["updates"]].count(False) == 1
    assert (result["skipped"], result["optimizer_steps_total"]) == (1, 1)
    assert all(np.isfinite(value).all() for value in run.weights(1).values())
    assert all(np.isfinite(value).all() for value in run.moments(1).values())


def started(run: Any, lab: Any, model: Path) -> tuple[Any, list[psutil.Process]]:
    """A job of two ranks in the middle of many updates, and its rank processes."""
    rows = lab.make_rows(model, [2] * 12)
    many = [{**row, "group_id": f"{row['group_id']}-{copy}"} for copy in range(250) for row in rows]
    batch = lab.write_batch(run.root / "many", many)
    process = run.start("--version", "0", "--batch", str(batch), ranks=2, updates_per_batch=3000)
    for line in process.stdout:
        if "update 3:" in line:
            break
    ranks = [
        child for child in psutil.Process(process.pid).children() if "muster.training" in " ".join(child.cmdline())
    ]
    assert len(ranks) == 2, "the job ended early"
    return process, ranks


def gone(processes: list[psutil.Process], limit: float = 10) -> bool:
    return not psutil.wait_procs(processes, timeout=limit)[1]


def test_a_killed_rank_ends_the_job_and_leaves_nothing_behind(job: Callable[..., Any], lab: Any, model: Path) -> None:
    run = job()
    run.inside(0, None)
    process, ranks = started(run, lab, model)
    began = time.monotonic()
    os.kill(ranks[1].pid, signal.SIGKILL)
    ended = run.end(process, began)
    assert ended.code != 0
    assert ended.seconds < 40
    assert ended.outcome is None or (ended.outcome["outcome"], ended.outcome["exit_code"]) == ("failed", 4)
    assert gone(ranks)
    assert sorted(p.name for p in (run.root / "weights").iterdir()) == ["v0000"]
    assert not (run.root / "checkpoints").exists()


def test_sigterm_ends_the_job_as_interrupted(job: Callable[..., Any], lab: Any, model: Path) -> None:
    run = job()
    run.inside(0, None)
    process, ranks = started(run, lab, model)
    process.terminate()
    ended = run.end(process, time.monotonic())
    assert ended.outcome == {"outcome": "failed", "exit_code": 130, "error": "interrupted by SIGTERM"}
    assert ended.seconds < 15
    assert gone(ranks)
    assert sorted(p.name for p in (run.root / "weights").iterdir()) == ["v0000"]


def test_no_rank_outlives_a_killed_torchrun(job: Callable[..., Any], lab: Any, model: Path) -> None:
    run = job()
    run.inside(0, None)
    process, ranks = started(run, lab, model)
    process.kill()
    assert gone(ranks)
    assert not (run.root / "outcome.json").exists()


def test_what_is_not_built_ends_with_exit_2_before_anything_starts(job: Callable[..., Any]) -> None:
    run = job()
    ended = run.run("--version", "0", "--prepare", engine="megatron")
    assert ended.outcome == {
        "outcome": "failed",
        "exit_code": 2,
        "error": "training.engine: megatron is not built yet; set it to fsdp",
    }
    assert not (run.root / "weights").exists()
