"""Several ranks on this machine, quick to start: torch is imported once, in a server process that forks the ranks.

A rank runs a function of a test module by name and returns something JSON can say. Ranks end within a time limit
whatever happens; how each one ended is part of the result.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How one rank ended: its exit code (negative: signal), what it returned, what it raised, and after what time."""

    code: int
    result: Any
    error: str
    seconds: float
    late: bool


class Forked:
    """Starts ranks; a context manager. Close it to end everything."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.forked"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()

    def run(
        self, function: Callable[..., Any], ranks: int, *, limit: float = 60, timeout: float = 20, **arguments: Any
    ) -> list[Ended]:
        """Runs `function(**arguments)` on every rank of a gloo group whose collectives time out after `timeout`."""
        name = f"{Path(function.__code__.co_filename).relative_to(ROOT).with_suffix('')}".replace("/", ".")
        order = {"module": name, "function": function.__name__, "arguments": arguments}
        order |= {"ranks": ranks, "limit": limit, "timeout": timeout}
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return [Ended(**one) for one in json.loads(self._server.stdout.readline())]

    def results(self, function: Callable[..., Any], ranks: int, **arguments: Any) -> list[Any]:
        """The same, when every rank must end well."""
        ended = self.run(function, ranks, **arguments)
        assert all(one.code == 0 for one in ended), "\n".join(one.error or f"exit code {one.code}" for one in ended)
        return [one.result for one in ended]


def _serve() -> None:
    """Reads orders, runs them, answers; ranks never outlive this process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch.distributed  # noqa: F401

    for line in sys.stdin:
        order = json.loads(line)
        importlib.import_module(order["module"])
        with tempfile.TemporaryDirectory() as folder:
            started = time.monotonic()
            children = {_fork(order, rank, Path(folder)): rank for rank in range(order["ranks"])}
            ended = _wait(children, started, order["limit"])
            reports = []
            for rank in range(order["ranks"]):
                code, seconds, late = ended[rank]
                path = Path(folder) / f"{rank}.json"
                said = json.loads(path.read_text()) if path.exists() else {"result": None, "error": ""}
                reports.append({"code": code, "seconds": seconds, "late": late, **said})
        answers.write(json.dumps(reports) + "\n")
        answers.flush()


def _wait(children: dict[int, int], started: float, limit: float) -> dict[int, tuple[int, float, bool]]:
    ended: dict[int, tuple[int, float, bool]] = {}
    late = False
    while len(ended) < len(children):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ended[children[pid]] = (os.waitstatus_to_exitcode(status), time.monotonic() - started, late)
            continue
        if not late and time.monotonic() - started > limit:
            late = True
            for child, rank in children.items():
                if rank not in ended:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return ended


def _fork(order: dict[str, Any], rank: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    code = 1
    said: dict[str, Any] = {"result": None, "error": ""}
    try:
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), order["ranks"])
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=order["ranks"], timeout=timedelta(seconds=order["timeout"])
        )
        said["result"] = getattr(importlib.import_module(order["module"]), order["function"])(**order["arguments"])
        code = 0
    except BaseException:
        said["error"] = traceback.format_exc()
    finally:
        part = folder / f"{rank}.part"
        part.write_text(json.dumps(said))
        part.rename(folder / f"{rank}.json")
        os._exit(code)


if __name__ == "__main__":
    _serve()
