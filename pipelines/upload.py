"""Uploads a compiled pipeline to Kubeflow Pipelines: `python -m muster.pipelines.upload FILE --host URL`.

The chart's hook runs this after each install and upgrade, so it may run twice, at once, or while the API still starts:
the same file is uploaded once, another one becomes a new version of the same pipeline. It starts no run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from muster.errors import DependencyDied, InvalidInput, MusterError
from muster.pipelines.cluster import Target

log = logging.getLogger("muster.upload")

_AWAY = frozenset({0, 429, 500, 502, 503, 504})
"""Answers of an API that is not there yet, or not for the moment."""

_CONFLICT = 409
_PAGE = 100
_PAUSE_SECONDS = 5.0


@dataclass(frozen=True)
class Uploaded:
    """Where a compiled pipeline is in Kubeflow Pipelines.

    Attributes:
        pipeline: name of the pipeline.
        pipeline_id: its identity there.
        version: name of the version that holds the file.
        new: whether this call made the version.
    """

    pipeline: str
    pipeline_id: str
    version: str
    new: bool


def upload(file: Path, target: Target, *, label: str = "", patience: float = 0.0) -> Uploaded:
    """Makes sure that a compiled pipeline is there.

    The version is named after its content, so that the same file is never uploaded twice.

    Args:
        file: IR YAML, as `muster compile` writes it.
        target: the installation; `namespace` None means a pipeline shared by all profiles.
        label: comes before the content's digest in the version's name, such as a release number.
        patience: seconds that the API may be away.

    Raises:
        InvalidInput: the file cannot be read or is not a compiled pipeline.
        DependencyDied: the API refused, or was away for too long.
    """
    name, digest = _read(file)
    version = f"{label}-{digest}" if label else digest
    api = _Api(target, patience)
    pipeline_id = api.pipeline(name) or api.create_pipeline(name)
    known = api.versions(pipeline_id)
    # the label is for people: a new release with the same content brings no new version
    present = next((given for given in known if given.rsplit("-", 1)[-1] == digest), None)
    if present is not None:
        return Uploaded(name, pipeline_id, present, new=False)
    new = api.create_version(pipeline_id, version, file)
    return Uploaded(name, pipeline_id, version, new)


class _Api:
    """The calls that an upload needs, with patience. Names are looked up first, a lost race counts as found."""

    def __init__(self, target: Target, patience: float) -> None:
        self._target, self._end = target, time.monotonic() + patience
        self._where = f"Kubeflow Pipelines at {target.host or 'the default address'}"
        self._token = _token(target)
        self._client = self._call("connect", self._connect)

    def pipeline(self, name: str) -> str | None:
        """Identity of the pipeline of a name."""
        given = {"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]}
        for page in self._pages(
            f"list pipelines named {name}",
            lambda token: self._client.list_pipelines(
                page_token=token, page_size=_PAGE, filter=json.dumps(given), namespace=self._target.namespace
            ),
        ):
            for found in page.pipelines or []:
                if found.display_name == name:
                    return str(found.pipeline_id)
        return None

    def create_pipeline(self, name: str) -> str:
        """Makes a pipeline without versions: the first one then gets a name of ours, like all others."""
        import kfp_server_api

        body = kfp_server_api.V2beta1Pipeline(display_name=name, namespace=self._target.namespace)
        made = self._call(
            f"create pipeline {name}",
            lambda: self._client.pipelines.pipeline_service_create_pipeline(body),
            on_conflict=lambda: None,
        )
        pipeline_id = self.pipeline(name) if made is None else str(made.pipeline_id)
        if pipeline_id is None:
            where = f"namespace {self._target.namespace}" if self._target.namespace else "the shared pipelines"
            raise DependencyDied(
                f"{self._where} says that pipeline {name} exists, but does not list it in {where}; "
                "does it belong to another namespace?"
            )
        return pipeline_id

    def versions(self, pipeline_id: str) -> list[str]:
        """Names of a pipeline's versions."""
        return [
            str(version.display_name)
            for page in self._pages(
                "list versions",
                lambda token: self._client.list_pipeline_versions(pipeline_id, page_token=token, page_size=_PAGE),
            )
            for version in page.pipeline_versions or []
        ]

    def create_version(self, pipeline_id: str, version: str, file: Path) -> bool:
        """Uploads; False if somebody else has just done so."""
        made = self._call(
            f"upload version {version}",
            lambda: self._client.upload_pipeline_version(str(file), version, pipeline_id=pipeline_id),
            on_conflict=lambda: None,
        )
        return made is not None

    def _connect(self) -> Any:
        import kfp

        return kfp.Client(
            host=self._target.host,
            # Any name but the SDK's own default keeps it from asking for one, five times, whatever the answer. Nothing
            # takes it from there: all calls name their namespace.
            namespace=self._target.namespace or "shared",
            existing_token=self._token,
            ssl_ca_cert=str(self._target.ca_cert) if self._target.ca_cert else None,
        )

    def _pages(self, what: str, fetch: Callable[[str], Any]) -> Iterator[Any]:
        token = ""
        while True:
            current = token
            page = self._call(what, lambda: fetch(current))  # noqa: B023 - called before it changes
            yield page
            token = page.next_page_token or ""
            if not token:
                return

    def _call(self, what: str, function: Callable[[], Any], on_conflict: Callable[[], Any] | None = None) -> Any:
        while True:
            try:
                return function()
            except Exception as error:  # what the SDK, its HTTP client and its auth raise has no common base
                status = getattr(error, "status", None)
                if status == _CONFLICT and on_conflict is not None:
                    return on_conflict()
                away = status in _AWAY or _is_network(error)
                if not away or time.monotonic() + _PAUSE_SECONDS > self._end:
                    raise DependencyDied(f"{self._where} did not {what}: {_said(error)}") from error
                log.warning("%s is away (%s), trying again", self._where, _said(error))
                time.sleep(_PAUSE_SECONDS)


def _is_network(error: Exception) -> bool:
    import urllib3

    return isinstance(error, urllib3.exceptions.HTTPError | OSError)


def _said(error: Exception) -> str:
    """What an API error says, in one line."""
    body = getattr(error, "body", None)
    status = getattr(error, "status", None)
    text = body if isinstance(body, str) and body else str(error) or type(error).__name__
    line = " ".join(text.split())[:500]
    return f"{status} {line}" if status else line


def _token(target: Target) -> str | None:
    if target.token_file is None:
        return None
    try:
        return target.token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InvalidInput(f"--token-file: cannot read {target.token_file}: {error.strerror}") from error


def _read(file: Path) -> tuple[str, str]:
    """Name and content digest of a compiled pipeline."""
    try:
        content = file.read_bytes()
        parts = list(yaml.safe_load_all(content))
    except OSError as error:
        raise InvalidInput(f"{file}: cannot read the pipeline: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{file}: not valid YAML: {' '.join(str(error).split())}") from error
    name = parts[0].get("pipelineInfo", {}).get("name") if parts and isinstance(parts[0], dict) else None
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise InvalidInput(f"{file}: not a compiled pipeline: it has no pipelineInfo.name; `muster compile` writes one")
    return name, hashlib.sha256(content).hexdigest()[:12]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code of the contract."""
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="python -m muster.pipelines.upload", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="compiled pipeline (muster compile NAME --out FILE.yaml)")
    parser.add_argument("--host", help="address of the KFP API; found by the SDK when absent")
    parser.add_argument("--namespace", help="profile that gets the pipeline; absent: shared by all")
    parser.add_argument("--label", default="", help="comes before the digest in the version's name")
    parser.add_argument("--token-file", type=Path, help="file with a bearer token for the API")
    parser.add_argument("--ca-cert", type=Path, help="certificate authority of the API")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds that the API may be away")
    given = parser.parse_args(arguments)
    target = Target(given.host, given.namespace, None, None, given.token_file, given.ca_cert)
    try:
        done = upload(given.file, target, label=given.label, patience=given.patience)
    except MusterError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    state = "uploaded" if done.new else "already there"
    print(f"pipeline {done.pipeline} ({done.pipeline_id}), version {done.version}: {state}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
