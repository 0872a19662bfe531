"""The rollout table: schema, reading, writing, checking. The contract between rollout, assembly and training.

A table that exists has been checked: every later stage trusts it. What a slot or a group is worth is not decided here
(that is `groups`), and a reward that is no number is no fault of the file: it makes its slot failed (rule 10).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from muster.errors import DependencyDied, InvalidInput, storage_died
from muster.groups import FAILURE_REASONS

SCHEMA = pa.schema(
    [
        ("group_id", pa.string()),
        ("n_samples", pa.int32()),
        ("slot", pa.int32()),
        ("row", pa.int32()),
        ("status", pa.string()),
        ("failure", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("reward", pa.float64()),
        ("rollout_reward", pa.float64()),
        ("finish_reason", pa.string()),
    ]
)
"""The columns of a rollout file (contracts.md); others are carried through untouched."""

OPTIONAL = ("row", "failure", "loss_mask", "reward", "rollout_reward", "finish_reason")
"""Columns a file may leave out: row is 0, loss_mask all true, the others null."""

PER_TOKEN = ("loss_mask", "logprobs", "versions")
"""Lists with one value per completion token."""

SHOWN = 20
"""Faults that are reported in full; the rest are counted."""

TOKENS_PER_ROW_GROUP = 1_000_000
LINES_PER_CHUNK = 4096

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Origin:
    """Where a stretch of rows was read from.

    Attributes:
        name: the file.
        first: index of its first row in the whole table.
        lines: line of each row, for JSON Lines; None for Parquet, whose rows count from 0.
    """

    name: str
    first: int
    lines: Ints | None = None


@dataclass(frozen=True, eq=False)
class RolloutTable:
    """Checked rollout rows. Built by `read`, `from_table` and `from_rows` only.

    Attributes:
        table: R rows, the columns of SCHEMA in its order, then whatever else the files carried.
        groups: [N] group ids, sorted.
        group: [R] index into `groups`.
        order: [R] the rows sorted by group, slot, row: what everything is computed in, since row order means nothing.
    """

    table: pa.Table
    groups: pa.Array
    group: Ints
    order: Ints
    origins: tuple[Origin, ...] = field(repr=False)

    def __len__(self) -> int:
        """Rows."""
        return int(self.table.num_rows)

    def where(self, row: int) -> str:
        """Names a row for an error message: its file, its place there, its group, slot and row."""
        return _where(self.table, self.origins, row)

    def column(self, name: str) -> NDArray[Any]:
        """[R] a scalar column as NumPy; nulls of float columns are NaN."""
        return _numpy(self.table[name])


def read(paths: str | Path | Sequence[str | Path]) -> RolloutTable:
    """Reads rollout files.

    Args:
        paths: Parquet files, JSON Lines files, or directories that hold such files at any depth (names that start with
            `.` or `_` are passed over), in any mixture.

    Raises:
        InvalidInput: a path that cannot be read, a file that is not what it should be, rows that break the contract:
            the first 20 faults in full with file, row, column, value and remedy, then how many more there are.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    faults = _Faults()
    tables: list[pa.Table] = []
    origins: list[Origin] = []
    rows = 0
    for path in _files([Path(p) for p in given], faults):
        loaded = _load(path, faults)
        if loaded is not None:
            table, lines = loaded
            origins.append(Origin(str(path), rows, lines))
            tables.append(table)
            rows += table.num_rows
    faults.stop()
    names = ", ".join(str(p) for p in given) or "nothing"
    if not rows:
        raise InvalidInput(f"{names}: holds no rollout rows; give files with at least one")
    return _checked(_concat(tables, names), tuple(origins))


def from_table(table: pa.Table, name: str = "rollout table") -> RolloutTable:
    """Checks a table held in memory.

    Args:
        table: at least the required columns of SCHEMA, in types that convert without loss.
        name: what to call it in errors.

    Raises:
        InvalidInput: as `read`.
    """
    faults = _Faults()
    conformed = _conform(table, name, None, faults)
    faults.stop()
    assert conformed is not None
    if not conformed.num_rows:
        raise InvalidInput(f"{name}: holds no rollout rows; give at least one")
    return _checked(conformed, (Origin(name, 0),))


def from_rows(rows: Iterable[Mapping[str, Any]], name: str = "rollout rows") -> RolloutTable:
    """Checks rows held in memory as mappings, keyed by column.

    Raises:
        InvalidInput: as `read`.
    """
    faults = _Faults()
    tables = [
        table
        for chunk, start in _chunks(rows)
        if (table := _from_mappings(chunk, name, np.arange(start, start + len(chunk)), faults, "row")) is not None
    ]
    faults.stop()
    if not tables:
        raise InvalidInput(f"{name}: holds no rollout rows; give at least one")
    return _checked(_concat(tables, name), (Origin(name, 0),))


def write(table_or_rows: RolloutTable | pa.Table | Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Writes one Parquet file of rollout rows, whole or not at all.

    Args:
        table_or_rows: a checked table, or what `from_table` and `from_rows` take; those are checked first.
        path: the file; folders on the way are made, an existing file is replaced.

    Raises:
        InvalidInput: as `read`.
        DependencyDied: storage failed (say, the disk is full); nothing is left under the final name.
    """
    if isinstance(table_or_rows, RolloutTable):
        rollouts = table_or_rows
    elif isinstance(table_or_rows, pa.Table):
        rollouts = from_table(table_or_rows)
    else:
        rollouts = from_rows(table_or_rows)
    with atomic_file(path) as temporary:
        write_parquet(_row_groups(rollouts.table), rollouts.table.schema, temporary)


# --- Storage


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """A name to write to in the folder of `path`; on success it is on disk under `path`, on failure there is nothing.

    Raises:
        DependencyDied: the operating system refused; names the path and its reason.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise storage_died(error, path) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Forces a file, or a folder's list of names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_parquet(tables: Iterable[pa.Table], schema: pa.Schema, path: Path) -> None:
    """Writes tables as the row groups of one Parquet file.

    Tokens and versions repeat, so they are stored through a dictionary; log-probs do not.
    """
    plain = {"logprobs", "advantages", "normalized_reward", "reward", "rollout_reward", "loss_mask"}
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=[_leaf(f) for f in schema if f.name not in plain],
        write_statistics=[f.name for f in schema if not pa.types.is_nested(f.type)],
    ) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, table.num_rows))


def _leaf(column: pa.Field) -> str:
    """The name Parquet gives the values of a column."""
    return f"{column.name}.list.element" if pa.types.is_list(column.type) else str(column.name)


def stretches(lengths: NDArray[Any], tokens: int = TOKENS_PER_ROW_GROUP) -> Iterator[tuple[int, int]]:
    """Cuts rows into stretches of about `tokens` tokens: (start, stop) pairs that cover all rows in order."""
    ends = np.cumsum(lengths, dtype=np.int64)
    start = 0
    while start < len(lengths):
        done = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + tokens, side="right")))
        yield start, stop
        start = stop


def _row_groups(table: pa.Table) -> Iterator[pa.Table]:
    for start, stop in stretches(list_lengths(table["completion_ids"])):
        yield table.slice(start, stop - start)


def list_lengths(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """[R] lengths of the lists of a column without nulls."""
    return _numpy(pc.list_value_length(column)).astype(np.int64)


# --- Reading


def _files(paths: Sequence[Path], faults: _Faults) -> Iterator[Path]:
    """The rollout files that the paths stand for."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        inside = sorted(
            p
            for p in path.rglob("*")
            if p.suffix in (".parquet", ".jsonl")
            and p.is_file()
            and not any(part.startswith((".", "_")) for part in p.relative_to(path).parts)
        )
        if not inside:
            faults.add(f"{path}: holds no *.parquet or *.jsonl file; give a directory of rollout files")
        yield from inside


def _load(path: Path, faults: _Faults) -> tuple[pa.Table, Ints | None] | None:
    """One file as a table in the contract's types, with the line of each row for JSON Lines."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic == b"PAR1" or path.suffix == ".parquet":
            with pq.ParquetFile(path) as parquet:
                names = parquet.schema_arrow.names
                if len(set(names)) != len(names):
                    twice = sorted({n for n in names if names.count(n) > 1})
                    faults.add(f"{path}: has more than one column named {', '.join(twice)}; keep one")
                    return None
                parts = [parquet.read_row_group(i) for i in range(parquet.num_row_groups)]  # one encoded at a time
                table = pa.concat_tables(parts) if parts else parquet.schema_arrow.empty_table()
            conformed = _conform(table, str(path), None, faults)
            return None if conformed is None else (conformed, None)
        return _load_lines(path, faults)
    except pa.ArrowException as error:
        faults.add(f"{path}: is not a readable Parquet file ({_line(error)}); write it again")
    except OSError as error:
        if error.errno is None:  # pyarrow's own, about content
            faults.add(f"{path}: is not a readable Parquet file ({_line(error)}); write it again")
        elif isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError):
            faults.add(f"{path}: cannot be read: {error.strerror}")
        else:
            raise DependencyDied(f"{path}: cannot be read: {_line(error)}") from error
    return None


def _load_lines(path: Path, faults: _Faults) -> tuple[pa.Table, Ints] | None:
    """JSON Lines; NaN and Infinity are read as Python writes them."""
    numbers: list[int] = []

    def rows() -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                try:
                    value = json.loads(text)
                except ValueError as error:
                    faults.add(f"{path} line {number}: is not JSON ({_line(error)}); write one object a line")
                    continue
                if not isinstance(value, dict):
                    faults.add(f"{path} line {number}: is a {type(value).__name__}; write one object a line")
                    continue
                numbers.append(number)
                yield value

    tables = [
        table
        for chunk, start in _chunks(rows())
        if (table := _from_mappings(chunk, str(path), np.array(numbers[start:]), faults, "line")) is not None
    ]
    if not tables or faults.count:
        return None
    try:
        return _concat(tables, str(path)), np.array(numbers, dtype=np.int64)
    except InvalidInput as error:
        faults.add(str(error))
        return None


def _chunks(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[list[Mapping[str, Any]], int]]:
    """Rows in lists of bounded length, with the index of each list's first row."""
    chunk: list[Mapping[str, Any]] = []
    start = 0
    for row in rows:
        chunk.append(row)
        if len(chunk) == LINES_PER_CHUNK:
            yield chunk, start
            start, chunk = start + len(chunk), []
    if chunk:
        yield chunk, start


def _from_mappings(
    rows: Sequence[Mapping[str, Any]], name: str, numbers: Ints, faults: _Faults, unit: str
) -> pa.Table | None:
    """Rows as a table in the contract's types."""
    columns: dict[str, pa.Array] = {}
    before = faults.count
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key) for row in rows]
        try:
            columns[key] = pa.array(values)
        except (pa.ArrowException, OverflowError, TypeError) as error:
            if key not in SCHEMA.names:
                faults.add(f"{name}: column {key} mixes types ({_line(error)}); write one type")
                continue
            cells = [_cell(value, key, f"{name} {unit} {numbers[i]}", faults) for i, value in enumerate(values)]
            if faults.count == before:
                columns[key] = pa.concat_arrays([cell for cell in cells if cell is not None])
    if faults.count != before:
        return None
    return _conform(pa.table(columns), name, numbers, faults, unit)


def _cell(value: Any, key: str, where: str, faults: _Faults) -> pa.Array | None:
    """One value of a column whose values do not share a type."""
    target = SCHEMA.field(key).type
    try:
        array = pa.array([value])
        if array.type != target and _bad_type(array.type, target) is None and not _lossy(array, target).any():
            array = array.cast(target, safe=False)
        if array.type == target:
            return array
    except (pa.ArrowException, OverflowError, TypeError):
        pass
    faults.add(f"{where}: {key} is {_show(value)}; {_wanted(key)}")
    return None


def _conform(table: pa.Table, name: str, numbers: Ints | None, faults: _Faults, unit: str = "row") -> pa.Table | None:
    """The contract's columns in their types and order, then the others; what does not convert is a fault."""
    before = faults.count
    absent = [n for n in SCHEMA.names if n not in OPTIONAL and n not in table.column_names]
    if absent:
        faults.add(f"{name}: lacks the columns {', '.join(absent)}; a rollout file has {', '.join(SCHEMA.names)}")
        return None
    columns: dict[str, pa.ChunkedArray] = {}
    for column in SCHEMA:
        key, target = column.name, column.type
        if key not in table.column_names:
            continue
        given = table[key]
        if given.type == target:
            columns[key] = given
        elif (wrong := _bad_type(given.type, target)) is not None:
            faults.add(f"{name}: column {key} is of type {wrong}; {_wanted(key)}")
        else:
            lossy = np.concatenate([np.zeros(0, dtype=bool), *(_lossy(c, target) for c in given.chunks)])
            for row in np.flatnonzero(lossy)[:SHOWN]:
                number = row if numbers is None else numbers[row]
                faults.add(f"{name} {unit} {number}: {key} is {_show(given[row].as_py())}; {_wanted(key)}")
            faults.count += max(0, int(lossy.sum()) - SHOWN)
            if not lossy.any():
                columns[key] = given.cast(target, safe=False)
    if faults.count != before:
        return None
    rows = table.num_rows
    for key in ("completion_ids", "prompt_ids", "logprobs", "versions"):
        columns[key] = _no_null_lists(columns[key])
    columns["loss_mask"] = _full_mask(columns.get("loss_mask"), columns["completion_ids"])
    zero = pa.chunked_array([pa.array(np.zeros(rows, dtype=np.int32))])
    columns["row"] = pc.fill_null(columns["row"], 0) if "row" in columns else zero
    for key in OPTIONAL:
        if key not in columns:
            columns[key] = pa.chunked_array([pa.nulls(rows, SCHEMA.field(key).type)])
    others = {key: table[key] for key in table.column_names if key not in SCHEMA.names}
    return pa.table({**{key: columns[key] for key in SCHEMA.names}, **others})


def _bad_type(given: pa.DataType, target: pa.DataType) -> str | None:
    """The given type's name when no value of it could be meant, else None."""
    if pa.types.is_list(target):
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        if pa.types.is_null(given):
            return None
        if not any(kind(given) for kind in lists) or _bad_type(given.value_type, target.value_type) is not None:
            return str(given)
        return None
    if pa.types.is_dictionary(given) and pa.types.is_string(target):
        given = given.value_type
    numbers = pa.types.is_integer(given) or pa.types.is_floating(given)
    if pa.types.is_string(target):
        text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        fits = any(kind(given) for kind in text) or pa.types.is_integer(given)
    elif pa.types.is_integer(target):
        fits = numbers
    else:
        fits = numbers or pa.types.is_boolean(given)
    return None if fits or pa.types.is_null(given) else str(given)


def _lossy(array: pa.Array, target: pa.DataType) -> Mask:
    """[rows] whether a value would change by the conversion to `target`; float32 rounds its values, which is meant."""
    if pa.types.is_list(target) and not pa.types.is_null(array.type):
        rows = np.zeros(len(array), dtype=bool)
        lossy = _lossy(array.flatten(), target.value_type)
        if lossy.any():
            rows[_numpy(pc.list_parent_indices(array))[lossy]] = True
        return rows
    if pa.types.is_floating(array.type) and pa.types.is_integer(target):
        values = _numpy(array.cast(pa.float64()))
        whole = np.iinfo(np.int32)
        with np.errstate(invalid="ignore"):
            fits = (values == np.floor(values)) & (values >= whole.min) & (values <= whole.max)
        return np.asarray(~(fits | _numpy(array.is_null())))
    if pa.types.is_integer(array.type) and (pa.types.is_integer(target) or pa.types.is_boolean(target)):
        whole = np.iinfo(np.int32)
        low, high = (whole.min, whole.max) if pa.types.is_integer(target) else (0, 1)
        values = array.to_numpy(zero_copy_only=False) if not array.null_count else pc.fill_null(array, 0).to_numpy()
        return np.asarray((values < low) | (values > high))
    if pa.types.is_floating(array.type) and pa.types.is_boolean(target):
        fits = _numpy(pc.fill_null(pc.or_(pc.equal(array, 0), pc.equal(array, 1)), True))
        return np.asarray(~fits)
    return np.zeros(len(array), dtype=bool)


def _wanted(key: str) -> str:
    target = SCHEMA.field(key).type
    kind = str(target).replace("element: ", "").replace("item: ", "")
    return f"write {'a' if kind[0] not in 'i' else 'an'} {kind}"


def _no_null_lists(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Absent lists as empty ones."""
    return pc.coalesce(column, pa.scalar([], column.type)) if column.null_count else column


def _full_mask(mask: pa.ChunkedArray | None, completions: pa.ChunkedArray) -> pa.ChunkedArray:
    """The loss mask, all true where it is absent."""
    if mask is not None and not mask.null_count:
        return mask
    lengths = list_lengths(completions)
    if mask is None:
        return _lists(np.ones(int(lengths.sum()), dtype=bool), lengths)
    absent = _numpy(mask.is_null())
    given = _numpy(pc.fill_null(pc.list_value_length(mask), 0)).astype(np.int64)
    lengths = np.where(absent, lengths, given)
    values = np.ones(int(lengths.sum()), dtype=bool)
    present = pa.concat_arrays([chunk.flatten() for chunk in mask.chunks])
    if present.null_count:  # keep the nulls: they are reported as faults
        filled: NDArray[Any] = np.ones(len(values), dtype=object)
        filled[np.repeat(~absent, lengths)] = np.array(present.to_pylist(), dtype=object)
        return _lists(filled, lengths)
    values[np.repeat(~absent, lengths)] = _numpy(present)
    return _lists(values, lengths)


def _lists(values: NDArray[Any], lengths: Ints) -> pa.ChunkedArray:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return pa.chunked_array(
        [
            pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.bool_())).cast(
                pa.list_(pa.bool_())
            )
        ]
    )


def _concat(tables: Sequence[pa.Table], names: str) -> pa.Table:
    try:
        return pa.concat_tables(tables, promote_options="permissive").replace_schema_metadata(None)
    except pa.ArrowException as error:
        raise InvalidInput(f"{names}: a column has different types ({_line(error)}); write one type") from error


# --- Checking


class _Faults:
    """Faults seen so far: the first ones in full, the rest as a count."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.count = 0

    def add(self, line: str) -> None:
        """Adds one fault that is not about a checked row."""
        self.count += 1
        if len(self.lines) < SHOWN:
            self.lines.append((-1, line))

    def add_rows(self, rows: NDArray[Any], describe: Callable[[int], str]) -> None:
        """Adds one fault for each row index; only those that may be shown are described."""
        self.count += len(rows)
        self.lines.extend((int(row), describe(int(row))) for row in np.sort(rows)[:SHOWN])

    def stop(self) -> None:
        """Raises what was found, if anything was."""
        if not self.count:
            return
        shown = [line for _, line in sorted(self.lines, key=lambda item: item[0])[:SHOWN]]
        more = self.count - len(shown)
        raise InvalidInput([*shown, f"... and {more} more faults"] if more else shown)


def _checked(table: pa.Table, origins: tuple[Origin, ...]) -> RolloutTable:
    """Checks every row against the contract, and finds the groups."""
    faults = _Faults()

    def where(row: int) -> str:
        return _where(table, origins, row)

    def report(bad: Mask, describe: Callable[[int], str]) -> None:
        if bad.any():
            faults.add_rows(np.flatnonzero(bad), lambda row: f"{where(row)}: {describe(row)}")

    for key in ("group_id", "n_samples", "slot", "status"):
        if table[key].null_count:
            report(_numpy(table[key].is_null()), lambda _, key=key: f"{key} is absent; {_wanted(key)}")  # type: ignore[misc]
    faults.stop()

    n_samples, slot, row = (_numpy(table[key]) for key in ("n_samples", "slot", "row"))
    report(n_samples < 1, lambda i: f"n_samples is {n_samples[i]}; a group has at least 1 slot")
    report(
        (n_samples >= 1) & ((slot < 0) | (slot >= n_samples)),
        lambda i: f"slot is {slot[i]}; with n_samples {n_samples[i]} it must be in 0..{n_samples[i] - 1}",
    )
    report(row < 0, lambda i: f"row is {row[i]}; rows of a slot count from 0")
    _check_status(table, report)
    _check_tokens(table, report)

    groups, group = _groups(table["group_id"])
    order = _sorted(group, slot, row)
    _check_groups(table, group, order, report, where)
    faults.stop()
    return RolloutTable(table, groups, group, order, origins)


Report = Callable[[Mask, Callable[[int], str]], None]


def _check_status(table: pa.Table, report: Report) -> None:
    """Status, failure and reward agree with one another."""
    status, failure = table["status"], table["failure"]
    usable, failed = (_numpy(pc.equal(status, word)) for word in ("usable", "failed"))
    report(~(usable | failed), lambda i: f"status is {_show(status[i].as_py())}; write 'usable' or 'failed'")
    known = _numpy(pc.is_in(failure, pa.array(FAILURE_REASONS)))
    report(
        failed & ~known,
        lambda i: f"failure is {_show(failure[i].as_py())}; a failed slot names one of {', '.join(FAILURE_REASONS)}",
    )
    report(
        usable & _numpy(failure.is_valid()),
        lambda i: f"failure is {_show(failure[i].as_py())} though status is 'usable'; write null or status 'failed'",
    )
    absent = _numpy(pc.and_(table["reward"].is_null(), table["rollout_reward"].is_null()))
    report(
        usable & absent,
        lambda _: (
            "reward and rollout_reward are both absent; give a usable slot its reward, or write status 'failed' "
            "with failure 'reward_error'"
        ),
    )


def _check_tokens(table: pa.Table, report: Report) -> None:
    """Lists agree in length and hold values a trainer can use."""
    lengths = list_lengths(table["completion_ids"])
    for key in PER_TOKEN:
        given = list_lengths(table[key])
        report(
            given != lengths,
            lambda i, key=key, given=given: (  # type: ignore[misc]
                f"{key} has {given[i]} values, completion_ids {lengths[i]}; write one for each completion token"
            ),
        )
    for key in ("prompt_ids", "completion_ids", *PER_TOKEN):
        bad = np.zeros(table.num_rows, dtype=bool)
        start = 0
        for chunk in table[key].chunks:
            for stop_at in range(0, len(chunk), 8192):  # bounds what the checks hold at once
                part = chunk.slice(stop_at, 8192)
                elements = _bad_elements(part.flatten(), key)
                if elements is not None:
                    bad[start + stop_at + np.unique(_numpy(pc.list_parent_indices(part))[elements])] = True
            start += len(chunk)
        report(bad, lambda i, key=key: _describe_element(table[key][i].as_py(), key))  # type: ignore[misc]


def _bad_elements(values: pa.Array, key: str) -> Mask | None:
    """[tokens] which values of a token list no trainer can use; None when all are good."""
    bad = _numpy(values.is_null()) if values.null_count else None
    if key == "logprobs":
        wrong = ~np.isfinite(_numpy(values))
    elif key.endswith("_ids"):
        wrong = _numpy(pc.fill_null(values, 0)) < 0
    else:
        return bad
    if not wrong.any():
        return bad
    return np.asarray(wrong if bad is None else wrong | bad)


def _describe_element(values: list[Any], key: str) -> str:
    def bad(value: Any) -> bool:
        return value is None or (not np.isfinite(value) if key == "logprobs" else key.endswith("_ids") and value < 0)

    at = next(i for i, value in enumerate(values) if bad(value))
    want = {"logprobs": "a finite log-prob", "loss_mask": "true or false", "versions": "a weight version"}
    return f"{key}[{at}] is {_show(values[at])}; write {want.get(key, 'a token id of 0 or more')}"


def _check_groups(table: pa.Table, group: Ints, order: Ints, report: Report, where: Callable[[int], str]) -> None:
    """Rows of a group agree on its size, rows of a slot on its end; no row comes twice."""
    n_samples, slot, row = (_numpy(table[key])[order] for key in ("n_samples", "slot", "row"))
    sorted_group = group[order]
    new_group = np.append(True, sorted_group[1:] != sorted_group[:-1])
    leader = np.flatnonzero(new_group)[np.cumsum(new_group) - 1]  # first row of each row's group, in sorted order
    new_slot = new_group | np.append(True, slot[1:] != slot[:-1])
    head = np.flatnonzero(new_slot)[np.cumsum(new_slot) - 1]
    place = np.empty_like(order)
    place[order] = np.arange(len(order))

    def unsort(bad: Mask) -> Mask:
        mask = np.zeros(len(bad), dtype=bool)
        mask[order[bad]] = True
        return mask

    report(
        unsort(n_samples != n_samples[leader]),
        lambda i: (
            f"n_samples is {n_samples[place[i]]}, but another row of this group says {n_samples[leader[place[i]]]}; "
            "all rows of a group have one n_samples"
        ),
    )
    report(
        unsort(~new_slot & np.append(False, row[1:] == row[:-1])),
        lambda i: (
            f"slot {slot[place[i]]}, row {row[place[i]]} of this group is there already, at "
            f"{where(int(order[place[i] - 1]))}; write each row of a slot once, with a number of its own"
        ),
    )
    ends = pc.fill_null(pc.binary_join_element_wise(table["status"], pc.fill_null(table["failure"], ""), "/"), "")
    _, end = _groups(ends)
    end = end[order]
    report(
        unsort(end != end[head]),
        lambda i: (
            f"status {_show(table['status'][i].as_py())}, failure {_show(table['failure'][i].as_py())}, but another "
            "row of this slot ends differently; a slot ends in one way, on all its rows"
        ),
    )


def _groups(ids: pa.ChunkedArray) -> tuple[pa.Array, Ints]:
    """The distinct values, sorted, and for each row its index among them."""
    encoded = ids.combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):  # more text than one array holds
        encoded = encoded.cast(pa.large_string()).combine_chunks()
    encoded = encoded.dictionary_encode()
    by_name = _numpy(pc.sort_indices(encoded.dictionary)).astype(np.int64)
    rank = np.empty(len(by_name), dtype=np.int64)
    rank[by_name] = np.arange(len(by_name))
    return encoded.dictionary.take(pa.array(by_name)), rank[_numpy(encoded.indices)]


def _sorted(group: Ints, slot: NDArray[Any], row: NDArray[Any]) -> Ints:
    """Indices that sort rows by group, slot, row; rows that are sorted already are not sorted again."""
    later = group[1:] - group[:-1]
    for key in (slot, row):
        later = np.where(later != 0, later, key[1:].astype(np.int64) - key[:-1])
    if (later >= 0).all():
        return np.arange(len(group), dtype=np.int64)
    return np.asarray(np.lexsort((row, slot, group)), dtype=np.int64)


def _where(table: pa.Table, origins: Sequence[Origin], row: int) -> str:
    origin = next(o for o in reversed(origins) if o.first <= row)
    local = row - origin.first
    place = f"row {local}" if origin.lines is None else f"line {origin.lines[local]}"
    group, slot, number = (table[key][row].as_py() for key in ("group_id", "slot", "row"))
    return f"{origin.name} {place} (group {_show(group)}, slot {slot}, row {number})"


def _numpy(array: pa.Array | pa.ChunkedArray) -> NDArray[Any]:
    if isinstance(array, pa.ChunkedArray):
        return np.asarray(array.to_numpy())
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."
