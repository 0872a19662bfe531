"""A vLLM server's life: start, watch, publish weights with proof, stop.

A publish counts only when the server has shown that it serves what was trained: the log-probs of a fixed prompt, longer
than a cache block, as the trainer's own process computed them. An answer of 200 proves nothing (tied embeddings stay
old, prefix caches stay full); the version label that a server reports proves nothing either.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from muster import process
from muster.config import Faults, Rollout, Server
from muster.errors import DependencyDied, InvalidInput
from muster.telemetry.metrics import Metrics

PROBE_NAME = "probe.json"
_ADMIN_TIMEOUT = 300.0
_ATTEMPTS = 8


@dataclass(frozen=True)
class RunningServer:
    """A server that `started` has made ready.

    Attributes:
        endpoint: where to send requests.
        log: what it prints.
        check: raises DependencyDied if it has died.
    """

    endpoint: str
    log: Path
    check: Callable[[], None]


@contextlib.contextmanager
def started(
    server: Server,
    model: Path,
    dtype: str,
    startup_timeout: float,
    log: Path,
    on_wait: Callable[[float], None] = lambda _: None,
) -> Iterator[RunningServer]:
    """Runs a vLLM server on loopback while the block runs, with a fault-injecting proxy before it where asked for.

    Args:
        server: its settings.
        model: Hugging Face model directory to start with.
        dtype: to serve in.
        startup_timeout: seconds until it must answer.
        log: takes its output.
        on_wait: called about every second with the seconds waited so far.

    Raises:
        InvalidInput: the port is taken, or the model directory is missing.
        DependencyDied: it did not come up; with the end of its log.
    """
    if not (model / "config.json").is_file():
        raise InvalidInput(f"model.path: {model} is not a model directory: it has no config.json")
    port = server.port or process.free_port()
    if not process.port_is_free(port):
        raise InvalidInput(
            f"rollout.server.port: {port} is in use; stop what listens there, or set 0 to have one chosen"
        )
    inner = process.free_port() if server.faults else port
    log.unlink(missing_ok=True)
    child = process.spawn(_command(server, model, dtype, inner), env=_environment(server), log=log)
    proxy = None
    try:
        if server.faults:
            proxy = process.spawn(_proxy_command(port, inner, server.faults), env=dict(os.environ), log=log)

        def check() -> None:
            if child.poll() is not None:
                raise DependencyDied(f"the vLLM server ended with exit code {child.returncode}", process.tail(log))
            if proxy is not None and proxy.poll() is not None:
                raise DependencyDied(f"the fault proxy ended with exit code {proxy.returncode}", process.tail(log))

        running = RunningServer(f"http://127.0.0.1:{port}", log, check)
        _wait_until_ready(running, startup_timeout, on_wait)
        yield running
    finally:
        # The server first: it has more to do. Both end even if a second interruption comes.
        with contextlib.ExitStack() as stack:
            if proxy is not None:
                stack.callback(process.end_tree, proxy, 5.0)
            stack.callback(process.end_tree, child, 5.0)


def replicas(endpoints: Sequence[str]) -> list[str]:
    """Every server behind the endpoints, each by an address of its own.

    A headless Service has one address a replica; publishing through its name would reach a random one. Names of https
    endpoints are kept, since certificates are for names.

    Args:
        endpoints: as in `rollout.endpoints`.

    Raises:
        DependencyDied: a name does not resolve.
    """
    found: dict[str, None] = {}
    for endpoint in endpoints:
        url = httpx.URL(endpoint)
        if url.scheme == "https":
            found[endpoint] = None
            continue
        port = url.port or 80
        try:
            answers = socket.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise DependencyDied(
                f"the server name {url.host} in rollout.endpoints does not resolve: {error}"
            ) from error
        addresses = [answer[4][0] for answer in answers if answer[0] == socket.AF_INET]
        addresses = addresses or [f"[{answer[4][0]}]" for answer in answers]
        found.update(dict.fromkeys(f"http://{address}:{port}" for address in sorted(addresses)))
    return list(found)


def publish(rollout: Rollout, weights: Path, version: int, metrics: Metrics) -> None:
    """Makes every server of a run serve a version, and has each one prove it.

    Args:
        rollout: `endpoints` and `admin` are used.
        weights: a directory that the servers see under the same path, with the trainer's `probe.json`.
        version: its number; the label is set on a server only after its proof.
        metrics: counts publications and times them.

    Raises:
        InvalidInput: the directory has no usable probe.
        DependencyDied: a server refused, did not answer, or failed the proof; the version is then unchanged.
    """
    probe = read_probe(weights)
    start = time.monotonic()
    try:
        for endpoint in rollout.endpoints:
            _publish_to(endpoint, rollout, weights, version, probe)
    except DependencyDied:
        metrics.publishes.labels("failed").inc()
        raise
    metrics.publishes.labels("proved").inc()
    metrics.publish_seconds.observe(time.monotonic() - start)
    metrics.policy_version.labels("served").set(version)


@dataclass(frozen=True)
class Probe:
    """What the trained model must answer.

    Attributes:
        prompt_ids: tokens of the fixed prompt.
        logprobs: log-prob of each token but the first, given those before it; nats, temperature 1.
        tolerance: largest allowed absolute difference; depends on the dtype.
    """

    prompt_ids: Sequence[int]
    logprobs: Sequence[float]
    tolerance: float


def read_probe(weights: Path) -> Probe:
    """Reads the probe that the trainer wrote beside the weights.

    Raises:
        InvalidInput: it is missing or makes no sense; weights without a probe are never published.
    """
    path = weights / PROBE_NAME
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        probe = Probe(given["prompt_ids"], given["logprobs"], float(given["tolerance"]))
        sound = len(probe.prompt_ids) == len(probe.logprobs) + 1 > 1 and all(map(math.isfinite, probe.logprobs))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"{path}: cannot read the trainer's probe ({error}); weights without one are not published"
        ) from error
    if not sound:
        raise InvalidInput(f"{path}: needs one finite log-prob for each prompt token but the first")
    if not (weights / "config.json").is_file() or not any(weights.glob("*.safetensors")):
        # vLLM does not refuse such a directory: its engine dies of it.
        raise InvalidInput(f"{weights}: holds no weights (config.json and *.safetensors), so it is not published")
    return probe


def _publish_to(endpoint: str, rollout: Rollout, weights: Path, version: int, probe: Probe) -> None:
    """Pause, reload, drop caches, resume, prove, label: one server."""
    what = f"the server {endpoint} could not prove that it serves version {version}"
    timeout = rollout.request_timeout
    with _Admin(endpoint, rollout) as admin:
        # The probe's prompt goes into the cache under the old weights: if the cache is not dropped, the proof shows it.
        _ask(endpoint, what, timeout, probe.prompt_ids)
        admin.post("/pause", params={"mode": "abort"})
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.resolve())}}
            admin.post("/collective_rpc", json=reload)
            admin.post("/reset_prefix_cache")
        except DependencyDied:
            with contextlib.suppress(DependencyDied):  # the first failure says more
                admin.post("/resume")
            raise
        admin.post("/resume")
        _prove(endpoint, what, timeout, probe)
        admin.post("/update_weight_version", json={"new_version": str(version)})


def _prove(endpoint: str, what: str, timeout: float, probe: Probe) -> None:
    """Compares served log-probs of the probe with the trainer's, and cached ones with fresh ones.

    Two requests. One samples a token after the prompt, which a server answers from its prefix cache. The other asks for
    the log-prob of every token of the prompt and of that one, which a server computes anew: the prompt's must be the
    trainer's, and the sampled token's must be what the first request said, or the cache is stale.
    """
    sampled = _sampled(_ask(endpoint, what, timeout, probe.prompt_ids, logprobs=0))
    if sampled is None:
        raise DependencyDied(f"{what}: its answer lacks the log-prob of the sampled token")
    token, cached = sampled
    ids = [*probe.prompt_ids, token]
    served = _prompt_logprobs(_ask(endpoint, what, timeout, ids, prompt_logprobs=0), ids)
    if served is None:
        raise DependencyDied(f"{what}: its answer lacks the log-probs of the prompt")
    *served, fresh = served
    worst = max(abs(a - b) for a, b in zip(served, probe.logprobs, strict=True))
    if not worst <= probe.tolerance:
        raise DependencyDied(
            f"{what}: log-probs of the probe differ from the trained model's by up to {worst:.3g} nats, "
            f"allowed {probe.tolerance:g}; it serves other weights (an old version, tied embeddings that do not reload)"
        )
    if not abs(cached - fresh) <= probe.tolerance:
        raise DependencyDied(
            f"{what}: the log-prob after a cached prompt is {abs(cached - fresh):.3g} nats off, allowed "
            f"{probe.tolerance:g}; its prefix cache still holds what the old weights computed"
        )


def _ask(endpoint: str, what: str, timeout: float, ids: Sequence[int], **sampling: Any) -> Any:
    """One token after a prompt, as JSON. It travels as generation does, where connections are lost now and then."""
    body = {"token_ids": list(ids), "sampling_params": {"max_tokens": 1, "temperature": 1.0, "seed": 0, **sampling}}
    last = ""
    for _ in range(_ATTEMPTS):
        try:
            answer = httpx.post(f"{endpoint}/inference/v1/generate", json=body, timeout=timeout, trust_env=False)
        except httpx.HTTPError as error:
            last = f"{type(error).__name__}: {error}"
            continue
        if answer.status_code != httpx.codes.OK:
            raise DependencyDied(f"{what}: it answered {answer.status_code}", answer.text[:500])
        try:
            return answer.json()
        except ValueError:
            raise DependencyDied(f"{what}: its answer is not JSON", answer.text[:500]) from None
    raise DependencyDied(f"{what}: no answer in {_ATTEMPTS} attempts", last)


def _sampled(answer: Any) -> tuple[int, float] | None:
    """The token that was sampled, and its log-prob; None if the answer does not have them."""
    try:
        entry = answer["choices"][0]["logprobs"]["content"][0]
        token, logprob = int(entry["token_id"]), float(entry["logprob"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return (token, logprob) if math.isfinite(logprob) else None


def _prompt_logprobs(answer: Any, ids: Sequence[int]) -> list[float] | None:
    """Log-probs of prompt tokens 1.. from an answer; None if it does not have them."""
    try:
        given = answer["prompt_logprobs"][1:]
        values = [float(entry[str(token)]["logprob"]) for entry, token in zip(given, ids[1:], strict=True)]
    except (KeyError, TypeError, ValueError):
        return None
    return values if all(map(math.isfinite, values)) else None


class _Admin:
    """Control requests to one server; they may change weights, so they carry the token where one is set."""

    def __init__(self, endpoint: str, rollout: Rollout) -> None:
        base = httpx.URL(endpoint)
        if rollout.admin.port is not None:
            base = base.copy_with(port=rollout.admin.port)
        headers = {}
        if rollout.admin.token_file is not None:
            try:
                headers["Authorization"] = f"Bearer {rollout.admin.token_file.read_text(encoding='utf-8').strip()}"
            except OSError as error:
                raise InvalidInput(
                    f"rollout.admin.token_file: cannot read {rollout.admin.token_file}: {error}"
                ) from error
        self._base = base
        self._http = httpx.Client(base_url=base, headers=headers, timeout=_ADMIN_TIMEOUT, trust_env=False)

    def __enter__(self) -> _Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def post(self, path: str, **request: Any) -> None:
        try:
            answer = self._http.post(path, **request)
        except httpx.HTTPError as error:
            raise DependencyDied(
                f"the server {self._base} did not answer {path}: {type(error).__name__}: {error}"
            ) from error
        if answer.is_error:
            raise DependencyDied(f"the server {self._base} answered {answer.status_code} to {path}", answer.text[:500])


def _command(server: Server, model: Path, dtype: str, port: int) -> list[str]:
    """vLLM's own entry point: the `vllm` command does not start in the CPU distribution."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype),
        *("--max-model-len", str(server.max_model_len)),
        *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--disable-uvicorn-access-log", *server.args),
    ]


def _environment(server: Server) -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # opens the control endpoints; on loopback only
        "VLLM_CPU_KVCACHE_SPACE": f"{server.kv_cache_gb:g}",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **server.env,
    }


def _proxy_command(port: int, upstream: int, faults: Faults) -> list[str]:
    return [
        *(sys.executable, "-m", "muster.rollout.faults", "--listen", str(port), "--upstream", str(upstream)),
        *("--drop", str(faults.drop), "--delay", str(faults.delay), "--delay-seconds", str(faults.delay_seconds)),
    ]


def _wait_until_ready(server: RunningServer, limit: float, on_wait: Callable[[float], None]) -> None:
    start = time.monotonic()
    while (waited := time.monotonic() - start) < limit:
        server.check()
        on_wait(waited)
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.endpoint}/health", timeout=2.0, trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.5)
    raise DependencyDied(f"the vLLM server was not ready after startup_timeout {limit:g} s", process.tail(server.log))
