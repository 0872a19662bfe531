"""Metrics, the diary and the report, as their readers see them."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from muster.config import RunConfig
from muster.errors import InvalidInput
from muster.groups import FAILURE_REASONS, GROUP_OUTCOMES
from muster.layout import RunDirectory
from muster.process import free_port
from muster.telemetry import events
from muster.telemetry.metrics import Metrics, load_snapshot, serve
from muster.telemetry.report import write_report
from muster.telemetry.status import describe
from tests.unit.conftest import MakeConfig

CONTRACT = {
    "muster_run_info": "gauge",
    "muster_rollout_slots": "counter",
    "muster_rollout_groups": "counter",
    "muster_rollout_empty_rounds": "counter",
    "muster_rollout_stalls": "counter",
    "muster_rollout_stall_rounds": "gauge",
    "muster_rollout_stall_seconds": "gauge",
    "muster_rollout_request_duration_seconds": "histogram",
    "muster_rollout_staleness_versions": "histogram",
    "muster_last_progress_timestamp_seconds": "gauge",
    "muster_policy_version": "gauge",
    "muster_weight_publish": "counter",
    "muster_weight_publish_duration_seconds": "histogram",
    "muster_training_tokens": "counter",
    "muster_training_masked_token_ratio": "gauge",
    "muster_training_steps": "counter",
    "muster_training_step_duration_seconds": "histogram",
    "muster_training_loss": "gauge",
    "muster_training_grad_norm": "gauge",
    "muster_training_clip_ratio": "gauge",
    "muster_training_entropy": "gauge",
    "muster_training_approx_kl": "gauge",
    "muster_training_logprob_drift": "gauge",
    "muster_training_importance_weight": "gauge",
    "muster_training_reward": "gauge",
    "muster_training_load_imbalance_ratio": "gauge",
    "muster_job_terminations": "counter",
    "muster_job_pending_seconds": "gauge",
}


def scrape(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Any], name: str, **labels: str) -> float:
    family = families[name.removesuffix("_total").removesuffix("_count").removesuffix("_sum")]
    (found,) = [s.value for s in family.samples if s.name == name and labels.items() <= s.labels.items()]
    return float(found)


def test_the_endpoint_serves_the_metrics_of_the_contract_with_their_types() -> None:
    port = free_port()
    with serve(Metrics("night-run"), port, "127.0.0.1"):
        families = scrape(port)
    assert {name: families[name].type for name in CONTRACT} == CONTRACT
    assert {name for name in families if name.startswith("muster_")} == set(CONTRACT)
    assert value(families, "muster_run_info", run="night-run") == 1


def test_counters_go_on_where_the_previous_process_stopped(tmp_path: Path) -> None:
    first = Metrics("r", load_snapshot(tmp_path))
    first.slots.labels("failed", "timeout").inc(3)
    first.slots.labels("usable", "").inc(5)
    first.publish_seconds.observe(0.3)
    first.loss.set(2.0)
    first.save_snapshot(tmp_path)
    second = Metrics("r", load_snapshot(tmp_path))
    second.slots.labels("usable", "").inc(2)
    second.publish_seconds.observe(7.0)
    second.save_snapshot(tmp_path)
    port = free_port()
    with serve(Metrics("r", load_snapshot(tmp_path)), port, "127.0.0.1"):
        families = scrape(port)
    assert value(families, "muster_rollout_slots_total", outcome="usable", reason="") == 7
    assert value(families, "muster_rollout_slots_total", outcome="failed", reason="timeout") == 3
    assert value(families, "muster_weight_publish_duration_seconds_count") == 2
    assert value(families, "muster_weight_publish_duration_seconds_sum") == pytest.approx(7.3)
    assert value(families, "muster_training_loss") == 0  # a gauge says what is, not what was


def test_a_port_in_use_is_invalid_input_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput, match=rf"telemetry\.port: .*{port}"), serve(Metrics("r"), port, "127.0.0.1"):
            pass


def test_port_zero_serves_nothing() -> None:
    with serve(Metrics("r"), 0, "127.0.0.1"):
        pass


def test_the_diary_is_read_from_where_one_stopped_and_survives_a_torn_line(tmp_path: Path) -> None:
    events.append(tmp_path, "started", run="r")
    first, offset = events.read(tmp_path)
    assert [event["kind"] for event in first] == ["started"]
    with (tmp_path / events.FILE_NAME).open("a") as file:
        file.write('{"kind": "collec')
    assert events.read(tmp_path, offset)[0] == []
    with (tmp_path / events.FILE_NAME).open("a") as file:
        file.write("\n")
    events.append(tmp_path, "trained", iteration=0)
    assert [event["kind"] for event in events.read(tmp_path, offset)[0]] == ["trained"]


def small_run(config: RunConfig, iterations: int = 3) -> RunDirectory:
    """The files that a run of some iterations leaves, without running one."""
    assert config.run
    files = RunDirectory(config.run.root)
    files.root.mkdir(parents=True)
    files.config.write_text(config.dump(), encoding="utf-8")
    events.append(files.root, "started", run="test", iterations=iterations)
    for k in range(iterations):
        files.rollouts(k).mkdir(parents=True)
        collection = {
            "version": k,
            "slots": 16,
            "usable": 12,
            "reward": 0.2 + 0.1 * k,
            "groups": {"complete": 1, "incomplete": 2, "below_minimum": 1},
            "failures": {"timeout": 3, "reward_error": 1},
            "seconds": 1.0,
            "tokens": 60,
        }
        files.collection(k).write_text(json.dumps(collection), encoding="utf-8")
        files.batch(k).mkdir()
        bias = {"usable_mean_length": 5.0, "failed_mean_length": None, "failure_reward_gap": 0.01 * k}
        summary = {"bias": bias, "tokens": {"masked_ratio": 0.0}, "warnings": ["be careful"]}
        (files.batch(k) / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        updates = [{"entropy": 0.5, "approx_kl": 0.01, "loss": 0.0}] * 2
        training = {"version": k + 1, "updates": updates, "optimizer_steps_total": 2 * (k + 1)}
        files.training(k).write_text(json.dumps(training), encoding="utf-8")
        events.append(files.root, "trained", iteration=k)
    return files


def test_the_result_has_the_keys_of_the_contract_and_adds_up(make_config: MakeConfig) -> None:
    files = small_run(make_config())
    files.evaluations.mkdir()
    for version, reward in ((0, 0.2), (3, 0.9)):
        found = {"version": version, "reward": reward, "standard_error": 0.02, "samples": 512}
        files.evaluation(version).write_text(json.dumps(found), encoding="utf-8")
    page = write_report(files.root)
    result = json.loads(files.result.read_text(encoding="utf-8"))
    assert {k: result[k] for k in ("reward_start", "reward_end", "iterations", "optimizer_steps")} == {
        "reward_start": 0.2,
        "reward_end": 0.9,
        "iterations": 3,
        "optimizer_steps": 6,
    }
    assert (result["slots_target"], result["slots_failed"], result["groups_below_minimum"]) == (48, 12, 3)
    assert result["seed"] == 0
    assert result["wall_seconds"] >= 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg ") == 7
    assert "be careful" in text
    assert "25.0 %" in text
    assert "http" not in text.split("</style>")[1].replace("http://www.w3.org", "").split("<pre>")[0].replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "")


def test_a_run_that_failed_before_anything_has_a_report_that_says_why(make_config: MakeConfig) -> None:
    files = small_run(make_config(), iterations=0)
    events.append(files.root, "failed", stage="rollout", exit_code=4, error="the server <b>died</b>")
    text = write_report(files.root).read_text(encoding="utf-8")
    assert "the server &lt;b&gt;died&lt;/b&gt;" in text
    assert "exit code 4" in text
    assert json.loads(files.result.read_text(encoding="utf-8"))["failure"]["stage"] == "rollout"
    assert any("exit code 4" in line for line in describe(files.root))


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no run\.yaml"):
        write_report(tmp_path)


def test_labels_come_from_closed_sets() -> None:
    assert len(set(FAILURE_REASONS)) == len(FAILURE_REASONS) == 11
    assert len(set(GROUP_OUTCOMES)) == len(GROUP_OUTCOMES) == 7
