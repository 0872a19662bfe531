"""What a job's ending means, and how often it is tried again: any back end, no processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from muster.config import parse
from muster.errors import DependencyDied, InvalidInput, MusterError, NotBuilt
from muster.job import Ended, JobError, JobEvent, JobSpec, Notify, backend, read_outcome, run_job


class Scripted:
    """A back end whose attempts write given outcomes."""

    name = "scripted"
    settle_seconds = 0.0

    def __init__(self, *outcomes: Any, max_restarts: int = 3, first: int = 0, ended: Ended | None = None) -> None:
        self.outcomes, self.max_restarts, self.first = list(outcomes), max_restarts, first
        self.ended = ended or Ended("exited with 1", "boom")
        self.attempts: list[int] = []

    def first_attempt(self, spec: JobSpec) -> int:
        return self.first

    def run(self, spec: JobSpec, attempt: int, notify: Notify) -> Ended:
        self.attempts.append(attempt)
        spec.outcome.unlink(missing_ok=True)
        said = self.outcomes.pop(0) if self.outcomes else None
        if said is not None:
            spec.outcome.write_text(said if isinstance(said, str) else json.dumps(said))
        return self.ended


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return JobSpec("train-0000", ("-m", "muster.training"), 1, 1, tmp_path / "outcome.json", tmp_path)


DONE = {"outcome": "done"}


def failed(exit_code: Any) -> dict[str, Any]:
    return {"outcome": "failed", "exit_code": exit_code, "error": "said so"}


def test_done(spec: JobSpec) -> None:
    run_job(Scripted(DONE), spec)


@pytest.mark.parametrize("exit_code", [2, 3])
def test_a_failure_that_would_come_again_is_not_tried_again(spec: JobSpec, exit_code: int) -> None:
    place = Scripted(failed(exit_code), DONE)
    with pytest.raises(JobError, match="said so") as raised:
        run_job(place, spec)
    assert raised.value.exit_code == exit_code
    assert place.attempts == [0]


@pytest.mark.parametrize(
    "first", [failed(1), failed(4), failed(130), None, "{not json", '["done"]', {"outcome": "maybe"}]
)
def test_what_a_second_try_may_mend_is_tried_again(spec: JobSpec, first: Any) -> None:
    place = Scripted(first, DONE, first=5)
    events: list[JobEvent] = []
    run_job(place, spec, events.append)
    assert place.attempts == [5, 6]
    assert [event.kind for event in events] == [events[0].kind, "relaunch", "done"]
    assert "restart 1 of 3" in events[1].text


def test_restarts_are_bounded_and_the_last_death_is_told(spec: JobSpec) -> None:
    place = Scripted(max_restarts=2)
    with pytest.raises(DependencyDied) as raised:
        run_job(place, spec)
    assert place.attempts == [0, 1, 2]
    assert str(raised.value) == (
        "job train-0000 died without saying how it went (exited with 1; no outcome.json)\n--- its last words ---\nboom"
    )


def test_no_relaunch_where_it_cannot_help(spec: JobSpec) -> None:
    place = Scripted(ended=Ended("deleted by someone", relaunch=False))
    with pytest.raises(DependencyDied):
        run_job(place, spec)
    assert place.attempts == [0]


@pytest.mark.parametrize(("given", "taken"), [(4, 4), (0, 1), (300, 1), ("2", 1), (True, 1), (None, 1)])
def test_odd_exit_codes_in_an_outcome(spec: JobSpec, given: Any, taken: int) -> None:
    spec.outcome.write_text(json.dumps(failed(given)))
    outcome = read_outcome(spec.outcome)
    assert outcome is not None
    assert (outcome.done, outcome.exit_code) == (False, taken)


def test_errors_name_all_faults_of_a_spec(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as raised:
        JobSpec("Train_1", ("python",), 0, 1, tmp_path, tmp_path, timeout=0)
    assert len(raised.value.faults) == 4


def test_trainjob_is_not_built() -> None:
    config = parse("job: {backend: trainjob, image: i, namespace: n}")
    with pytest.raises(NotBuilt, match="trainjob"):
        backend(config)


def test_pytorchjob_without_a_cluster_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    settings = {
        "run": {"id": "r", "root": str(tmp_path)},
        "storage": {"pvc": "p", "mount_path": str(tmp_path)},
        "job": {"backend": "pytorchjob", "image": "i", "namespace": "n"},
    }
    with pytest.raises(MusterError, match="no cluster"):
        backend(parse(json.dumps(settings)))
