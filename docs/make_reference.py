"""Writes docs/reference.md from the code: configuration keys, metrics, failure reasons. A test keeps it in step."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from muster.config import PRESETS, RunConfig
from muster.groups import FAILURE_REASONS, GROUP_OUTCOMES
from muster.telemetry.metrics import Metrics

TARGET = Path(__file__).with_name("reference.md")

HEAD = """\
# Reference

Made from the code by `docs/make_reference.py`.

## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | a defect of ours, with a traceback |
| 2 | invalid input or configuration: one line per fault, nothing written; also what is not built yet |
| 3 | stalled, or nothing trainable: collected, required, failed samples by reason |
| 4 | something we depend on died (server, job, storage), with its own last words |
| 130 | interrupted; what was collected is kept |

## The run directory

| path below `run.root` | what |
|---|---|
| `run.yaml` | the configuration the run was started with |
| `events.jsonl` | the run's diary, one line an event |
| `iterations/0003/rollouts/` | every group that iteration 3 attempted (`rollouts.partial/` until all are there) |
| `iterations/0003/batch/` | the training batch made of them, and `summary.json`: what was lost |
| `iterations/0003/train.json` | what training measured; written last |
| `weights/v0004/` | what iteration 3 trained: a Hugging Face directory with the probe that a server must reproduce |
| `checkpoints/v0004/` | what training continues from |
| `jobs/`, `pipeline/`, `server.log` | logs |
| `result.json`, `report.html` | what the run came to |
"""


def main() -> str:
    """The page."""
    parts = [HEAD, "## Configuration (`run.yaml`)\n", "| key | type | default |", "|---|---|---|"]
    parts += [f"| `{key}` | {kind} | {default} |" for key, kind, default in keys(RunConfig)]
    parts += ["", "What `algorithm` sets, unless you do:", "", "| algorithm | sets |", "|---|---|"]
    parts += [f"| `{name}` | {', '.join(f'`{k}: {v}`' for k, v in flat(preset))} |" for name, preset in PRESETS.items()]
    parts += [
        "",
        "`dapo` also penalises the last fifth of `rollout.max_new_tokens`, unless `estimator.overlong` is set.",
    ]
    parts += ["", "## Metrics", "", "| metric | type | labels | what |", "|---|---|---|---|"]
    parts += [metric_row(metric) for metric in Metrics("reference").registry.collect()]
    parts += ["", "Labels come from closed sets.", ""]
    parts += [f"- `reason`: {', '.join(FAILURE_REASONS)}", f"- `outcome` of a group: {', '.join(GROUP_OUTCOMES)}"]
    return "\n".join(parts) + "\n"


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Dotted key, type and default of every field below a model."""
    for name, field in model.model_fields.items():
        inner = section(field.annotation)
        key = f"{prefix}{name}"
        optional = type(None) in typing.get_args(field.annotation)
        if inner is not None and typing.get_origin(field.annotation) is not list:
            if prefix and (optional or field.is_required()):
                yield key, "section", "null" if optional else "required"
            yield from keys(inner, f"{key}.")
        elif inner is not None:
            yield key, f"list of {{{', '.join(inner.model_fields)}}}", default_of(field)
        else:
            yield key, type_name(field.annotation), default_of(field)


def section(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `Model | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in typing.get_args(annotation) if (found := section(arg))), None)


def type_name(annotation: Any) -> str:
    """A type as people write it."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(args[0])
    if origin is typing.Literal:
        return " or ".join(f"`{arg}`" for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(arg) for arg in args))
    if origin is not None:
        inner = ", ".join(type_name(arg) for arg in args if arg is not Ellipsis)
        return f"{origin.__name__} of {inner}" if origin is not dict else f"mapping of {inner}"
    names = {float: "number", int: "integer", bool: "true or false", str: "text", Path: "path", type(None): "null"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def default_of(field: FieldInfo) -> str:
    """The default as it would be written in YAML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`"


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "null" if value is None else value


def metric_row(metric: Metric) -> str:
    """One row of the table of metrics."""
    labels = LABELS.get(metric.name, "")
    suffix = "_total" if metric.type == "counter" else ""
    return f"| `{metric.name}{suffix}` | {metric.type} | {labels} | {metric.documentation} |"


LABELS = {
    "muster_run_info": "run",
    "muster_rollout_slots": "outcome, reason",
    "muster_rollout_groups": "outcome",
    "muster_rollout_stalls": "stage",
    "muster_rollout_request_duration_seconds": "outcome",
    "muster_last_progress_timestamp_seconds": "stage",
    "muster_policy_version": "role",
    "muster_weight_publish": "outcome",
    "muster_training_tokens": "kind",
    "muster_training_steps": "outcome",
    "muster_training_step_duration_seconds": "phase",
    "muster_training_logprob_drift": "kind",
    "muster_job_terminations": "backend, outcome",
}


if __name__ == "__main__":
    TARGET.write_text(main(), encoding="utf-8")
