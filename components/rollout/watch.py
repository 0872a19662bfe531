"""What ends a collection from outside: a server that died, a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp

from muster.errors import DependencyDied, Interrupted

T = TypeVar("T")

_HEALTH_SECONDS = 1.0
_HEALTH_FAILURES = 3
_HEALTH_TIMEOUT = 5.0


@contextlib.asynccontextmanager
async def watched(endpoints: Sequence[str]) -> AsyncIterator[None]:
    """Watches the servers while the block runs, and ends it when one has died.

    Raises:
        DependencyDied: a server failed its health check three times in a row.
    """
    body = asyncio.current_task()
    assert body is not None
    death: list[str] = []

    async def watch(endpoint: str) -> None:
        failures = 0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT)) as http:
            while failures < _HEALTH_FAILURES:
                await asyncio.sleep(_HEALTH_SECONDS)
                problem = await _problem(http, endpoint)
                failures = failures + 1 if problem else 0
        death.append(f"the server {endpoint} died while rollouts were collected: its health check {problem}")
        body.cancel()

    watches = [asyncio.create_task(watch(endpoint)) for endpoint in endpoints]
    try:
        yield
    except asyncio.CancelledError:
        if not death:
            raise
        body.uncancel()
        raise DependencyDied(death[0]) from None
    finally:
        for task in watches:
            task.cancel()


async def until_healthy(endpoints: Sequence[str]) -> None:
    """Returns when every server is healthy; in a `watched` block one that stays away ends the block meanwhile."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT)) as http:
        for endpoint in endpoints:
            while await _problem(http, endpoint):
                await asyncio.sleep(_HEALTH_SECONDS)


async def _problem(http: aiohttp.ClientSession, endpoint: str) -> str | None:
    """What is wrong with a server, if anything. One that takes long is busy: slots have time limits of their own."""
    try:
        async with http.get(f"{endpoint}/health") as answer:
            return None if answer.status == HTTPStatus.OK else f"answered {answer.status}"
    except TimeoutError:
        return None
    except (aiohttp.ClientError, OSError) as error:
        return f"failed with {type(error).__name__}: {error}"


def run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine; SIGINT and SIGTERM cancel it.

    Raises:
        Interrupted: a signal came; the coroutine has cleaned up by then.
    """

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        caught: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            caught.append(number)
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            return await work
        except asyncio.CancelledError:
            if not caught:
                raise
            raise Interrupted(f"stopped by {caught[0].name}") from None
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    return asyncio.run(main())
