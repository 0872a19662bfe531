"""Shows a run to the person who waits for it: a live bar on a terminal, a line an iteration elsewhere; on stderr."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class RunProgress:
    """Turns the events of a run's diary into what a person wants to see. Use as a context manager.

    Args:
        console: where to write; a live bar is shown only if it is a terminal.
        iterations: to be finished at the end.
    """

    def __init__(self, console: Console, iterations: int) -> None:
        self._console, self._iterations = console, iterations
        self._done = 0
        self._collected: dict[str, Any] = {}
        self._iteration_seconds: list[float] = []
        self._began = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=float(iterations), facts="", left="")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._bar.console.print(text, highlight=False, soft_wrap=True)

    def doing(self, text: str, share: float | None = None) -> None:
        """What is going on now, and how much of the run is done by it."""
        self._bar.update(self._task, description=text, completed=share if share is not None else float(self._done))

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Shows one event."""
        kind = event["kind"]
        if kind == "prepared":
            self._done = event["finished_iterations"]
            self._began = time.monotonic()
            if self._done:
                self.say(f"  found {self._done} of {event['iterations']} iterations finished; going on from there")
            self.doing("preparing")
        elif kind == "collecting":
            part = 0.6 * event["trainable"] / max(1, event["target"])
            self.doing(f"iteration {event['iteration'] + 1}/{self._iterations}: collecting", self._done + part)
        elif kind == "collected":
            self._collected = dict(event)
            if event["resumed_groups"]:
                self.say(
                    f"  found {event['resumed_groups']} finished groups of iteration {event['iteration'] + 1}; kept"
                )
            self.doing(f"iteration {event['iteration'] + 1}/{self._iterations}: training", self._done + 0.6)
        elif kind == "trained":
            self._done = event["iteration"] + 1
            self._iteration_seconds.append(time.monotonic() - self._began)
            self._began = time.monotonic()
            self._finished_iteration(event)
        elif kind == "evaluated":
            reward = "nothing could be graded" if event["reward"] is None else f"reward {event['reward']:.3f}"
            spread = "" if event["standard_error"] is None else f" ± {event['standard_error']:.3f}"
            self.say(f"  version {event['version']} on {event['prompts']} held prompts: {reward}{spread}")
            self._began = time.monotonic()

    def _finished_iteration(self, event: Mapping[str, Any]) -> None:
        rollout = self._collected
        left = self._seconds_left()
        facts = ""
        if rollout.get("iteration") == event["iteration"]:
            reward = "-" if rollout["reward"] is None else f"{rollout['reward']:.3f}"
            lost = rollout["slots"] - rollout["usable"]
            speed = rollout["tokens"] / rollout["seconds"] if rollout["seconds"] else 0.0
            facts = f"reward {reward}  usable {rollout['usable']}  lost {lost}  {speed:,.0f} tok/s"
        self._bar.update(self._task, completed=float(self._done), facts=facts, left=left)
        self.say(f"  iteration {self._done:>3}/{self._iterations}  {facts}  {left}".rstrip())

    def _seconds_left(self) -> str:
        remaining = self._iterations - self._done
        if not remaining or not self._iteration_seconds:
            return ""
        recent = self._iteration_seconds[-5:]
        return f"about {_duration(remaining * sum(recent) / len(recent))} left"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"
