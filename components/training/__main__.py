"""One rank of a job: `torchrun ... -m muster.training --config run.yaml --version K (--batch DIR | --prepare)`.

Arguments, process group, and how the process ends. What is trained is in `trainer.py`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from muster import config as configuration
from muster.config import RunConfig
from muster.errors import DependencyDied, InvalidInput, MusterError
from muster.telemetry.metrics import Metrics, load_snapshot, serve
from muster.training.limits import check
from muster.training.ranks import Outcome, Ranks, die_with_parent, end_on_signals, joined

log = logging.getLogger("muster.training")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank.

    Returns:
        The exit code of the command-line contract; torchrun hides it, the outcome file carries it.
    """
    outcome = Outcome.from_environment()
    die_with_parent()
    end_on_signals(outcome)
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(
        level=logging.INFO if rank == "0" else logging.WARNING,
        stream=sys.stderr,
        format=f"%(asctime)s rank {rank} %(levelname)s %(message)s",
    )
    try:
        _run(_parse(arguments))
    except SystemExit as error:  # argparse has said what is wrong
        if error.code:
            outcome.failed(2, f"invalid arguments: {' '.join(sys.argv[1:] if arguments is None else arguments)}")
        raise
    except MusterError as error:
        return _fail(outcome, error.exit_code, str(error))
    except Exception as error:
        explained = _explained(error)
        if explained is None:
            return _fail(outcome, 1, "".join(traceback.format_exception(error)))
        return _fail(outcome, explained.exit_code, str(explained))
    if rank == "0":
        outcome.done()
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="muster.training", description="One training job, run under torchrun.")
    parser.add_argument("--config", type=Path, required=True, help="run.yaml")
    parser.add_argument("--version", type=int, required=True, help="the version to train; the next one is written")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--batch", type=Path, help="training batch directory")
    what.add_argument("--prepare", action="store_true", help="with --version 0: export model.path, train nothing")
    given = parser.parse_args(arguments)
    if given.version < 0 or (given.prepare and given.version != 0):
        parser.error(f"--version {given.version}: must not be negative, and 0 with --prepare")
    return given


def _run(given: argparse.Namespace) -> None:
    config = configuration.load(given.config)
    check(config, int(os.environ.get("WORLD_SIZE", "1")))
    # many small ranks on one machine: a thread pool each would only get in the others' way
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from muster.training.trainer import prepare, train

    torch.use_deterministic_algorithms(config.training.deterministic)
    with joined(config.training.process_group_timeout) as ranks:
        if given.prepare:
            prepare(config, ranks)
        elif ranks.first:
            _train_and_tell(config, given, ranks)
        else:
            train(config, given.version, given.batch, ranks, lambda _: None)


def _train_and_tell(config: RunConfig, given: argparse.Namespace, ranks: Ranks) -> None:
    """Trains on the first rank, which serves the metrics of all."""
    from muster.training.trainer import train

    assert config.run is not None
    metrics = Metrics(config.run.id, load_snapshot(config.run.root))

    def report(update: Mapping[str, Any]) -> None:
        metrics.record_update(update)
        log.info(
            "update %s: loss %.4g, grad norm %s, lr %.3g, reward %s, %.2f s",
            update["update"],
            update["loss"] if update["loss"] is not None else float("nan"),
            update["grad_norm"],
            update["lr"],
            update["reward"],
            update["seconds"],
        )

    address = "127.0.0.1" if config.job.backend == "local" else "0.0.0.0"  # noqa: S104  # pods are scraped from outside
    with serve(metrics, config.telemetry.port, address):
        result = train(config, given.version, given.batch, ranks, report)
        if result is not None:
            for phase, seconds in result["seconds"].items():
                metrics.step_seconds.labels(phase).observe(seconds)
        metrics.policy_version.labels("trained").set(given.version + 1)
        metrics.save_snapshot(config.run.root)


def _fail(outcome: Outcome, exit_code: int, text: str) -> int:
    """Records a failure and says it, unless another rank said its own before."""
    if outcome.failed(exit_code, text):
        print(text, file=sys.stderr)
    return exit_code


def _explained(error: Exception) -> MusterError | None:
    """What torch's exceptions mean to a user; None for a defect of ours."""
    import torch
    import torch.distributed as dist

    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". This is typically")[0]
    if isinstance(error, torch.OutOfMemoryError):
        return InvalidInput(
            f"out of accelerator memory: {first_line}; lower training.max_tokens_per_mb or logprobs_chunk_size, or use "
            "more ranks"
        )
    signs = ("connection closed", "connection reset", "timed out", "broken pipe", "connection refused")
    if isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)
    ):
        return DependencyDied(
            f"another rank of the training job died or did not answer: {first_line}; that rank's own end is in the "
            "job's log (exit code -9 without a word is mostly the kernel's out-of-memory killer)"
        )
    return None


if __name__ == "__main__":
    sys.exit(main())
