"""The hook's uploader against an HTTP API that plays the pipeline endpoints of Kubeflow Pipelines."""

from __future__ import annotations

import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from muster.errors import DependencyDied, InvalidInput
from muster.pipelines import upload as module
from muster.pipelines.cluster import Target
from muster.pipelines.upload import Uploaded, main, upload

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = ROOT / "charts" / "muster" / "files" / "grpo.yaml"


@dataclass
class Api:
    """Plays the API: pipelines by namespace and name, their versions, a page of two at a time."""

    pipelines: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    answer_first: list[int] = field(default_factory=list)
    race: bool = False
    host: str = ""

    def create(self, name: str, namespace: str) -> tuple[int, Any]:
        if any(p["display_name"] == name and p["namespace"] == namespace for p in self.pipelines):
            return 409, {"message": "The name is taken"}
        made = {"pipeline_id": f"p{len(self.pipelines)}", "display_name": name, "namespace": namespace}
        self.pipelines.append(made)
        self.versions[made["pipeline_id"]] = []
        return 200, made

    def add_version(self, pipeline: str, name: str, text: str) -> tuple[int, Any]:
        if any(v["display_name"] == name for v in self.versions[pipeline]):
            return 409, {"message": "The name is taken"}
        made = {"pipeline_id": pipeline, "pipeline_version_id": f"{pipeline}-{name}", "display_name": name}
        self.versions[pipeline].append({**made, "text": text})
        return 200, made

    def handle(self, method: str, path: str, query: dict[str, str], body: bytes) -> tuple[int, Any]:
        if self.answer_first:
            return self.answer_first.pop(0), {"message": "upstream connect error"}
        if path == "/apis/v2beta1/healthz":
            return 200, {"multi_user": True}
        if (method, path) == ("GET", "/apis/v2beta1/pipelines"):
            wanted = json.loads(query["filter"])["predicates"][0]
            assert (wanted["operation"], wanted["key"]) == ("EQUALS", "display_name")
            namespace = query.get("namespace", "")
            found = [p for p in self.pipelines if p["namespace"] == namespace]
            return 200, {"pipelines": [p for p in found if p["display_name"] == wanted["stringValue"]]}
        if (method, path) == ("POST", "/apis/v2beta1/pipelines"):
            given = json.loads(body)
            if self.race:
                self.create(given["display_name"], given.get("namespace", ""))
            return self.create(given["display_name"], given.get("namespace", ""))
        if match := re.fullmatch(r"/apis/v2beta1/pipelines/(p\d+)/versions", path):
            start = int(query.get("page_token") or 0)
            some = self.versions[match[1]]
            page = {"pipeline_versions": [{k: v for k, v in item.items() if k != "text"} for item in some[start:][:2]]}
            return 200, {**page, "next_page_token": str(start + 2)} if start + 2 < len(some) else page
        if (method, path) == ("POST", "/apis/v2beta1/pipelines/upload_version"):
            text = body.split(b"\r\n\r\n", 1)[1].rsplit(b"\r\n--", 1)[0].decode()
            if self.race:
                self.add_version(query["pipelineid"], query["name"], text)
            return self.add_version(query["pipelineid"], query["name"], text)
        return 404, {"message": f"no {method} {path}"}


@pytest.fixture
def api() -> Iterator[Api]:
    state = Api()

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            address = urllib.parse.urlsplit(self.path)
            state.tokens.add(self.headers.get("Authorization", ""))
            status, said = state.handle(self.command, address.path, dict(urllib.parse.parse_qsl(address.query)), body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        do_GET = do_POST = _answer  # noqa: N815 - the names that http.server calls

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    state.host = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # the SDK keeps its settings there
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.05)


def target(api: Api, namespace: str | None = None) -> Target:
    return Target(host=api.host, namespace=namespace)


def pipeline(folder: Path, text: str = "") -> Path:
    path = folder / "p.yaml"
    path.write_text(f"pipelineInfo:\n  name: muster-grpo\nroot: {{}}\n# {text}\n", encoding="utf-8")
    return path


def test_the_shipped_pipeline_arrives_whole_and_once(api: Api) -> None:
    first = upload(PIPELINE, target(api), label="0.1.0")
    assert first.new
    assert re.fullmatch(r"0\.1\.0-[0-9a-f]{12}", first.version)
    again = upload(PIPELINE, target(api), label="0.1.0")
    assert again == Uploaded(first.pipeline, first.pipeline_id, first.version, new=False)
    assert [p["display_name"] for p in api.pipelines] == ["muster-grpo"]
    [version] = api.versions["p0"]
    assert version["text"].replace("\r\n", "\n") == PIPELINE.read_text(encoding="utf-8")


def test_another_content_is_another_version_of_the_same_pipeline(api: Api, tmp_path: Path) -> None:
    names = [upload(pipeline(tmp_path, str(n)), target(api), label="1").version for n in range(5)]
    assert len(set(names)) == 5
    assert len(api.pipelines) == 1
    # the first is found again although it is on another page, and under a later label
    back = upload(pipeline(tmp_path, "4"), target(api), label="2")
    assert (back.version, back.new) == (names[4], False)
    assert len(api.versions["p0"]) == 5


def test_profiles_do_not_share_pipelines(api: Api, tmp_path: Path) -> None:
    for namespace in ("team-a", "team-b", None):
        assert upload(pipeline(tmp_path), target(api, namespace)).new
    assert [p["namespace"] for p in api.pipelines] == ["team-a", "team-b", ""]


def test_two_uploads_at_once_are_both_content(api: Api, tmp_path: Path) -> None:
    api.race = True
    done = upload(pipeline(tmp_path), target(api))
    assert not done.new
    assert len(api.versions[done.pipeline_id]) == 1


def test_waits_for_an_api_that_starts(api: Api, tmp_path: Path) -> None:
    api.answer_first = [503, 503, 502]
    assert upload(pipeline(tmp_path), target(api), patience=30).new
    api.answer_first = [503] * 1000
    with pytest.raises(DependencyDied, match=r"did not .*503"):
        upload(pipeline(tmp_path, "2"), target(api), patience=0.2)


def test_a_refusal_is_told_at_once(api: Api, tmp_path: Path) -> None:
    upload(pipeline(tmp_path), target(api))
    api.answer_first = [403] * 3
    with pytest.raises(DependencyDied, match=re.escape(api.host) + ".*403"):
        upload(pipeline(tmp_path, "2"), target(api), patience=600)


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(DependencyDied, match=r"127\.0\.0\.1:9"):
        upload(pipeline(tmp_path), Target(host="http://127.0.0.1:9"))


@pytest.mark.parametrize("text", ["", "a: b: c", "[1, 2]", "pipelineInfo: {}", "pipelineInfo: {name: 'Nice Name'}"])
def test_what_is_no_pipeline_is_not_sent(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"x\.yaml"):
        upload(path, Target(host="http://127.0.0.1:9"))


def test_the_command_line(api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("secret-token\n", encoding="utf-8")
    command = [str(pipeline(tmp_path)), "--host", api.host, "--namespace", "team-a", "--token-file", str(token)]
    assert main(command) == 0
    assert "uploaded" in capsys.readouterr().out
    assert main(command) == 0
    assert "already there" in capsys.readouterr().out
    assert "Bearer secret-token" in api.tokens

    assert main([str(tmp_path / "none.yaml"), "--host", api.host]) == 2
    assert "none.yaml" in capsys.readouterr().err
    assert main([str(pipeline(tmp_path)), "--host", "http://127.0.0.1:9"]) == 4
