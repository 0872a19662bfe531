"""A real vLLM server: what it samples, what a publish proves, and how it ends."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from muster.config import Rollout
from muster.errors import DependencyDied, InvalidInput
from muster.rollout.client import Client, Completion, SlotFailure
from muster.rollout.server import RunningServer, publish, started
from muster.telemetry.metrics import Metrics
from tests.serving.conftest import SERVER, Meddler

pytestmark = pytest.mark.slow


def weights(model: Path, folder: Path, seed: int, *, endless: bool = False) -> Path:
    """The model with its weights moved a little (seed 0: not at all), and the probe of what it is now.

    An endless one never samples the end: one feature is large whatever was read, and speaks against it.
    """
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * (seed > 0) * torch.randn_like(parameter))
        if endless:
            policy.get_input_embeddings().weight[:, 0] = 100.0
            policy.model.norm.weight[0] = 1.0
            policy.get_output_embeddings().weight[policy.config.eos_token_id, 0] = -10.0
        ids = torch.randint(3, 20, (1, 400), generator=torch.Generator().manual_seed(1))
        logprobs = torch.log_softmax(policy(ids).logits, dim=-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    policy.save_pretrained(folder)
    probe = {"prompt_ids": ids[0].tolist(), "logprobs": logprobs.tolist(), "tolerance": 5e-4}
    (folder / "probe.json").write_text(json.dumps(probe), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def versions(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("weights")
    return [weights(model_dir, folder / f"v{seed}", seed) for seed in range(2)]


def on(endpoint: str) -> Rollout:
    return Rollout(endpoints=[endpoint], max_new_tokens=8, temperature=0.8)


def sample(endpoint: str, version: int) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        async with Client(on(endpoint), version) as client:
            prompts = [[13, 14, 3 + n, 4, 5, 6, 15] for n in range(8)]
            return await asyncio.gather(*(client.generate(p, group_id="g", seed=n) for n, p in enumerate(prompts)))

    return asyncio.run(all_of_them())


def served_label(endpoint: str) -> str:
    body = {"token_ids": [13, 14, 3, 15], "sampling_params": {"max_tokens": 1}}
    answer = httpx.post(f"{endpoint}/inference/v1/generate", json=body, timeout=30)
    return str(answer.json()["choices"][0]["weight_versions"][0]["version"])


@pytest.mark.timeout(400)
def test_recorded_logprobs_are_those_of_the_published_policy_at_the_temperature(
    vllm: RunningServer, versions: list[Path]
) -> None:
    for version, folder in enumerate(versions):
        publish(on(vllm.endpoint), folder, version, Metrics("t"))
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for n, done in enumerate(sample(vllm.endpoint, version)):
            prompt = [13, 14, 3 + n, 4, 5, 6, 15]
            ids = torch.tensor([[*prompt, *done.ids]])
            with torch.no_grad():
                logits = policy(ids).logits[0, len(prompt) - 1 : -1] / 0.8
            expected = torch.log_softmax(logits, dim=-1).gather(-1, torch.tensor(done.ids)[:, None])[:, 0]
            assert torch.tensor(done.logprobs).sub(expected).abs().max() < 1e-4
            assert set(done.versions) == {version}
            assert served_label(vllm.endpoint) == str(version)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("lie", "text"),
    [
        ({"/collective_rpc"}, "it serves other weights"),
        # a pause clears the cache as well
        ({"/pause", "/resume", "/reset_prefix_cache"}, "its prefix cache still holds"),
    ],
)
def test_a_server_left_on_old_weights_or_caches_fails_the_proof(
    vllm: RunningServer, meddler: Meddler, versions: list[Path], lie: set[str], text: str
) -> None:
    metrics = Metrics("t")
    publish(on(meddler.endpoint), versions[0], 0, metrics)
    meddler.swallow = lie
    with pytest.raises(DependencyDied, match=f"could not prove that it serves version 1.*{text}") as caught:
        publish(on(meddler.endpoint), versions[1], 1, metrics)
    assert caught.value.exit_code == 4
    assert served_label(vllm.endpoint) == "0"
    counts = metrics.snapshot()
    assert counts['muster_weight_publish_total{"outcome": "failed"}'] == 1
    meddler.swallow = set()
    publish(on(meddler.endpoint), versions[1], 1, metrics)
    assert served_label(vllm.endpoint) == "1"


@pytest.mark.timeout(400)
def test_f29_f30_an_update_that_the_server_refuses_leaves_the_version_and_says_why(
    vllm: RunningServer, meddler: Meddler, versions: list[Path]
) -> None:
    publish(on(meddler.endpoint), versions[0], 0, Metrics("t"))
    meddler.refuse = {"/collective_rpc"}
    with pytest.raises(DependencyDied, match=r"(?s)answered 500 to /collective_rpc.*out of memory, says the server"):
        publish(on(meddler.endpoint), versions[1], 1, Metrics("t"))
    assert served_label(vllm.endpoint) == "0"
    publish(on(vllm.endpoint), versions[0], 0, Metrics("t"))  # it has not been left paused


def test_a_directory_without_weights_never_reaches_the_server(versions: list[Path], tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_bytes((versions[0] / "probe.json").read_bytes())
    with pytest.raises(InvalidInput, match="holds no weights"):
        publish(on("http://127.0.0.1:9"), tmp_path, 1, Metrics("t"))


@pytest.mark.timeout(400)
def test_samples_of_a_server_that_lost_what_was_published_are_refused(
    vllm: RunningServer, versions: list[Path]
) -> None:
    """A restarted server answers as before, with the weights it was started with and without our label."""
    publish(on(vllm.endpoint), versions[1], 1, Metrics("t"))

    async def one(version: int) -> Completion:
        async with Client(on(vllm.endpoint), version, published=True) as client:
            return await client.generate([13, 14, 3, 4, 5, 6, 15], group_id="g", seed=0)

    assert asyncio.run(one(1)).ids
    httpx.post(f"{vllm.endpoint}/update_weight_version", json={"new_version": "default"}, timeout=30)
    with pytest.raises(SlotFailure, match="labelled default, not 1") as caught:
        asyncio.run(one(1))
    assert caught.value.reason == "server_error"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("limit", ["request_timeout", "slot_timeout"])
def test_requests_that_run_out_of_time_end_on_the_server_and_keep_their_tokens(
    vllm: RunningServer, model_dir: Path, tmp_path: Path, limit: str
) -> None:
    """By the name that vLLM gives a request, which could change with vLLM."""
    folder = weights(model_dir, tmp_path / "endless", 1, endless=True)
    publish(on(vllm.endpoint), folder, 1, Metrics("t"))
    seconds = {"request_timeout": 1000.0, "slot_timeout": 1000.0, limit: 0.4}
    rollout = on(vllm.endpoint).model_copy(
        update={"max_new_tokens": 480, "request_timeout": seconds["request_timeout"]}
    )
    prompts = [[13, 14, 3 + n, 4, 5, 6, 15] for n in range(8)]

    async def all_of_them() -> list[Completion | BaseException]:
        async with Client(rollout, 1, published=True) as client:
            client.grace = 60.0
            client = client.until(asyncio.get_running_loop().time() + seconds["slot_timeout"])
            requests = [client.generate(p, group_id="g", seed=n) for n, p in enumerate(prompts)]
            return await asyncio.gather(*requests, return_exceptions=True)

    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, error in zip(prompts, asyncio.run(all_of_them()), strict=True):
        assert isinstance(error, SlotFailure)
        assert error.reason == "timeout"
        assert limit in str(error)
        done = error.partial
        assert done is not None
        assert done.finish_reason == "abort"
        assert 0 < len(done.ids) == len(done.logprobs) == len(done.versions) < 480
        with torch.no_grad():
            logits = policy(torch.tensor([[*prompt, *done.ids]])).logits[0, len(prompt) - 1 : -1] / 0.8
        expected = torch.log_softmax(logits, dim=-1).gather(-1, torch.tensor(done.ids)[:, None])[:, 0]
        assert torch.tensor(done.logprobs).sub(expected).abs().max() < 1e-4

    end = time.monotonic() + 30
    while running(vllm.endpoint):
        assert time.monotonic() < end
        time.sleep(0.1)
    publish(on(vllm.endpoint), weights(model_dir, tmp_path / "usual", 0), 2, Metrics("t"))
    assert all(done.finish_reason in ("stop", "length") for done in sample(vllm.endpoint, 2))


def running(endpoint: str) -> float:
    """Requests that the server is working at."""
    lines = httpx.get(f"{endpoint}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def test_weights_without_a_probe_are_not_published(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"probe\.json"):
        publish(on("http://127.0.0.1:9"), tmp_path, 1, Metrics("t"))


def test_a_port_in_use_is_named_before_anything_starts(model_dir: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = SERVER.model_copy(update={"port": port})
        with (
            pytest.raises(InvalidInput, match=rf"rollout\.server\.port: {port} is in use"),
            started(server, model_dir, "float32", 60, tmp_path / "log"),
        ):
            pass


@pytest.mark.timeout(200)
def test_a_server_that_cannot_start_is_reported_with_its_own_words(model_dir: Path, tmp_path: Path) -> None:
    server = SERVER.model_copy(update={"args": ["--no-such-option"]})
    with (
        pytest.raises(DependencyDied, match=r"(?s)ended with exit code 2.*no-such-option"),
        started(server, model_dir, "float32", 120, tmp_path / "log"),
    ):
        pass


def test_a_model_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidInput, match=r"has no config\.json"),
        started(SERVER, tmp_path, "float32", 60, tmp_path / "log"),
    ):
        pass
