"""What is done with tokens whose trained and sampled probabilities are too far apart (semantics.md, "Loss").

The log ratio is log(trained / sampled). Masking narrows what the loss sums over, never what it divides by; clamping
limits the behaviour weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muster.config import Rejection


def reject(
    log_ratio: Tensor, valid: Tensor, sequence: Tensor, rows: int, settings: Rejection | None
) -> tuple[Tensor, Tensor]:
    """Behaviour weights after clamping, and the mask after rejection.

    Metrics of a token with r = exp(log_ratio), drawn from the sampling policy: `ratio` r, and the estimators of
    KL(sampled || trained) k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r (Schulman, "Approximating KL
    divergence").
    At sequence level `ratio` is the geometric mean over the row's valid tokens, the others are means.

    Args:
        log_ratio: `[tokens]`, without gradient.
        valid: `[tokens]` bool.
        sequence: `[tokens]` int64, row of each token.
        rows: number of rows.
        settings: None rejects nothing.

    Returns:
        Weights `[tokens]` exp(log_ratio), clamped when asked, 0 where not valid; and the narrowed mask `[tokens]`.
    """
    log_ratio = torch.where(valid, log_ratio, 0.0)
    if settings is None:
        return torch.where(valid, log_ratio.exp(), 0.0), valid
    if settings.metric == "ratio":
        if settings.level == "sequence":
            log_ratio = sequence_mean(log_ratio, valid, sequence, rows)[sequence]
        measure = log_ratio.exp()
    else:
        measure = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - 1 - log_ratio}[settings.metric]
        if settings.level == "sequence":
            measure = sequence_mean(measure, valid, sequence, rows)[sequence]
    weights = log_ratio.exp()
    if settings.action == "clamp":
        return torch.where(valid, weights.clamp(min=settings.lower, max=settings.upper), 0.0), valid
    kept = valid & (measure <= settings.upper)
    if settings.lower is not None:
        kept &= measure >= settings.lower
    return torch.where(valid, weights, 0.0), kept


def sequence_mean(values: Tensor, valid: Tensor, sequence: Tensor, rows: int) -> Tensor:
    """Mean over the valid tokens of each row; 0 for a row without any. `[tokens]` -> `[rows]`."""
    totals = values.new_zeros(rows).index_add(0, sequence, torch.where(valid, values, 0.0))
    counts = values.new_zeros(rows).index_add(0, sequence, valid.to(values.dtype))
    return totals / counts.clamp(min=1)
