"""Runs every benchmark, each in a process of its own, and prints one JSON object: name -> what it measured."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import tests.benchmarks


def main() -> int:
    """Prints the results on stdout, what is being run on stderr; returns 1 if one failed."""
    results, failed = {}, False
    for module in pkgutil.iter_modules(tests.benchmarks.__path__):
        if module.name.startswith("_"):
            continue
        print(f"benchmark {module.name} ...", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", f"tests.benchmarks.{module.name}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        failed |= done.returncode != 0
        results[module.name] = json.loads(done.stdout) if done.returncode == 0 else {"failed": done.returncode}
    print(json.dumps(results, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
