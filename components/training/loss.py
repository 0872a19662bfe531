"""The policy loss of one micro-batch: clipped PPO at token or sequence level, already divided by the update's counts.

Sums over micro-batches and ranks give the update's loss: nothing here is a mean over a micro-batch. Log-probs come from
`logprob`, advantages from assembly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muster.config import Loss, Rejection, Training
from muster.training.rejection import reject, sequence_mean

if TYPE_CHECKING:
    from muster.training.engine import Objective
    from muster.training.microbatch import MicroBatch

_EXTREME = 20.0
"""Largest log ratio taken as it is: e^20 is far outside any clip, and exp of much more would make gradients NaN."""


@dataclass(frozen=True)
class Counts:
    """What the loss of one update is divided by; global over ranks and micro-batches, before any rejection.

    Attributes:
        tokens: valid tokens.
        sequences: rows with at least one valid token.
        slots: trainable slots.
        max_new_tokens: the completion budget of a slot.
    """

    tokens: int
    sequences: int
    slots: int
    max_new_tokens: int


def objective(micro: MicroBatch, prox: Tensor, counts: Counts, settings: Training) -> Objective:
    """What an engine minimises over one micro-batch: `policy_loss`, with the sum of entropies among the metrics.

    Args:
        micro: the micro-batch.
        prox: `[tokens]`, log-probs under the proximal policy.
        counts: of the whole update.
        settings: `training`.
    """

    def run(logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = policy_loss(
            logprobs,
            prox=prox,
            behave=micro.behave,
            advantages=micro.advantages,
            valid=micro.valid,
            sequence=micro.sequence,
            rows=micro.rows,
            counts=counts,
            settings=settings.loss,
            rejection=settings.rejection,
        )
        return loss, {**sums, "entropy": torch.where(micro.valid, entropies, 0.0).sum()}

    return run


def policy_loss(
    logprobs: Tensor,
    *,
    prox: Tensor,
    behave: Tensor,
    advantages: Tensor,
    valid: Tensor,
    sequence: Tensor,
    rows: int,
    counts: Counts,
    settings: Loss,
    rejection: Rejection | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the update's loss.

    With r = exp(logp - prox), or its geometric mean over the row at sequence level (GSPO, Zheng et al. 2025), and
    advantage A: L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); dual clip c bounds L by c |A| (Ye et al. 2020).
    L is multiplied by the behaviour weight exp(prox - behave) (decoupled PPO, Hilton et al. 2021).

    Aggregation: `token_mean` sum / tokens; `seq_mean` sum of each row's token mean / sequences; `fixed`
    sum / (slots x max_new_tokens) (Dr. GRPO, Liu et al. 2025).

    Args:
        logprobs: `[tokens]`, with gradient.
        prox, behave, advantages: `[tokens]`, constants.
        valid: `[tokens]` bool; other tokens contribute exactly 0, whatever their values.
        sequence: `[tokens]` int64, row of each token.
        rows: rows of the micro-batch.
        counts: of the whole update.
        settings: `training.loss`.
        rejection: `training.rejection`. With `prox: rollout` it looks at the current policy against the sampling one.

    Returns:
        The scalar to run backward on, and sums over valid tokens for the metrics, without gradient.
    """
    zero = torch.zeros_like(logprobs)
    logprobs_now = torch.where(valid, logprobs, zero)
    prox, behave = torch.where(valid, prox, zero), torch.where(valid, behave, zero)
    advantages = torch.where(valid, advantages, zero)

    log_ratio = logprobs_now - prox
    if settings.level == "sequence":
        log_ratio = torch.where(valid, sequence_mean(log_ratio, valid, sequence, rows)[sequence], zero)
        advantages = torch.where(valid, sequence_mean(advantages, valid, sequence, rows)[sequence], zero)
    ratio = torch.exp(log_ratio.clamp(-_EXTREME, _EXTREME))
    clipped_ratio = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    plain, clipped = -advantages * ratio, -advantages * clipped_ratio
    surrogate = torch.maximum(plain, clipped)
    if settings.dual_clip is not None:
        surrogate = torch.minimum(surrogate, settings.dual_clip * advantages.abs())

    trained = logprobs_now.detach() if settings.prox == "rollout" else prox
    weights, kept = reject(trained - behave, valid, sequence, rows, rejection)
    if settings.prox == "rollout":
        weights = valid.to(logprobs.dtype)
    per_token = torch.where(kept, surrogate * weights, zero)

    if settings.aggregation == "token_mean":
        loss = per_token.sum() / counts.tokens
    elif settings.aggregation == "fixed":
        loss = per_token.sum() / (counts.slots * counts.max_new_tokens)
    else:
        lengths = zero.new_zeros(rows).index_add(0, sequence, valid.to(zero.dtype)).clamp(min=1)
        loss = (per_token / lengths[sequence]).sum() / counts.sequences

    with torch.no_grad():
        drift = logprobs_now - behave
        sums = {
            "loss": loss.detach(),
            "clipped": (clipped > plain).sum(),
            "rejected": (valid & ~kept).sum(),
            "approx_kl": (drift.exp() - 1 - drift).sum(),
            "drift_signed": drift.sum(),
            "drift_absolute": drift.abs().sum(),
            "importance_weight": torch.where(valid, ratio, zero).sum(),
            "behaviour_weight": weights.sum(),
        }
    return loss, sums
