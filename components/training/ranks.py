"""This process among the ranks of the job: who it is, its device, and how it lives and dies with the others.

Ranks end when torchrun ends, a signal ends a rank at once wherever it is, and the first failure is the one recorded.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ranks:
    """Where this process stands.

    Attributes:
        rank: 0 to world_size - 1 over the whole job.
        world_size: number of ranks.
        device: what this rank computes on.
    """

    rank: int
    world_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes what all have made."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks of the job."""
        import torch.distributed as dist

        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def barrier(self) -> None:
        """Waits for all ranks."""
        import torch.distributed as dist

        dist.barrier()

    def from_first(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.broadcast(tensor, 0)
        return int(tensor.item())


@contextmanager
def joined(timeout: float) -> Iterator[Ranks]:
    """Joins the job's process group (gloo on CPUs, nccl on GPUs), and leaves it at the end.

    Without torchrun's variables the process is a job of one rank.

    Args:
        timeout: seconds after which a collective without its peers fails (`training.process_group_timeout`).
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    limit = timedelta(seconds=timeout)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=limit, device_id=device if device.type == "cuda" else None)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=limit)
    yield Ranks(rank, world_size, device)
    # after a failure the peers may be gone and leaving in order would wait for them: the process just ends
    dist.destroy_process_group()


class Outcome:
    """The job's completion marker: `{"outcome": "done"}`, or the first failure that was recorded."""

    def __init__(self, path: Path | None) -> None:
        """A marker at `path`; None records nothing."""
        self._path = path

    @classmethod
    def from_environment(cls) -> Outcome:
        """The marker that whoever started the job waits for."""
        path = os.environ.get("MUSTER_OUTCOME")
        return cls(Path(path) if path else None)

    def done(self) -> None:
        """Everything is written; called last, by rank 0 alone."""
        self._record({"outcome": "done"})

    def failed(self, exit_code: int, error: str) -> bool:
        """Something failed on this rank; a failure recorded earlier stays.

        Returns:
            Whether this was the first failure, or nothing is recorded anyway.
        """
        return self._record({"outcome": "failed", "exit_code": exit_code, "error": error})

    def _record(self, content: dict[str, object]) -> bool:
        if self._path is None:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(f".{self._path.name}.{os.uname().nodename}.{os.getpid()}")
        part.write_text(json.dumps(content), encoding="utf-8")
        try:
            # link, unlike rename, does not replace: the first writer wins
            os.link(part, self._path)
            return True
        except FileExistsError:
            return False
        finally:
            part.unlink()


def die_with_parent() -> None:
    """On Linux, asks the kernel to kill this rank when torchrun's agent dies, however it dies."""
    if not sys.platform.startswith("linux") or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def end_on_signals(outcome: Outcome) -> None:
    """Ends the process with code 130 on SIGTERM or SIGINT, at once, even inside a collective.

    Everything under a final name is whole at any time, so nothing needs winding up. The outcome is recorded unless a
    sibling rank is gone: then torchrun is ending the survivors of a death, and nobody interrupted the job.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def watch() -> None:
        number = os.read(reader, 1)[0]
        if _siblings_alive():
            outcome.failed(130, f"interrupted by {signal.Signals(number).name}")
        os._exit(130)

    threading.Thread(target=watch, name="signals", daemon=True).start()


def _siblings_alive() -> bool:
    """Whether every rank that this machine's agent started still runs."""
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if wanted == 1:
        return True
    import psutil

    try:
        children = psutil.Process(os.getppid()).children()
        alive: int = sum(child.status() != psutil.STATUS_ZOMBIE for child in children)
        return alive >= wanted
    except psutil.Error:
        return False
