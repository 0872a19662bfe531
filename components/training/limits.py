"""What the trainer does not do, and settings that make no sense together: all found before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from muster.config import RunConfig
from muster.errors import InvalidInput, NotBuilt


def check(config: RunConfig, world_size: int) -> None:
    """Refuses a configuration that the trainer cannot follow.

    Raises:
        NotBuilt: exactly one thing is asked for that is not built.
        InvalidInput: every fault, one line each, when there are several.
    """
    config.require("run", "model")
    faults = [*_not_built(config), *_senseless(config, world_size)]
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise InvalidInput([line for fault in faults for line in fault.faults])


def _not_built(config: RunConfig) -> Iterator[InvalidInput]:
    training, estimator = config.training, config.estimator
    if training.engine != "fsdp":
        yield NotBuilt(f"training.engine: {training.engine}", "set it to fsdp")
    for name in ("tp", "pp"):
        if getattr(training.parallel, name) > 1:
            yield NotBuilt(
                f"training.parallel.{name}: {getattr(training.parallel, name)}",
                "set it to 1: fsdp shards over all ranks",
            )
    if training.lora is not None:
        yield NotBuilt("training.lora", "leave it out: all weights are trained")
    if training.loss.prox == "interpolate":
        yield NotBuilt("training.loss.prox: interpolate", "set it to recompute or rollout")
    if config.algorithm == "ppo":
        yield NotBuilt("algorithm: ppo (its critic)", "use grpo, dr_grpo, rloo, dapo or gspo")
    elif (estimator.gamma, estimator.lam) != (1.0, 1.0):
        yield NotBuilt(f"estimator.gamma {estimator.gamma:g} with lam {estimator.lam:g}", "set both to 1")
    if estimator.kl_coef > 0:
        yield NotBuilt(f"estimator.kl_coef: {estimator.kl_coef:g}", "set it to 0")


def _senseless(config: RunConfig, world_size: int) -> Iterator[InvalidInput]:
    training, rejection = config.training, config.training.rejection
    if training.parallel.dp not in ("auto", world_size):
        yield InvalidInput(
            f"training.parallel.dp: is {training.parallel.dp}, but the job has {world_size} ranks; set it to auto"
        )
    if training.loss.aggregation == "fixed" and config.rollout is None:
        yield InvalidInput(
            "rollout: training.loss.aggregation fixed divides by rollout.max_new_tokens; add the section"
        )
    if rejection is not None and rejection.action == "clamp":
        if rejection.metric != "ratio":
            yield InvalidInput(
                f"training.rejection.metric: is {rejection.metric}, but clamp limits the weight itself; set ratio, or "
                "action mask"
            )
        if training.loss.prox == "rollout":
            yield InvalidInput(
                "training.rejection.action: clamp limits the weight exp(prox - rollout), which is 1 with "
                "training.loss.prox rollout; set prox to recompute, or action to mask"
            )
    if rejection is not None and rejection.lower is not None and rejection.lower > rejection.upper:
        yield InvalidInput(
            f"training.rejection.lower: is {rejection.lower:g}, above upper {rejection.upper:g}: nothing would be kept"
        )
