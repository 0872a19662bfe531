"""How fast groups become a training batch, and how much memory that takes: `python -m tests.benchmarks.assembly`.

Each case runs in a process of its own on one core. Cases without `io` hold the rollouts in memory and end with the
batch in memory; cases with `io` read a Parquet file, check it, assemble and write. `seconds` of a case is the better
of two tries, `cpu_seconds` likewise of the processor (it tells a busy machine from a slow program); `peak_bytes` is the
most memory the process held beyond its imports, the rollouts included; `batch_bytes` is the batch as an Arrow table.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from muster import config, trajectory
from muster.assembly import assemble

SHAPES = ((100_000, 512), (250_000, 128), (1_000_000, 128))
SLOTS = 8
LOST = 0.2
CHILD_SECONDS = 600


def rollouts(rows: int, tokens: int) -> pa.Table:
    """Complete groups of 8, of which a fifth of the slots then timed out; in no particular order of groups."""
    random = np.random.default_rng(0)
    group = np.repeat(random.permutation(rows // SLOTS), SLOTS)
    lost = random.random(rows) < LOST

    def lists(values: np.ndarray, length: int, kind: pa.DataType) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1) * length, pa.int32()), pa.array(values, kind))

    return pa.table(
        {
            "group_id": pa.array([f"group-{g}" for g in group]),
            "n_samples": pa.array(np.full(rows, SLOTS), pa.int32()),
            "slot": pa.array(np.arange(rows) % SLOTS, pa.int32()),
            "status": pa.array(np.where(lost, "failed", "usable")),
            "failure": pa.array(np.where(lost, "timeout", None), pa.string()),
            "prompt_ids": lists(random.integers(0, 150_000, rows * 16), 16, pa.int32()),
            "completion_ids": lists(random.integers(0, 150_000, rows * tokens, dtype=np.int32), tokens, pa.int32()),
            "logprobs": lists(-random.random(rows * tokens, dtype=np.float32), tokens, pa.float32()),
            "versions": lists(np.zeros(rows * tokens, dtype=np.int32), tokens, pa.int32()),
            "reward": pa.array(random.integers(0, 2, rows), pa.float64()),
        }
    )


def held(key: str) -> int:
    """Bytes this process holds (`VmRSS`) or has held at most (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(rows: int, tokens: int, path: Path | None) -> dict[str, Any]:
    """One case, in this process."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    pa.array([1]).cast(pa.float64())  # loads what is loaded late
    run = config.parse("{}")
    before = held("VmRSS")
    table = None if path else trajectory.from_table(rollouts(rows, tokens))
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(OSError):  # where that is not allowed, building the rollouts counts too
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    best, best_cpu = float("inf"), float("inf")
    for attempt in range(2):
        start, start_cpu = time.perf_counter(), time.process_time()
        if path:
            batch = assemble(trajectory.read(path), run)
            batch.write(path.with_name(f"batch-{attempt}"))
        else:
            assert table is not None
            batch = assemble(table, run)
            _ = batch.table
        best = min(best, time.perf_counter() - start)
        best_cpu = min(best_cpu, time.process_time() - start_cpu)
        if attempt == 0:
            peak = held("VmHWM") - before
    return {
        "rows": rows,
        "tokens_per_row": tokens,
        "io": path is not None,
        "seconds": best,
        "cpu_seconds": best_cpu,
        "tokens_per_second": rows * tokens / best,
        "peak_bytes": peak,
        "batch_bytes": batch.table.nbytes,
    }


def main() -> None:
    """All cases; with arguments, one of them."""
    if len(sys.argv) > 1:
        rows, tokens, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        if file.endswith(".make"):
            trajectory.write(rollouts(rows, tokens), file.removesuffix(".make"))
        else:
            print(json.dumps(measure(rows, tokens, Path(file) if file != "-" else None)))
        return
    start = time.perf_counter()
    cases = []
    for rows, tokens in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "rollouts.parquet")
            cases.append(json.loads(_child(rows, tokens, "-")))
            _child(rows, tokens, f"{file}.make")
            cases.append(json.loads(_child(rows, tokens, file)))
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    print(json.dumps({"cases": cases, "machine": machine, "seconds": time.perf_counter() - start}))


def _child(rows: int, tokens: int, file: str) -> str:
    """One case in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.assembly", str(rows), str(tokens), file],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=CHILD_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout


if __name__ == "__main__":
    main()
