"""Calls to an API server with bad days: what is tried again, what is not, and what a 404 means."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import urllib3
from kubernetes import client as k8s
from kubernetes.client.exceptions import ApiException

from muster.errors import DependencyDied, InvalidInput
from muster.job import cluster as module
from muster.job.cluster import Cluster


def answer(status: int, body: str = "") -> ApiException:
    error = ApiException(status=status, reason="reason")
    error.body = body
    return error


NOT_FOUND = json.dumps({"kind": "Status", "reason": "NotFound", "message": 'pytorchjobs "x" not found'})
NO_SUCH_KIND = "404 page not found\n"


def script(*answers: Any) -> Callable[..., Any]:
    left = list(answers)

    def call(*_: Any, **__: Any) -> Any:
        given = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(given, Exception):
            raise given
        return given

    return call


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(module.random, "uniform", lambda *_: 0.01)
    return Cluster(k8s.ApiClient(k8s.Configuration()), "team-a", outage_seconds=0.3)


@pytest.mark.parametrize(
    "first",
    [
        answer(503),
        answer(429),
        answer(500),
        answer(404, NO_SUCH_KIND),
        urllib3.exceptions.ProtocolError("Connection aborted."),
        ConnectionResetError("reset"),
    ],
)
def test_an_answer_that_is_not_about_the_request_is_asked_again(place: Cluster, first: Exception) -> None:
    assert place.call("get it", script(first, first, {"ok": 1})) == {"ok": 1}


def test_patience_ends(place: Cluster) -> None:
    with pytest.raises(DependencyDied, match=r"away for 0\.3 s: cannot get it"):
        place.call("get it", script(answer(503)))


def test_a_404_page_is_not_a_missing_object(place: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place.custom, "get_namespaced_custom_object", script(answer(404, NOT_FOUND)))
    assert place.get("kubeflow.org", "v1", "pytorchjobs", "x") is None
    monkeypatch.setattr(place.custom, "get_namespaced_custom_object", script(answer(404, NO_SUCH_KIND)))
    with pytest.raises(InvalidInput, match="is the training operator"):
        place.get("kubeflow.org", "v1", "pytorchjobs", "x")


@pytest.mark.parametrize("status", [401, 403])
def test_a_missing_right_says_what_to_bind(place: Cluster, status: int) -> None:
    with pytest.raises(InvalidInput, match="RBAC_RULES"):
        place.call("get it", script(answer(status)))


def test_a_refusal_is_passed_on_at_once(place: Cluster) -> None:
    with pytest.raises(ApiException):
        place.call("get it", script(answer(422), {"ok": 1}))
