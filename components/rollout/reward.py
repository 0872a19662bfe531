"""Verifiable rewards: user functions run in worker processes, each call with a time limit, outside the event loop.

A function that raises or exceeds its time fails its slot (semantics, rule 10): never a silent 0.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as WorkerTimeout
from functools import cache
from typing import Any

from pebble import ProcessExpired, ProcessPool

from muster.config import Reward
from muster.errors import InvalidInput


class RewardError(Exception):
    """A reward function raised, died, or returned something that is not a number."""


class RewardTimeout(Exception):
    """A reward function exceeded `rollout.reward_timeout`; its process was killed."""


class RewardPool:
    """Scores completions in worker processes. Use as a context manager.

    Args:
        rewards: the functions and their weights; a slot's reward is the weighted sum.
        timeout: seconds for one completion, all functions together.
        workers: processes.

    Raises:
        InvalidInput: a function cannot be imported or is not callable.
    """

    def __init__(self, rewards: Sequence[Reward], timeout: float, workers: int) -> None:
        check_rewards(rewards)
        self._terms = tuple((reward.name, reward.weight, dict(reward.options)) for reward in rewards)
        self._timeout = timeout
        self._pool = ProcessPool(
            max_workers=workers, initializer=_worker_start, context=multiprocessing.get_context("spawn")
        )

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.stop()
        self._pool.join(timeout=5)

    async def score(self, prompt: str, completion: str, record: Mapping[str, Any]) -> float:
        """The weighted sum of all reward functions; may be NaN or infinite, which the caller must judge.

        Args:
            prompt: text of the prompt.
            completion: text of the completion.
            record: the prompt's record from the prompt file (answers, tests and the like).

        Raises:
            RewardError: a function raised or its process died; the text is the function's own.
            RewardTimeout: the time limit passed.
        """
        future = self._pool.schedule(
            _score, args=(self._terms, prompt, completion, dict(record)), timeout=self._timeout
        )
        try:
            return float(await asyncio.wrap_future(future))
        except WorkerTimeout:
            raise RewardTimeout(f"no reward after {self._timeout:g} s") from None
        except ProcessExpired as error:
            raise RewardError(f"the reward process died with exit code {error.exitcode}") from None
        except asyncio.CancelledError:
            future.cancel()
            raise
        except Exception as error:
            raise RewardError(f"{type(error).__name__}: {error}") from error


def check_rewards(rewards: Sequence[Reward]) -> None:
    """Checks that there are reward functions and that they can be imported.

    Raises:
        InvalidInput: one line for each that cannot.
    """
    if not rewards:
        raise InvalidInput("rollout.reward: at least one reward function is needed, such as {name: my.module:score}")
    faults = [fault for reward in rewards if (fault := _import_fault(reward.name))]
    if faults:
        raise InvalidInput(faults)


def _score(
    terms: Sequence[tuple[str, float, Mapping[str, Any]]], prompt: str, completion: str, record: Mapping[str, Any]
) -> float:
    """Runs in the worker."""
    total = 0.0
    for name, weight, options in terms:
        value = _function(name)(prompt=prompt, completion=completion, record=record, **options)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} returned {value!r}; a reward is a number")
        total += weight * value
    return total if math.isfinite(total) else math.nan


def _worker_start() -> None:
    """Ctrl-C is for the collector, which then stops its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@cache
def _function(name: str) -> Callable[..., float]:
    module, _, attribute = name.partition(":")
    function: Callable[..., float] = getattr(importlib.import_module(module), attribute)
    return function


def _import_fault(name: str) -> str | None:
    try:
        function = _function(name)
    except (ImportError, AttributeError) as error:
        return f"rollout.reward: cannot import {name!r}: {error}"
    return None if callable(function) else f"rollout.reward: {name!r} is not callable"
