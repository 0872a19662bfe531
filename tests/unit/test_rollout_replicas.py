"""Which servers an endpoint stands for."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from muster.errors import DependencyDied
from muster.rollout.server import replicas


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    def getaddrinfo(_host: str, port: int, **_: Any) -> list[Any]:
        family = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(family[":" in a], socket.SOCK_STREAM, 6, "", (a, port)) for a in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_each_replica_of_a_headless_service_is_addressed_alone_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "10.0.0.7", "10.0.0.5", "10.0.0.7")
    assert replicas(["http://fleet:8000", "http://fleet:8000"]) == ["http://10.0.0.5:8000", "http://10.0.0.7:8000"]


def test_addresses_of_one_family_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "::1", "127.0.0.1")
    assert replicas(["http://localhost:8000"]) == ["http://127.0.0.1:8000"]
    resolve_to(monkeypatch, "fd00::1")
    assert replicas(["http://fleet:8000"]) == ["http://[fd00::1]:8000"]


def test_names_of_https_endpoints_are_kept() -> None:
    assert replicas(["https://fleet.example:8443"]) == ["https://fleet.example:8443"]


def test_a_name_that_does_not_resolve_is_a_dependency_that_died() -> None:
    with pytest.raises(DependencyDied, match=r"no-such-host\.invalid"):
        replicas(["http://no-such-host.invalid:8000"])
