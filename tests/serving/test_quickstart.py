"""The whole quickstart, and interruptions at any moment. Minutes long: part of `make test-full` only."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muster.errors import Interrupted
from muster.layout import RunDirectory
from muster.rollout.server import RunningServer
from tests.serving.conftest import small_run
from tests.serving.test_run_local import eventually, finished, processes_of, submit

pytestmark = [pytest.mark.full, pytest.mark.slow]

MUSTER = str(Path(sys.executable).with_name("muster"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_quickstart_learns_while_a_quarter_of_the_samples_is_lost(seed: int, tmp_path: Path) -> None:
    root = tmp_path / "run"
    command = [MUSTER, "quickstart", "--dir", str(root), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    result, _ = finished(root)
    assert result["reward_start"] < 0.35
    assert result["reward_end"] >= 0.85
    assert 0.15 < result["slots_failed"] / result["slots_target"] < 0.4
    assert result["seed"] == seed
    assert {"timeout", "server_error", "reward_error"} <= result["failures"].keys()
    assert "held-out reward after" in done.stdout
    assert not processes_of(root)

    shown_again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert shown_again.returncode == 0
    assert "found a finished run" in shown_again.stderr
    other = [MUSTER, "quickstart", "--dir", str(root), "--seed", str(seed + 1)]
    refused = subprocess.run(other, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert f"data.seed: is {seed + 1}" in refused.stderr


@pytest.mark.timeout(1200)
def test_interruptions_at_any_moment_leave_nothing_behind_and_lose_nothing(
    vllm: RunningServer, model_dir: Path, tmp_path: Path
) -> None:
    root, dice = tmp_path / "run", random.Random(0)
    config = small_run(root, model_dir, vllm.endpoint)
    for attempt in range(15):
        child = submit(config, tmp_path)
        time.sleep(dice.uniform(0.2, 14))
        number = dice.choice([signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
        if child.poll() is None:
            os.kill(child.pid, number)
        _, text = child.communicate(timeout=60)
        assert child.returncode in (0, Interrupted.exit_code, -number), (attempt, number, text)
        assert eventually(lambda: not processes_of(root), 30), (attempt, number, processes_of(root))
        for final in root.glob("weights/v*"):
            assert (final / "probe.json").exists()
    child = submit(config, tmp_path)
    _, text = child.communicate(timeout=200)
    assert child.returncode == 0, text
    result, kinds = finished(root)
    assert result["iterations"] == 2
    assert kinds.count("trained") <= 2
    for k in range(2):
        collection = json.loads(RunDirectory(root).collection(k).read_text(encoding="utf-8"))
        assert collection["trainable"] == 8
