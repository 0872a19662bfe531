"""One request: what it records, and the reason it fails for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from muster.config import RunConfig
from muster.rollout.client import Client, Completion, SlotFailure, slot_seed
from tests.unit.conftest import DROP, HANG, MakeConfig, ScriptedServer, good


def generate(config: RunConfig, endpoint: str, version: int = 7) -> Completion:
    assert config.rollout
    rollout = config.rollout.model_copy(update={"endpoints": [endpoint]})

    async def one() -> Completion:
        async with Client(rollout, version) as client:
            return await client.generate([13, 14, 3, 15], group_id="g", seed=5)

    return asyncio.run(one())


def failure(config: RunConfig, endpoint: str) -> SlotFailure:
    with pytest.raises(SlotFailure) as caught:
        generate(config, endpoint)
    return caught.value


def test_tokens_logprobs_and_the_pinned_version_are_recorded(scripted: ScriptedServer, make_config: MakeConfig) -> None:
    done = generate(make_config(), scripted.endpoint)
    assert done == Completion((3, 4, 5, 6, 1), (-0.5,) * 5, (7,) * 5, "stop")


def test_the_distribution_asked_for_is_the_one_recorded(scripted: ScriptedServer, make_config: MakeConfig) -> None:
    generate(make_config(rollout={"temperature": 0.7}), scripted.endpoint)
    sampling = scripted.requests[0]["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"], sampling["min_p"]) == (0.7, 1.0, -1, 0.0)
    assert scripted.requests[0]["token_ids"] == [13, 14, 3, 15]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (DROP, "server_error"),
        (500, "server_error"),
        ((400, '{"error": {"message": "This model\'s maximum context length is 512 tokens"}}'), "context_overflow"),
        ((400, "no"), "server_error"),
        ("not json", "server_error"),
        ({"choices": []}, "server_error"),
        (good([]), "empty_completion"),
        (good([3, 4], finish="abort"), "aborted"),
        ({"choices": [{"token_ids": [3], "finish_reason": "stop", "logprobs": None}]}, "server_error"),
        (
            {
                "choices": [
                    {
                        "token_ids": [3],
                        "finish_reason": "stop",
                        "logprobs": {"content": [{"token_id": 4, "logprob": 0}]},
                    }
                ]
            },
            "server_error",
        ),
    ],
)
def test_each_failure_has_its_reason(
    scripted: ScriptedServer, make_config: MakeConfig, answer: Any, reason: str
) -> None:
    scripted.behave = lambda _body, _n: answer
    assert failure(make_config(), scripted.endpoint).reason == reason


def test_nan_logprobs_fail_the_slot(scripted: ScriptedServer, make_config: MakeConfig) -> None:
    scripted.behave = lambda _body, _n: (
        '{"choices": [{"token_ids": [3], "finish_reason": "stop",'
        ' "logprobs": {"content": [{"token_id": 3, "logprob": NaN}]}}]}'
    )
    assert failure(make_config(), scripted.endpoint).reason == "server_error"


def test_no_answer_in_time_is_a_timeout(scripted: ScriptedServer, make_config: MakeConfig) -> None:
    scripted.behave = lambda _body, _n: HANG
    error = failure(make_config(rollout={"request_timeout": 0.3}), scripted.endpoint)
    assert error.reason == "timeout"
    assert "request_timeout" in str(error)


def test_nobody_listening_is_a_server_error(make_config: MakeConfig) -> None:
    assert failure(make_config(), "http://127.0.0.1:9").reason == "server_error"


def test_what_an_aborted_request_had_sampled_is_kept(scripted: ScriptedServer, make_config: MakeConfig) -> None:
    scripted.behave = lambda _body, _n: good([3, 4], finish="abort")
    partial = failure(make_config(), scripted.endpoint).partial
    assert partial is not None
    assert partial.ids == (3, 4)


def test_seeds_differ_by_slot_and_segment_and_are_the_same_everywhere() -> None:
    seeds = {slot_seed(0, "g", slot, segment) for slot in range(8) for segment in range(4)}
    assert len(seeds) == 32
    assert slot_seed(0, "0000-00000001", 3) == slot_seed(0, "0000-00000001", 3)
    assert all(0 <= seed < 2**31 for seed in seeds)
