"""The compiled pipeline: its shape, its parameters, and that every step is one that `stages` has."""

from __future__ import annotations

import errno
import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from muster.job import Ended, JobEvent, JobSpec, Notify
from muster.layout import RunDirectory
from muster.pipelines import stages, steps
from muster.pipelines.cluster import compile_to
from muster.pipelines.grpo import MAX_ITERATIONS
from muster.process import free_port, port_is_free
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


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


class PendingJob:
    """A place whose job waits, then runs and is done; `look` is called at each of the three."""

    max_restarts = 0
    settle_seconds = 0.0

    def __init__(self, name: str, files: RunDirectory, look: Callable[[], Any]) -> None:
        self.name, self.files, self.look, self.saw = name, files, look, list[Any]()

    def first_attempt(self, spec: JobSpec) -> int:
        return 0

    def run(self, spec: JobSpec, attempt: int, notify: Notify) -> Ended:
        for event in (
            JobEvent("launched", "created"),
            JobEvent("pending", "suspended: waiting for quota in queue gpus", 3725.0),
            JobEvent("running", "all 1 pods run"),
        ):
            notify(event)
            self.saw.append(self.look())
        measured = {"updates": [], "optimizer_steps_total": 1}
        self.files.training(0).parent.mkdir(parents=True)
        self.files.training(0).write_text(json.dumps(measured), encoding="utf-8")
        spec.outcome.write_text(json.dumps({"outcome": "done"}), encoding="utf-8")
        return Ended("done")


def test_how_long_a_job_has_waited_is_scraped_from_its_launcher_and_nothing_that_the_job_serves(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    config = make_config(
        job={"backend": "pytorchjob", "image": "trainer:1", "namespace": "ml"}, telemetry={"port": port}
    )
    assert config.run
    place = PendingJob("pytorchjob", RunDirectory(config.run.root), lambda: scrape(port))
    monkeypatch.setattr(stages, "backend", lambda _config: place)
    stages.train(stages.Context(config), iteration=0)
    assert [seen["muster_job_pending_seconds"] for seen in place.saw] == [0, 3725, 0]
    assert set(place.saw[1]) == {"muster_job_pending_seconds", "muster_run_info"}
    assert port_is_free(port)  # the next job of the step's process can be served, too


def test_on_one_machine_the_port_is_left_to_the_job(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    config = make_config(telemetry={"port": port})
    assert config.run
    place = PendingJob("local", RunDirectory(config.run.root), lambda: port_is_free(port))
    monkeypatch.setattr(stages, "backend", lambda _config: place)
    stages.train(stages.Context(config), iteration=0)
    assert place.saw == [True] * 3
