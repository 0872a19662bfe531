"""Log-probabilities and entropies of given tokens from hidden states, without the whole `[tokens, vocabulary]` at once.

Chunks of tokens go through the output layer one after another; backward computes each chunk's logits again. Vocabulary
parallelism is not here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    temperature: float,
    chunk: int,
    fp32_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `labels` under softmax(logits / temperature), in float32 (float64 stays float64).

    Args:
        hidden: `[tokens, hidden]`, the states that predict the labels; at least one token.
        weight: `[vocabulary, hidden]` of the output layer.
        bias: `[vocabulary]`, or None.
        labels: `[tokens]` int64.
        temperature: the sampling temperature, above 0.
        chunk: tokens whose logits are alive at once.
        fp32_head: compute the logits themselves in float32.

    Returns:
        Log-probabilities `[tokens]`, and entropies in nats `[tokens]` that carry no gradient.
    """
    pieces = range(0, labels.shape[0], chunk)
    outputs = []
    for start in pieces:
        part = (hidden[start : start + chunk], weight, bias, labels[start : start + chunk], temperature, fp32_head)
        if len(pieces) > 1 and torch.is_grad_enabled():
            outputs.append(checkpoint(_chunk, *part, use_reentrant=False))
        else:
            outputs.append(_chunk(*part))
    logprobs, entropies = zip(*outputs, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, fp32_head: bool
) -> tuple[Tensor, Tensor]:
    if fp32_head:
        hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if logits.dtype != torch.float64:
        logits = logits.float()
    logits = logits / temperature
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - normaliser
    with torch.no_grad():
        entropies = normaliser - (torch.exp(logits - normaliser.unsqueeze(-1)) * logits).sum(-1)
    return logprobs, entropies
