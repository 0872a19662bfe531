"""The guard runs a job's command and ends it only when the lease has run out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from muster.job.guard import ABANDONED, Watch, guard


def lease(renewed: str, seconds: int = 100, holder: str = "a") -> dict[str, Any]:
    return {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": seconds}


def test_a_lease_runs_out_only_without_renewals() -> None:
    watch = Watch()
    assert not watch.look(lease("t0"), now=1000)
    assert not watch.look(lease("t0"), now=1099)
    assert not watch.look(lease("t1"), now=1101)
    assert not watch.look(lease("t1", holder="b"), now=1200)  # adopted: a new holder counts
    assert not watch.look(lease("t1", holder="b"), now=1299)
    assert watch.look(lease("t1", holder="b"), now=1301)


def test_a_lease_that_cannot_be_read_does_not_end_a_job() -> None:
    watch = Watch()
    assert not watch.look(None, now=0)
    assert not watch.look(None, now=1e9)
    assert not watch.look(lease("t0"), now=1e9)
    assert not watch.look(None, now=2e9)
    assert not watch.look({"holderIdentity": "a"}, now=3e9)


def run(code: str, read: str = "lambda: None", **timing: float) -> subprocess.Popen[str]:
    program = (
        "import sys\nfrom muster.job.guard import guard\n"
        f"sys.exit(guard([sys.executable, '-c', {code!r}], {read}, **{timing!r}))"
    )
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("code", "expected"), [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_is_the_commands(code: str, expected: int) -> None:
    process = run(code)
    process.communicate(timeout=30)
    assert process.returncode == expected


WAITS = """
import signal, sys, time
def end(*_):
    print("checkpoint", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("started", flush=True)
time.sleep(60)
"""


@pytest.mark.timeout(60)
def test_sigterm_reaches_the_command() -> None:
    process = run(WAITS)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=30)
    assert (rest, process.returncode) == ("checkpoint\n", 0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ignores", [False, True])
def test_an_abandoned_command_is_ended_with_a_grace(ignores: bool) -> None:
    code = WAITS.replace("end)\n", "signal.SIG_IGN)\n") if ignores else WAITS
    expired = "lambda: {'holderIdentity': 'a', 'renewTime': 't', 'leaseDurationSeconds': 1}"
    begun = time.monotonic()
    process = run(code, expired, check_seconds=0.3, grace_seconds=1)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == ABANDONED
    assert ("checkpoint" in said) == (not ignores)
    assert time.monotonic() - begun < 20


def test_guard_without_a_command_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "muster.job.guard"], capture_output=True, text=True, timeout=30, env=dict(os.environ)
    )
    assert done.returncode == 2
    assert "usage" in done.stderr
    assert callable(guard)
