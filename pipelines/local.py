"""Runs a pipeline on this machine: the same DAG as on a cluster, under `kfp.local`, with our own vLLM server beside it.

The pipeline runs in a process of its own, in a session of its own. This process starts the server, watches both, shows
progress from the run's diary, and ends everything whatever happens. (A `kfp.local` process that gets SIGTERM leaves its
step running: the child below forwards it and waits.)
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from muster import process
from muster.config import RunConfig
from muster.errors import DependencyDied, Interrupted, InvalidInput, MusterError
from muster.layout import RunDirectory
from muster.pipelines.stages import check, claim
from muster.rollout.server import started
from muster.telemetry import events

NAMES = {"grpo": "muster.pipelines.grpo:grpo"}
"""The shipped pipelines: name on the command line -> import path."""

_STEP_GRACE_SECONDS = 15.0


class StepFailed(MusterError):
    """A step of the pipeline ended with an error that it has explained itself; it carries the step's exit code."""

    def __init__(self, stage: str, exit_code: int, text: str) -> None:
        self.exit_code = exit_code
        super().__init__(f"{stage}: {text}")


def load_pipeline(name: str) -> Any:
    """The KFP pipeline of a name.

    Raises:
        InvalidInput: there is none of that name.
    """
    if name not in NAMES:
        raise InvalidInput(f"no pipeline {name!r}; there are: {', '.join(NAMES)}")
    module, _, attribute = NAMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def run_local(
    name: str,
    config: RunConfig,
    *,
    iterations: int,
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
    on_wait: Callable[[float], None] = lambda _: None,
) -> None:
    """Runs a pipeline to its end.

    Args:
        name: of the pipeline.
        config: `rollout.server` starts a vLLM server for the run; with `rollout.endpoints` those that run are used.
        iterations: to have finished at the end, those of earlier attempts included.
        on_event: called with each event of the run's diary, soon after it is written.
        on_wait: called with the seconds waited for the server so far.

    Raises:
        InvalidInput, Stalled, DependencyDied, Interrupted, StepFailed: what the run came to.
    """
    load_pipeline(name)
    check(config)
    assert config.run
    assert config.model
    assert config.rollout
    files = RunDirectory(config.run.root)
    claim(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(process.terminable())
        stack.enter_context(_alone(files.root))
        _, offset = events.read(files.root)
        events.append(files.root, "started", run=config.run.id, iterations=iterations)
        server = None
        if config.rollout.server is not None:
            server = stack.enter_context(
                started(
                    config.rollout.server,
                    config.model.path,
                    config.model.dtype,
                    config.rollout.startup_timeout,
                    files.root / "server.log",
                    on_wait,
                )
            )
            rollout = config.rollout.model_copy(update={"endpoints": [server.endpoint], "server": None})
            config = config.model_copy(update={"rollout": rollout})
        resolved = files.root / "pipeline" / "run.yaml"
        resolved.parent.mkdir(parents=True, exist_ok=True)
        resolved.write_text(config.dump(), encoding="utf-8")
        log = files.root / "pipeline" / "log"
        child = process.spawn(
            [sys.executable, "-m", "muster.pipelines.local", name, str(resolved), str(iterations)],
            env=dict(os.environ),
            log=log,
        )
        stack.callback(process.end_tree, child, _STEP_GRACE_SECONDS + 5)
        failure: dict[str, Any] | None = None
        ended = False
        while not ended:
            ended = child.poll() is not None
            if server is not None and not ended:
                server.check()
            news, offset = events.read(files.root, offset)
            for event in news:
                if event["kind"] == "failed" and failure is None:
                    failure = event
                on_event(event)
            if not ended:
                time.sleep(0.2)
        if failure is not None:
            if server is not None:
                server.check()  # its last words say more than those of a step that missed it
            raise StepFailed(failure["stage"], failure["exit_code"], failure["error"])
        if child.returncode != 0:
            raise DependencyDied(f"the pipeline process ended with exit code {child.returncode}", process.tail(log))


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Holds the run directory; a second run in it is refused.

    Raises:
        InvalidInput: another process holds it.
    """
    with (root / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(
                f"{root}: another run is at work in this directory; wait for it or choose another"
            ) from None
        yield


def _main() -> None:
    """The child: runs the pipeline under kfp.local."""
    parser = argparse.ArgumentParser(prog="python -m muster.pipelines.local")
    parser.add_argument("name")
    parser.add_argument("config", type=Path)
    parser.add_argument("iterations", type=int)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    from kfp import local

    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(args.config.parent),
        raise_on_error=True,
    )
    load_pipeline(args.name)(run_config=args.config.read_text(encoding="utf-8"), iterations=args.iterations)


def _forward(_number: int, _frame: FrameType | None) -> NoReturn:
    """Passes SIGTERM to the step that runs, and leaves when it has."""
    # A step is a shell that runs Python that may have workers. A job has a session of its own: its launcher ends it.
    group = [member for member in psutil.Process().children(recursive=True) if _in_our_group(member)]
    for member in group:
        with contextlib.suppress(psutil.Error):
            member.terminate()
    psutil.wait_procs(group, timeout=_STEP_GRACE_SECONDS)
    os._exit(Interrupted.exit_code)


def _in_our_group(member: psutil.Process) -> bool:
    try:
        return os.getpgid(member.pid) == os.getpgrp()
    except ProcessLookupError:
        return False


if __name__ == "__main__":
    _main()
