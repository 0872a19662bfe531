"""The learning rate, counted in optimizer steps over the whole run: warm-up, then constant, linear or cosine decay."""

from __future__ import annotations

import math

from muster.config import Optimizer


def learning_rate(step: int, total: int, settings: Optimizer) -> float:
    """Learning rate of optimizer step `step` (0 is the first).

    During warm-up it rises linearly and reaches `lr` on the last warm-up step; then it decays to
    `min_lr_ratio * lr` at step `total` and stays there.

    Args:
        step: optimizer steps applied before this one.
        total: optimizer steps of the whole run (`training.steps * training.updates_per_batch`).
        settings: `training.optimizer`.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    progress = min(1.0, (step - settings.warmup_steps) / max(1, total - settings.warmup_steps))
    share = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * share)
