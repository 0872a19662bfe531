"""The run configuration (`run.yaml`): every key, its default, its limits, validated whole before anything starts.

`load` is the only way in. It resolves the `algorithm` preset, reports all faults together, names the nearest known key
for an unknown one, and returns a frozen `RunConfig`. Nothing here knows how a setting is used.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from muster.errors import InvalidInput
from muster.groups import FAILURE_REASONS, resolve_minimum

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Algorithm = Literal["grpo", "dr_grpo", "rloo", "dapo", "gspo", "reinforce_pp", "ppo"]
Level = Literal["group", "batch"]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values are final."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Run(Section):
    """Identity of the run; everything it writes is below `root`."""

    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
    root: Path


class Storage(Section):
    """Where weights and checkpoints live, seen by trainer and servers alike."""

    pvc: str | None = None
    mount_path: Path = Path("/muster")
    uri: str | None = None


class Model(Section):
    """The policy to start from: a Hugging Face model directory, and the dtype it is trained and served in."""

    path: Path
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class Data(Section):
    """Prompts and how they are cut into batches."""

    prompts: Path
    held_prompts: Path | None = None
    seed: int = 0
    shuffle: bool = True
    groups_per_batch: Count = 128
    dynamic_batch: bool = False
    max_attempts_per_prompt: Count = 3


class Group(Section):
    """Group size, and what is done with lost slots."""

    n_samples: Count = 8
    min_usable_group_size: int | None = None
    drop_incomplete_group: bool = False
    failures: dict[str, Literal["drop"] | float] = {}

    @field_validator("failures")
    @classmethod
    def _known_reasons(cls, value: dict[str, Literal["drop"] | float]) -> dict[str, Literal["drop"] | float]:
        for reason in value:
            if reason not in FAILURE_REASONS:
                raise ValueError(f"unknown reason {reason!r}{nearest(reason, FAILURE_REASONS)}")
        return value


class Norm(Section):
    """Centre and scale of a normalisation (semantics.md, "Normalisation")."""

    mean_level: Level | None = None
    std_level: Level | None = None
    mean_leave1out: bool = False
    std_unbiased: bool = True
    eps: Positive = 1e-5

    @property
    def uses_group_statistics(self) -> bool:
        """Whether a group mean or a group standard deviation is taken."""
        return "group" in (self.mean_level, self.std_level)


class Overlong(Section):
    """Penalty for completions that use the last `buffer_tokens` of the budget."""

    buffer_tokens: Count
    factor: NonNegative


class Estimator(Section):
    """Rewards -> advantages."""

    reward_norm: Norm | None = None
    adv_norm: Norm | None = None
    reward_bias: float = 0.0
    reward_scale: float = 1.0
    reward_clip: Positive = 20.0
    overlong: Overlong | None = None
    filter_zero_variance: bool = False
    kl_coef: NonNegative = 0.0
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0

    @field_validator("adv_norm")
    @classmethod
    def _no_leave_one_out(cls, value: Norm | None) -> Norm | None:
        if value is not None and value.mean_leave1out:
            raise ValueError("mean_leave1out is for rewards; over the tokens of a batch it is refused, set it to false")
        return value

    @property
    def uses_group_statistics(self) -> bool:
        """Whether rewards or advantages use a group mean or a group standard deviation."""
        return any(norm is not None and norm.uses_group_statistics for norm in (self.reward_norm, self.adv_norm))


class Reward(Section):
    """A verifiable reward: an importable function, its weight in the sum, and keyword arguments passed to it."""

    name: Annotated[str, StringConstraints(pattern=r"^[\w.]+:\w+$")]
    weight: float = 1.0
    options: dict[str, Any] = {}


class Faults(Section):
    """Faults that a proxy in front of our own server injects, to rehearse a bad night.

    `drop` is the share of generation requests whose connection is cut, `delay` the share that is held back for
    `delay_seconds`.
    """

    drop: Annotated[float, Field(ge=0, lt=1)] = 0.0
    delay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    delay_seconds: Positive = 30.0

    @model_validator(mode="after")
    def _shares(self) -> Faults:
        if self.drop + self.delay >= 1:
            raise ValueError(f"drop + delay is {self.drop + self.delay:g}; together they must stay below 1")
        return self


class Server(Section):
    """A vLLM server that we start, watch and stop ourselves (local runs)."""

    port: Port = 0
    max_model_len: Count = 1024
    kv_cache_gb: Positive = 1.0
    args: list[str] = []
    env: dict[str, str] = {}
    faults: Faults | None = None


class Admin(Section):
    """How the control endpoints of a fleet are reached, where they are not on the generation port."""

    port: Port | None = None
    token_file: Path | None = None


class Stall(Section):
    """Collection fails only when both bounds are passed without progress."""

    min_rounds: Count = 8
    min_seconds: NonNegative = 1800.0


class Rollout(Section):
    """Who generates, how, and how rewards are found."""

    endpoints: list[Annotated[str, StringConstraints(pattern=r"^https?://[^/]+$")]] = []
    server: Server | None = None
    admin: Admin = Admin()
    temperature: Positive = 1.0
    max_new_tokens: Count = 256
    request_timeout: Positive = 600.0
    slot_timeout: Positive = 1800.0
    reward: list[Reward] = []
    reward_timeout: Positive = 30.0
    reward_workers: Count = 2
    max_concurrent: Count = 256
    max_staleness: Annotated[int, Field(ge=0)] = 0
    startup_timeout: Positive = 1800.0
    stall: Stall = Stall()

    @model_validator(mode="after")
    def _one_source(self) -> Rollout:
        if self.endpoints and self.server is not None:
            raise ValueError("set endpoints (servers that run already) or server (one that we start), not both")
        return self


class Parallel(Section):
    """How ranks are laid out; `dp: auto` takes what tensor and pipeline parallelism leave."""

    dp: Literal["auto"] | Count = "auto"
    tp: Count = 1
    pp: Count = 1


class Optimizer(Section):
    """AdamW and its learning-rate schedule, counted in optimizer steps over the whole run."""

    lr: Positive = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    grad_clip: Positive = 1.0

    @field_validator("betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= b < 1 for b in value):
            raise ValueError("each beta must be in [0, 1)")
        return value


class Loss(Section):
    """What is minimised."""

    clip_low: Positive = 0.2
    clip_high: Positive = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    level: Literal["token", "sequence"] = "token"
    aggregation: Literal["token_mean", "seq_mean", "fixed"] = "token_mean"
    prox: Literal["rollout", "recompute", "interpolate"] = "rollout"


class Rejection(Section):
    """What is done with tokens whose trained and sampled probabilities are too far apart."""

    level: Literal["token", "sequence"] = "token"
    action: Literal["mask", "clamp"] = "mask"
    metric: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    lower: float | None = None
    upper: float = 5.0


class Lora(Section):
    """Low-rank adapters."""

    r: Count
    alpha: Positive
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: list[str]


class Checkpoint(Section):
    """How often a resumable state is written, and how many are kept.

    `every` is for streaming: the stepwise pipeline writes one each iteration, which the next job continues from. Its
    default is accepted, since resolved configurations have it written out.
    """

    every: Count = 10
    keep: Count = 2

    @field_validator("every")
    @classmethod
    def _streaming_only(cls, value: int) -> int:
        default = cls.model_fields["every"].default
        if value != default:
            raise ValueError(
                f"{value} is not built yet: the stepwise pipeline writes a checkpoint each iteration, and streaming, "
                f"which would write one every {value} batches, is not there; leave it out"
            )
        return value


class Training(Section):
    """One training batch -> `updates_per_batch` optimizer steps."""

    steps: Count = 100
    updates_per_batch: Count = 8
    engine: Literal["fsdp", "megatron"] = "fsdp"
    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    loss: Loss = Loss()
    rejection: Rejection | None = None
    max_tokens_per_mb: Count = 16384
    n_mbs: Count = 1
    balance: Literal["tokens", "compute"] = "tokens"
    deterministic: bool = False
    fp32_lm_head: bool = False
    logprobs_chunk_size: Count = 512
    lora: Lora | None = None
    checkpoint: Checkpoint = Checkpoint()
    process_group_timeout: Positive = 600.0


class Job(Section):
    """Where the training job runs, and with what."""

    backend: Literal["local", "pytorchjob", "trainjob"] = "local"
    image: str | None = None
    namespace: str | None = None
    replicas: Count = 1
    nproc_per_node: Count | None = None
    gpus: Annotated[int, Field(ge=0)] = 0
    resources: dict[str, str] = {}
    queue: str | None = None
    max_restarts: Annotated[int, Field(ge=0)] = 3
    timeout: Positive = 86400.0
    lease_seconds: Positive = 1800.0
    service_account: str = "muster-job"
    env: dict[str, str] = {}
    # where pods may go, and what they may pull; as in a pod's own specification
    node_selector: dict[str, str] = {}
    tolerations: list[dict[str, Any]] = []
    image_pull_secrets: list[str] = []
    priority_class: str | None = None

    @property
    def processes_per_replica(self) -> int:
        """Ranks in each replica: as set, else one a GPU, else one."""
        return self.nproc_per_node or max(1, self.gpus)

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.replicas * self.processes_per_replica

    @model_validator(mode="after")
    def _image(self) -> Job:
        if self.backend != "local" and not (self.image and self.namespace):
            raise ValueError(f"backend {self.backend} needs image and namespace")
        return self


class Telemetry(Section):
    """The `/metrics` endpoint of each process; port 0 turns it off."""

    port: Port = 9464
    linger_seconds: NonNegative = 30.0


PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"estimator": {"reward_norm": {"mean_level": "group", "std_level": "group"}}},
    "dr_grpo": {
        "estimator": {"reward_norm": {"mean_level": "group", "std_level": None}},
        "training": {"loss": {"aggregation": "fixed"}},
    },
    "rloo": {"estimator": {"reward_norm": {"mean_level": "group", "std_level": None, "mean_leave1out": True}}},
    "dapo": {
        "estimator": {
            "reward_norm": {"mean_level": "group", "std_level": "group"},
            "filter_zero_variance": True,
        },
        "training": {"loss": {"clip_low": 0.2, "clip_high": 0.28}},
    },
    "gspo": {
        "estimator": {"reward_norm": {"mean_level": "group", "std_level": "group"}},
        "training": {
            "loss": {"level": "sequence", "aggregation": "seq_mean", "clip_low": 3e-4, "clip_high": 4e-4},
        },
    },
    "reinforce_pp": {
        "estimator": {"kl_coef": 0.01, "adv_norm": {"mean_level": "batch", "std_level": "batch"}},
    },
    "ppo": {"estimator": {"lam": 0.95}},
}
"""What `algorithm` stands for: fields, not code paths (semantics.md, table of estimators)."""


class RunConfig(Section):
    """A whole run. Sections that a command does not need may be absent; `require` names the ones it does."""

    algorithm: Algorithm = "grpo"
    run: Run | None = None
    storage: Storage | None = None
    model: Model | None = None
    data: Data | None = None
    group: Group = Group()
    estimator: Estimator
    rollout: Rollout | None = None
    training: Training
    job: Job = Job()
    telemetry: Telemetry = Telemetry()

    @property
    def min_usable_group_size(self) -> int:
        """The resolved minimum of usable slots for a group to be trained on (semantics.md, rules 5 to 7)."""
        return resolve_minimum(
            self.group.n_samples, self.group.min_usable_group_size, self.estimator.uses_group_statistics
        )

    def require(self, *sections: str) -> None:
        """Checks that the named sections are there.

        Raises:
            InvalidInput: one line for each absent section.
        """
        missing = [name for name in sections if getattr(self, name) is None]
        if missing:
            raise InvalidInput([f"{name}: this command needs the section {name}, which is absent" for name in missing])

    def dump(self) -> str:
        """The resolved configuration as YAML that `parse` reads back to an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load(path: str | Path) -> RunConfig:
    """Reads and validates a configuration file.

    Args:
        path: a YAML (or JSON) file.

    Raises:
        InvalidInput: the file cannot be read, or every fault in it, one line each.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: cannot read the configuration: {error}") from error
    return parse(text, where=str(path))


def parse(text: str, where: str = "configuration") -> RunConfig:
    """Validates configuration text.

    Args:
        text: YAML or JSON.
        where: what to call it in errors.

    Raises:
        InvalidInput: every fault, one line each.
    """
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidInput(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(given, dict):
        raise InvalidInput(f"{where}: must be a mapping of sections such as model: and group:, not {_kind(given)}")
    config, faults = _validate(given)
    if config is None:
        raise InvalidInput([f"{where}: {fault}" for fault in faults])
    return config


def nearest(key: str, known: Mapping[str, Any] | tuple[str, ...] | list[str]) -> str:
    """A hint at the known key that is spelt most like `key`, or nothing."""
    match = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


def _validate(given: dict[str, Any]) -> tuple[RunConfig | None, list[str]]:
    """Validates each section on its own, so that faults in one do not hide those in another."""
    faults = [
        f"{key}: unknown section{nearest(str(key), RunConfig.model_fields)}"
        for key in given
        if key not in RunConfig.model_fields
    ]
    algorithm = given.get("algorithm", "grpo")
    if not isinstance(algorithm, str) or algorithm not in PRESETS:
        hint = nearest(str(algorithm), PRESETS)
        faults.append(f"algorithm: {algorithm!r} is not one of {', '.join(PRESETS)}{hint}")
    merged = _merge(PRESETS.get(algorithm, {}) if isinstance(algorithm, str) else {}, given)
    if algorithm == "dapo":
        _add_dapo_penalty(merged)
    sections: dict[str, Any] = {"algorithm": algorithm}
    for name, field in RunConfig.model_fields.items():
        if name == "algorithm":
            continue
        value = merged.get(name)
        if value is None:
            if field.is_required():
                value = {}
            else:
                continue
        model = next(m for m in _models(field.annotation) if issubclass(m, Section))
        try:
            sections[name] = model.model_validate(value)
        except ValidationError as error:
            faults.extend(_explain(error, name, model))
    group, estimator = sections.get("group", Group()), sections.get("estimator")
    if estimator is not None and not any(f.startswith("group") for f in faults):
        try:
            resolve_minimum(group.n_samples, group.min_usable_group_size, estimator.uses_group_statistics)
        except ValueError as error:
            faults.append(str(error))
    faults.extend(_cross_section(sections))
    return (None, faults) if faults else (RunConfig(**sections), [])


def _add_dapo_penalty(merged: dict[str, Any]) -> None:
    """The length penalty of the preset dapo, where none is written and the budget is known.

    It covers the last fifth of the budget, as in DAPO (arXiv 2503.14476, section 4.1: 4096 of 20480 tokens).
    """
    estimator, rollout = merged.get("estimator"), merged.get("rollout")
    if not isinstance(estimator, dict) or not isinstance(rollout, dict) or "overlong" in estimator:
        return
    budget = rollout.get("max_new_tokens", Rollout.model_fields["max_new_tokens"].default)
    if isinstance(budget, int) and budget >= 1:
        estimator["overlong"] = {"buffer_tokens": max(1, budget // 5), "factor": 1.0}


def _cross_section(sections: Mapping[str, Any]) -> Iterator[str]:
    """Faults that only show when two sections are seen together."""
    data, training, rollout = sections.get("data"), sections.get("training"), sections.get("rollout")
    estimator = sections.get("estimator")
    if data is not None and training is not None and data.groups_per_batch < training.updates_per_batch:
        yield (
            f"training.updates_per_batch: is {training.updates_per_batch}, but data.groups_per_batch is "
            f"{data.groups_per_batch}: an update needs at least one group"
        )
    if estimator is not None and estimator.overlong and rollout is not None:  # noqa: SIM102  # reads better
        if estimator.overlong.buffer_tokens > rollout.max_new_tokens:
            yield (
                f"estimator.overlong.buffer_tokens: is {estimator.overlong.buffer_tokens}, more than "
                f"rollout.max_new_tokens {rollout.max_new_tokens}"
            )


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, mapping by mapping; an explicit null in `over` wins."""
    merged = copy.deepcopy(dict(base))
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models inside an annotation such as `Model | None` or `list[Reward]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models(inner)


def _explain(error: ValidationError, section: str, model: type[BaseModel]) -> Iterator[str]:
    """One line per pydantic error: the dotted key, what is wrong, the value, the nearest known key."""
    seen: set[str] = set()
    for item in error.errors(include_url=False):
        location = [part for part in item["loc"] if not _is_union_tag(part)]
        key = ".".join([section, *map(str, location)])
        if item["type"] == "extra_forbidden":
            fields = _fields_at(model, location[:-1])
            line = f"{key}: unknown key{nearest(str(location[-1]), fields)}"
        elif item["type"] == "missing":
            line = f"{key}: is required"
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
            shown = "" if item["type"] == "value_error" else f", not {_shown(item['input'])}"
            line = f"{key}: {message}{shown}"
        if line not in seen:
            seen.add(line)
            yield line


def _is_union_tag(part: Any) -> bool:
    """Pydantic adds the tried branch of a union to the location; people did not write it."""
    return isinstance(part, str) and (
        part.startswith(("literal[", "constrained-", "function-")) or part in {"int", "float"}
    )


def _fields_at(model: type[BaseModel], location: list[Any]) -> list[str]:
    """The known keys of the sub-section at `location`."""
    for part in location:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = next(_models(field.annotation), None) if field else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    return "an empty file" if value is None else f"a {type(value).__name__}"
