"""Whole training jobs whose ranks differ: in rows, in micro-batches, in what is masked. All finish, or all raise."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401  # loaded once, before the ranks are forked

from muster.config import parse
from muster.errors import MusterError
from muster.training import trainer
from muster.training.ranks import Ranks
from tests.distributed.forked import Forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

Rows = list[dict[str, Any]]


# --- What runs on the ranks


def train(root: str, model: str, batch: str, cap: int, updates: int = 1, broken_rank: int = -1) -> Any:
    """One job, as `python -m muster.training` runs it; on failure, what the rank raises."""
    training = {
        "steps": 4,
        "updates_per_batch": updates,
        "max_tokens_per_mb": cap,
        "optimizer": {"lr": 1e-2, "betas": [0.5, 0.99], "eps": 1e-4, "grad_clip": 1e6},
    }
    config = parse(
        str(
            {
                "run": {"id": "test", "root": root},
                "model": {"path": model, "dtype": "float32"},
                "rollout": {"max_new_tokens": 16},
                "training": training,
            }
        )
    )
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    if ranks.rank == broken_rank:

        def fail(*_: Any, **__: Any) -> Any:
            raise OSError("Stale file handle")

        trainer.batches.pq.ParquetFile = fail  # type: ignore[attr-defined]
    try:
        if not batch:
            trainer.prepare(config, ranks)
            return None
        return trainer.train(config, 0, Path(batch), ranks, lambda _: None)
    except MusterError as error:
        dist.barrier()  # nobody is left inside a collective
        return [type(error).__name__, error.exit_code, str(error)]


# --- What must hold


@pytest.fixture(scope="module")
def ranks() -> Iterator[Forked]:
    with Forked() as forked:
        yield forked


@pytest.fixture
def job(ranks: Forked, lab: Any, model: Path, prepared: Path, tmp_path: Path) -> Callable[..., Any]:
    """Trains rows on so many ranks; the first rank's result, or what all raised, and the weights."""

    def run(rows: Rows, count: int, **settings: Any) -> tuple[Any, dict[str, np.ndarray]]:
        root = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(prepared, root)
        batch = lab.write_batch(root / "batch", rows)
        results = ranks.results(train, count, root=str(root), model=str(model), batch=str(batch), **settings)
        if isinstance(results[0], list):
            assert all(one == results[0] for one in results), "the ranks do not say the same"
            return results[0], {}
        return results[0], lab.Job(root, model).weights(1)

    return run


@pytest.fixture(scope="module")
def prepared(ranks: Forked, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared") / "run"
    ranks.results(train, 1, root=str(root), model=str(model), batch="", cap=64)
    return root


def group(name: str, rows: int, tokens: int = 10, *, masked: bool = False) -> Rows:
    """Rows of `tokens` tokens, 3 of them the prompt."""
    random = np.random.default_rng(int(name[1:]))
    return [
        {
            "group_id": name,
            "n_samples": max(4, rows),
            "slot": slot,
            "row": 0,
            "status": "usable",
            "prompt_ids": [1, 2, 3],
            "completion_ids": random.integers(0, 20, tokens - 3).tolist(),
            "loss_mask": [not masked] * (tokens - 3),
            "logprobs": (-3 + 0.1 * random.standard_normal(tokens - 3)).tolist(),
            "versions": [0] * (tokens - 3),
            "reward": 1.0,
            "advantages": [float(random.standard_normal())] * (tokens - 3),
            "normalized_reward": 0.0,
            "group_usable": rows,
        }
        for slot in range(rows)
    ]


def same_as_alone(job: Any, rows: Rows, count: int, **settings: Any) -> dict[str, Any]:
    """The update of `count` ranks equals that of one; the result of the many."""
    result, weights = job(rows, count, **settings)
    alone, wanted = job(rows, 1, **settings)
    assert result["updates"][0]["grad_norm"] == pytest.approx(alone["updates"][0]["grad_norm"], rel=1e-5)
    assert result["updates"][0]["grad_norm"] > 0
    for name, value in wanted.items():
        np.testing.assert_allclose(weights[name], value, atol=1e-5 * float(np.abs(value).max()), err_msg=name)
    return result


def test_f15_one_micro_batch_against_four_ends_in_the_same_update(job: Any) -> None:
    result = same_as_alone(job, group("g1", 1) + group("g2", 4), 2, cap=10)
    assert result["updates"][0]["micro_batches"] == 4


def test_f16_a_rank_with_no_rows_takes_a_step_of_weight_zero(job: Any) -> None:
    result = same_as_alone(job, group("g1", 3), 3, cap=64)
    assert result["updates"][0]["load_imbalance"] == pytest.approx(3)


def test_f17_one_row_on_two_ranks_finishes_on_both(job: Any) -> None:
    same_as_alone(job, group("g1", 1), 2, cap=10)


def test_f17_a_row_that_one_rank_refuses_is_refused_by_all(job: Any) -> None:
    result, _ = job(group("g1", 1) + group("g2", 1, tokens=11), 2, cap=10)
    assert result[:2] == ["InvalidInput", 2]
    assert "row 1 (group 'g2', slot 0): has 11 tokens, more than training.max_tokens_per_mb 10" in result[2]


def test_f18_206_items_on_4_ranks_train_as_on_one(job: Any) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(2.5, 0.5, 206), 4, 60).astype(int)
    rows = [row for number, tokens in enumerate(lengths) for row in group(f"g{number}", 1, int(tokens))]
    result = same_as_alone(job, rows, 4, cap=512)
    assert result["updates"][0]["load_imbalance"] < 1.01


def test_f20_7_turns_on_2_ranks_take_four_steps_each(job: Any) -> None:
    result = same_as_alone(job, [row for n in range(7) for row in group(f"g{n}", 1)], 2, cap=10)
    assert result["updates"][0]["micro_batches"] == 4


def test_a_rank_whose_rows_are_all_masked_adds_exactly_nothing(job: Any) -> None:
    rows = group("g1", 3) + group("g2", 3, masked=True)
    result = same_as_alone(job, rows, 2, cap=64)
    without, weights = job(rows[:3], 1, cap=64)
    assert result["updates"][0]["grad_norm"] == pytest.approx(without["updates"][0]["grad_norm"], rel=1e-5)
    assert weights


def test_no_groups_anywhere_is_the_same_clear_error_on_every_rank(job: Any) -> None:
    result, _ = job([], 3, cap=64)
    assert result[:2] == ["Stalled", 3]
    assert "nothing to train on: 0 rows" in result[2]


def test_a_file_that_one_rank_cannot_read_stops_all_with_its_words(job: Any) -> None:
    result, _ = job(group("g1", 2) + group("g2", 2), 3, cap=64, broken_rank=2)
    assert result[:2] == ["InvalidInput", 2]
    assert result[2].endswith("batch.parquet: cannot read the training batch: Stale file handle")
