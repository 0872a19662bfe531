"""Token-in, token-out requests to a vLLM server, and why one that gave nothing failed.

Knows nothing about groups or rewards. The weight version is the caller's: it is pinned before the request leaves.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from muster.config import Rollout
from muster.errors import InvalidInput


class SlotFailure(Exception):
    """A slot cannot be completed.

    Attributes:
        reason: one of `muster.groups.FAILURE_REASONS`.
        partial: what had been sampled by then, if anything.
    """

    def __init__(self, reason: str, message: str, partial: Completion | None = None) -> None:
        self.reason, self.partial = reason, partial
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
    """

    def __init__(self, rollout: Rollout, version: int, *, published: bool = False) -> None:
        if not rollout.endpoints:
            raise InvalidInput(
                "rollout.endpoints: no server to generate with; name at least one, such as http://vllm:8000"
            )
        self._rollout, self.version = rollout, version
        self._label = str(version) if published else None
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._rollout.request_timeout),
            # Servers close idle connections after a few seconds: let go of them sooner, or a request meets the closing.
            connector=aiohttp.TCPConnector(limit=self._rollout.max_concurrent, keepalive_timeout=2.0),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._http is not None
        await self._http.close()

    async def generate(self, prompt_ids: Sequence[int], *, group_id: str, seed: int) -> Completion:
        """Samples one completion.

        Args:
            prompt_ids: tokens of the prompt.
            group_id: slots of one group go to one server, whose prefix cache then helps.
            seed: of the sampler.

        Raises:
            SlotFailure: the reason is `timeout`, `server_error`, `context_overflow`, `aborted` or `empty_completion`.
        """
        version = self.version
        endpoint = self._rollout.endpoints[_hash(group_id) % len(self._rollout.endpoints)]
        sampling = {
            "max_tokens": self._rollout.max_new_tokens,
            "temperature": self._rollout.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "logprobs": 0,
            "seed": seed,
        }
        status, text = await self._post(endpoint, {"token_ids": list(prompt_ids), "sampling_params": sampling})
        if status != HTTPStatus.OK:
            too_long = status == HTTPStatus.BAD_REQUEST and b"context length" in text
            raise SlotFailure(
                "context_overflow" if too_long else "server_error",
                f"{endpoint} answered {status}: {text[:300].decode(errors='replace')}",
            )
        return _completion(text, endpoint, version, self._label)

    async def _post(self, endpoint: str, body: dict[str, Any]) -> tuple[int, bytes]:
        assert self._http is not None, "use the client as an asynchronous context manager"
        try:
            async with self._http.post(f"{endpoint}/inference/v1/generate", json=body) as answer:
                return answer.status, await answer.read()
        except TimeoutError:
            raise SlotFailure(
                "timeout", f"{endpoint} gave no answer in request_timeout {self._rollout.request_timeout:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise SlotFailure("server_error", f"{endpoint}: {type(error).__name__}: {error}") from error


def slot_seed(seed: int, group_id: str, slot: int, segment: int = 0) -> int:
    """The sampler's seed of one segment of one slot: 31 bits, the same in every process.

    Args:
        seed: of the run.
        group_id: of the group.
        slot: 0..G-1.
        segment: 0, then one more after each resumption.
    """
    return _hash(f"{seed}\0{group_id}\0{slot}\0{segment}") & 0x7FFFFFFF


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
    done = Completion(ids, tuple(value for _, value in sampled), (version,) * len(ids), str(finish))
    if finish == "abort":
        raise SlotFailure("aborted", f"{endpoint} aborted the request after {len(ids)} tokens", partial=done)
    if not ids:
        raise SlotFailure("empty_completion", f"{endpoint} returned no token")
    return done


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
