"""Normalised rewards -> advantages, where these need neither a critic nor a reference model (semantics.md).

With a KL penalty, a critic, or gamma or lambda other than 1, advantages need log-probs or values and are the trainer's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from muster.assembly.normalize import Layout, constant, deviation, divisor, segment_sums
from muster.config import Norm, RunConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def trainer_computes(config: RunConfig) -> str | None:
    """Why advantages are left to the trainer; None when assembly's are final."""
    estimator = config.estimator
    if config.algorithm == "ppo":
        return "a critic is used (algorithm ppo)"
    if estimator.kl_coef > 0:
        return f"a KL penalty is in the rewards (estimator.kl_coef {estimator.kl_coef:g})"
    if estimator.gamma != 1 or estimator.lam != 1:
        return f"rewards are discounted (estimator.gamma {estimator.gamma:g}, lam {estimator.lam:g})"
    return None


def normalize_advantages(advantage: Floats, valid: Ints, layout: Layout, norm: Norm | None) -> Floats:
    """Centres and scales advantages over valid tokens, of which each counts as one element.

    Args:
        advantage: [R] the value on every valid token of a row.
        valid: [R] valid tokens of each row.
        layout: rows, slots, groups.
        norm: `estimator.adv_norm`; leave-one-out is refused by the configuration.

    Returns:
        [R] the new value on every valid token of a row.
    """
    if norm is None:
        return advantage
    group_first = layout.slot_first[layout.group_first]
    group_rows = layout.rows_per_group
    tokens = valid.astype(np.float64)
    group_tokens, all_tokens = np.add.reduceat(valid, group_first), np.array([valid.sum()])

    centre = np.zeros(len(advantage))
    if norm.mean_level == "group":
        means = segment_sums(advantage * tokens, group_first) / np.maximum(group_tokens, 1)
        centre = np.where(constant(advantage, group_first), advantage, np.repeat(means, group_rows))
    elif norm.mean_level == "batch":
        mean = (advantage * tokens).sum() / max(int(all_tokens[0]), 1)
        centre = np.where(constant(advantage, np.zeros(1, dtype=np.int64)), advantage, mean)
    centred = advantage - centre

    if norm.std_level is None:
        return centred
    squares = centred**2 * tokens
    if norm.std_level == "group":
        by_group = deviation(segment_sums(squares, group_first), group_tokens, norm.std_unbiased)
        sigma = np.repeat(by_group, group_rows)
    else:
        whole = deviation(np.array([squares.sum()]), all_tokens, norm.std_unbiased)
        sigma = np.repeat(whole, len(advantage))
    return centred / divisor(sigma, norm.eps)
