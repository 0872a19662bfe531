"""A causal language model from a Hugging Face directory: its shape, and its tensors read piece by piece.

Only safetensors are read, and only models whose logits are one linear layer of the last hidden state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from muster.errors import InvalidInput, NotBuilt

_SCALED_LOGITS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
_CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary tables that follow the longest row run together, so that a row's log-probs depend on its neighbours."""


@dataclass(frozen=True)
class Layout:
    """What of a model decides where its rows go.

    Attributes:
        padded: rows of one micro-batch are padded, not laid end to end.
        hidden: hidden size; None if config.json does not tell.
    """

    padded: bool
    hidden: int | None = None


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a model directory, checked to be one that the trainer handles.

    Raises:
        InvalidInput: the file is absent or broken, or the model is quantised.
        NotBuilt: the model scales or caps its logits, or its positions depend on what runs together.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: cannot read the model's configuration: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise InvalidInput(f"{path}: has no model_type; a Hugging Face causal language model is needed")
    if config.get("quantization_config"):
        raise InvalidInput(f"{path}: the model is quantised; training needs plain weights (remove quantization_config)")
    for name, plain in _SCALED_LOGITS.items():
        if config.get(name) not in (None, plain):
            raise NotBuilt(f"{path}: {name} {config[name]} (scaled logits)", "use a model without it")
    for name in ("rope_parameters", "rope_scaling"):
        value = config.get(name) or {}
        for rope in (value, *value.values()):  # of the model, or of each kind of layer
            kind = isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type"))
            if kind in _CHANGING_ROPE:
                raise NotBuilt(f"{path}: {name} of type {kind}", "use a model whose positions are fixed")
    return config


def layout(directory: Path) -> Layout:
    """How the rows of a model are laid out.

    Raises:
        InvalidInput, NotBuilt: as `read_config`.
    """
    from muster.training.engine import attention

    config = read_config(directory)
    hidden = config.get("hidden_size") or (config.get("text_config") or {}).get("hidden_size")
    return Layout(padded=config["model_type"] not in attention.FAMILIES, hidden=hidden)


def build_on_meta(directory: Path) -> tuple[nn.Module, bool]:
    """The model of a directory without memory behind its parameters, in float32, its embeddings untied.

    Returns:
        The model, and whether its files hold one tensor for embedding and output layer.

    Raises:
        InvalidInput: transformers knows no such causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from muster.training.engine import attention

    kind = "sdpa" if layout(directory).padded else attention.NAME
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        tied = bool(getattr(config, "tie_word_embeddings", False))
        config.tie_word_embeddings = False
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=kind)
    except (ValueError, KeyError, OSError, AttributeError) as error:
        raise InvalidInput(f"{directory}: transformers cannot build this model: {error}") from error
    assert isinstance(model, nn.Module)
    return model.eval(), tied


def fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Computes again what `to_empty` left undefined: buffers that are in no file (rotary tables).

    Raises:
        NotBuilt: a module's buffers cannot be computed from the configuration alone.
    """
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers:
            continue
        try:
            fresh = dict(type(module)(config=model.config).named_buffers(recurse=False))
        except TypeError as error:
            raise NotBuilt(f"the buffers {sorted(buffers)} of {name}", "use a model without them") from error
        for key in buffers:
            setattr(module, key, nn.Buffer(fresh[key].to(device), persistent=False))


class TensorFiles:
    """The tensors of all `*.safetensors` files in a directory, opened lazily."""

    def __init__(self, directory: Path) -> None:
        """Opens the files of a model directory.

        Raises:
            InvalidInput: there is no such file, or one is broken.
        """
        self._directory = directory
        self._files: dict[str, Any] = {}
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise InvalidInput(f"{directory}: holds no *.safetensors file; other weight formats are not read")
        for path in paths:
            try:
                handle = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InvalidInput(f"{path}: not a readable safetensors file: {error}") from error
            names: list[str] = handle.keys()  # type: ignore[no-untyped-call]
            for name in names:
                self._files[name] = handle

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Checks that exactly the tensors in `shapes` are there.

        Raises:
            InvalidInput: one line for each absent, unexpected or misshapen tensor (the first 20).
        """
        faults = []
        for name, shape in shapes.items():
            if name not in self._files:
                faults.append(f"{self._directory}: the tensor {name} {list(shape)} is absent")
            elif self.shape(name) != shape:
                faults.append(
                    f"{self._directory}: the tensor {name} is {list(self.shape(name))}, the model wants {list(shape)}"
                )
        unknown = [n for n in self._files if n not in shapes and not n.endswith("rotary_emb.inv_freq")]
        faults += [f"{self._directory}: the tensor {name} belongs to no parameter of the model" for name in unknown]
        if faults:
            raise InvalidInput(faults[:20])

    def alias(self, name: str, source: str) -> None:
        """Lets `name` read the tensor `source` (a tied embedding)."""
        if source in self._files:
            self._files[name] = _Alias(self._files[source], source)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Rows `start` to `end` of a tensor's first dimension, read alone."""
        rows = self._files[name].get_slice(name)[start:end]
        assert isinstance(rows, Tensor)
        return rows


class _Alias:
    """A file in which one tensor is found under another name."""

    def __init__(self, handle: Any, source: str) -> None:
        self._handle, self._source = handle, source

    def get_slice(self, _name: str) -> Any:
        return self._handle.get_slice(self._source)
