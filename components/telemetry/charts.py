"""The curves of the report, as inline SVG.

Each function takes the record of a run and returns an SVG element, or a sentence where there is nothing to draw.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from muster.groups import FAILURE_REASONS, GROUP_OUTCOMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from muster.telemetry.report import RunRecord

_INK, _MUTED = "#1f2933", "#7b8794"
_COLOURS = (
    "#2563a8",
    "#e08e2b",
    "#3f9b6c",
    "#b4485a",
    "#7a5ea8",
    "#8a6d3b",
    "#4aa3b5",
    "#98a2ad",
    "#c2a83e",
    "#5c6b73",
    "#d07ba6",
)
_OUTCOME_COLOURS = dict(
    zip(GROUP_OUTCOMES, ("#2563a8", "#86b3dc", "#e08e2b", "#c2a83e", "#b4485a", "#98a2ad", "#7a5ea8"), strict=True)
)
_NOTHING = Markup("<p class='none'>Nothing to show yet.</p>")


def reward(record: RunRecord) -> Markup:
    """Mean reward of training rollouts by iteration, and of held prompts where measured."""
    points = [(it.number, it.collection["reward"]) for it in record.iterations if it.collection is not None]
    points = [(k, value) for k, value in points if value is not None]
    held = [
        (e["version"], e["reward"], e["standard_error"] or 0.0) for e in record.evaluations if e["reward"] is not None
    ]
    if not points and not held:
        return _NOTHING
    figure, axes = _axes()
    if points:
        axes.plot(
            *zip(*points, strict=True),
            color=_COLOURS[0],
            marker="o",
            markersize=4,
            label="training rollouts (usable samples)",
        )
    if held:
        versions, rewards, errors = zip(*held, strict=True)
        axes.errorbar(
            versions,
            rewards,
            yerr=errors,
            color=_COLOURS[1],
            fmt="D",
            capsize=4,
            label="held prompts, ± standard error",
        )
    _label(axes, "weight version", "mean reward")
    if all(0 <= value <= 1 for _, value, *_ in [*points, *held]):
        axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, loc="lower right")
    return _svg(figure, "Mean reward by weight version")


def groups(record: RunRecord) -> Markup:
    """What became of the groups, by iteration."""
    rows = [(it.number, it.collection["groups"]) for it in record.iterations if it.collection is not None]
    names = [name for name in GROUP_OUTCOMES if any(counts.get(name) for _, counts in rows)]
    series = [
        (name.replace("_", " "), [counts.get(name, 0) for _, counts in rows], _OUTCOME_COLOURS[name]) for name in names
    ]
    return _stacked([k for k, _ in rows], series, "groups", "Group outcomes by iteration")


def failures(record: RunRecord) -> Markup:
    """Why slots were lost, by iteration."""
    rows = [(it.number, it.collection["failures"]) for it in record.iterations if it.collection is not None]
    names = [name for name in FAILURE_REASONS if any(counts.get(name) for _, counts in rows)]
    series = [
        (name.replace("_", " "), [counts.get(name, 0) for _, counts in rows], _COLOURS[FAILURE_REASONS.index(name)])
        for name in names
    ]
    return _stacked([k for k, _ in rows], series, "lost samples", "Lost samples by reason and iteration")


def masked(record: RunRecord) -> Markup:
    """Share of samples lost, and of tokens in the batch that add no loss."""
    lost = [
        (it.number, 1 - it.collection["usable"] / it.collection["slots"])
        for it in record.iterations
        if it.collection is not None and it.collection["slots"]
    ]
    tokens = [(it.number, it.summary["tokens"]["masked_ratio"]) for it in record.iterations if it.summary is not None]
    if not lost and not tokens:
        return _NOTHING
    figure, axes = _axes()
    for points, colour, label in ((lost, _COLOURS[3], "samples lost"), (tokens, _COLOURS[0], "batch tokens masked")):
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=label)
    _label(axes, "iteration", "share")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(frameon=False)
    return _svg(figure, "Share of samples lost and of tokens masked")


def gaps(record: RunRecord) -> Markup:
    """Whether samples are lost at random: reward of groups without losses minus that of groups with some."""
    points = [
        (it.number, it.summary["bias"]["failure_reward_gap"])
        for it in record.iterations
        if it.summary is not None and it.summary["bias"]["failure_reward_gap"] is not None
    ]
    if not points:
        return _NOTHING
    figure, axes = _axes()
    axes.axhline(0, color=_MUTED, linewidth=0.8)
    axes.plot(*zip(*points, strict=True), color=_COLOURS[4], marker="o", markersize=3)
    _label(axes, "iteration", "reward gap")
    limit = 1.2 * max(0.1, *(abs(value) for _, value in points))
    axes.set_ylim(-limit, limit)
    return _svg(figure, "Reward of groups without losses minus that of groups with losses")


def lengths(record: RunRecord) -> Markup:
    """Mean length of usable samples and of failed ones, as far as those got."""
    figure, axes = _axes()
    drawn = False
    for key, colour, label in (
        ("usable_mean_length", _COLOURS[0], "usable samples"),
        ("failed_mean_length", _COLOURS[3], "failed samples, as far as they got"),
    ):
        points = [(it.number, it.summary["bias"][key]) for it in record.iterations if it.summary is not None]
        points = [(k, value) for k, value in points if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=label)
            drawn = True
    if not drawn:
        return _NOTHING
    _label(axes, "iteration", "completion tokens")
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.legend(frameon=False, loc="lower right")
    return _svg(figure, "Mean length of usable and of failed samples")


def optimisation(record: RunRecord) -> Markup:
    """Entropy and KL of each update."""
    updates = [u for it in record.iterations if it.training is not None for u in it.training["updates"]]
    if not updates:
        return _NOTHING
    figure, axes = _axes()
    for key, colour, label in (
        ("entropy", _COLOURS[2], "entropy (nats)"),
        ("approx_kl", _COLOURS[3], "KL to the sampling policy (nats)"),
    ):
        points = [(n, u[key]) for n, u in enumerate(updates, start=1) if u.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.2, label=label)
    _label(axes, "optimizer step", "nats per token")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return _svg(figure, "Entropy and KL by optimizer step")


ALL: dict[str, Callable[[RunRecord], Markup]] = {
    "reward": reward,
    "groups": groups,
    "failures": failures,
    "masked": masked,
    "gaps": gaps,
    "lengths": lengths,
    "optimisation": optimisation,
}
"""Name in the template -> chart."""


def _stacked(numbers: Sequence[int], series: Sequence[tuple[str, Sequence[int], str]], unit: str, title: str) -> Markup:
    if not series:
        return _NOTHING
    figure, axes = _axes()
    base = [0] * len(numbers)
    for label, values, colour in series:
        axes.bar(numbers, values, bottom=base, color=colour, width=0.8, label=label)
        base = [a + b for a, b in zip(base, values, strict=True)]
    _label(axes, "iteration", unit)
    figure.legend(frameon=False, ncols=min(4, len(series)), loc="outside upper center")
    return _svg(figure, title)


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.2, 3.1), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, labelcolor=_INK)
    return figure, axes


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, color=_INK)
    axes.set_ylabel(y, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _svg(figure: Figure, title: str) -> Markup:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    element = svg[svg.index("<svg ") :]
    return Markup(f'<svg role="img" aria-label="{title}" ' + element.removeprefix("<svg "))  # noqa: S704  # our own drawing
