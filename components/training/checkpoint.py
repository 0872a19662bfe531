"""What survives a crash besides the exported weights: optimizer moments, the step count, float32 masters.

Tensors are stored whole, so that any number of ranks reads them. No weights for serving; those are `export`'s.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from muster.errors import InvalidInput
from muster.training.engine import Engine, Kind
from muster.training.files import appearing, keep_versions, write_tensors
from muster.training.ranks import Ranks


@dataclass(frozen=True)
class State:
    """The scalars of a checkpoint.

    Attributes:
        version: the version whose training state this is.
        optimizer_steps: updates applied since the run began.
        skipped: updates skipped since the run began.
        seed: `data.seed` of the run.
        world_size: number of ranks that wrote it.
        masters: whether float32 parameters are stored, because the exported ones are rounded.
    """

    version: int
    optimizer_steps: int
    skipped: int
    seed: int
    world_size: int
    masters: bool


def save(engine: Engine, state: State, ranks: Ranks, directory: Path) -> None:
    """Writes a checkpoint; the directory appears whole. Collective.

    Raises:
        DependencyDied: the storage failed.
    """
    kinds = _kinds(state)
    tensors = (tensor for kind in kinds for _, tensor in engine.full(kind))
    if not ranks.first:
        for _ in tensors:
            pass
        return
    shapes = {f"{kind}.{name}": shape for kind in kinds for name, shape in engine.shapes().items()}
    with appearing(directory) as part:
        whole = (tensor for tensor in tensors if tensor is not None)
        write_tensors(part / "optimizer.safetensors", shapes, "float32", whole)
        (part / "state.json").write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")


def load(engine: Engine, directory: Path, version: int) -> State:
    """Restores a checkpoint, written by any number of ranks. Collective.

    Raises:
        InvalidInput: there is none, it is of another version, or it does not fit the model.
    """
    path = directory / "state.json"
    try:
        state = State(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInput(f"{path}: cannot read the checkpoint to train version {version} from: {error}") from error
    if state.version != version:
        raise InvalidInput(f"{path}: version is {state.version}, but version {version} is to be trained")
    for kind in _kinds(state):
        engine.restore(kind, directory)
    engine.set_steps(state.optimizer_steps)
    return state


def collect_old(weights: Path, checkpoints: Path, *, version: int, keep: int) -> None:
    """Removes old versions after version `version` is complete.

    Of the weights the first, the previous and the new one stay (the base, what may still be served, what comes next);
    of the checkpoints the newest `keep`.
    """
    keep_versions(weights, {0, version - 1, version}, below=version)
    keep_versions(checkpoints, set(range(version - keep + 1, version + 1)), below=version)


def _kinds(state: State) -> tuple[Kind, ...]:
    """What a checkpoint holds for each parameter."""
    return ("parameter", "exp_avg", "exp_avg_sq") if state.masters else ("exp_avg", "exp_avg_sq")
