"""Moves whole groups between ranks, so that each rank holds what it was assigned and nothing else.

Ranks may hold any number of groups, none included. Lengths are exchanged once (`announce`), everybody computes the same
assignment, and the rows travel in one all-to-all per device (`deliver`), whatever their columns and dtypes. How a group
is placed is `partition`'s matter.
"""

from __future__ import annotations

import json
import math
import struct
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from muster.errors import InvalidInput, MusterError, Stalled
from muster.training.partition import partition

Row = Mapping[str, Any]
"""Column -> tensor or numpy array of any dtype and shape, or anything that JSON can say."""
Batch = Sequence[Sequence[Row]]
"""Groups of rows: a group moves whole, with all columns of its rows."""

_ALIGN = 16
_WIDTHS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Bytes of an element -> the dtype that such elements travel as; widest first keeps every element aligned."""
_SHOWN = 20


class RankFailed(RuntimeError):
    """Something failed on another rank; the message carries that rank's number and its own text."""


@dataclass(frozen=True)
class Manifest:
    """What all ranks of a process group hold together; the same on every rank but for the groups themselves.

    Attributes:
        costs: cost of every group, in order of ranks, then of the rank's own batch.
        owners: the rank that holds each group now.
        notes: what its holder said about each group; None where nothing was said.
        rank: this rank's place in the process group; for a tensor or pipeline peer, that of its head.
        ranks: size of the process group.
    """

    costs: list[float]
    owners: list[int]
    notes: list[Any]
    rank: int
    ranks: int
    _groups: list[_Packed] = field(repr=False)
    _sizes: list[tuple[int, ...]] = field(repr=False)
    _lines: _Lines = field(repr=False)


def redistribute(
    batch: Batch,
    *,
    group: dist.ProcessGroup,
    costs: Sequence[float],
    model_group: dist.ProcessGroup | None = None,
) -> list[list[dict[str, Any]]]:
    """Spreads the groups that the ranks hold so that every rank carries about the same cost. Collective.

    Args:
        batch: this rank's groups, each a list of rows; may be empty. Columns may differ from row to row.
        group: the data-parallel process group; any, not only the world.
        costs: cost of each group of `batch`, such as its tokens.
        model_group: this rank and its tensor and pipeline peers. The first of them is the head: heads exchange, then
            hand what they hold to their peers, whose own `batch` is ignored.

    Returns:
        The groups assigned to this rank. Tensors and arrays are views into this rank's own receive buffer, on the kind
        of device that they came from; nothing in `batch` is changed.

    Raises:
        Stalled: no rank holds a group; on every rank alike.
        RankFailed: something failed on another rank (its own exception is raised there); invalid input is raised as
            `InvalidInput` everywhere.
    """
    manifest = announce(batch, group=group, costs=costs, model_group=model_group)
    if not manifest.costs:
        raise Stalled(f"nothing to distribute: none of the {manifest.ranks} ranks holds a group, at least 1 is needed")
    return deliver(manifest, partition(manifest.costs, manifest.ranks))


def announce(
    batch: Batch,
    *,
    group: dist.ProcessGroup,
    costs: Sequence[float],
    notes: Sequence[Any] | None = None,
    model_group: dist.ProcessGroup | None = None,
) -> Manifest:
    """Exchanges lengths: what every rank holds, and how large it is. Collective; the first half of `redistribute`.

    Args:
        batch, group, costs, model_group: as in `redistribute`.
        notes: something JSON can say about each group, told to all ranks.

    Raises:
        RankFailed, InvalidInput: as in `redistribute`.
    """
    lines = _Lines(group, model_group)
    groups: list[_Packed] = []
    payload, failure = b"", None
    try:
        if lines.head:
            if len(costs) != len(batch) or (notes is not None and len(notes) != len(batch)):
                said = f"{len(costs)} costs" + (f" and {len(notes)} notes" if notes is not None else "")
                raise ValueError(f"{said} for {len(batch)} groups; there must be one for each")
            groups = [_pack(rows, place) for place, rows in enumerate(batch)]
            table = np.array([one.sizes for one in groups], dtype=np.int64)
            payload = _join(
                [
                    np.asarray(costs, dtype=np.float64).tobytes(),
                    table.tobytes(),
                    json.dumps(list(notes) if notes is not None else [None] * len(batch)).encode(),
                ]
            )
    except Exception as error:
        failure = error
    rank, told = lines.collect(_join([_describe(failure), payload]))
    parts = [[_cut(one) for one in of_rank] for of_rank in told]
    _raise_any([one[0] for of_rank in parts for one in of_rank], failure)
    all_costs: list[float] = []
    owners: list[int] = []
    all_notes: list[Any] = []
    sizes: list[tuple[int, ...]] = []
    for owner, (head, *_) in enumerate(parts):
        values, table_bytes, note_bytes = _cut(head[1])
        all_costs += np.frombuffer(values, dtype=np.float64).tolist()
        sizes += [tuple(row) for row in np.frombuffer(table_bytes, dtype=np.int64).reshape(-1, 3).tolist()]
        all_notes += json.loads(note_bytes)
        owners += [owner] * (len(values) // 8)
    return Manifest(all_costs, owners, all_notes, rank, len(parts), groups, sizes, lines)


def deliver(manifest: Manifest, parts: Sequence[Sequence[int]]) -> list[list[dict[str, Any]]]:
    """Moves every group to the rank it is assigned to. Collective; the second half of `redistribute`.

    Args:
        manifest: from `announce`, whose batch must be unchanged since.
        parts: for each rank, the numbers of the groups it gets, in `manifest.costs`' order; the same on every rank.

    Returns:
        This rank's groups, in the order of its part.

    Raises:
        ValueError: `parts` does not hold every group once; on every rank alike.
        RankFailed, InvalidInput: as in `redistribute`.
    """
    _check_parts(manifest, parts)
    lines, rank = manifest._lines, manifest.rank
    routes = [
        [[g for g in sorted(part) if manifest.owners[g] == source] for part in parts]
        for source in range(manifest.ranks)
    ]
    incoming = [routes[source][rank] for source in range(manifest.ranks)]
    sends: list[Tensor] = []
    receives: list[Tensor] = []
    first = manifest.owners.index(rank) if rank in manifest.owners else 0
    channels = lines.channels(manifest._sizes)
    with raised_by_all(lines.group, lines.model_group):
        for channel in channels:
            if lines.head:
                messages = [[manifest._groups[g - first] for g in groups] for groups in routes[rank]]
                sends.append(_fill(channel, messages))
            length = sum(_message_bytes(channel, manifest._sizes, groups) for groups in incoming)
            receives.append(torch.empty(length, dtype=torch.uint8, device=channel.device))
    for number, channel in enumerate(channels):
        if lines.head:
            words = torch.int64
            dist.all_to_all_single(
                receives[number].view(words),
                sends[number].view(words),
                [_message_bytes(channel, manifest._sizes, groups) // 8 for groups in incoming],
                [_message_bytes(channel, manifest._sizes, groups) // 8 for groups in routes[rank]],
                group=lines.group,
            )
            sends[number] = receives[number]  # lets go of what was sent
        if lines.model_group is not None:
            dist.broadcast(receives[number], lines.head_rank, group=lines.model_group)
    found: dict[int, list[dict[str, Any]]] = {}
    with raised_by_all(lines.group, lines.model_group):
        for groups, opened in zip(incoming, _open(channels, receives, manifest._sizes, incoming), strict=True):
            found.update(zip(groups, opened, strict=True))
    return [found[g] for g in parts[rank]]


@contextmanager
def raised_by_all(group: dist.ProcessGroup, model_group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Local work that fails on every rank if it fails on one: each learns that rank's text. Collective.

    No collective may run inside the block: a failure inside a collective is for all ranks to meet there, not to be
    talked about in another.

    Raises:
        RankFailed, InvalidInput: what failed elsewhere; where it failed, the exception itself.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    _, told = _Lines(group, model_group).collect(_describe(failure))
    _raise_any([one for of_rank in told for one in of_rank], failure)


# --- Failures as bytes


def _describe(failure: Exception | None) -> bytes:
    if failure is None:
        return b""
    kind = "input" if isinstance(failure, InvalidInput) else "muster" if isinstance(failure, MusterError) else "defect"
    text = str(failure) if kind != "defect" else f"{type(failure).__name__}: {failure}"
    return json.dumps([kind, text, getattr(failure, "exit_code", 1)]).encode()


def _raise_any(told: Sequence[bytes], own: Exception | None) -> None:
    """Raises what any rank told, the same on every rank; a rank that failed alone with that text raises its own."""
    failures = [(rank, *json.loads(text)) for rank, text in enumerate(told) if text]
    if failures:
        _raise(failures, own)


def _raise(failures: Sequence[tuple[int, str, str, int]], own: Exception | None) -> NoReturn:
    texts = list(dict.fromkeys(text for _, _, text, _ in failures))
    if own is not None and len(texts) == 1:
        raise own
    kinds = {kind for _, kind, _, _ in failures}
    if "defect" in kinds:
        raise RankFailed("; ".join(f"rank {rank}: {text}" for rank, _, text, _ in failures)) from own
    if kinds == {"input"}:
        lines = list(dict.fromkeys(line for text in texts for line in text.split("\n")))
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise InvalidInput(lines[:_SHOWN] + more) from own
    error = MusterError("\n".join(texts))
    error.exit_code = max(code for _, _, _, code in failures)
    raise error from own


# --- Who talks to whom


@dataclass(frozen=True)
class _Channel:
    """One all-to-all: the device it runs on, which of a group's sizes it carries, and whether structure is in it."""

    device: torch.device
    carries: tuple[int, ...]
    structure: bool


class _Lines:
    """The process groups of this rank, and what is said over them besides rows."""

    def __init__(self, group: dist.ProcessGroup, model_group: dist.ProcessGroup | None) -> None:
        self.group, self.model_group = group, model_group
        self.head = model_group is None or dist.get_rank(model_group) == 0
        self.head_rank = dist.get_process_group_ranks(model_group)[0] if model_group is not None else dist.get_rank()
        kinds = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self._cpu = "cpu" in kinds
        accelerators = [kind for kind, backend in kinds.items() if kind != "cpu" and backend != "gloo"]
        self._accelerator = accelerators[0] if accelerators else None

    @property
    def device(self) -> torch.device:
        """Where lengths are exchanged."""
        return torch.device("cpu") if self._cpu else self._own_accelerator()

    def channels(self, sizes: Sequence[tuple[int, ...]]) -> list[_Channel]:
        """The all-to-alls that are needed; the same on every rank, as it follows from lengths alone."""
        if self._accelerator is None or not self._cpu:  # one kind of device carries everything
            return [_Channel(self.device, (_HOST, _ACCELERATOR), structure=True)]
        both = [_Channel(torch.device("cpu"), (_HOST,), structure=True)]
        if any(one[_ACCELERATOR] for one in sizes):
            both.append(_Channel(self._own_accelerator(), (_ACCELERATOR,), structure=False))
        return both

    def collect(self, payload: bytes) -> tuple[int, list[list[bytes]]]:
        """What every rank says, as `[rank of group][peer]`, told to all, and this rank's (or its head's) place."""
        if self.model_group is None:
            return dist.get_rank(self.group), [[one] for one in self._gather(payload, self.group)]
        peers = self._gather(payload, self.model_group)
        everything = b""
        if self.head:
            place = dist.get_rank(self.group).to_bytes(8, "little")
            everything = _join([place, *self._gather(_join(peers), self.group)])
        length = torch.tensor([len(everything)], dtype=torch.int64, device=self.device)
        dist.broadcast(length, self.head_rank, group=self.model_group)
        content = torch.empty(int(length.item()), dtype=torch.uint8, device=self.device)
        if self.head:
            content.copy_(_bytes_tensor(everything))
        dist.broadcast(content, self.head_rank, group=self.model_group)
        place, *told = _cut(content.cpu().numpy().tobytes())
        return int.from_bytes(place, "little"), [_cut(one) for one in told]

    def _gather(self, payload: bytes, group: dist.ProcessGroup) -> list[bytes]:
        """Every rank's bytes: one collective, or two if anybody has something to say."""
        ranks = dist.get_world_size(group)
        length = torch.tensor([len(payload)], dtype=torch.int64, device=self.device)
        lengths = [torch.empty_like(length) for _ in range(ranks)]
        dist.all_gather(lengths, length, group=group)
        counts = [int(one.item()) for one in lengths]
        longest = max(counts)
        if longest == 0:
            return [b""] * ranks
        mine = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        mine[: len(payload)] = _bytes_tensor(payload).to(self.device)
        contents = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(contents, mine, group=group)
        return [one[:n].cpu().numpy().tobytes() for one, n in zip(contents, counts, strict=True)]

    def _own_accelerator(self) -> torch.device:
        assert self._accelerator is not None
        return torch.device(self._accelerator, torch.accelerator.current_device_index())


def _join(parts: Sequence[bytes]) -> bytes:
    return struct.pack(f"<q{len(parts)}q", len(parts), *map(len, parts)) + b"".join(parts)


def _cut(joined: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<q", joined)
    lengths = struct.unpack_from(f"<{count}q", joined, 8)
    parts, at = [], 8 * (1 + count)
    for length in lengths:
        parts.append(joined[at : at + length])
        at += length
    return parts


def _bytes_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8))


# --- Groups as bytes

_STRUCTURE, _HOST, _ACCELERATOR = 0, 1, 2
"""A group's sizes in bytes: its structure, its tensors in host memory, its tensors on an accelerator."""


@dataclass(frozen=True)
class _Packed:
    """A group ready to travel.

    Attributes:
        structure: JSON, see `_pack`.
        tensors: (place, flat tensor) in the order of the structure; the place is `_HOST` or `_ACCELERATOR`.
        sizes: bytes, by `_STRUCTURE`, `_HOST`, `_ACCELERATOR`.
    """

    structure: bytes
    tensors: list[tuple[int, Tensor]]
    sizes: tuple[int, int, int]


def _pack(rows: Sequence[Row], place: int) -> _Packed:
    """A group's structure: `[layouts, rows]`; a layout is `[[name, dtype or None, is array, place], ..]`.

    A row is `[layout, [value or shape, ..]]`.
    """
    layouts: dict[tuple[Any, ...], int] = {}
    described: list[Any] = []
    tensors: list[tuple[int, Tensor]] = []
    sizes = [0, 0, 0]
    for number, row in enumerate(rows):
        layout: list[tuple[str, str | None, bool, int]] = []
        values: list[Any] = []
        for name, value in row.items():
            if not isinstance(name, str):
                raise TypeError(f"group {place}, row {number}: the column name {name!r} is not a string")
            if isinstance(value, np.generic):
                value = value.item()
            if isinstance(value, Tensor | np.ndarray):
                flat = _flat(value, f"group {place}, row {number}, column {name}")
                where = _HOST if flat.device.type == "cpu" else _ACCELERATOR
                layout.append((name, str(flat.dtype).removeprefix("torch."), isinstance(value, np.ndarray), where))
                values.append(list(value.shape))
                tensors.append((where, flat))
                sizes[where] += flat.numel() * flat.element_size()
            else:
                layout.append((name, None, False, _HOST))
                values.append(value)
        described.append([layouts.setdefault(tuple(layout), len(layouts)), values])
    try:
        structure = json.dumps([list(layouts), described], separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"group {place}: a column holds what cannot be moved ({error}); tensors, numpy arrays, numbers, strings, "
            "None, and lists and dicts of them can"
        ) from error
    sizes[_STRUCTURE] = len(structure)
    return _Packed(structure, tensors, (sizes[0], sizes[1], sizes[2]))


def _flat(value: Tensor | np.ndarray[Any, Any], name: str) -> Tensor:
    """One dimension, contiguous; a copy only of what is not."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise TypeError(f"{name}: only dense tensors can be moved, not {value.layout} or quantised ones")
        return value.detach().reshape(-1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the array may be read-only: nothing is written to it
            backwards = any(stride < 0 for stride in value.strides)
            return torch.from_numpy(value.copy() if backwards else np.ascontiguousarray(value)).reshape(-1)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: arrays of {value.dtype} cannot be moved: {error}") from error


def _message_bytes(channel: _Channel, sizes: Sequence[tuple[int, ...]], groups: Sequence[int]) -> int:
    """Bytes of the message that carries these groups, rounded up so that the next one is aligned."""
    total = sum(sizes[g][place] for g in groups for place in channel.carries)
    total += sum(sizes[g][_STRUCTURE] for g in groups) if channel.structure else 0
    return -(-total // _ALIGN) * _ALIGN


def _fill(channel: _Channel, messages: Sequence[Sequence[_Packed]]) -> Tensor:
    """The send buffer: one message after another, each its tensors by width, widest first, then its structures."""
    lengths = [_message_bytes(channel, [one.sizes for one in groups], range(len(groups))) for groups in messages]
    buffer = torch.empty(sum(lengths), dtype=torch.uint8, device=channel.device)
    for start, groups, length in zip(_starts(lengths), messages, lengths, strict=True):
        at = start
        by_width: dict[int, list[Tensor]] = defaultdict(list)
        for one in groups:
            for place, tensor in one.tensors:
                if place in channel.carries:
                    by_width[tensor.element_size()].append(tensor)
        for width, kind in _WIDTHS.items():
            pieces = [tensor.view(kind) for tensor in by_width[width]]
            if pieces:
                end = at + width * sum(piece.numel() for piece in pieces)
                region = buffer[at:end].view(kind)
                if any(piece.device != channel.device for piece in pieces):
                    pieces = [piece.to(channel.device) for piece in pieces]
                torch.cat(pieces, out=region)
                at = end
        if channel.structure:
            structures = _bytes_tensor(b"".join(one.structure for one in groups))
            buffer[at : at + len(structures)] = structures.to(channel.device)
            at += len(structures)
        buffer[at : start + length] = 0
    return buffer


def _open(
    channels: Sequence[_Channel],
    buffers: Sequence[Tensor],
    sizes: Sequence[tuple[int, ...]],
    incoming: Sequence[Sequence[int]],
) -> Iterator[list[list[dict[str, Any]]]]:
    """The groups of each message, as views into the receive buffers."""
    starts = [_starts([_message_bytes(channel, sizes, groups) for groups in incoming]) for channel in channels]
    for source, groups in enumerate(incoming):
        at = starts[0][source] + sum(sizes[g][place] for g in groups for place in channels[0].carries)
        structures = []
        for g in groups:
            end = at + sizes[g][_STRUCTURE]
            structures.append(json.loads(buffers[0][at:end].cpu().numpy().tobytes()))
            at = end
        tensors: dict[int, Iterator[Tensor]] = {}
        for number, channel in enumerate(channels):
            split = _split(buffers[number], starts[number][source], structures, channel)
            for place in channel.carries:
                tensors[place] = split
        yield [_rebuild(structure, tensors) for structure in structures]


def _split(buffer: Tensor, start: int, structures: Sequence[Any], channel: _Channel) -> Iterator[Tensor]:
    """The tensors of one message in the order of its structures, flat."""
    wanted = [
        (getattr(torch, column[1]), math.prod(value))
        for layouts, rows in structures
        for layout, values in rows
        for column, value in zip(layouts[layout], values, strict=True)
        if column[1] is not None and column[3] in channel.carries
    ]
    pieces: dict[int, Iterator[Tensor]] = {}
    at = start
    for width, kind in _WIDTHS.items():
        counts = [count for dtype, count in wanted if dtype.itemsize == width]
        end = at + width * sum(counts)
        pieces[width] = iter(torch.split(buffer[at:end].view(kind), counts) if counts else ())
        at = end
    for dtype, _ in wanted:
        yield next(pieces[dtype.itemsize]).view(dtype)


def _rebuild(structure: Any, tensors: Mapping[int, Iterator[Tensor]]) -> list[dict[str, Any]]:
    """The rows of one group."""
    layouts, described = structure
    rows: list[dict[str, Any]] = []
    for layout, values in described:
        row: dict[str, Any] = {}
        for (name, dtype, is_array, place), value in zip(layouts[layout], values, strict=True):
            if dtype is None:
                row[name] = value
                continue
            tensor = next(tensors[place]).view(value)
            if place == _HOST:
                tensor = tensor.cpu()
            elif tensor.device.type == "cpu":
                tensor = tensor.to(cast(torch.device, torch.accelerator.current_accelerator()))
            row[name] = tensor.numpy() if is_array else tensor
        rows.append(row)
    return rows


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(lengths, dtype=np.int64).tolist()][: len(lengths)]


def _check_parts(manifest: Manifest, parts: Sequence[Sequence[int]]) -> None:
    if len(parts) != manifest.ranks:
        raise ValueError(f"the assignment has {len(parts)} parts for {manifest.ranks} ranks")
    if sorted(g for part in parts for g in part) != list(range(len(manifest.costs))):
        raise ValueError(f"the assignment does not hold each of the {len(manifest.costs)} groups exactly once")
