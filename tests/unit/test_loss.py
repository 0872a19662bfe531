"""Loss values against formulae written out by hand, and what masks, splits and rejection may and may not do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muster.config import Loss, Rejection
from muster.training.logprob import token_logprobs
from muster.training.loss import Counts, policy_loss
from muster.training.rejection import reject

LENGTHS = [12, 3, 7, 1, 12, 5]


def run(
    new: list[float],
    old: list[float],
    advantages: list[float],
    *,
    valid: list[bool] | None = None,
    sequence: list[int] | None = None,
    behave: list[float] | None = None,
    rejection: Rejection | None = None,
    counts: Counts | None = None,
    **settings: Any,
) -> tuple[float, list[float], dict[str, float]]:
    """Loss, gradient by token, and metric sums."""
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    valid = valid or [True] * len(new)
    sequence = sequence or [0] * len(new)
    rows = max(sequence) + 1
    used = {s for s, v in zip(sequence, valid, strict=True) if v}
    loss, sums = policy_loss(
        logprobs,
        prox=torch.tensor(old, dtype=torch.float64),
        behave=torch.tensor(behave or old, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        valid=torch.tensor(valid),
        sequence=torch.tensor(sequence),
        rows=rows,
        counts=counts or Counts(tokens=sum(valid), sequences=len(used), slots=rows, max_new_tokens=10),
        settings=Loss(**settings),
        rejection=rejection,
    )
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist(), {name: float(value) for name, value in sums.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "slope"),
    [
        (1.1, 2.0, None, -2.2, -2.2),  # inside the clip: the gradient of -A r is -A r
        (1.5, 2.0, None, -2.0 * 1.28, 0.0),  # too likely already, and good: clipped at 1 + clip_high
        (0.5, 2.0, None, -1.0, -1.0),  # unlikely and good: not clipped
        (0.5, -2.0, None, 2.0 * 0.8, 0.0),  # unlikely already, and bad: clipped at 1 - clip_low
        (1.5, -2.0, None, 3.0, 3.0),  # likely and bad: not clipped
        (5.0, -2.0, None, 10.0, 10.0),
        (5.0, -2.0, 3.0, 6.0, 0.0),  # dual clip bounds it by c |A|
        (5.0, 2.0, 3.0, -2.0 * 1.28, 0.0),  # and leaves good tokens alone
    ],
)
def test_clipping(ratio: float, advantage: float, dual: float | None, loss: float, slope: float) -> None:
    value, gradient, sums = run(
        [math.log(ratio) - 1], [-1.0], [advantage], clip_low=0.2, clip_high=0.28, dual_clip=dual
    )
    assert value == pytest.approx(loss)
    assert gradient[0] == pytest.approx(slope)
    assert sums["importance_weight"] == pytest.approx(ratio)


def test_sequence_level_takes_one_geometric_mean_ratio_a_row() -> None:
    """GSPO: s = exp(mean log ratio); loss is the mean over rows of -min(s A, clip(s) A)."""
    new, old = [-1.0, -1.1, -2.0], [-1.2, -1.2, -2.3]
    first, second = math.exp((0.2 + 0.1) / 2), math.exp(0.3)
    value, gradient, _ = run(
        new, old, [1.0, 1.0, -2.0], sequence=[0, 0, 1], level="sequence", aggregation="seq_mean", clip_high=0.5
    )
    assert value == pytest.approx((-first + 2 * second) / 2)
    assert gradient == pytest.approx([-first / 4, -first / 4, second])


@pytest.mark.parametrize(
    ("aggregation", "wanted"),
    [
        ("token_mean", -(1 + 2 + 3 + 10) / 4),
        ("seq_mean", -((1 + 2 + 3) / 3 + 10) / 2),
        ("fixed", -(1 + 2 + 3 + 10) / (2 * 10)),
    ],
)
def test_aggregations(aggregation: str, wanted: float) -> None:
    value, _, _ = run([-1.0] * 4, [-1.0] * 4, [1.0, 2.0, 3.0, 10.0], sequence=[0, 0, 0, 1], aggregation=aggregation)
    assert value == pytest.approx(wanted)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "fixed"])
@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf"), -1e30])
def test_an_all_masked_micro_batch_is_exactly_zero(level: str, aggregation: str, poison: float) -> None:
    value, gradient, sums = run(
        [-1.0, -2.0],
        [poison, -1.0],
        [poison, poison],
        valid=[False, False],
        level=level,
        aggregation=aggregation,
        dual_clip=3.0,
        counts=Counts(tokens=5, sequences=2, slots=2, max_new_tokens=10),
    )
    assert value == 0.0
    assert gradient == [0.0, 0.0]
    assert all(total == 0.0 for total in sums.values())


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "fixed"])
def test_one_micro_batch_of_six_equals_three_of_two(level: str, aggregation: str) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = [torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in LENGTHS]
    labels = [torch.randint(0, 11, (n,), generator=generator) for n in LENGTHS]
    old = [-2 + torch.randn(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    advantages = [torch.randn(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    weight = torch.randn(11, 8, generator=generator, dtype=torch.float64)
    counts = Counts(tokens=sum(LENGTHS), sequences=6, slots=6, max_new_tokens=12)

    def gradient(split: list[list[int]]) -> tuple[float, Tensor]:
        head = weight.clone().requires_grad_()
        total = 0.0
        for one in split:
            logprobs, _ = token_logprobs(
                torch.cat([hidden[i] for i in one]),
                head,
                None,
                torch.cat([labels[i] for i in one]),
                temperature=1.0,
                chunk=5,
            )
            loss, _ = policy_loss(
                logprobs,
                prox=torch.cat([old[i] for i in one]),
                behave=torch.cat([old[i] for i in one]),
                advantages=torch.cat([advantages[i] for i in one]),
                valid=torch.ones(len(logprobs), dtype=torch.bool),
                sequence=torch.cat([torch.full((LENGTHS[i],), row) for row, i in enumerate(one)]),
                rows=len(one),
                counts=counts,
                settings=Loss(level=level, aggregation=aggregation),
            )
            loss.backward()
            total += loss.item()
        assert head.grad is not None
        return total, head.grad

    whole, whole_gradient = gradient([[0, 1, 2, 3, 4, 5]])
    for split in ([[0, 1], [2, 3], [4, 5]], [[5], [0, 3], [1, 2, 4]]):
        value, parts = gradient(split)
        assert value == pytest.approx(whole, rel=1e-6)
        torch.testing.assert_close(parts, whole_gradient, rtol=1e-6, atol=1e-9)


def test_decoupled_loss_weighs_by_prox_over_behaviour() -> None:
    value, _, sums = run([-1.0], [-1.0], [2.0], behave=[-1.5], prox="recompute")
    assert value == pytest.approx(-2 * math.exp(0.5))
    assert sums["behaviour_weight"] == pytest.approx(math.exp(0.5))


def test_masking_narrows_the_sum_and_keeps_the_denominator() -> None:
    value, gradient, sums = run(
        [-1.0, -1.0], [-1.0, -1.0], [2.0, 4.0], behave=[-1.0, -3.0], prox="recompute", rejection=Rejection(upper=5.0)
    )
    assert value == pytest.approx(-2.0 / 2)  # e^2 is above 5: the second token is out, the count stays 2
    assert gradient == pytest.approx([-1.0, 0.0])
    assert sums["rejected"] == 1


def test_clamping_limits_the_weight() -> None:
    value, _, sums = run(
        [-1.0, -1.0],
        [-1.0, -1.0],
        [2.0, 4.0],
        behave=[-1.0, -3.0],
        prox="recompute",
        rejection=Rejection(action="clamp", upper=5.0),
    )
    assert value == pytest.approx(-(2.0 + 4.0 * 5.0) / 2)
    assert sums["rejected"] == 0


def test_without_a_prox_of_its_own_rejection_looks_at_the_current_policy() -> None:
    value, _, sums = run([-1.0, -1.0], [-1.0, -3.0], [2.0, -4.0], rejection=Rejection(upper=5.0))
    assert value == pytest.approx(-2.0 / 2)
    assert sums["rejected"] == 1


@pytest.mark.parametrize(
    ("metric", "wanted"),
    [("ratio", math.exp(0.3)), ("k1", -0.3), ("k2", 0.09 / 2), ("k3", math.exp(0.3) - 1 - 0.3)],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rejection_metrics_at_their_bound(metric: str, wanted: float, level: str) -> None:
    log_ratio, valid, sequence = torch.full((2,), 0.3).double(), torch.tensor([True, True]), torch.tensor([0, 0])
    for upper, kept in ((wanted + 1e-6, True), (wanted - 1e-6, False)):
        settings = Rejection(metric=metric, level=level, upper=upper)
        assert reject(log_ratio, valid, sequence, 1, settings)[1].tolist() == [kept, kept]


def test_sequence_level_rejection_takes_a_row_as_a_whole() -> None:
    log_ratio = torch.tensor([0.0, 4.0, 0.0, 0.0])
    weights, kept = reject(
        log_ratio,
        torch.tensor([True, True, True, False]),
        torch.tensor([0, 0, 1, 1]),
        2,
        Rejection(level="sequence", upper=5.0),
    )
    assert kept.tolist() == [False, False, True, False]  # geometric mean of the first row is e^2
    assert weights[0].item() == pytest.approx(math.exp(2.0))


@given(
    st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.floats(-3, 3), st.booleans()), min_size=1, max_size=12)
)
def test_what_masked_tokens_hold_changes_nothing(tokens: list[tuple[float, float, float, bool]]) -> None:
    new, old, advantages, valid = (list(column) for column in zip(*tokens, strict=True))
    counts = Counts(tokens=7, sequences=1, slots=1, max_new_tokens=10)
    value, gradient, _ = run(new, old, advantages, valid=valid, counts=counts)
    junk = [x if v else float("nan") for x, v in zip(old, valid, strict=True)]
    again, gradient_again, _ = run(new, junk, advantages, valid=valid, counts=counts)
    assert (value, gradient) == (again, gradient_again)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_logprobs_and_entropy_equal_log_softmax(temperature: float, chunk: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    bias, labels = torch.randn(11, dtype=torch.float64), torch.randint(0, 11, (7,))
    logprobs, entropies = token_logprobs(hidden, weight, bias, labels, temperature=temperature, chunk=chunk)
    reference = torch.log_softmax((hidden @ weight.T + bias) / temperature, -1)
    torch.testing.assert_close(logprobs, reference.gather(-1, labels[:, None])[:, 0])
    torch.testing.assert_close(entropies, -(reference.exp() * reference).sum(-1).detach())
    assert not entropies.requires_grad
    mixed = torch.arange(7, dtype=torch.float64)
    ours = torch.autograd.grad((logprobs * mixed).sum(), (hidden, weight))
    theirs = torch.autograd.grad((reference.gather(-1, labels[:, None])[:, 0] * mixed).sum(), (hidden, weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
