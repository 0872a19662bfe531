"""How far the update depends on layout: `python -m tests.benchmarks.invariance [CASES]`.

The cases, ranks and reference of `tests/property/test_invariance.py`; errors are ||difference|| / ||gradient||, the
largest over all cases, updates and world sizes. Also checked: every surviving token is trained on by exactly one rank.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time

from tests.distributed.forked import Forked
from tests.property.test_invariance import RANKS, check, run_cases


def main() -> None:
    """All cases on all world sizes."""
    start = time.perf_counter()
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    worlds = list(range(RANKS, 0, -1))
    with Forked() as forked:
        worst = check(
            forked.results(
                run_cases, RANKS, seeds=list(range(cases)), worlds=worlds, limit=60 + 10 * cases, timeout=120
            )
        )
    result = {
        "cases": cases,
        "world_sizes": sorted(worlds),
        "max_relative_error_float64": worst["error64"],
        "max_relative_error_float32": worst["error32"],
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
        },
    }
    print(json.dumps(result | {"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
