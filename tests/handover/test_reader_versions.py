"""The sequence lock: however writes and copies interleave, no reader is given a torn copy."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from support.extent import up_to
from support.handover_jobs import Job, read_in_a_loop

from odc.errors import StaleVersionError
from odc.handover import Reader
from odc.protocol import Word
from odc.runtime import reading
from odc.settings import Settings


class Interleaved:
    """Publishers that go on by a given schedule, one write at a time, in the middle of every copy and every pause."""

    string_at = staticmethod(ctypes.string_at)

    def __init__(self, job: Job, schedule: list[int]) -> None:
        self.publishers = [job.publishing(member) for member in range(2)]
        self.schedule, self.at, self.turn = schedule, 0, 0

    def go_on(self) -> None:
        for _ in range(self.schedule[self.at % len(self.schedule)]):
            self.step()
        self.at += 1

    def step(self) -> None:
        self.turn = 1 - self.turn
        next(self.publishers[self.turn])

    def memmove(self, to: int, source: int, nbytes: int) -> None:
        half = nbytes // 2
        self.go_on()
        ctypes.memmove(to, source, half)
        self.go_on()
        ctypes.memmove(to + half, source + half, nbytes - half)

    def sleep(self, seconds: float) -> None:
        self.step()  # one at a time: no state is skipped, so a reader that waits finds one it can start from


@pytest.fixture
def interleave(monkeypatch: pytest.MonkeyPatch) -> Callable[[Job, list[int]], None]:
    def start(job: Job, schedule: list[int]) -> None:
        steps = Interleaved(job, schedule)
        monkeypatch.setattr(reading, "ctypes", steps)
        monkeypatch.setattr("odc.deadlines.time", SimpleNamespace(monotonic=time.monotonic, sleep=steps.sleep))

    return start


def of_one_version(version: int, tensors: dict[str, torch.Tensor]) -> None:
    """Every element of a publisher's weights is the version's number."""
    wrong = {name: tensor.tolist() for name, tensor in tensors.items() if (tensor != version).any()}
    assert not wrong, f"version {version}: {wrong}"


def many(test: Callable[..., None]) -> Callable[..., None]:
    """Hypothesis, with one fixture for all examples: every example sets it anew."""
    patient = examples(max_examples=up_to(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
    return patient(given(schedule=st.lists(st.integers(0, 12), min_size=1, max_size=24))(test))


@pytest.mark.parametrize("buffers", [1, 2])
@many
def test_no_copy_is_torn_however_writes_and_copies_interleave(
    buffers: int, interleave: Callable[[Job, list[int]], None], schedule: list[int]
) -> None:
    with Job(settings=Settings(timeout_s=60.0, second_buffer=buffers == 2)) as job:
        interleave(job, schedule)
        with Reader(job.handle, tries=3) as source:
            good, stale = read_in_a_loop(source, 4, of_one_version)
    assert good + stale == 4


BUSY = [0, 3, 1, 5, 2, 7]


def test_the_schedules_do_tear_an_unchecked_copy(
    job: Job, interleave: Callable[[Job, list[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    interleave(job, BUSY)
    monkeypatch.setattr(Reader, "_overtaken", lambda self, over: False)
    with Reader(job.handle) as source, pytest.raises(AssertionError, match="version"):
        read_in_a_loop(source, 20, of_one_version)


def test_with_a_second_buffer_fewer_copies_are_overtaken(interleave: Callable[[Job, list[int]], None]) -> None:
    overtaken = []
    for second in (False, True):
        with Job(settings=Settings(timeout_s=60.0, second_buffer=second)) as job:
            interleave(job, [0, 1, 1])
            with Reader(job.handle, tries=4) as source:
                read_in_a_loop(source, 10, of_one_version)
                overtaken.append(source.overtaken)
    assert overtaken[0] > overtaken[1]


def test_a_reader_that_is_too_slow_gives_up_after_so_many_tries(
    job: Job, interleave: Callable[[Job, list[int]], None]
) -> None:
    interleave(job, [40])
    with Reader(job.handle, tries=3) as source:
        with pytest.raises(StaleVersionError, match=r"3 copies .* group .*second_buffer=True"):
            source.read()
        assert source.overtaken == 3


def test_publish_announces_what_it_is_about_to_overwrite(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    board = job.group.layouts[0].peer(0).board
    seen = list[tuple[int, int]]()
    copy = torch._foreach_copy_

    def watched(*args: Any) -> None:
        seen.append((board.load(Word.PUBLISHING), board.load(Word.PUBLISHED)))
        copy(*args)

    monkeypatch.setattr(torch, "_foreach_copy_", watched)
    job.group.publish(0)
    job.group.publish(0)
    assert seen == [(1, 0), (2, 1)], "all units are copied in one call"
    assert board.load(Word.PUBLISHED) == 2
