"""The command line: exit codes, one line per error, nothing written on bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from muster.config import RunConfig
from tests.unit.conftest import MakeConfig

MUSTER = str(Path(sys.executable).with_name("muster"))


def muster(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([MUSTER, *map(str, arguments)], capture_output=True, text=True, timeout=60, cwd=cwd)


def write(config: RunConfig, path: Path, **changes: object) -> Path:
    values = yaml.safe_load(config.dump())
    for key, value in changes.items():
        section, _, field = key.partition("__")
        values[section][field] = value
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def test_validate_prints_a_configuration_that_validates(make_config: MakeConfig, tmp_path: Path) -> None:
    first = muster("validate", "--config", write(make_config(), tmp_path / "run.yaml"))
    assert first.returncode == 0
    (tmp_path / "again.yaml").write_text(first.stdout, encoding="utf-8")
    assert muster("validate", "--config", tmp_path / "again.yaml").stdout == first.stdout


def test_a_configuration_with_three_faults_gets_three_lines(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("group: {n_samples: -1}\nmodel: {pth: x}\nalgorithm: grpoo\n", encoding="utf-8")
    done = muster("validate", "--config", tmp_path / "run.yaml")
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 4  # model.path is missing besides
    assert all("run.yaml" in line for line in lines)
    assert "Traceback" not in done.stderr


def test_a_missing_prompt_file_ends_a_run_before_anything_starts(make_config: MakeConfig, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.jsonl"
    config = write(make_config(), tmp_path / "run.yaml", data__prompts=str(nowhere))
    for command in (("rollout", "--out", tmp_path / "out"), ("submit", "grpo", "--local")):
        done = muster(*command, "--config", config)
        assert done.returncode == 2, done.stderr
        assert f"{nowhere}: cannot read the prompt file" in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "run").rglob("*.parquet"))


@pytest.mark.parametrize("command", ["logs", "stop", "gc"])
def test_what_is_not_built_says_so_and_what_to_do_instead(command: str) -> None:
    done = muster(command, "some-run")
    assert done.returncode == 2
    assert f"muster {command} is not built yet; " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("compile", "grop", "--out", "x.yaml"), "no pipeline 'grop'"),
        (("compile", "grpo", "--out", "x.txt"), "must end in .yaml"),
        (("assemble",), "Missing"),
        (("no-such-command",), "No such command"),
        (("report", "/nonexistent"), "is not a run directory"),
        (("status", "/nonexistent"), "is not a run directory"),
        (("quickstart", "--failure-rate", "0.95"), "0.89"),
    ],
)
def test_wrong_arguments_end_with_2_and_say_why(arguments: tuple[str, ...], text: str, tmp_path: Path) -> None:
    done = muster(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_quickstart_does_not_touch_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious", encoding="utf-8")
    done = muster("quickstart", "--dir", tmp_path)
    assert done.returncode == 2
    assert "thesis.tex" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_quickstart_on_a_full_disk_is_exit_4_and_is_not_taken_for_a_run(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a file system of its own, to be filled, needs root")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "muster-test", str(small)], check=True)
    try:
        done = muster("quickstart", "--dir", small / "run")
        assert done.returncode == 4, done.stderr
        assert "the storage failed: No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (small / "run" / "run.yaml").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_folder_that_holds_a_model_is_not_taken_for_quickstarts_own(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_text("precious", encoding="utf-8")
    assert muster("quickstart", "--dir", tmp_path).returncode == 2
    assert (tmp_path / "model" / "model.safetensors").read_text(encoding="utf-8") == "precious"


def test_submitting_to_a_cluster_says_everything_that_cannot_work_there(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    values = yaml.safe_load(make_config().dump())
    values["storage"] = {"mount_path": "/muster"}
    values["rollout"] |= {"endpoints": [], "server": {}}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    done = muster("submit", "grpo", "--config", file, "--iterations", 30)
    assert done.returncode == 2
    for key in ("storage.pvc", "run.root", "rollout.server", "job.backend", "iterations"):
        assert any(line.startswith(key) for line in done.stderr.splitlines()), (key, done.stderr)


def test_an_api_that_is_away_is_exit_4(make_config: MakeConfig, tmp_path: Path) -> None:
    values = yaml.safe_load(make_config().dump())
    values["storage"] = {"mount_path": str(tmp_path), "pvc": "runs"}
    values["job"] |= {"backend": "pytorchjob", "image": "trainer:1", "namespace": "ml"}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    done = muster("submit", "grpo", "--config", file, "--host", "http://127.0.0.1:9")
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_every_command_of_the_contract() -> None:
    text = muster("--help").stdout
    names = ("quickstart", "validate", "rollout", "evaluate", "assemble", "compile", "submit", "report")
    for command in (*names, "status", "logs", "stop", "gc"):
        assert command in text
