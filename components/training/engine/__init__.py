"""How a model is sharded, run and stepped: one small interface, one file an engine.

The trainer knows only `Engine`. Every method is collective: all ranks call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from muster.config import RunConfig
from muster.errors import NotBuilt

if TYPE_CHECKING:
    from torch import Tensor

    from muster.training.microbatch import MicroBatch
    from muster.training.ranks import Ranks

Kind = Literal["parameter", "exp_avg", "exp_avg_sq"]
"""What is kept for each parameter: its float32 master value and AdamW's two moments."""

Objective = Callable[["Tensor", "Tensor"], tuple["Tensor", dict[str, "Tensor"]]]
"""Log-probs and entropies of a micro-batch's tokens -> its share of the loss, and sums for the metrics."""


class Engine(Protocol):
    """A policy and its optimizer, spread over the ranks."""

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding: token ids are below it."""

    @property
    def positions(self) -> int:
        """The longest sequence the model takes (`max_position_embeddings`)."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name, as in the model's files, -> full shape of every parameter, in a fixed order."""

    def logprobs(self, micro: MicroBatch, *, temperature: float | None = None) -> Tensor:
        """Log-probs `[tokens]` of a micro-batch, without gradient; at the training temperature unless told."""

    def forward_backward(self, micro: MicroBatch, objective: Objective) -> dict[str, Tensor]:
        """Adds the gradient of one micro-batch, summed (not averaged) over ranks, and returns the objective's sums."""

    def step(self, lr: float) -> tuple[float, bool]:
        """Clips, steps and clears the gradient.

        Returns:
            The global gradient norm before clipping, and whether the step was applied: a non-finite norm changes
            nothing, on every rank alike.
        """

    def full(self, kind: Kind) -> Iterator[tuple[str, Tensor | None]]:
        """One whole float32 tensor after another, on the CPU of rank 0; None on the others."""

    def restore(self, kind: Kind, directory: Path) -> None:
        """Reads this rank's part of every tensor from safetensors files that hold `{kind}.{name}` whole."""

    def set_steps(self, steps: int) -> None:
        """Sets the number of optimizer steps applied so far (AdamW's bias correction)."""


def build(config: RunConfig, source: Path, ranks: Ranks) -> Engine:
    """The configured engine with the weights in `source`.

    Args:
        config: the run.
        source: a Hugging Face model directory with safetensors.
        ranks: this process among the others.

    Raises:
        InvalidInput: `source` is not a model that can be trained; the message names the file and what is wrong.
        NotBuilt: an engine that is not built.
    """
    if config.training.engine == "fsdp":
        from muster.training.engine.fsdp import FSDPEngine

        return FSDPEngine(config, source, ranks)
    raise NotBuilt(f"training.engine: {config.training.engine}", "set it to fsdp")
