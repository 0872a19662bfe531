"""A server that answers as vLLM does and misbehaves on command, and a small configuration, for this folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from muster.config import RunConfig, parse
from muster.quickstart import task

DROP = "drop"
HANG = "hang"
Behaviour = Callable[[dict[str, Any], int], Any]


def good(ids: list[int], finish: str = "stop") -> dict[str, Any]:
    """A well-formed answer with these tokens."""
    content = [{"token_id": token, "logprob": -0.5} for token in ids]
    return {"choices": [{"token_ids": ids, "finish_reason": finish, "logprobs": {"content": content}}]}


class ScriptedServer:
    """`behave(body, n)` decides what the n-th generation request gets: an answer, a status code, text, DROP or HANG."""

    def __init__(self) -> None:
        self.behave: Behaviour = lambda _body, _n: good([3, 4, 5, 6, 1])
        self.requests: list[dict[str, Any]] = []
        self.healthy = True
        self._lock, self._closing = threading.Lock(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                self._send(200 if outer.healthy else 503, b"{}")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
                with outer._lock:
                    number = len(outer.requests)
                    outer.requests.append({**body, "path": self.path})
                answer = outer.behave(body, number)
                if answer == DROP:
                    self.close_connection = True
                elif answer == HANG:
                    outer._closing.wait(30)
                    self.close_connection = True
                elif isinstance(answer, int):
                    self._send(answer, b'{"error": {"message": "scripted failure"}}')
                elif isinstance(answer, tuple):
                    self._send(answer[0], answer[1].encode())
                else:
                    self._send(200, answer.encode() if isinstance(answer, str) else json.dumps(answer).encode())

            def _send(self, status: int, body: bytes) -> None:
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:  # the client has gone
                    self.close_connection = True

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops answering and listening."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a tokenizer and nothing else: all that the rollout client reads."""
    from muster.quickstart.model import tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(folder)
    return folder


MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def make_config(tmp_path: Path, tokenizer_dir: Path) -> MakeConfig:
    """Builds a configuration for a small run below the test's folder; keyword arguments are laid over its sections."""

    def make(**sections: dict[str, Any]) -> RunConfig:
        prompts = tmp_path / "prompts.jsonl"
        if not prompts.exists():
            task.write_prompts(prompts, task.prompts(12, seed=0))
        values: dict[str, Any] = {
            "run": {"id": "test", "root": str(tmp_path / "run")},
            "model": {"path": str(tokenizer_dir), "dtype": "float32"},
            "data": {"prompts": str(prompts), "groups_per_batch": 4},
            "group": {"n_samples": 4},
            "rollout": {
                "endpoints": ["http://127.0.0.1:9"],
                "max_new_tokens": 8,
                "request_timeout": 5,
                "slot_timeout": 10,
                "reward": [{"name": "muster.quickstart.task:reward"}],
                "stall": {"min_rounds": 3, "min_seconds": 0},
            },
            "training": {"updates_per_batch": 2, "steps": 2},
            "telemetry": {"port": 0},
        }
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section}
        return parse(json.dumps(values))

    return make
