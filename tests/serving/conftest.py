"""One real vLLM server for all tests of this folder, and a proxy that can lie about what it did."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from muster.config import RunConfig, Server, parse
from muster.quickstart import task
from muster.quickstart.run import settings
from muster.rollout.server import RunningServer, started

SERVER = Server(**{**settings(Path("/"), 0, 0.0)["rollout"]["server"], "faults": None})
"""The server settings of quickstart, without its faults."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warm-started model of quickstart."""
    from muster.quickstart.model import make

    folder = tmp_path_factory.mktemp("model") / "model"
    make(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def vllm(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with started(SERVER, model_dir, "float32", 240, log) as server:
        yield server


class Meddler:
    """Passes requests on, but only pretends to for paths in `swallow`, and answers 500 to those in `refuse`."""

    def __init__(self, endpoint: str) -> None:
        self.swallow: set[str] = set()
        self.refuse: set[str] = set()
        host = endpoint.removeprefix("http://")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.partition("?")[0]
                if path in outer.swallow:
                    status, answer = 200, b"{}"
                elif path in outer.refuse:
                    status, answer = 500, b"out of memory, says the server"
                else:
                    upstream = http.client.HTTPConnection(host, timeout=60)
                    upstream.request(self.command, self.path, body, {"Content-Type": "application/json"})
                    got = upstream.getresponse()
                    status, answer = got.status, got.read()
                    upstream.close()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = _pass_on  # noqa: N815

        class Proxy(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

        self._server = Proxy(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def meddler(vllm: RunningServer) -> Iterator[Meddler]:
    proxy = Meddler(vllm.endpoint)
    yield proxy
    proxy.close()


def small_run(root: Path, model: Path, endpoint: str, **changes: Any) -> RunConfig:
    """Two iterations of the quickstart task, small, on a server that runs already."""
    root.parent.mkdir(parents=True, exist_ok=True)
    prompts, held = root.with_name("prompts.jsonl"), root.with_name("held.jsonl")
    task.write_prompts(prompts, task.prompts(64, seed=0))
    task.write_prompts(held, task.prompts(32, seed=1))
    values = settings(root, 0, 0.0)
    values["model"]["path"] = str(model)
    values["data"] |= {"prompts": str(prompts), "held_prompts": str(held), "groups_per_batch": 8}
    del values["rollout"]["server"]
    values["rollout"] |= {"endpoints": [endpoint], "request_timeout": 20, "slot_timeout": 40}
    values["training"] |= {"steps": 2, "updates_per_batch": 2}
    for section, change in changes.items():
        values[section] |= change
    return parse(json.dumps(values))
