from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.members import F32, HeapGroup

from odc.errors import WaitTimeoutError
from odc.fsdp.sender import Sender
from odc.protocol import Gradient
from odc.settings import Settings
from odc.trace import PUSH, recorder


class GatedPusher:
    """Stands in for a root's pusher: pushes when it is let."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        self.open, self.fails = threading.Event(), False
        self.first = threading.Event()

    def push(self, unit: Any, gradients: Any) -> int:
        self.begun.append((unit.name, threading.current_thread().name))
        self.first.set()
        assert self.open.wait(60.0)
        if self.fails:
            raise WaitTimeoutError(f"{unit.name} could not be pushed")
        return 7


class Unit:
    """Stands in for a unit."""

    def __init__(self, name: str) -> None:
        self.name = name


@contextlib.contextmanager
def sending(overlap: bool) -> Iterator[tuple[Sender, GatedPusher]]:
    pusher = GatedPusher()
    sender = Sender(pusher, overlap)  # type: ignore[arg-type]
    try:
        yield sender, pusher
    finally:
        pusher.open.set()
        sender.close()


def send(sender: Sender, name: str) -> None:
    sender.send(Unit(name), [])  # type: ignore[arg-type]


def assert_flush_waits(sender: Sender, pusher: GatedPusher) -> None:
    """Until what is under way has been pushed."""
    flusher = in_thread(sender.flush)
    flusher.join(0.05)
    assert flusher.is_alive()
    pusher.open.set()
    flusher.join(60.0)
    assert not flusher.is_alive()


def in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_without_overlap_a_push_is_over_when_send_returns() -> None:
    with sending(overlap=False) as (sender, pusher):
        pusher.open.set()
        send(sender, "a")
        assert pusher.begun == [("a", "MainThread")]
        sender.flush()


def test_at_most_two_units_wait_so_that_memory_stays_bounded() -> None:
    with sending(overlap=True) as (sender, pusher):
        send(sender, "a")
        assert pusher.first.wait(60.0)
        send(sender, "b")
        send(sender, "c")
        assert pusher.begun == [("a", "odc-send")], "backward goes on while a push is under way"
        fourth = in_thread(lambda: send(sender, "d"))
        fourth.join(0.05)
        assert fourth.is_alive(), "a third unit of gradients would wait"
        flusher = in_thread(sender.flush)
        flusher.join(0.05)
        assert flusher.is_alive(), "it returns when everything is posted"
        pusher.open.set()
        fourth.join(60.0)
        flusher.join(60.0)
        sender.flush()
        assert [name for name, _ in pusher.begun] == ["a", "b", "c", "d"], "a ring has one producer, in order"
        assert {thread for _, thread in pusher.begun} == {"odc-send"}


@pytest.mark.parametrize("how", ["flush", "send"])
def test_a_failed_push_is_raised_at_the_next_call(how: str) -> None:
    with sending(overlap=True) as (sender, pusher):
        pusher.fails = True
        pusher.open.set()
        send(sender, "a")
        with contextlib.suppress(WaitTimeoutError):
            sender._jobs[0].wait()
        with pytest.raises(WaitTimeoutError, match="a could not be pushed"):
            send(sender, "b") if how == "send" else sender.flush()
        sender.flush()  # which has forgotten what was raised


def test_flush_waits_for_what_is_under_way_after_a_push_that_failed() -> None:
    """DONE follows a flush: nothing may be posted after it, and an error that ends the job comes before any other."""
    with sending(overlap=True) as (sender, pusher):
        held = threading.Event()

        def push(unit: Any, gradients: Any) -> int:
            if unit.name == "a":
                raise MemoryError("no room")
            assert held.wait(60.0)
            raise WaitTimeoutError("b could not be pushed")

        pusher.push = push  # type: ignore[method-assign]
        send(sender, "a")
        with contextlib.suppress(MemoryError):
            sender._jobs[0].wait()
        sender._jobs[0]._done.clear()  # not seen to have failed by the next send
        send(sender, "b")
        sender._jobs[0]._done.set()
        raised: list[BaseException] = []

        def flush() -> None:
            try:
                sender.flush()
            except BaseException as error:
                raised.append(error)

        flusher = in_thread(flush)
        flusher.join(0.05)
        assert flusher.is_alive()
        held.set()
        flusher.join(60.0)
        assert [type(error) for error in raised] == [WaitTimeoutError]


def test_a_flush_that_a_signal_ends_leaves_its_pushes_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or DONE would follow while one is under way, and its blocks be added to the next minibatch."""

    def interrupted(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    with sending(overlap=True) as (sender, pusher):
        send(sender, "a")
        with monkeypatch.context() as signalled:
            signalled.setattr(sender._jobs[0]._done, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sender.flush()
        assert_flush_waits(sender, pusher)


def test_a_push_that_failed_is_raised_by_the_flush_after_one_that_a_signal_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the minibatch would end as if that push had arrived."""
    with sending(overlap=True) as (sender, pusher):
        pusher.fails = True
        pusher.open.set()
        send(sender, "a")

        def interrupted(*span: Any, **more: Any) -> None:
            raise KeyboardInterrupt

        sender._jobs[0].over(None)
        with monkeypatch.context() as signalled:
            signalled.setattr(recorder(), "add", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sender.flush()
        with pytest.raises(WaitTimeoutError, match="a could not be pushed"):
            sender.flush()
        sender.flush()


def test_a_push_that_began_as_a_signal_came_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with sending(overlap=True) as (sender, pusher):
        worker = sender._worker
        assert worker is not None
        submit = worker.submit

        def interrupted(job: Any) -> None:
            submit(job)
            assert pusher.first.wait(60.0)
            raise KeyboardInterrupt

        monkeypatch.setattr(worker, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            send(sender, "a")
        assert_flush_waits(sender, pusher)


def test_a_push_that_a_signal_keeps_from_being_submitted_is_not_waited_for() -> None:
    class Interrupting(list[Any]):
        def append(self, job: Any) -> None:
            super().append(job)
            raise KeyboardInterrupt

    with sending(overlap=True) as (sender, pusher):
        sender._jobs = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            send(sender, "a")
        flusher = in_thread(sender.flush)
        flusher.join(60.0)
        assert not flusher.is_alive() and not pusher.begun


def test_a_push_that_was_not_submitted_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(job: Any) -> None:
        raise KeyboardInterrupt

    with sending(overlap=True) as (sender, pusher):
        monkeypatch.setattr(sender._worker, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            send(sender, "a")
        flusher = in_thread(sender.flush)
        flusher.join(60.0)
        assert not flusher.is_alive() and not pusher.begun


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_arrive_and_are_recorded(overlap: bool) -> None:
    with HeapGroup([[("w", 4, F32)]], 2, settings=Settings(timeout_s=60.0)) as group:
        group.publish_all()
        sender = Sender(group.members[0].pusher, overlap)
        recorder().clear()
        sender.send(group.units[0], [Gradient(0, torch.arange(8.0))])
        sender.flush()
        sender.close()
        assert group.layouts[1].peer(1).accumulator(group.units[0]).tolist() == [4.0, 5.0, 6.0, 7.0]
        assert group.layouts[0].peer(0).accumulator(group.units[0]).tolist() == [0.0, 1.0, 2.0, 3.0]
        lane = "push" if overlap else "main"
        mine = [s for s in recorder().spans() if s.category == PUSH and s.lane == lane and s.nbytes]
        assert [(s.unit, s.nbytes) for s in mine] == [("u0", 16)]
