"""The whole loop on a real server: two iterations, and what happens when something goes wrong in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from muster.config import RunConfig
from muster.errors import InvalidInput, MusterError
from muster.layout import RunDirectory
from muster.pipelines.local import run_local
from muster.process import end_tree, free_port, spawn
from muster.rollout.server import RunningServer
from muster.telemetry import events
from tests.serving.conftest import Meddler, small_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def finished(root: Path) -> tuple[dict[str, Any], list[str]]:
    result = json.loads(RunDirectory(root).result.read_text(encoding="utf-8"))
    return result, [event["kind"] for event in events.read(root)[0]]


def processes_of(root: Path) -> list[str]:
    """Command lines of living processes that belong to a run."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if str(root) in line and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(line[:200])
        except psutil.Error:
            continue
    return found


def eventually(condition: Callable[[], Any], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    return condition()


def submit(config: RunConfig, folder: Path) -> subprocess.Popen[str]:
    """`muster submit grpo --local` in a process of its own, as a person would run it."""
    file = folder / "given.yaml"
    file.write_text(config.dump(), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("muster")), "submit", "grpo", "--local", "--config", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def reached(root: Path, kind: str, **fields: Any) -> Callable[[], bool]:
    return lambda: any(event["kind"] == kind and fields.items() <= event.items() for event in events.read(root)[0])


def test_iterations_train_on_two_ranks_and_a_second_run_repeats_nothing(
    vllm: RunningServer, model_dir: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    proxy_port = free_port()
    upstream = vllm.endpoint.rpartition(":")[2]
    faults = [sys.executable, "-m", "muster.rollout.faults", "--listen", str(proxy_port), "--upstream", upstream]
    proxy = spawn([*faults, "--drop", "0.15"], env=dict(os.environ), log=tmp_path / "proxy.log")
    try:
        training = {"steps": 3, "checkpoint": {"keep": 1}}
        config = small_run(root, model_dir, f"http://127.0.0.1:{proxy_port}", training=training)
        run_local("grpo", config, iterations=3)
        result, kinds = finished(root)
        files = RunDirectory(root)
        assert (result["iterations"], result["optimizer_steps"], result["seed"]) == (3, 6, 0)
        assert result["slots_failed"] == result["failures"]["server_error"] > 0
        assert 0 <= result["reward_start"] <= 1
        assert 0 <= result["reward_end"] <= 1
        for k in range(3):
            trained = json.loads(files.training(k).read_text(encoding="utf-8"))
            assert trained["world_size"] == 2
            assert abs(trained["logprob_drift"]["absolute"]) < 1e-4  # what vLLM recorded is what the trainer computes
            rows = pq.read_table(files.batch(k) / "batch.parquet").to_pylist()
            assert {version for row in rows for version in row["versions"]} == {k}
        assert kinds.count("published") == 3
        assert not files.weights(1).exists()  # collected: resuming must not need it
        assert files.report.read_text(encoding="utf-8").count("<svg ") == 7
        metrics = json.loads((root / "metrics.json").read_text(encoding="utf-8"))
        slots = sum(value for key, value in metrics.items() if key.startswith("muster_rollout_slots_total"))
        assert slots == result["slots_target"]
        assert metrics['muster_training_steps_total{"outcome": "applied"}'] == 6
        ended = metrics['muster_job_terminations_total{"backend": "local", "outcome": "done"}']
        assert ended == 1 + 3  # version 0, and one an iteration

        run_local("grpo", config, iterations=3)
        again, kinds = finished(root)
        assert {k: v for k, v in again.items() if k != "wall_seconds"} == {
            k: v for k, v in result.items() if k != "wall_seconds"
        }
        assert kinds.count("trained") == kinds.count("collected") == 3
        assert kinds.count("kept") == 9
        with pytest.raises(InvalidInput, match=r"data\.seed: is 1, but .* holds a run with 0"):
            run_local(
                "grpo", small_run(root, model_dir, vllm.endpoint, data={"seed": 1}, training=training), iterations=3
            )
    finally:
        end_tree(proxy)
    assert not processes_of(root)


def test_a_server_left_on_old_weights_fails_the_run(
    vllm: RunningServer, meddler: Meddler, model_dir: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"

    def lie_from_version_one(event: dict[str, Any]) -> None:
        if event["kind"] == "published":
            meddler.swallow = {"/collective_rpc"}

    with pytest.raises(MusterError, match="could not prove that it serves version 1") as caught:
        run_local("grpo", small_run(root, model_dir, meddler.endpoint), iterations=2, on_event=lie_from_version_one)
    assert caught.value.exit_code == 4
    files = RunDirectory(root)
    assert files.weights(1).exists()
    assert not files.rollouts(1).exists()
    assert "could not prove" in files.report.read_text(encoding="utf-8")
    meddler.swallow = set()
    run_local("grpo", small_run(root, model_dir, meddler.endpoint), iterations=2)
    assert finished(root)[0]["iterations"] == 2


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (("collecting", {}), signal.SIGTERM),
        (("assembled", {"iteration": 0}), signal.SIGINT),
    ],
    ids=["SIGTERM-while-collecting", "SIGINT-while-training"],
)
def test_a_signal_leaves_no_process_and_the_next_run_goes_on(
    vllm: RunningServer,
    model_dir: Path,
    tmp_path: Path,
    moment: tuple[str, dict[str, Any]],
    number: signal.Signals,
) -> None:
    root = tmp_path / "run"
    slow = {"groups_per_batch": 24} if moment[0] == "collecting" else {}
    config = small_run(root, model_dir, vllm.endpoint, data=slow, rollout={"max_concurrent": 4})
    child = submit(config, tmp_path)
    assert eventually(reached(root, moment[0], **moment[1]), 90)
    os.kill(child.pid, number)
    _, text = child.communicate(timeout=60)
    assert child.returncode == 130, text
    assert eventually(lambda: not processes_of(root), 10), processes_of(root)
    kept = list(RunDirectory(root).iteration(0).glob("rollouts*/part-*.parquet"))
    assert kept

    run_local("grpo", config, iterations=2)
    result, _ = finished(root)
    assert result["iterations"] == 2
    assert result["failure"] is None


def test_a_server_that_dies_ends_the_run_with_exit_4(vllm: RunningServer, model_dir: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    port = free_port()
    upstream = vllm.endpoint.rpartition(":")[2]
    argv = [sys.executable, "-m", "muster.rollout.faults", "--listen", str(port), "--upstream", upstream]
    server = spawn(argv, env=dict(os.environ), log=tmp_path / "server.log")
    try:
        endpoint = f"http://127.0.0.1:{port}"
        config = small_run(root, model_dir, endpoint, data={"groups_per_batch": 64}, rollout={"max_concurrent": 4})
        child = submit(config, tmp_path)
        assert eventually(reached(root, "collecting"), 90)
        server.kill()
        _, text = child.communicate(timeout=90)
    finally:
        end_tree(server)
    assert child.returncode == 4, text
    assert f"the server {endpoint} died while rollouts were collected" in text
    assert "Traceback" not in text
    assert not RunDirectory(root).rollouts(0).exists()


def test_two_runs_in_one_directory_are_not_mixed(vllm: RunningServer, model_dir: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    config = small_run(root, model_dir, vllm.endpoint, data={"groups_per_batch": 24}, rollout={"max_concurrent": 4})
    first = submit(config, tmp_path)
    try:
        assert eventually(reached(root, "prepared"), 60)
        with pytest.raises(InvalidInput, match="another run is at work in this directory"):
            run_local("grpo", config, iterations=2)
    finally:
        first.terminate()
        first.communicate(timeout=60)
