"""Fails when `import muster` is slow, or when a light module pulls in a heavy package. Run by `make lint`."""

import subprocess
import sys
import time

LIMIT_SECONDS = 0.3
HEAVY = ("torch", "transformers", "vllm", "kfp", "kubernetes", "matplotlib")
LIGHT = (
    "muster",
    "muster.config",
    "muster.trajectory",
    "muster.groups",
    "muster.assembly",
    "muster.cli",
    "muster.job",
    "muster.rollout.collect",
    "muster.telemetry.metrics",
)


def best_seconds(module: str) -> float:
    """The quickest of five imports, in a process of its own each."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return min(float(run.stdout) for run in runs)


def heavy_imports(module: str) -> str:
    """The heavy packages that importing the module loads."""
    code = f"import sys, {module}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Prints what is wrong, and returns 1 if anything is."""
    start, faults = time.perf_counter(), []
    if (seconds := best_seconds("muster")) > LIMIT_SECONDS:
        faults.append(f"import muster takes {seconds:.2f} s, allowed {LIMIT_SECONDS}")
    faults += [f"import {module} loads {heavy}" for module in LIGHT if (heavy := heavy_imports(module))]
    print("\n".join(faults) or f"imports are light ({time.perf_counter() - start:.1f} s)")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
