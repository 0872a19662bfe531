"""The FSDP2 engine: parameters, gradients and moments sharded over all ranks, float32 masters.

In bfloat16 the forward runs on a rounded copy, which is exactly what is exported and served. Each rank reads only its
own part of every file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from muster.config import RunConfig
from muster.errors import InvalidInput
from muster.training.engine import Kind, Objective, attention
from muster.training.logprob import token_logprobs
from muster.training.microbatch import MicroBatch
from muster.training.model import TensorFiles, build_on_meta, fill_buffers
from muster.training.ranks import Ranks

_PREFIX = "lm."


class Policy(nn.Module):
    """The language model, whose forward gives log-probs of chosen tokens instead of logits."""

    def __init__(self, lm: nn.Module, *, temperature: float, chunk: int, fp32_head: bool) -> None:
        """Wraps a model whose logits are one linear layer of its last hidden state."""
        super().__init__()
        self.lm = lm
        self._temperature, self._chunk, self._fp32_head = temperature, chunk, fp32_head
        self.padded = cast(Any, lm).config._attn_implementation != attention.NAME

    def forward(self, micro: MicroBatch, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies `[tokens]` of a micro-batch's loss tokens."""
        lm = cast(Any, self.lm)
        layout = {} if self.padded else {"lengths": micro.lengths}
        decoder = lm.get_decoder()
        hidden = decoder(micro.input_ids, position_ids=micro.position_ids, use_cache=False, **layout).last_hidden_state
        head = lm.get_output_embeddings()
        return token_logprobs(
            hidden.flatten(0, 1).index_select(0, micro.positions),
            head.weight,
            getattr(head, "bias", None),
            micro.labels,
            temperature=temperature or self._temperature,
            chunk=self._chunk,
            fp32_head=self._fp32_head,
        )


class FSDPEngine:
    """See `muster.training.engine.Engine`."""

    def __init__(self, config: RunConfig, source: Path, ranks: Ranks) -> None:
        """Shards the model in `source` over the ranks and reads its weights."""
        assert config.model is not None
        self._ranks, self._settings = ranks, config.training.optimizer
        lm, tied = build_on_meta(source)
        self.vocabulary = int(cast(Any, lm).get_input_embeddings().weight.shape[0])
        self.positions = int(getattr(cast(Any, lm).config, "max_position_embeddings", None) or 2**31)
        policy = Policy(
            lm,
            temperature=config.rollout.temperature if config.rollout else 1.0,
            chunk=config.training.logprobs_chunk_size,
            fp32_head=config.training.fp32_lm_head,
        )
        mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if config.model.dtype == "bfloat16" else None, reduce_dtype=torch.float32
        )
        blocks = set(getattr(lm, "_no_split_modules", None) or ())
        for module in lm.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh, mp_policy=precision)
        fully_shard(policy, mesh=mesh, mp_policy=precision)
        self._policy = policy
        for module in self._policy.modules():
            if isinstance(module, FSDPModule):
                # the loss is divided by global counts: gradients add up over ranks, they are not averaged
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._policy.to_empty(device=ranks.device)
        fill_buffers(lm, ranks.device)
        self._parameters = {
            name.removeprefix(_PREFIX): cast(DTensor, parameter) for name, parameter in self._policy.named_parameters()
        }
        files = TensorFiles(source)
        if tied:
            self._untie(lm, files)
        files.check(self.shapes())
        self._fill(self._parameters, files, prefix="")
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(),
            lr=self._settings.lr,
            betas=self._settings.betas,
            eps=self._settings.eps,
            weight_decay=self._settings.weight_decay,
        )
        for parameter in self._parameters.values():
            self._optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> full shape of every parameter."""
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def logprobs(self, micro: MicroBatch, *, temperature: float | None = None) -> Tensor:
        """Log-probs of a micro-batch, without gradient."""
        with torch.no_grad():
            logprobs, _ = self._policy(micro, temperature)
        return cast(Tensor, logprobs)

    def forward_backward(self, micro: MicroBatch, objective: Objective) -> dict[str, Tensor]:
        """Adds one micro-batch's gradient."""
        logprobs, entropies = self._policy(micro)
        loss, sums = objective(logprobs, entropies)
        loss.backward()  # type: ignore[no-untyped-call]
        return sums

    @torch.no_grad()
    def step(self, lr: float) -> tuple[float, bool]:
        """Clips by the global norm, steps, clears."""
        gradients = [cast(DTensor, p.grad).to_local() for p in self._parameters.values() if p.grad is not None]
        squares = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        for gradient in gradients:
            squares += torch.linalg.vector_norm(gradient).double() ** 2
        dist.all_reduce(squares)
        norm = math.sqrt(squares.item()) if math.isfinite(squares.item()) else math.nan
        applied = math.isfinite(norm)
        if applied:
            scale = min(1.0, self._settings.grad_clip / (norm + 1e-6))
            if scale < 1.0:
                torch._foreach_mul_(gradients, scale)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm, applied

    def full(self, kind: Kind) -> Iterator[tuple[str, Tensor | None]]:
        """Gathers one tensor after another."""
        for name, tensor in self._kept(kind).items():
            whole = cast(DTensor, tensor.detach()).full_tensor()
            yield name, whole.cpu() if self._ranks.rank == 0 else None

    def restore(self, kind: Kind, directory: Path) -> None:
        """Reads this rank's part of each tensor."""
        files = TensorFiles(directory)
        try:
            self._fill(self._kept(kind), files, prefix=f"{kind}.")
        except (KeyError, ValueError) as error:
            raise InvalidInput(f"{directory}: does not fit the model: {error}") from error

    def set_steps(self, steps: int) -> None:
        """Sets AdamW's step count."""
        for parameter in self._parameters.values():
            self._optimizer.state[parameter]["step"].fill_(steps)

    def _kept(self, kind: Kind) -> dict[str, DTensor]:
        if kind == "parameter":
            return self._parameters
        return {name: cast(DTensor, self._optimizer.state[p][kind]) for name, p in self._parameters.items()}

    def _untie(self, lm: nn.Module, files: TensorFiles) -> None:
        """The output layer of a tied model reads the embedding's tensor, and is its own from then on."""
        names = {id(module): name for name, module in lm.named_modules()}
        head = names[id(cast(Any, lm).get_output_embeddings())]
        embedding = names[id(cast(Any, lm).get_input_embeddings())]
        files.alias(f"{head}.weight", f"{embedding}.weight")

    @torch.no_grad()
    def _fill(self, tensors: dict[str, DTensor], files: TensorFiles, prefix: str) -> None:
        for name, tensor in tensors.items():
            rows, local = tensor.shape[0], tensor.to_local()
            # FSDP2 shards the first dimension as torch.chunk does
            size = -(-rows // self._ranks.world_size)
            start = min(rows, self._ranks.rank * size)
            end = min(rows, start + size)
            part = files.rows(prefix + name, start, end)
            if part.shape != local.shape:
                raise ValueError(
                    f"{prefix}{name}: this rank holds {list(local.shape)}, the file has {list(part.shape)}"
                )
            local.copy_(part)
