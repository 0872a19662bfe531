"""Local jobs under a real torchrun: how they end, what is said about it, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from muster.config import RunConfig, parse
from muster.errors import DependencyDied
from muster.job import JobError, JobEvent, JobSpec, backend, read_outcome, run_job
from muster.job.local import LocalBackend
from muster.process import TREE_VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100)]

# What the ranks run; it knows the outcome protocol and nothing of this project.
RANKS = """
import json, os, signal, sys, time
from pathlib import Path

rank, outcome = int(os.environ["RANK"]), Path(os.environ["MUSTER_OUTCOME"])

def write(**said):
    part = outcome.with_suffix(f".{rank}")
    part.write_text(json.dumps(said))
    part.rename(outcome)

print("rank", rank, "of", os.environ["WORLD_SIZE"], "pid", os.getpid(), flush=True)
case, attempts = sys.argv[1], Path(sys.argv[2])
attempt = len(list(attempts.iterdir())) if rank == 0 else None
if rank == 0:
    (attempts / str(attempt)).touch()
if case == "done" and rank == 0:
    assert not outcome.exists(), "a stale outcome was left for us"
    write(outcome="done")
if case == "refuse" and rank == 1:
    write(outcome="failed", exit_code=2, error="batch.parquet row 7: advantages are NaN")
    sys.exit(2)
if case == "killed" and rank == 1:
    print("the last thing rank 1 said", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if case == "silent":
    sys.exit(0)
if case == "second-time" and rank == 0 and attempt > 0:
    write(outcome="done")
elif case == "second-time" and rank == 0:
    sys.exit("out of memory, said rank 0")
if case == "hang" or (case in ("killed", "refuse") and rank != 1):
    if "ignore" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def module_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "ranks.py").write_text(RANKS)
    return folder


def config(max_restarts: int = 0) -> RunConfig:
    return parse(f"model: {{path: m}}\njob: {{max_restarts: {max_restarts}}}\n")


def spec(folder: Path, module_path: Path, case: str, *more: str, timeout: float = 60, nproc: int = 2) -> JobSpec:
    attempts = folder / "attempts"
    attempts.mkdir(parents=True, exist_ok=True)
    return JobSpec(
        name=f"test-{case}",
        arguments=("-m", "ranks", case, str(attempts), *more),
        replicas=1,
        nproc_per_node=nproc,
        outcome=folder / "job" / "outcome.json",
        log_dir=folder / "job" / "logs",
        env={"PYTHONPATH": str(module_path)},
        timeout=timeout,
    )


def ours(folder: Path) -> list[int]:
    """Live processes that were started for the job in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.environ().get("MUSTER_OUTCOME", "") and process.status() != "zombie":
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_for(condition: Callable[[], object], seconds: float = 40.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition did not come true in time"
        time.sleep(0.05)


def ranks_started(folder: Path, count: int) -> bool:
    logs = list((folder / "job" / "logs").glob("attempt-*/*/attempt_0/*/stdout.log"))
    return sum("pid" in log.read_text() for log in logs) >= count


def test_done_although_a_stale_failure_was_lying_there(tmp_path: Path, module_path: Path) -> None:
    job = spec(tmp_path, module_path, "done")
    job.outcome.parent.mkdir(parents=True)
    job.outcome.write_text(json.dumps({"outcome": "failed", "exit_code": 3, "error": "of yesterday"}))
    events: list[JobEvent] = []
    run_job(backend(config()), job, events.append)
    assert [event.kind for event in events] == ["launched", "done"]
    assert ours(tmp_path) == []


def test_a_failure_comes_with_the_exit_code_and_text_of_the_job_and_is_not_tried_again(
    tmp_path: Path, module_path: Path
) -> None:
    with pytest.raises(JobError, match=r"batch\.parquet row 7: advantages are NaN") as raised:
        run_job(backend(config(max_restarts=3)), spec(tmp_path, module_path, "refuse"))
    assert raised.value.exit_code == 2
    assert len(list((tmp_path / "attempts").iterdir())) == 1
    assert ours(tmp_path) == []


def test_a_killed_rank_is_a_death_with_its_last_words(tmp_path: Path, module_path: Path) -> None:
    with pytest.raises(DependencyDied) as raised:
        run_job(backend(config()), spec(tmp_path, module_path, "killed"))
    assert raised.value.exit_code == 4
    assert "rank 1, exit code -9" in raised.value.last_words
    assert "the last thing rank 1 said" in raised.value.last_words
    assert ours(tmp_path) == []


def test_exit_code_zero_without_an_outcome_is_a_death(tmp_path: Path, module_path: Path) -> None:
    with pytest.raises(DependencyDied, match=r"torchrun exited with 0; no outcome\.json"):
        run_job(backend(config()), spec(tmp_path, module_path, "silent", nproc=1))


def test_a_death_is_followed_by_a_bounded_number_of_relaunches(tmp_path: Path, module_path: Path) -> None:
    events: list[JobEvent] = []
    run_job(backend(config(max_restarts=1)), spec(tmp_path, module_path, "second-time", nproc=1), events.append)
    assert [event.kind for event in events] == ["launched", "died", "relaunch", "launched", "done"]
    assert "out of memory, said rank 0" in events[1].text
    with pytest.raises(DependencyDied):
        run_job(backend(config(max_restarts=1)), spec(tmp_path / "b", module_path, "silent", nproc=1))
    assert len(list((tmp_path / "b" / "attempts").iterdir())) == 2


def test_a_job_that_uses_up_its_time_is_ended_and_not_relaunched(tmp_path: Path, module_path: Path) -> None:
    events: list[JobEvent] = []
    job = spec(tmp_path, module_path, "hang", "ignore", timeout=6, nproc=1)
    with pytest.raises(DependencyDied, match="still running after its timeout of 6 s"):
        run_job(LocalBackend(config(max_restarts=2), grace_seconds=0.5), job, events.append)
    assert [event.kind for event in events] == ["launched", "died"]
    assert ours(tmp_path) == []


CALLER = """
import sys
from pathlib import Path
from muster.config import parse
from muster.errors import MusterError
from muster.job import JobSpec, run_job
from muster.job.local import LocalBackend

folder, module_path = Path(sys.argv[1]), sys.argv[2]
job = JobSpec("test-hang", ("-m", "ranks", "hang", str(folder / "attempts"), *sys.argv[3:]), 1, 2,
              folder / "job" / "outcome.json", folder / "job" / "logs", {"PYTHONPATH": module_path}, 60)
try:
    run_job(LocalBackend(parse("model: {path: m}"), grace_seconds=1), job)
except MusterError as error:
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(
    ("number", "more", "exit_code"),
    [
        (signal.SIGTERM, (), 130),
        (signal.SIGTERM, ("ignore",), 130),
        (signal.SIGINT, (), 130),
        (signal.SIGKILL, (), -signal.SIGKILL),
    ],
)
def test_nothing_outlives_the_caller(
    tmp_path: Path, module_path: Path, number: signal.Signals, more: tuple[str, ...], exit_code: int
) -> None:
    (tmp_path / "attempts").mkdir()
    argv = [sys.executable, "-c", CALLER, str(tmp_path), str(module_path), *more]
    caller = subprocess.Popen(argv, env={k: v for k, v in os.environ.items() if k != TREE_VARIABLE})
    try:
        wait_for(lambda: ranks_started(tmp_path, 2))
        assert len(ours(tmp_path)) >= 3
        caller.send_signal(number)
        code = caller.wait(30)
    finally:
        caller.kill()
    assert code in (exit_code, -signal.SIGINT if number == signal.SIGINT else exit_code)
    wait_for(lambda: not ours(tmp_path), 0.1 if number != signal.SIGKILL else 40)


def test_two_jobs_at_once_do_not_meet(tmp_path: Path, module_path: Path) -> None:
    jobs = [spec(tmp_path / name, module_path, "done") for name in ("a", "b")]
    threads = [threading.Thread(target=run_job, args=(backend(config()), job)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(80)
    for job in jobs:
        outcome = read_outcome(job.outcome)
        assert outcome is not None
        assert outcome.done
