"""Weights read in groups: every parameter once, of one version, in two rooms that are used in turns."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.handover_jobs import Job
from support.members import BF16, F32, F64

from odc.errors import StaleVersionError
from odc.handover import Reader, read_groups
from odc.settings import Settings

#: Bytes of a group: w (48 whole elements, bf16: 96), b (30), v (2000), u (40, f64) and a scalar-sized one.
LAYOUT = [[("w", 24, BF16), ("b", 8, BF16)], [("v", 250, F32)], [("u", 3, F64), ("s", 1, F32)]]


@pytest.fixture
def large() -> Iterator[Job]:
    with Job(LAYOUT) as made:
        yield made


@pytest.mark.parametrize(
    ("nbytes", "groups"),
    [
        (1, [["u0.w"], ["u0.b"], ["u1.v"], ["u2.u"], ["u2.s"]]),
        (100, [["u0.w"], ["u0.b"], ["u1.v"], ["u2.u", "u2.s"]]),
        (127, [["u0.w"], ["u0.b"], ["u1.v"], ["u2.u", "u2.s"]]),
        (128, [["u0.w", "u0.b"], ["u1.v"], ["u2.u", "u2.s"]]),  # with the gaps, to the byte
        (150, [["u0.w", "u0.b"], ["u1.v"], ["u2.u", "u2.s"]]),
        (1 << 20, [["u0.w", "u0.b", "u1.v", "u2.u", "u2.s"]]),
    ],
)
def test_groups_hold_every_parameter_once_and_a_larger_one_alone(large: Job, nbytes: int, groups: object) -> None:
    large.publish([1.5, 2.5])
    found, tensors = [], dict[str, torch.Tensor]()
    with Reader(large.handle) as source:
        for group in read_groups(source, nbytes, 1):
            found.append(list(group))
            tensors |= {name: tensor.clone() for name, tensor in group.items()}
        whole = source.read().tensors
    assert found == groups
    assert {name: (one.dtype, one.tolist()) for name, one in tensors.items()} == {
        name: (one.dtype, one.tolist()) for name, one in whole.items()
    }


def test_a_group_is_not_overwritten_while_it_is_used(large: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next group has been read by then, wherever the thread ran."""
    large.publish([1.5, 2.5])
    reads: list[str] = []
    read = Reader.read

    def noted(self: Reader, into: dict[str, torch.Tensor], **options: int) -> object:
        result = read(self, into, **options)
        reads.extend(into)
        return result

    monkeypatch.setattr(Reader, "read", noted)
    with Reader(large.handle) as source:
        whole = read(source).tensors
        names = list(whole)
        for number, group in enumerate(read_groups(source, 1, 1)):
            while len(reads) < min(number + 2, len(names)):
                pass
            assert {name: one.tolist() for name, one in group.items()} == {names[number]: whole[names[number]].tolist()}


def test_a_pinned_room_is_not_overwritten_while_a_gpu_copies_out_of_it(
    large: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such copies are asked for before the next group is, and done at the latest when their stream is waited for."""
    large.publish([1.5, 2.5])
    gpu, asked, copied, empty = (
        torch.device("cuda", 0),
        list[dict[str, torch.Tensor]](),
        dict[str, object](),
        torch.empty,
    )

    def copy_out(device: torch.device = gpu) -> None:
        assert device == gpu
        for group in asked:
            copied.update({name: tensor.tolist() for name, tensor in group.items()})
        asked.clear()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: SimpleNamespace(synchronize=lambda: copy_out(of)))
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **options: empty(*args, **options))
    with Reader(large.handle) as source:
        whole = source.read().tensors
        reader: Any = SimpleNamespace(device=gpu, shapes=source.shapes, read=source.read)
        for group in read_groups(reader, 1, 1):
            asked.append(group)
        copy_out()
    assert copied == {name: tensor.tolist() for name, tensor in whole.items()}


def test_only_what_was_asked_for(large: Job) -> None:
    large.publish([1.0, 1.0])
    with Reader(large.handle) as source:
        assert [list(group) for group in read_groups(source, 150, 1, ["u2.s", "u0.w"])] == [["u0.w", "u2.s"]]
        assert list(read_groups(source, 150, 1, [])) == []
        with pytest.raises(ValueError, match=r"not exported: u0\.x"):
            next(read_groups(source, 150, 1, ["u0.w", "u0.x"]))


def test_a_mixture_of_versions_is_refused(large: Job) -> None:
    large.publish([1.0, 1.0])
    with Reader(large.handle) as source:
        groups = read_groups(source, 1, 1)
        next(groups)
        next(groups)
        large.publish([2.0, 2.0])
        with pytest.raises(StaleVersionError, match="version 2 was published while version 1 was still to be read"):
            list(groups)


def test_with_a_second_buffer_a_version_lasts_until_the_one_after_the_next() -> None:
    with Job(LAYOUT, settings=Settings(timeout_s=60.0, second_buffer=True)) as job, Reader(job.handle) as source:
        job.publish([1.0, 1.0])
        groups = read_groups(source, 1, 1)
        found = next(groups)["u0.w"].tolist()
        job.publish([2.0, 2.0])
        for group in groups:
            found += next(iter(group.values())).tolist()
        assert set(found) == {1.0}
        groups = read_groups(source, 1, 2)
        next(groups)
        for value in (3.0, 4.0):
            job.publish([value, value])
        with pytest.raises(StaleVersionError, match="version 4 was published while version 2 was still to be read"):
            list(groups)


def test_there_is_no_version_0(large: Job) -> None:
    large.publish([1.0, 1.0])
    with Reader(large.handle) as source, pytest.raises(ValueError, match="no rank ever publishes version 0"):
        next(read_groups(source, 1, 0))


def test_a_caller_that_stops_may_close_the_reader(large: Job) -> None:
    large.publish([1.0, 1.0])
    for taken in range(3):
        with Reader(large.handle) as source:
            groups = read_groups(source, 1, 1)
            for _ in range(taken):
                next(groups)
            groups.close()
