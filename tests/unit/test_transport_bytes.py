"""Groups as bytes and back: whatever their columns, through a process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.errors import InvalidInput
from muster.training import transport

dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.int16, torch.float64, torch.complex128]
)
shapes = st.lists(st.integers(0, 4), max_size=3)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(shapes)
    tensor = torch.from_numpy(np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, shape)).to(draw(dtypes))
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


arrays = st.builds(
    lambda n, dtype, step: np.arange(n).astype(dtype)[::step],
    st.integers(0, 6),
    st.sampled_from([np.int8, np.uint16, np.float32, np.float64, np.bool_]),
    st.sampled_from([1, 2, -1]),
)
rows = st.dictionaries(st.text(max_size=4), plain | tensors() | arrays, max_size=4)
batches = st.lists(st.lists(rows, max_size=3), min_size=1, max_size=5)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    from torch._C._distributed_c10d import HashStore

    if dist.is_initialized():
        pytest.fail("an earlier test left its process group behind")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other) and type(one) is type(other)


@settings(deadline=None)
@given(batches)
def test_what_comes_out_is_what_went_in(batch: list[list[dict[str, Any]]]) -> None:
    held = transport.redistribute(batch, group=dist.group.WORLD, costs=[1] * len(batch))
    assert [len(group) for group in held] == [len(group) for group in batch]
    for group, original in zip(held, batch, strict=True):
        for row, wanted in zip(group, original, strict=True):
            assert list(row) == list(wanted)
            assert all(same(wanted[name], row[name]) for name in row)


def test_read_only_arrays_and_numpy_numbers_travel_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    array = np.arange(4, dtype=np.float32)
    array.flags.writeable = False
    ((row,),) = transport.redistribute([[{"a": array, "n": np.float64(0.1)}]], group=dist.group.WORLD, costs=[1])
    assert row["a"].tolist() == [0, 1, 2, 3]
    assert row["n"] == 0.1
    assert not recwarn.list


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"x": {1, 2}}, "group 0: a column holds what cannot be moved"),
        ({3: "x"}, "row 0: the column name 3 is not a string"),
        ({"x": np.array(["a"])}, "row 0, column x: arrays of <U1 cannot be moved"),
        ({"x": torch.eye(2).to_sparse()}, "only dense tensors can be moved"),
    ],
)
def test_what_cannot_travel_is_named(row: dict[Any, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        transport.redistribute([[row]], group=dist.group.WORLD, costs=[1])


def test_an_assignment_must_hold_every_group_once() -> None:
    manifest = transport.announce([[], []], group=dist.group.WORLD, costs=[1, 2], notes=["a", {"b": 1}])
    assert (manifest.costs, manifest.owners, manifest.notes) == ([1, 2], [0, 0], ["a", {"b": 1}])
    for parts, words in (([[0]], "each of the 2 groups exactly once"), ([[0], [1]], "2 parts for 1 ranks")):
        with pytest.raises(ValueError, match=words):
            transport.deliver(manifest, parts)
    assert transport.deliver(manifest, [[1, 0]]) == [[], []]


def test_alone_a_failure_stays_what_it_is() -> None:
    fault = InvalidInput("file: row 1: broken")
    with pytest.raises(InvalidInput) as caught, transport.raised_by_all(dist.group.WORLD):
        raise fault
    assert caught.value is fault
