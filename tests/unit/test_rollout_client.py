"""One request: what it records, and the reason it fails for."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from muster.config import RunConfig
from muster.rollout.client import Client, Completion, SlotFailure, slot_seed
from tests.unit.conftest import DROP, HANG, MakeConfig, ScriptedServer, good

PROMPT = [13, 14, 3, 15]


def client_of(config: RunConfig, endpoint: str, *, published: bool = False) -> Client:
    assert config.rollout
    return Client(config.rollout.model_copy(update={"endpoints": [endpoint]}), 7, published=published)


def generate(client: Client, slot_seconds: float = 1000.0) -> Completion:
    async def one() -> Completion:
        async with client:
            mine = client.until(asyncio.get_running_loop().time() + slot_seconds)
            return await mine.generate(PROMPT, group_id="g", seed=5)

    return asyncio.run(one())


def failure(client: Client, slot_seconds: float = 1000.0) -> SlotFailure:
    with pytest.raises(SlotFailure) as caught:
        generate(client, slot_seconds)
    return caught.value


class Endless:
    """Generation that goes on until it is aborted by its id, and then gets `answer`; the abort itself gets `reply`."""

    def __init__(self, answer: Any, reply: Any = "") -> None:
        self.answer, self.reply = answer, reply
        self.aborted = threading.Event()
        self.begun: list[str] = []

    def __call__(self, body: dict[str, Any], _n: int) -> Any:
        if "request_ids" not in body:
            self.begun.append(body["request_id"])
            self.aborted.wait(20)
            return self.answer
        if body["request_ids"] == [f"generate-tokens-{self.begun[-1]}"]:
            self.aborted.set()
        return self.reply


def test_tokens_logprobs_and_the_pinned_version_are_recorded(scripted: ScriptedServer, make_config: MakeConfig) -> None:
    done = generate(client_of(make_config(), scripted.endpoint))
    assert done == Completion((3, 4, 5, 6, 1), (-0.5,) * 5, (7,) * 5, "stop")
    assert [request["path"] for request in scripted.requests] == ["/inference/v1/generate"]


def test_the_distribution_asked_for_is_the_one_recorded(scripted: ScriptedServer, make_config: MakeConfig) -> None:
    generate(client_of(make_config(rollout={"temperature": 0.7}), scripted.endpoint))
    sampling = scripted.requests[0]["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"], sampling["min_p"]) == (0.7, 1.0, -1, 0.0)
    assert scripted.requests[0]["token_ids"] == PROMPT


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
    assert failure(client_of(make_config(), scripted.endpoint)).reason == reason


def test_nan_logprobs_fail_the_slot(scripted: ScriptedServer, make_config: MakeConfig) -> None:
    scripted.behave = lambda _body, _n: (
        '{"choices": [{"token_ids": [3], "finish_reason": "stop",'
        ' "logprobs": {"content": [{"token_id": 3, "logprob": NaN}]}}]}'
    )
    assert failure(client_of(make_config(), scripted.endpoint)).reason == "server_error"


def test_no_answer_in_time_is_a_timeout(scripted: ScriptedServer, make_config: MakeConfig) -> None:
    scripted.behave = lambda _body, _n: HANG
    error = failure(client_of(make_config(rollout={"request_timeout": 0.3}), scripted.endpoint))
    assert (error.reason, error.partial) == ("timeout", None)
    assert "request_timeout 0.3 s" in str(error)


def short(config: MakeConfig, endpoint: str, *, published: bool = False) -> Client:
    """A client that soon loses patience and then waits for long."""
    # one connection: the request holds it while its abort is asked for
    settings = {"request_timeout": 0.3, "max_concurrent": 1}
    client = client_of(config(rollout=settings), endpoint, published=published)
    client.grace = 15.0
    return client


def test_a_request_whose_time_is_up_keeps_what_it_had_sampled(
    scripted: ScriptedServer, make_config: MakeConfig
) -> None:
    scripted.behave = Endless(good([3, 4], finish="abort"))
    error = failure(short(make_config, scripted.endpoint))
    assert error.reason == "timeout"
    assert error.partial == Completion((3, 4), (-0.5, -0.5), (7, 7), "abort")
    assert error.prompt_ids == PROMPT
    assert [request["path"].rpartition("/")[2] for request in scripted.requests] == ["generate", "abort_requests"]


def test_a_slot_whose_time_is_up_first_keeps_them_too(scripted: ScriptedServer, make_config: MakeConfig) -> None:
    scripted.behave = Endless(good([3, 4], finish="abort"))
    client = client_of(make_config(rollout={"request_timeout": 60, "slot_timeout": 80}), scripted.endpoint)
    error = failure(client, slot_seconds=0.3)
    assert error.reason == "timeout"
    assert error.partial is not None
    assert error.partial.ids == (3, 4)
    assert "what was left of slot_timeout 80 s" in str(error)


def test_a_slot_without_time_left_asks_for_nothing(scripted: ScriptedServer, make_config: MakeConfig) -> None:
    error = failure(client_of(make_config(), scripted.endpoint), slot_seconds=-0.1)
    assert (error.reason, error.partial) == ("timeout", None)
    assert scripted.requests == []


def test_an_answer_that_is_whole_but_late_is_a_timeout_with_its_tokens(
    scripted: ScriptedServer, make_config: MakeConfig
) -> None:
    scripted.behave = Endless(good([3, 4, 1]))
    error = failure(short(make_config, scripted.endpoint))
    assert error.reason == "timeout"
    assert error.partial == Completion((3, 4, 1), (-0.5,) * 3, (7,) * 3, "stop")


@pytest.mark.parametrize(
    "answer",
    [
        good([], finish="abort"),
        {"choices": [{"token_ids": [3, 4], "finish_reason": "abort", "logprobs": None}]},
        "not json",
        500,
        (400, "maximum context length"),
        DROP,
    ],
)
def test_a_late_answer_that_is_none_leaves_no_tokens(
    scripted: ScriptedServer, make_config: MakeConfig, answer: Any
) -> None:
    scripted.behave = Endless(answer)
    error = failure(short(make_config, scripted.endpoint))
    assert (error.reason, error.partial) == ("timeout", None)


@pytest.mark.parametrize(("label", "kept"), [("7", True), ("6", False)])
def test_tokens_of_an_ended_request_are_kept_only_with_the_published_label(
    scripted: ScriptedServer, make_config: MakeConfig, label: str, kept: bool
) -> None:
    answer = good([3, 4], finish="abort")
    answer["choices"][0]["weight_versions"] = [{"version": label}]
    scripted.behave = Endless(answer)
    error = failure(short(make_config, scripted.endpoint, published=True))
    assert error.reason == "timeout"
    assert (error.partial is not None) == kept


def test_a_server_that_ignores_the_abort_is_waited_for_no_longer_than_the_grace(
    scripted: ScriptedServer, make_config: MakeConfig
) -> None:
    scripted.behave = lambda body, _n: "" if "request_ids" in body else HANG
    client = short(make_config, scripted.endpoint)
    client.grace = 0.5
    start = time.monotonic()
    error = failure(client)
    assert (error.reason, error.partial) == ("timeout", None)
    assert 0.8 <= time.monotonic() - start < 8


@pytest.mark.parametrize("reply", [404, 500, DROP])
def test_a_server_that_cannot_abort_is_not_waited_for(
    scripted: ScriptedServer, make_config: MakeConfig, reply: Any
) -> None:
    scripted.behave = lambda body, _n: reply if "request_ids" in body else HANG
    start = time.monotonic()
    error = failure(short(make_config, scripted.endpoint))
    assert (error.reason, error.partial) == ("timeout", None)
    assert time.monotonic() - start < 8


@pytest.mark.parametrize(("request_timeout", "slot_timeout", "grace"), [(600, 1800, 5.0), (2, 4, 0.2), (600, 10, 1.0)])
def test_time_limits_are_overrun_by_a_tenth_and_five_seconds_at_most(
    make_config: MakeConfig, request_timeout: float, slot_timeout: float, grace: float
) -> None:
    limits = {"request_timeout": request_timeout, "slot_timeout": slot_timeout}
    assert client_of(make_config(rollout=limits), "http://127.0.0.1:9").grace == pytest.approx(grace)


def test_cancellation_does_not_wait_for_an_abort(scripted: ScriptedServer, make_config: MakeConfig) -> None:
    asked = threading.Event()

    def behave(body: dict[str, Any], _n: int) -> Any:
        if "request_ids" in body:
            asked.set()
        return HANG

    scripted.behave = behave
    client = short(make_config, scripted.endpoint)

    async def cancelled() -> tuple[float, set[asyncio.Task[Any]]]:
        async with client:
            request = asyncio.create_task(client.generate(PROMPT, group_id="g", seed=5))
            await asyncio.to_thread(asked.wait, 10)
            start = time.monotonic()
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
        return time.monotonic() - start, asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    seconds, left = asyncio.run(cancelled())
    assert asked.is_set()
    assert seconds < 2
    assert left == set()


def test_nobody_listening_is_a_server_error(make_config: MakeConfig) -> None:
    assert failure(client_of(make_config(), "http://127.0.0.1:9")).reason == "server_error"


def test_what_an_aborted_request_had_sampled_is_kept(scripted: ScriptedServer, make_config: MakeConfig) -> None:
    scripted.behave = lambda _body, _n: good([3, 4], finish="abort")
    partial = failure(client_of(make_config(), scripted.endpoint)).partial
    assert partial is not None
    assert partial.ids == (3, 4)


def test_seeds_differ_by_slot_and_segment_and_are_the_same_everywhere() -> None:
    seeds = {slot_seed(0, "g", slot, segment) for slot in range(8) for segment in range(4)}
    assert len(seeds) == 32
    assert slot_seed(0, "0000-00000001", 3) == slot_seed(0, "0000-00000001", 3)
    assert all(0 <= seed < 2**31 for seed in seeds)
