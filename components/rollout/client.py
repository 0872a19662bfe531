"""Token-in, token-out requests to a vLLM server, and why one that gave nothing failed.

Knows nothing about groups or rewards. The weight version is the caller's: it is pinned before the request leaves.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from muster.config import Rollout
from muster.errors import InvalidInput

ABORT_GRACE = 5.0
"""Seconds that a server has at most, once time is up, to hand over what it has sampled."""

GRACE_SHARE = 0.1
"""The same as a share of the time limit: short limits are not overrun by much."""

_ENGINE_ID = "generate-tokens-{}"
"""What vLLM's engine calls a request that came with an id; it aborts by this name."""


class SlotFailure(Exception):
    """A slot cannot be completed.

    Attributes:
        reason: one of `muster.groups.FAILURE_REASONS`.
        partial: what had been sampled by then, if anything.
        prompt_ids: the tokens that `partial` continues; None: the slot's prompt.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        partial: Completion | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> None:
        self.reason, self.partial, self.prompt_ids = reason, partial, prompt_ids
        super().__init__(message)


@dataclass(frozen=True)
class Completion:
    """What a request returned.

    Attributes:
        ids: sampled tokens, the stop token included.
        logprobs: of each token under the distribution sampled from, same length.
        versions: weight version that produced each token, same length.
        finish_reason: `stop`, `length` or `abort`.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str


class Client:
    """Generates from the servers of a run. Use as an asynchronous context manager.

    Args:
        rollout: endpoints, sampling settings and time limits.
        version: the weight version that every endpoint has proved to serve.
        published: whether `publish` labelled the servers with it. An answer with another label is then refused: it
            comes from a server that was restarted, and serves the weights it was started with.

    Attributes:
        version: as given.
        grace: seconds that a time limit may be overrun by, for the tokens of a request that it ends.
    """

    def __init__(self, rollout: Rollout, version: int, *, published: bool = False) -> None:
        if not rollout.endpoints:
            raise InvalidInput(
                "rollout.endpoints: no server to generate with; name at least one, such as http://vllm:8000"
            )
        self._rollout, self.version = rollout, version
        self._label = str(version) if published else None
        self.grace = min(ABORT_GRACE, GRACE_SHARE * min(rollout.request_timeout, rollout.slot_timeout))
        self._deadline = math.inf
        self._http: aiohttp.ClientSession | None = None
        self._abort_http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        # Time limits are kept in `_post`. Aborts have connections of their own: requests may hold all of the others.
        unlimited = aiohttp.ClientTimeout()
        self._http = aiohttp.ClientSession(
            timeout=unlimited,
            # Servers close idle connections after a few seconds: let go of them sooner, or a request meets the closing.
            connector=aiohttp.TCPConnector(limit=self._rollout.max_concurrent, keepalive_timeout=2.0),
        )
        self._abort_http = aiohttp.ClientSession(
            timeout=unlimited, connector=aiohttp.TCPConnector(keepalive_timeout=2.0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._http
        assert self._abort_http
        await self._http.close()
        await self._abort_http.close()

    def until(self, deadline: float) -> Client:
        """This client for one slot, whose requests end when the slot's time is up.

        Args:
            deadline: on the event loop's clock.
        """
        mine = copy.copy(self)
        mine._deadline = deadline
        return mine

    async def generate(self, prompt_ids: Sequence[int], *, group_id: str, seed: int) -> Completion:
        """Samples one completion.

        Args:
            prompt_ids: tokens of the prompt.
            group_id: slots of one group go to one server, whose prefix cache then helps.
            seed: of the sampler.

        A request whose time is up is aborted, and what it has sampled by then is the failure's `partial`, if the server
        still hands it over.

        Raises:
            SlotFailure: the reason is `timeout`, `server_error`, `context_overflow`, `aborted` or `empty_completion`.
        """
        version = self.version
        endpoint = self._rollout.endpoints[_hash(group_id) % len(self._rollout.endpoints)]
        body = {
            "request_id": uuid.uuid4().hex,
            "token_ids": list(prompt_ids),
            "sampling_params": {
                "max_tokens": self._rollout.max_new_tokens,
                "temperature": self._rollout.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "logprobs": 0,
                "seed": seed,
            },
        }
        left = self._deadline - asyncio.get_running_loop().time()
        if left < self._rollout.request_timeout:
            seconds, limit = left, f"what was left of slot_timeout {self._rollout.slot_timeout:g} s"
        else:
            seconds = self._rollout.request_timeout
            limit = f"request_timeout {seconds:g} s"
        status, text, in_time = await self._post(endpoint, body, seconds)
        if not in_time:
            partial = _partial(status, text, endpoint, version, self._label)
            raise SlotFailure("timeout", f"{endpoint} gave no answer in {limit}", partial, prompt_ids)
        if status != HTTPStatus.OK:
            too_long = status == HTTPStatus.BAD_REQUEST and b"context length" in text
            raise SlotFailure(
                "context_overflow" if too_long else "server_error",
                f"{endpoint} answered {status}: {text[:300].decode(errors='replace')}",
            )
        done = _completion(text, endpoint, version, self._label)
        if done.finish_reason == "abort":
            raise SlotFailure(
                "aborted", f"{endpoint} aborted the request after {len(done.ids)} tokens", done, prompt_ids
            )
        if not done.ids:
            raise SlotFailure("empty_completion", f"{endpoint} returned no token")
        return done

    async def _post(self, endpoint: str, body: dict[str, Any], seconds: float) -> tuple[int, bytes, bool]:
        """Posts a request, and asks for its abortion when its time is up.

        Returns:
            Status and text of the answer, and whether it came in time. Status 0: no answer, not even to that.
        """
        assert self._http is not None, "use the client as an asynchronous context manager"
        if seconds <= 0:
            return 0, b"", False
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(None)
        aborts: list[asyncio.Task[None]] = []

        def give_up() -> None:
            limit.reschedule(loop.time() + self.grace)
            aborts.append(loop.create_task(abort()))

        async def abort() -> None:
            if not await self._abort(endpoint, body["request_id"]) and not limit.expired():
                limit.reschedule(loop.time())  # there is nothing to wait for

        timer = loop.call_later(seconds, give_up)
        try:
            async with limit, self._http.post(f"{endpoint}/inference/v1/generate", json=body) as answer:
                return answer.status, await answer.read(), not aborts
        except TimeoutError:
            return 0, b"", False
        except (aiohttp.ClientError, OSError) as error:
            if aborts:
                return 0, b"", False
            raise SlotFailure("server_error", f"{endpoint}: {type(error).__name__}: {error}") from error
        finally:
            timer.cancel()
            for task in aborts:
                task.cancel()
                await asyncio.wait({task})

    async def _abort(self, endpoint: str, request_id: str) -> bool:
        """Asks a server to end a request and to answer it with what it has; returns whether it will."""
        assert self._abort_http is not None
        body = {"request_ids": [_ENGINE_ID.format(request_id)]}
        try:
            async with self._abort_http.post(f"{endpoint}/inference/v1/abort_requests", json=body) as answer:
                return answer.status == HTTPStatus.OK
        except (aiohttp.ClientError, OSError):
            return False


def slot_seed(seed: int, group_id: str, slot: int, segment: int = 0) -> int:
    """The sampler's seed of one segment of one slot: 31 bits, the same in every process.

    Args:
        seed: of the run.
        group_id: of the group.
        slot: 0..G-1.
        segment: 0, then one more after each resumption.
    """
    return _hash(f"{seed}\0{group_id}\0{slot}\0{segment}") & 0x7FFFFFFF


def _partial(status: int, answer: bytes, endpoint: str, version: int, label: str | None) -> Completion | None:
    """What a request that was ended had sampled, if anything."""
    if status != HTTPStatus.OK:
        return None
    try:
        done = _completion(answer, endpoint, version, label)
    except SlotFailure:
        return None
    return done if done.ids else None


def _completion(answer: bytes, endpoint: str, version: int, label: str | None) -> Completion:
    """Reads an answer and checks what a lying server could get wrong."""
    try:
        choice: dict[str, Any] = json.loads(answer)["choices"][0]
        ids = tuple(int(token) for token in choice["token_ids"])
        finish = choice["finish_reason"]
        content = (choice.get("logprobs") or {}).get("content") or []
        sampled = [(int(entry["token_id"]), float(entry["logprob"])) for entry in content]
        labels = {str(span["version"]) for span in choice.get("weight_versions") or ()}
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise SlotFailure("server_error", f"{endpoint} sent an answer that cannot be read: {error!r}") from error
    if label is not None and ids and labels != {label}:
        raise SlotFailure(
            "server_error",
            f"{endpoint} sampled with weights labelled {', '.join(sorted(labels)) or 'nothing'}, not {label}",
        )
    if tuple(token for token, _ in sampled) != ids or not all(math.isfinite(value) for _, value in sampled):
        raise SlotFailure("server_error", f"{endpoint} sent log-probs that do not fit its {len(ids)} tokens")
    return Completion(ids, tuple(value for _, value in sampled), (version,) * len(ids), str(finish))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
