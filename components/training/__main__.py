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
from muster.errors import MusterError
from muster.training.limits import check
from muster.training.ranks import Outcome, die_with_parent, end_on_signals, joined

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
    except MusterError as error:
        print(error, file=sys.stderr)
        outcome.failed(error.exit_code, str(error))
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        if _is_lost_peer(error):
            outcome.failed(4, f"another rank of the training job died or did not answer: {_first_line(error)}")
            return 4
        outcome.failed(1, "".join(traceback.format_exception(error)))
        return 1
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
        else:
            train(config, given.version, given.batch, ranks, _report)


def _report(metrics: Mapping[str, Any]) -> None:
    log.info(
        "update %s: loss %.4g, grad norm %s, lr %.3g, reward %s, %.2f s",
        metrics["update"],
        metrics["loss"] if metrics["loss"] is not None else float("nan"),
        metrics["grad_norm"],
        metrics["lr"],
        metrics["reward"],
        metrics["seconds"],
    )


def _is_lost_peer(error: Exception) -> bool:
    """Whether a collective failed for want of its peers."""
    text = str(error).lower()
    signs = ("connection closed", "connection reset", "timed out", "broken pipe", "connection refused", "nccl", "gloo")
    return type(error).__module__.startswith("torch") or (
        isinstance(error, RuntimeError) and any(sign in text for sign in signs)
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    sys.exit(main())
