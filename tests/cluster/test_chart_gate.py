"""The gate before a rollout server, as the chart renders it, under a real nginx in front of a small upstream."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import yaml

from muster.config import Admin, Rollout
from muster.errors import DependencyDied
from muster.process import end_tree, free_port, spawn, tail
from muster.rollout.server import publish
from muster.telemetry.metrics import Metrics
from tests.cluster import tools

CHART = tools.ROOT / "charts" / "muster"
TOKEN = "A-token.of_the~right+length/and=Case"


@dataclass
class Upstream:
    """Plays vLLM: answers everything, and keeps what reached it."""

    port: int = 0
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Upstream:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                outer.seen.append((self.command, self.path, dict(self.headers)))
                if self.path.startswith("/v1/completions?drop"):
                    self.close_connection = True
                    return
                answer = json.dumps({"path": self.path, "bytes": len(body)}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                if self.path.startswith("/v1/completions?slow"):
                    self.wfile.write(answer[:4])
                    self.wfile.flush()
                    outer.hold.wait(10)
                    self.wfile.write(answer[4:])
                    return
                self.wfile.write(answer)

            do_GET = do_POST = handle_any  # noqa: N815 - the names that http.server calls

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hold.set()
        self.server.shutdown()
        self.server.server_close()


@dataclass
class Gate:
    """The running nginx and what is behind it."""

    upstream: Upstream
    generate: str
    metrics: str
    admin: str
    log: Path
    folder: Path

    def reached(self) -> list[tuple[str, str]]:
        return [(method, path) for method, path, _ in self.upstream.seen]


def install(folder: Path, ports: dict[str, int], token: str) -> list[str]:
    """Writes the rendered files below a folder, with its paths in place of the pod's, and says how to start them."""
    settings = [f"fleet.ports.{name}={port}" for name, port in ports.items()]
    arguments = [part for setting in settings for part in ("--set", setting)]
    done = tools.run(tools.helm(), "template", "rl", CHART, *arguments, "--show-only", "templates/fleet/gate.yaml")
    assert done.returncode == 0, done.stderr
    data = yaml.safe_load(done.stdout)["data"]
    (folder / "admin").mkdir(parents=True)
    (folder / "admin" / "token").write_text(token + "\n", encoding="utf-8")
    for name, text in data.items():
        text = text.replace("/tmp/gate", str(folder / "tmp")).replace("/etc/muster/admin", str(folder / "admin"))
        text = text.replace("/etc/muster/gate", str(folder)).replace("exec nginx", f"exec {tools.nginx()}")
        (folder / name).write_text(text, encoding="utf-8")
    return ["/bin/sh", str(folder / "start.sh")]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    folder = tmp_path_factory.mktemp("gate") / "run"
    with Upstream() as upstream:
        ports = {name: free_port() for name in ("generate", "metrics", "admin")}
        command = install(folder, {**ports, "vllm": upstream.port}, TOKEN)
        log = folder / "log"
        child = spawn(command, env=dict(os.environ), log=log)
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        try:
            end = time.monotonic() + 20
            while True:
                try:
                    assert httpx.get(urls["generate"] + "/gate", trust_env=False).status_code == 200
                    break
                except httpx.TransportError:
                    assert child.poll() is None, tail(log)
                    assert time.monotonic() < end, tail(log)
                    time.sleep(0.05)
            yield Gate(upstream, **urls, log=log, folder=folder)
        finally:
            end_tree(child, 5)


@pytest.fixture(autouse=True)
def _forget(gate: Gate) -> None:
    gate.upstream.seen.clear()


ABORT = "/inference/v1/abort_requests"
GENERATE = ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions", "/tokenize")
ADMIN = ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version")
CONTROL = (*ADMIN, "/sleep", "/wake_up", "/update_weights", "/abort_requests", "/server_info", "/start_profile")


def ask(url: str, path: str, method: str = "POST", **more: object) -> int:
    return httpx.request(method, url + path, trust_env=False, timeout=10, **more).status_code  # type: ignore[arg-type]


def ask_raw(url: str, target: str, headers: dict[str, str]) -> int:
    """Sends a path as it stands; other clients tidy it up first."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    try:
        connection.request("POST", target, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_generation_and_health_pass(gate: Gate) -> None:
    for path in GENERATE:
        assert ask(gate.generate, path, json={"token_ids": [1]}) == 200
    for path in ("/health", "/v1/models", "/version"):
        assert ask(gate.generate, path, "GET") == 200
    assert gate.reached() == [("POST", path) for path in GENERATE] + [
        ("GET", path) for path in ("/health", "/v1/models", "/version")
    ]


def test_a_request_can_be_ended_by_its_id(gate: Gate) -> None:
    """By that one path and method, on the generate port only."""
    assert ask(gate.generate, ABORT, json={"request_ids": ["generate-tokens-1"]}) == 200
    assert gate.reached() == [("POST", ABORT)]
    gate.upstream.seen.clear()
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        assert ask(gate.generate, ABORT, method) == 403
    for path in (ABORT + "/", ABORT + "/x", "/abort_requests", "/inference/abort_requests", "/inference/v1/"):
        assert ask(gate.generate, path) == 404
    assert ask(gate.metrics, ABORT) == 404
    assert ask(gate.admin, ABORT, headers=bearer(TOKEN)) == 404
    assert gate.reached() == []


@pytest.mark.parametrize("prefix", ["", "/", "/v1/completions/..", "/v1/completions/%2e%2e", "/health/../", "/x/../."])
def test_nothing_but_that_passes_there(gate: Gate, prefix: str) -> None:
    """Nor with the token, nor through a path that only looks allowed."""
    for path in (*CONTROL, "/metrics", "/", "/docs", "/openapi.json", "/v1/load_lora_adapter"):
        for headers in ({}, bearer(TOKEN)):
            assert ask_raw(gate.generate, prefix + path, headers) in (400, 404), prefix + path
    assert gate.reached() == []


def test_the_admin_port_asks_for_the_token(gate: Gate) -> None:
    wrong = ["x", TOKEN[:-1], TOKEN + "x", TOKEN.lower(), TOKEN.upper(), TOKEN.replace(".", "x"), ".*"]
    for path in (*ADMIN, "/health", "/nonsense"):
        assert ask(gate.admin, path) == 401
        for token in wrong:
            assert ask(gate.admin, path, headers=bearer(token)) == 401, token
        assert ask(gate.admin, path, headers={"Authorization": f"Basic {TOKEN}"}) == 401
    assert gate.reached() == []


def test_the_admin_port_opens_with_the_token(gate: Gate) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": "/muster/runs/r1/weights/v0001"}}
    for path in ADMIN:
        assert ask(gate.admin, path, json=body, headers=bearer(TOKEN)) == 200
    assert ask(gate.admin, "/pause?mode=abort", headers=bearer(TOKEN)) == 200
    assert gate.reached() == [("POST", path) for path in (*ADMIN, "/pause?mode=abort")]
    assert all("Authorization" not in headers for _, _, headers in gate.upstream.seen)
    for path in ("/inference/v1/generate", "/metrics", "/sleep", "/shutdown_weight_transfer_engine"):
        assert ask(gate.admin, path, headers=bearer(TOKEN)) == 404


def test_a_launcher_gets_through_the_gate(gate: Gate, tmp_path: Path) -> None:
    """The code that steps run, with the ports and the token that the chart's notes name, up to the model's proof."""
    probe = {"prompt_ids": [3, 7], "logprobs": [-1.5], "tolerance": 1e-6}
    (tmp_path / "probe.json").write_text(json.dumps(probe), encoding="utf-8")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "token").write_text(TOKEN + "\n", encoding="utf-8")
    admin = Admin(port=int(gate.admin.rpartition(":")[2]), token_file=tmp_path / "token")
    with pytest.raises(DependencyDied, match="log-prob"):  # the upstream is no model
        publish(Rollout(endpoints=[gate.generate], admin=admin), tmp_path, 1, Metrics("r1"))
    reached = {path.partition("?")[0] for _, path in gate.reached()}
    assert {"/pause", "/collective_rpc", "/reset_prefix_cache", "/resume", "/inference/v1/generate"} <= reached

    gate.upstream.seen.clear()
    (tmp_path / "token").write_text("another" * 6, encoding="utf-8")
    with pytest.raises(DependencyDied, match="answered 401 to /pause"):
        publish(Rollout(endpoints=[gate.generate], admin=admin), tmp_path, 2, Metrics("r1"))
    assert not {path.partition("?")[0] for _, path in gate.reached()} & set(ADMIN)


def test_the_metrics_port_gives_metrics_only(gate: Gate) -> None:
    assert ask(gate.metrics, "/metrics", "GET") == 200
    assert ask(gate.metrics, "/metrics") == 403
    for path in (*CONTROL, *GENERATE, "/", "/health", "/metrics/"):
        assert ask(gate.metrics, path, headers=bearer(TOKEN)) == 404
    assert gate.reached() == [("GET", "/metrics")]


def test_a_lost_request_is_not_asked_again(gate: Gate) -> None:
    """Who asks decides about a second time: a sample must not be drawn twice behind its back."""
    assert ask(gate.generate, "/v1/completions?drop") == 502
    assert gate.reached() == [("POST", "/v1/completions?drop")]


def test_big_requests_pass_and_answers_are_streamed(gate: Gate) -> None:
    assert ask(gate.generate, "/v1/completions", content=b"x" * 20_000_000) == 200
    gate.upstream.hold.clear()
    with httpx.stream("POST", gate.generate + "/v1/completions?slow", trust_env=False, timeout=10) as answer:
        parts = answer.iter_bytes()
        assert next(parts) == b'{"pa'  # while the upstream still holds the rest back
        gate.upstream.hold.set()
        assert b"".join(parts).endswith(b"}")


def test_the_token_is_kept_from_others_and_from_the_log(gate: Gate) -> None:
    assert (gate.folder / "tmp" / "token.conf").stat().st_mode & 0o077 == 0
    assert TOKEN not in gate.log.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("token", "said"),
    [("short", "needs at least 32"), ("x" * 40 + '") { return 200; } #', "may hold only"), ("", "0 char")],
)
def test_a_bad_token_stops_the_gate(tmp_path: Path, token: str, said: str) -> None:
    """It neither opens the port nor gets into the configuration."""
    ports = {name: free_port() for name in ("generate", "metrics", "admin", "vllm")}
    done = tools.run(*install(tmp_path / "run", ports, token), timeout=20)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "run" / "tmp" / "token.conf").exists()
