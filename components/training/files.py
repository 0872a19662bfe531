"""Directories and files that appear whole or not at all, and tensors written to one file as they come.

What a crash leaves behind has a name that begins with a dot; readers never look at those.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.errors import storage_died

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}


@contextmanager
def appearing(directory: Path) -> Iterator[Path]:
    """A directory to fill, which takes its final name when the block ends well; an older one gives way to it.

    Raises:
        DependencyDied: the storage failed; nothing is left under the final name that was not there before.
        InvalidInput: the path cannot be used; likewise.
    """
    part = directory.with_name(f".partial-{directory.name}")
    old = directory.with_name(f".replaced-{directory.name}")
    try:
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        for path in [*part.iterdir(), part]:
            _sync(path)
        if directory.exists():
            directory.rename(old)
        part.rename(directory)
        _sync(directory.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise storage_died(error, directory) from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file that appears whole.

    Raises:
        DependencyDied: the storage failed.
        InvalidInput: the path cannot be used.
    """
    part = path.with_name(f".partial-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        _sync(part)
        part.rename(path)
        _sync(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise storage_died(error, path) from error


def write_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, tensors: Iterable[Tensor]) -> None:
    """Writes a safetensors file one tensor at a time, so that memory holds no more than one of them.

    Args:
        path: the file.
        shapes: name -> shape, in the order in which `tensors` come.
        dtype: `float32` or `bfloat16`, what they are stored in.
        tensors: the tensors, on the CPU.

    Raises:
        OSError: the storage failed.
    """
    import torch

    code, size = _DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        count = size
        for length in shape:
            count *= length
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + count]}
        offset += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} is {list(tensor.shape)}, announced was {list(shape)}")
            stored = tensor.to(getattr(torch, dtype)).contiguous().reshape(-1).view(torch.uint8)
            file.write(stored.numpy().data)


def keep_versions(parent: Path, keep: set[int], below: int) -> None:
    """Removes the version directories under `parent` that are older than `below` and not in `keep`."""
    for path in parent.glob("v[0-9]*"):
        number = path.name[1:]
        if number.isdigit() and int(number) < below and int(number) not in keep:
            doomed = path.with_name(f".replaced-{path.name}")
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
