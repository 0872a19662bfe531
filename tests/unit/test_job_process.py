"""Children started by muster.process end with all they started, whatever way the caller goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from muster.errors import DependencyDied
from muster.process import end_tree, free_port, port_is_free, spawn, tail

# A parent that ignores nothing, and a grandchild in a session of its own that ignores SIGTERM.
GRANDCHILD = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""
STUBBORN = f"""
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {GRANDCHILD!r}], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print("pids", os.getpid(), child.pid, flush=True)
"""


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition did not come true in time"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def pids_in(log: Path) -> list[int]:
    wait_for(lambda: log.exists() and "pids" in log.read_text())
    return [int(word) for word in log.read_text().split("pids")[1].split()]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("then", ["time.sleep(60)", "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"])
def test_end_tree_ends_descendants_in_other_sessions(tmp_path: Path, then: str) -> None:
    log = tmp_path / "logs" / "child.log"
    child = spawn([sys.executable, "-c", STUBBORN + then], env=dict(os.environ), log=log)
    pids = pids_in(log)
    assert pids[0] == child.pid
    end_tree(child, grace_seconds=0.5)
    assert child.returncode is not None
    assert all(gone(pid) for pid in pids)


@pytest.mark.timeout(60)
def test_end_tree_finds_orphans_of_a_process_that_has_ended(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    child = spawn([sys.executable, "-c", STUBBORN + "os._exit(3)"], env=dict(os.environ), log=log)
    _, orphan = pids_in(log)
    assert child.wait(20) == 3
    assert not gone(orphan)
    end_tree(child)
    assert gone(orphan)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
@pytest.mark.timeout(60)
def test_a_child_does_not_outlive_a_caller_that_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    caller = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys, time; from pathlib import Path; from muster.process import spawn\n"
            "spawn([sys.executable, '-c', 'import os, time; print(\"pids\", os.getpid(), flush=True); time.sleep(60)'],"
            f" env=dict(os.environ), log=Path({str(log)!r}))\n"
            "time.sleep(60)",
        ]
    )
    (pid,) = pids_in(log)
    caller.kill()
    caller.wait(20)
    wait_for(lambda: gone(pid))


@pytest.mark.timeout(60)
def test_sigterm_becomes_interrupted_only_inside_the_block() -> None:
    program = (
        "import os, signal\nfrom muster.errors import Interrupted\nfrom muster.process import terminable\n"
        "try:\n    with terminable():\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "except Interrupted as error:\n    print(error.exit_code)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.stdout.strip(), done.returncode) == ("130", -signal.SIGTERM)


def test_a_program_that_cannot_start_names_itself(tmp_path: Path) -> None:
    with pytest.raises(DependencyDied, match=r"cannot start /no/such/program: No such file"):
        spawn(["/no/such/program"], env={}, log=tmp_path / "log")


def test_tail_and_ports(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {i}\n" for i in range(50_000)))
    assert tail(log, 2) == "line 49998\nline 49999"
    assert tail(tmp_path / "absent", 2) == ""
    assert port_is_free(free_port())
