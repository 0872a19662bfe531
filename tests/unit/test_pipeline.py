"""The compiled pipeline: its shape, its parameters, and that every step is one that `stages` has."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import yaml

from muster.pipelines import stages, steps
from muster.pipelines.cluster import compile_to
from muster.pipelines.grpo import MAX_ITERATIONS
from muster.telemetry import events
from tests.unit.conftest import MakeConfig

FILE = Path(__file__).parents[2] / "charts" / "muster" / "files" / "grpo.yaml"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("ir") / "grpo.yaml"
    compile_to("grpo", out)
    return list(yaml.safe_load_all(out.read_text(encoding="utf-8")))


def test_the_shipped_file_is_what_compiling_gives(compiled: list[dict[str, Any]]) -> None:
    shipped = list(yaml.safe_load_all(FILE.read_text(encoding="utf-8")))
    assert shipped == compiled, f"write it anew: muster compile grpo --out {FILE}"


def test_people_start_it_with_a_configuration_and_a_number(compiled: list[dict[str, Any]]) -> None:
    inputs = compiled[0]["root"]["inputDefinitions"]["parameters"]
    assert set(inputs) == {"run_config", "iterations", "first_iteration", "pvc"}
    assert "defaultValue" not in inputs["run_config"]
    assert inputs["iterations"]["defaultValue"] == 10


def test_iterations_are_nested_up_to_the_maximum(compiled: list[dict[str, Any]]) -> None:
    components = compiled[0]["components"]
    loop = components["comp-muster-grpo-iterations"]
    depth, conditions = 0, []
    while True:
        tasks = loop["dag"]["tasks"]
        inner = [name for name in tasks if name.startswith("iteration") or name.startswith("condition")]
        if not inner:
            break
        assert len(inner) == 1
        conditions.append(tasks[inner[0]]["triggerPolicy"]["condition"])
        loop = components[tasks[inner[0]]["componentRef"]["name"]]
        names = [name.rstrip("-0123456789") for name in loop["dag"]["tasks"]]
        assert {"rollout", "assemble", "train"} <= set(names)
        depth += 1
    assert depth == MAX_ITERATIONS
    assert len(set(conditions)) == MAX_ITERATIONS


def test_no_step_is_cached_and_each_has_the_volume(compiled: list[dict[str, Any]]) -> None:
    spec, platform = compiled
    executors = set(spec["deploymentSpec"]["executors"])
    mounted = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert executors == set(mounted)
    assert all(executor["pvcMount"][0]["mountPath"] == "/muster" for executor in mounted.values())

    for component in [spec["root"], *spec["components"].values()]:
        for task in component.get("dag", {}).get("tasks", {}).values():
            inner = spec["components"][task["componentRef"]["name"]]
            if "executorLabel" in inner:
                assert not task.get("cachingOptions", {}).get("enableCache", False)


def test_every_component_calls_a_stage_that_exists() -> None:
    for name in stages.STAGES:
        component = getattr(steps, name)
        code = "".join(component.component_spec.implementation.container.command)
        assert f'stages.run("{name}"' in code


@pytest.mark.parametrize(
    ("error", "exit_code", "text"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), 4, "a connection failed: Connection ref"),
        (OSError(errno.ENOSPC, "No space left on device"), 4, "the storage failed: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/muster/x"), 2, "/muster/x: Permission denied; let user"),
    ],
)
def test_a_step_tells_connections_storage_and_paths_apart_on_stderr_and_in_the_diary(
    error: OSError,
    exit_code: int,
    text: str,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_context: stages.Context) -> None:
        raise error

    monkeypatch.setitem(stages.STAGES, "report", fail)
    config = make_config()
    with pytest.raises(SystemExit) as ended:
        stages.run("report", config.dump())
    assert ended.value.code == exit_code
    assert f"report: {text}" in capsys.readouterr().err
    assert config.run
    [event] = [e for e in events.read(config.run.root)[0] if e["kind"] == "failed"]
    assert event["exit_code"] == exit_code
    assert event["error"].startswith(text)
