"""Builds the base image without a container engine's daemon, and runs it as the user of our pods.

The base is made from Debian's packages (its Python is 3.11), so that no registry is needed. Root on Debian; minutes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import tools

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAMS = ("buildah", "mmdebstrap", "runc")
BASE = "localhost/python:3.11-slim"
Buildah = Callable[..., "subprocess.CompletedProcess[str]"]


def _programs() -> None:
    if all(shutil.which(program) for program in PROGRAMS):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip(f"needs {', '.join(PROGRAMS)}, or root on Debian to install them")
    apt = ("apt-get", "-qq", "-y", "--no-install-recommends")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    tools.run("apt-get", "-qq", "update", timeout=120, env=environment)
    done = tools.run(*apt, "install", *PROGRAMS, timeout=300, env=environment)
    if done.returncode != 0:
        pytest.skip(f"cannot install {', '.join(PROGRAMS)}: {done.stderr[-500:]}")


def _pip_settings() -> list[str]:
    """What pip needs of this machine during the build: its configuration, certificates, local indexes. Read-only."""
    paths = {Path("/etc/pip.conf"), Path("/etc/xdg/pip")}
    paths |= {Path(os.environ[name]) for name in ("SSL_CERT_FILE", "PIP_CERT") if os.environ.get(name)}
    listed = tools.run("python3", "-m", "pip", "config", "list").stdout
    for word in listed.replace("'", " ").split():
        path = urllib.parse.urlsplit(word).path if word.startswith("file://") else word
        if path.startswith("/"):
            paths.add(Path(path))
    return [part for path in sorted(paths) if path.exists() for part in ("--volume", f"{path}:{path}:ro")]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """Calls buildah with a storage of its own, where the base already is."""
    _programs()
    folder = tmp_path_factory.mktemp("buildah")
    storage = ("--root", folder / "storage", "--runroot", folder / "run", "--storage-driver", "vfs")

    def call(*arguments: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        done = tools.run("nice", "-n", "19", "buildah", *storage, *arguments, timeout=timeout, cwd=tools.ROOT)
        assert done.returncode == 0, (arguments, done.stdout[-2000:], done.stderr[-3000:])
        return done

    packages = "python3,python3-pip,python3-venv,python-is-python3,ca-certificates"
    system = ("mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", "bookworm", folder / "rootfs.tar")
    made = tools.run("nice", "-n", "19", *system, timeout=300)
    if made.returncode != 0:
        pytest.skip(f"cannot make a base image: {made.stderr[-500:]}")
    (folder / "Dockerfile").write_text(
        "FROM scratch\nADD rootfs.tar /\nRUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED\n", encoding="utf-8"
    )
    build = ("bud", "--isolation", "chroot", "--layers=false", "--pull-never")
    call(*build, "-t", BASE, "-f", folder / "Dockerfile", folder)
    try:
        yield call
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            call("rm", "--all")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def inside(buildah: Buildah) -> Iterator[Callable[..., str]]:
    """Runs a command in the built base image."""
    options = ("--isolation", "chroot", "--network", "host", "--layers=false", "--pull-never", *_pip_settings())
    options = (*options, "--build-arg", f"BASE={BASE}", "-t", "muster-base:test")
    buildah("bud", *options, "-f", "images/base/Dockerfile", ".")
    container = buildah("from", "--pull-never", "localhost/muster-base:test").stdout.strip()
    root = Path(buildah("mount", container).stdout.strip())

    def run(*command: str) -> str:
        # through a file: buildah loses the output of short commands now and then
        script = '"$@" > /tmp/.said 2>&1; echo "exit code $?" >> /tmp/.said'
        buildah("run", "--isolation", "chroot", container, "--", "sh", "-c", script, "sh", *command, timeout=60)
        said, _, code = (root / "tmp" / ".said").read_text(encoding="utf-8").rpartition("exit code ")
        (root / "tmp" / ".said").unlink()
        assert code == "0\n", said
        return said

    yield run
    buildah("rm", container)


def test_the_base_image_does_what_steps_need(inside: Callable[..., str]) -> None:
    assert "muster [OPTIONS] COMMAND" in inside("muster", "--help")
    assert "uid=1000(muster) gid=1000(muster)" in inside("id")
    assert "No broken requirements" in inside("python", "-m", "pip", "check")
    script = (
        "import importlib.util as u, muster.pipelines.stages, muster.job.pytorchjob, muster.assembly, kfp, kubernetes;"
        "print([n for n in ('torch', 'vllm', 'transformers', 'pytest') if u.find_spec(n)])"
    )
    assert inside("python", "-c", script).splitlines()[-1] == "[]"


def test_it_compiles_the_same_pipeline_and_uploads(inside: Callable[..., str]) -> None:
    inside("muster", "compile", "grpo", "--out", "/tmp/grpo.yaml")
    shipped = (tools.ROOT / "charts" / "muster" / "files" / "grpo.yaml").read_text(encoding="utf-8")
    assert inside("cat", "/tmp/grpo.yaml") == shipped
    assert "--host" in inside("python", "-m", "muster.pipelines.upload", "--help")


def test_nothing_can_be_changed_and_nothing_is_left_over(inside: Callable[..., str]) -> None:
    writable = "find / -xdev -not -path '/proc/*' -not -path '/dev/*' -not -path '/tmp*' -writable -type f"
    assert inside("sh", "-c", writable + " 2>/dev/null || true") == ""
    left = "find / -xdev \\( -name 'muster*.whl' -o -path '*/.cache/pip/*' \\) -not -path '/proc/*'"
    assert inside("sh", "-c", left + " 2>/dev/null || true") == ""
