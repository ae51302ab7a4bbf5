"""One reader against members of this process, whose every write a test can order."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from support.handover_jobs import LAYOUT, Job
from support.members import BF16, F32

from odc.errors import LayoutMismatchError, OdcError, PeerLostError, StaleVersionError, WaitTimeoutError
from odc.handover import Reader, reader
from odc.handover.handle import WeightHandle
from odc.runtime import Word, member
from odc.runtime.listener import ask
from odc.runtime.protocol import abort
from odc.settings import Settings


@pytest.fixture
def job() -> Iterator[Job]:
    with Job() as job:
        yield job


def changed(handle: str, **fields: Any) -> str:
    return json.dumps({**json.loads(handle), **fields})


# what is read --------------------------------------------------------------------------------------------------------


def test_all_shards_in_their_order_without_padding(job: Job) -> None:
    job.publish([1.5, 2.5])
    with Reader(job.handle) as source:
        version, tensors = source.read()
    assert version == 1
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "u0.w": [1.5] * 8 + [2.5] * 7,
        "u0.b": [1.5] * 3 + [2.5] * 2,
        "u1.v": [1.5] * 5 + [2.5] * 4,
    }
    assert [tensors[name].dtype for name in ("u0.w", "u0.b")] == [F32, BF16]


def test_a_version_is_there_when_the_last_rank_has_published_it(job: Job) -> None:
    with Reader(job.handle) as source:
        assert source.version == 0
        for member, version in ((0, 0), (1, 1), (1, 1), (0, 2)):
            job.crew.publish(member)
            assert source.version == version


def test_what_was_read_does_not_change_any_more(job: Job) -> None:
    job.publish([1.0, 1.0])
    with Reader(job.handle) as source:
        first = source.read()
        job.publish([2.0, 2.0])
        assert set(first.tensors["u0.w"].tolist()) == {1.0}
        assert source.version == source.read().version == 2


def test_into_tensors_of_any_kind(job: Job) -> None:
    job.publish([1.5, 2.5])
    strided = torch.zeros(15, 2)
    into = {"u0.w": strided[:, 0], "u1.v": torch.zeros(9, dtype=torch.float64)}
    with Reader(job.handle) as source:
        assert source.read(into).tensors.keys() == into.keys()
    assert strided.tolist() == [[1.5, 0.0]] * 8 + [[2.5, 0.0]] * 7
    assert into["u1.v"].tolist() == [1.5] * 5 + [2.5] * 4


def test_tied_names_are_all_filled_and_share_one_tensor_when_made(job: Job) -> None:
    job.publish([1.0, 1.0])
    parameters = json.loads(job.handle)["parameters"]
    parameters[0]["names"] = ["embed", "head"]
    with Reader(changed(job.handle, parameters=parameters)) as source:
        made = source.read().tensors
        assert made["embed"] is made["head"]
        into = {"embed": torch.zeros(15), "head": torch.zeros(15)}
        source.read(into)
    assert torch.equal(into["embed"], torch.ones(15)) and torch.equal(into["head"], torch.ones(15))


def test_sharded_along_another_dimension(job: Job) -> None:
    job.publish([1.0, 2.0])
    parameters = json.loads(job.handle)["parameters"]
    parameters[0] |= {"shape": [4, 4], "shard_dim": 1}
    with Reader(changed(job.handle, parameters=parameters)) as source:
        into = {"u0.w": torch.zeros(4, 4, dtype=torch.float64)}
        assert source.read().tensors["u0.w"].tolist() == [[1.0, 1.0, 2.0, 2.0]] * 4
        assert source.read(into).tensors["u0.w"].tolist() == [[1.0, 1.0, 2.0, 2.0]] * 4


def test_shapes_and_dtypes_are_known_before_reading(job: Job) -> None:
    with Reader(job.handle) as source:
        assert source.shapes() == {"u0.w": ((15,), F32), "u0.b": ((5,), BF16), "u1.v": ((9,), F32)}


@pytest.mark.parametrize(
    ("into", "says"),
    [({"u0.x": torch.zeros(15)}, "'u0.x' is not exported"), ({"u0.w": torch.zeros(16)}, r"shape \(15,\)")],
)
def test_wrong_destinations(job: Job, into: dict[str, torch.Tensor], says: str) -> None:
    job.publish([1.0, 1.0])
    with Reader(job.handle) as source, pytest.raises(ValueError, match=says):
        source.read(into)


# the sequence lock ---------------------------------------------------------------------------------------------------


class Interleaved:
    """Publishers that go on by a given schedule, one write at a time, in the middle of every copy and every pause."""

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
        real.memmove(to, source, half)
        self.go_on()
        real.memmove(to + half, source + half, nbytes - half)

    def sleep(self, seconds: float) -> None:
        self.step()  # one at a time: no state is skipped, so a reader that waits finds one it can start from


real = reader.ctypes


@pytest.fixture
def interleave(monkeypatch: pytest.MonkeyPatch) -> Callable[[Job, list[int]], None]:
    def start(job: Job, schedule: list[int]) -> None:
        steps = Interleaved(job, schedule)
        monkeypatch.setattr(reader, "ctypes", steps)
        monkeypatch.setattr(time, "sleep", steps.sleep)

    return start


def read_in_a_loop(source: Reader, reads: int) -> tuple[int, int]:
    """(consistent copies, given up); asserts that each copy is of its version to the last element."""
    good = stale = 0
    for _ in range(reads):
        try:
            version, tensors = source.read()
        except StaleVersionError:
            stale += 1
            continue
        good += 1
        wrong = {name: tensor.tolist() for name, tensor in tensors.items() if (tensor != version).any()}
        assert not wrong, f"version {version}: {wrong}"
    return good, stale


def many(test: Callable[..., None]) -> Callable[..., None]:
    """Hypothesis, with one fixture for all examples: every example sets it anew."""
    patient = examples(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    return patient(given(schedule=st.lists(st.integers(0, 12), min_size=1, max_size=24))(test))


@pytest.mark.parametrize("buffers", [1, 2])
@many
def test_no_copy_is_torn_however_writes_and_copies_interleave(
    buffers: int, interleave: Callable[[Job, list[int]], None], schedule: list[int]
) -> None:
    with Job(settings=Settings(timeout_s=60.0, second_buffer=buffers == 2)) as job:
        interleave(job, schedule)
        with Reader(job.handle, tries=3) as source:
            good, stale = read_in_a_loop(source, 4)
    assert good + stale == 4


BUSY = [0, 3, 1, 5, 2, 7]


def test_the_schedules_do_tear_a_copy_that_nobody_checks(
    job: Job, interleave: Callable[[Job, list[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    interleave(job, BUSY)
    monkeypatch.setattr(Reader, "_overtaken", lambda self, version: False)
    with Reader(job.handle) as source, pytest.raises(AssertionError, match="version"):
        read_in_a_loop(source, 20)


def test_with_a_second_buffer_fewer_copies_are_overtaken(interleave: Callable[[Job, list[int]], None]) -> None:
    overtaken = []
    for second in (False, True):
        with Job(settings=Settings(timeout_s=60.0, second_buffer=second)) as job:
            interleave(job, [0, 1, 1])
            with Reader(job.handle, tries=4) as source:
                read_in_a_loop(source, 10)
                overtaken.append(source.overtaken)
    assert overtaken[0] > overtaken[1]


def test_a_reader_too_slow_is_told_after_so_many_tries(job: Job, interleave: Callable[[Job, list[int]], None]) -> None:
    interleave(job, [40])
    with Reader(job.handle, tries=3) as source:
        with pytest.raises(StaleVersionError, match=r"3 copies .* crew .*second_buffer=True"):
            source.read()
        assert source.overtaken == 3


@pytest.mark.parametrize("second", [False, True])
def test_real_publishes_on_a_thread_are_never_torn(second: bool) -> None:
    layout = [[("w", 200_000, F32)], *LAYOUT]
    with Job(layout, settings=Settings(timeout_s=60.0, second_buffer=second)) as job:
        over = threading.Event()

        def publish() -> None:
            number = 0
            while not over.is_set():
                number += 1
                job.publish([number, number])
                time.sleep(0.001)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            with Reader(job.handle, tries=1000) as source:
                for _ in range(60):
                    version, tensors = source.read()
                    # The crew publishes the number in bf16 too: compare what that number becomes there.
                    wrong = [name for name, t in tensors.items() if (t != torch.tensor(version).to(t.dtype)).any()]
                    assert not wrong, f"version {version}: {wrong}"
        finally:
            over.set()
            thread.join()


def test_publish_says_what_it_is_about_to_overwrite(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    board = job.crew.layouts[0].peer(0).board
    seen = list[tuple[int, int]]()
    copy = torch._foreach_copy_

    def watched(*args: Any) -> None:
        seen.append((board.load(Word.PUBLISHING), board.load(Word.PUBLISHED)))
        copy(*args)

    monkeypatch.setattr(torch, "_foreach_copy_", watched)
    job.crew.publish(0)
    job.crew.publish(0)
    assert seen == [(1, 0), (1, 0), (2, 1), (2, 1)]
    assert board.load(Word.PUBLISHED) == 2


# waiting -------------------------------------------------------------------------------------------------------------


def test_waits_for_a_version_that_is_still_to_come(job: Job) -> None:
    job.publish([1.0, 1.0])
    timer = threading.Timer(0.1, lambda: job.publish([2.0, 2.0]))
    timer.start()
    with Reader(job.handle) as source:
        assert source.read(at_least=2).version == 2
    timer.join()


def test_a_version_older_than_asked_for_is_not_given_out(job: Job) -> None:
    job.publish([1.0, 1.0])
    job.publish([2.0, 2.0])
    with Reader(job.handle, timeout_s=0.1) as source:
        assert source.read(at_least=2).version == 2
        with pytest.raises(WaitTimeoutError, match="rank 10 to publish version 3"):
            source.read(at_least=3)


def test_a_rank_that_does_not_publish_is_named(job: Job) -> None:
    job.publish([1.0, 1.0])
    job.crew.publish(0, 2.0)
    with Reader(job.handle, timeout_s=0.1) as source:
        with pytest.raises(WaitTimeoutError, match="rank 13 to publish version 2") as caught:
            source.read()
        assert caught.value.culprit == 13


def test_progress_of_the_rank_starts_the_deadline_anew(job: Job) -> None:
    job.crew.publish(0, 1.0)
    over = time.monotonic() + 3.0

    def touch() -> None:
        while time.monotonic() < over:
            job.crew.members[1].protocol.touch("computing")
            time.sleep(0.02)
        job.crew.publish(1, 1.0)

    thread = threading.Thread(target=touch)
    thread.start()
    with Reader(job.handle, timeout_s=2.5) as source:
        assert source.read().version == 1
    thread.join()


def test_left_and_aborted_jobs(job: Job) -> None:
    job.publish([1.0, 1.0])
    with Reader(job.handle) as source:
        job.crew.layouts[1].peer(1).board.store(Word.LEFT, 1)
        with pytest.raises(PeerLostError, match="rank 13 has left the job"):
            source.read()
        abort(job.crew.layouts[0], "out of memory", 13)
        with pytest.raises(PeerLostError, match="aborted by rank 13: out of memory") as caught:
            source.read()
        assert caught.value.culprit == 13


# attaching -----------------------------------------------------------------------------------------------------------


def mapped() -> list[str]:
    """Rights of every mapping of a crew's memory in this process."""
    gc.collect()  # what earlier tests left
    return [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if "odc.crew" in line]


def test_the_memory_is_mapped_without_the_right_to_write(job: Job) -> None:
    before = Counter(mapped())
    with Reader(job.handle):
        assert Counter(mapped()) - before == {"r--s": 2}


def test_a_weight_handle_opens_nothing_but_reading(job: Job) -> None:
    owner = job.owners[0]
    answer = ask(owner.address, {"op": "attach", "root": "crew", "token": owner.token}, 60.0)
    assert answer.reply == {"error": "wrong token"} and not answer.fds


def test_a_wrong_token(job: Job) -> None:
    owners = json.loads(job.handle)["owners"]
    owners[1]["token"] = "0" * 32
    with pytest.raises(PeerLostError, match="rank 13: wrong token"):
        Reader(changed(job.handle, owners=owners))


def test_memory_of_another_size_than_was_answered_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """To map it would end the reader with a bus error at its first look."""
    ask_member = member.ask_member

    def exchanged(*args: Any, **options: Any) -> Any:
        answer = ask_member(*args, **options)
        for fd in answer.fds:
            os.close(fd)
        answer.fds[:] = [os.memfd_create("empty")]
        return answer

    monkeypatch.setattr(member, "ask_member", exchanged)
    with pytest.raises(LayoutMismatchError, match="rank 10: its heap is not laid out as the weight handle says"):
        Reader(job.handle)


def test_a_weight_handle_of_another_run() -> None:
    with Job() as job:
        handle = job.handle
        with pytest.raises(LayoutMismatchError, match="rank 10: its heap is not laid out as the weight handle says"):
            Reader(changed(handle, digest="0" * 64))
    with pytest.raises(PeerLostError, match="rank 10: its server does not answer"):
        Reader(handle)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "odc-weight-handle-0"}', '{"schema": "odc-weight-handle-1"}']
)
def test_no_weight_handle_at_all(text: str) -> None:
    with pytest.raises(OdcError, match="this is not a weight handle"):
        Reader(text)


def test_weight_handles_survive_the_journey(job: Job) -> None:
    assert WeightHandle.from_json(job.handle).to_json() == job.handle


@pytest.mark.parametrize("wrong", [{"tries": 0}, {"timeout_s": 0.0}])
def test_wrong_options(job: Job, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tries must be 1 or more"):
        Reader(job.handle, **wrong)


def test_nothing_stays_open(job: Job) -> None:
    with Reader(job.handle):
        pass
    before = mapped(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Reader(job.handle):
            pass
    assert (mapped(), len(os.listdir("/proc/self/fd"))) == before
