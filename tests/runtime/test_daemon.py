from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import threading

import pytest
from support.members import HeapGroup
from support.sides import ONE_UNIT, aborts, descriptors, settle
from support.waiting import until

from odc.memory import ProcessHandle
from odc.net.listener import list_listeners
from odc.net.requests import ask
from odc.protocol import Word
from odc.runtime import Daemon, Service

THREAD_ERROR = "ignore::pytest.PytestUnhandledThreadExceptionWarning"


# accumulating --------------------------------------------------------------------------------------------------------


def test_a_notification_makes_the_daemon_add_all_blocks(group: HeapGroup, server: Daemon) -> None:
    server.serve(group.services[0])
    for _ in range(2):
        group.push(1)
        group.push(2)
    server.notify()
    group.members[0].protocol.await_accumulated()
    assert group.layouts[0].peer(0).accumulator(group.units[0]).tolist() == [4.0] * 8


def test_what_was_posted_before_a_root_is_served_is_added_then(group: HeapGroup, server: Daemon) -> None:
    group.push(1)
    server.serve(group.services[0])
    group.members[0].protocol.await_accumulated()


def test_serves_several_roots(server: Daemon) -> None:
    with HeapGroup(ONE_UNIT, 2, by_hand=True) as first, HeapGroup(ONE_UNIT, 2, by_hand=True) as second:
        for number, group in enumerate((first, second)):
            group.services[0].identity = f"root{number}"
            group.publish_all()
            server.serve(group.services[0])
        for group in (first, second):
            group.push(1)
        server.notify()
        for group in (first, second):
            group.members[0].protocol.await_accumulated()
        roots = ask(server.address, {"op": "status"}, 60.0).reply["roots"]
        assert [root["root"] for root in roots] == ["root0", "root1"]


def test_dismiss_returns_when_the_heap_is_no_longer_touched(group: HeapGroup, server: Daemon) -> None:
    draining, go_on = threading.Event(), threading.Event()
    service, calls = group.services[0], list[str]()

    class Slow(Service):
        def drain(self) -> bool:
            calls.append("in")
            draining.set()
            go_on.wait(60.0)
            calls.append("out")
            return False

    service.__class__ = Slow
    server.serve(service)
    assert draining.wait(60.0)
    dismissing = threading.Thread(target=lambda: (server.dismiss(service)(), calls.append("dismissed")))
    dismissing.start()
    dismissing.join(0.2)
    assert calls == ["in"]
    go_on.set()
    dismissing.join(60.0)
    assert calls == ["in", "out", "dismissed"]
    server.notify()
    settle(server)
    assert calls == ["in", "out", "dismissed"]


# liveness ------------------------------------------------------------------------------------------------------------


def test_a_death_is_noticed_while_others_push_without_end(
    group: HeapGroup, server: Daemon, victim: subprocess.Popen[bytes]
) -> None:
    service, pushing, over = group.services[0], threading.Event(), threading.Event()
    server.serve(service)
    server.watch(service, 1, victim.pid)
    settle(server)
    service.drain = lambda: (pushing.set(), not over.is_set())[1]  # type: ignore[method-assign, func-returns-value]
    server.notify()
    assert pushing.wait(60.0)
    victim.kill()
    try:
        until(lambda: all(aborts(group)))
    finally:
        over.set()


def test_a_peer_that_was_dead_before_it_was_watched_is_noticed(
    group: HeapGroup, server: Daemon, victim: subprocess.Popen[bytes]
) -> None:
    victim.kill()
    victim.wait()
    server.serve(group.services[0])
    server.watch(group.services[0], 1, victim.pid)
    until(lambda: all(aborts(group)))


def test_a_peer_that_left_may_end(group: HeapGroup, server: Daemon, victim: subprocess.Popen[bytes]) -> None:
    server.serve(group.services[0])
    server.watch(group.services[0], 1, victim.pid)
    group.members[1].protocol.board.store(Word.LEFT, 1)
    victim.kill()
    victim.wait()
    settle(server)
    assert aborts(group) == [0, 0, 0]
    assert server.alive()


def test_one_death_aborts_every_root_that_watched_it(server: Daemon, victim: subprocess.Popen[bytes]) -> None:
    with HeapGroup(ONE_UNIT, 3) as first, HeapGroup(ONE_UNIT, 3) as second:
        for number, group in enumerate((first, second)):
            group.attach()
            group.services[0].identity = f"root{number}"
            server.serve(group.services[0])
            server.watch(group.services[0], 1, victim.pid)
        victim.kill()
        until(lambda: all(aborts(first)) and all(aborts(second)))


def test_a_root_may_be_dismissed_in_the_moment_in_which_its_peer_ends(
    group: HeapGroup, server: Daemon, victim: subprocess.Popen[bytes]
) -> None:
    """As at the end of every job: all ranks leave, and all processes end."""
    service, held, go_on = group.services[0], threading.Event(), threading.Event()
    server.serve(service)
    server.watch(service, 1, victim.pid)
    settle(server)
    status = service.status
    service.status = lambda: (held.set(), go_on.wait(60.0), status())[2]  # type: ignore[method-assign, func-returns-value]
    asking = threading.Thread(target=settle, args=(server,))
    dismissing = threading.Thread(target=lambda: server.dismiss(service)())
    asking.start()
    assert held.wait(60.0)  # the loop is at the listener
    dismissing.start()
    until(lambda: bool(server._reactor._tasks))
    victim.kill()
    victim.wait()
    go_on.set()  # and finds both in its next round
    dismissing.join(60.0)
    asking.join(60.0)
    settle(server)
    assert server.alive()
    assert aborts(group) == [0, 0, 0]


def test_a_device_that_fails_keeps_no_root(server: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    """Neither its own nor one that is dismissed after it, whose turn may come when the loop would have ended."""

    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(HeapGroup(ONE_UNIT, 2)) for _ in range(4)]
        over: list[int] = []
        for number, group in enumerate(groups):
            service = group.services[0]
            service.identity, service.settle = f"root{number}", fail  # type: ignore[method-assign]
            server.serve(service)
        for number, group in enumerate(groups):
            server.dismiss(group.services[0], functools.partial(over.append, number))()
        settle(server)
        assert over == [0, 1, 2, 3] and server.alive()
    assert caplog.text.count("although its device fails") == 4


@pytest.mark.parametrize("early", [True, False])
def test_a_peer_of_a_dismissed_root_is_not_watched(
    group: HeapGroup, server: Daemon, victim: subprocess.Popen[bytes], early: bool
) -> None:
    """`early`: the watch begins before the dismissal, and else after it."""
    server.serve(group.services[0])
    settle(server)
    before = descriptors()
    if early:
        server.watch(group.services[0], 1, victim.pid)
    server.dismiss(group.services[0])()
    if not early:
        server.watch(group.services[0], 1, victim.pid)
        settle(server)
    until(lambda: descriptors() <= before)
    victim.kill()
    victim.wait()
    settle(server)
    assert aborts(group) == [0, 0, 0]


def test_watching_many_roots_one_after_the_other_keeps_no_descriptors(
    group: HeapGroup, server: Daemon, victim: subprocess.Popen[bytes]
) -> None:
    server.serve(group.services[0])
    settle(server)
    before = descriptors()
    for _ in range(5):
        server.serve(group.services[0])
        server.watch(group.services[0], 1, victim.pid)
        server.dismiss(group.services[0])()
    until(lambda: descriptors() <= before)


def test_deaths_are_noticed_where_the_kernel_refuses_pidfds(
    group: HeapGroup, server: Daemon, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise PermissionError(1, "seccomp says no")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert ProcessHandle(victim.pid).fileno() is None
    server.serve(group.services[0])
    server.watch(group.services[0], 1, victim.pid)
    settle(server)
    assert aborts(group) == [0, 0, 0]
    victim.kill()
    until(lambda: all(aborts(group)))


def test_a_members_own_process_is_not_watched(group: HeapGroup, server: Daemon) -> None:
    """A world of one process, as in these tests, must not keep a descriptor for each of its members."""
    server.serve(group.services[0])
    settle(server)
    before = descriptors()
    server.watch(group.services[0], 1, os.getpid())
    settle(server)
    until(lambda: descriptors() <= before)
    assert aborts(group) == [0, 0, 0]


@pytest.mark.filterwarnings(THREAD_ERROR)
def test_a_failing_service_aborts_all_roots_and_names_the_rank(server: Daemon) -> None:
    class Broken(Service):
        def drain(self) -> bool:
            raise ZeroDivisionError("out of luck")

    with HeapGroup(ONE_UNIT, 3) as first, HeapGroup(ONE_UNIT, 3) as second:
        for number, group in enumerate((first, second)):
            group.attach()
            group.services[0].identity = f"root{number}"
        server.serve(first.services[0])
        second.services[0].__class__ = Broken
        server.serve(second.services[0])
        until(lambda: all(aborts(first)) and all(aborts(second)))
        for group in (first, second):
            assert aborts(group) == [1 + 10] * 3
            reason = group.layouts[1].peer(1).reason
            assert reason == "the server daemon of rank 10 failed: ZeroDivisionError: out of luck"
        until(lambda: not server.alive())
        assert server.address not in list_listeners("odc.")
