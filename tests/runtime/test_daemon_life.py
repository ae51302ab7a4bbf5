"""The daemon's listener, and its own begin and end."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from support.forked import answer_of_child
from support.members import HeapGroup
from support.ranks import RankPool
from support.sides import aborts, descriptors, settle
from support.waiting import until

from odc.errors import UnsupportedError
from odc.net.listener import list_listeners
from odc.net.requests import ask
from odc.runtime import Daemon, daemon, stop_daemon

# the listener -------------------------------------------------------------------------------------------------


def test_the_listener_hands_out_the_heap_and_the_doorbell_for_the_token(group: HeapGroup, server: Daemon) -> None:
    service = group.services[0]
    server.serve(service)
    answer = ask(server.address, {"op": "attach", "root": "group", "token": service.token}, 60.0)
    heap, doorbell = answer.fds
    try:
        assert answer.reply == {"nbytes": group.layouts[0].heap.nbytes, "digest": group.layouts[0].heap.digest}
        assert answer.pid == os.getpid()
        assert os.path.sameopenfile(heap, group.layouts[0].heap.fd)
        group.push(1)
        os.eventfd_write(doorbell, 1)
        group.members[0].protocol.await_accumulated()
    finally:
        os.close(heap)
        os.close(doorbell)


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "attach", "root": "group", "token": "guessed"},
        {"op": "attach", "root": "group"},
        {"op": "attach", "root": "another", "token": "any"},
        {"op": "attach"},
        {"op": "dance", "root": "group"},
        {},
    ],
)
def test_the_listener_hands_out_nothing_else(group: HeapGroup, server: Daemon, request_: dict[str, str]) -> None:
    server.serve(group.services[0])
    answer = ask(server.address, request_, 60.0)
    assert set(answer.reply) == {"error"}
    assert answer.fds == []
    assert server.alive()


def test_the_token_opens_the_heap_only_to_a_request_to_attach(group: HeapGroup, server: Daemon) -> None:
    server.serve(group.services[0])
    answer = ask(server.address, {"op": "dance", "root": "group", "token": group.services[0].token}, 60.0)
    assert (answer.reply, answer.fds) == ({"error": "no root 'group' here"}, [])


# its own life --------------------------------------------------------------------------------------------------------


def test_close_gives_everything_back_and_may_be_called_again(group: HeapGroup, victim: subprocess.Popen[bytes]) -> None:
    gc.collect()
    before, threads = descriptors(), threading.active_count()
    server = Daemon(10)
    server.serve(group.services[0])
    server.watch(group.services[0], 1, victim.pid)
    settle(server)
    assert server.address in list_listeners("odc.")
    server.close()
    server.close()
    until(lambda: descriptors() <= before and threading.active_count() <= threads)
    assert server.address not in list_listeners("odc.")
    assert not server.alive()
    assert aborts(group) == [0, 0, 0]


def test_a_daemon_that_cannot_listen_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a sandbox that forbids it."""

    def refuse(*unused: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    uncaught = list[object]()
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    monkeypatch.setattr(sys.modules[Daemon.__module__], "serve_requests", refuse)
    stop_daemon()  # that of an earlier test
    gc.collect()
    before, threads = descriptors(), threading.active_count()
    with pytest.raises(UnsupportedError, match=r"rank 4 cannot start its server daemon \(.*not permitted\); look at"):
        daemon(4)
    assert not uncaught
    until(lambda: descriptors() <= before and threading.active_count() <= threads)


def test_a_notification_after_close_writes_to_no_recycled_descriptor(group: HeapGroup) -> None:
    server = Daemon(10)
    number = server.doorbell
    server.close()
    pair = os.pipe2(os.O_NONBLOCK)
    read, write = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, number + 50) for fd in pair)
    for fd in pair:
        os.close(fd)
    os.dup2(write, number)
    try:
        server.notify()
        server.dismiss(group.services[0])()
        server.watch(group.services[0], 1, 1)
        with pytest.raises(BlockingIOError):
            os.read(read, 8)
    finally:
        for fd in (read, write, number):
            os.close(fd)


def test_there_is_one_daemon_a_process_until_it_is_stopped() -> None:
    try:
        first = daemon(4)
        assert daemon(4) is first
        assert first.alive()
        stop_daemon()
        assert not first.alive()
        stop_daemon()
        second = daemon(4)
        assert second is not first and second.alive()
        assert second.address != first.address
        assert second.address.startswith(f"odc.{os.getuid()}.4.{os.getpid()}.")
    finally:
        stop_daemon()


def in_a_forked_child(rank: int, world: int) -> tuple[bool, bool, list[str], bool]:
    """What a child that is forked from a rank, as a data loader's worker is, makes of the daemon."""
    parents = daemon(rank)

    def begin() -> str:
        own = daemon(rank)
        alive = parents.alive()
        parents.close()  # not its to close
        return f"{alive} {own is parents} {own.alive()} {own.address}"

    message = answer_of_child(begin).split()
    still = ask(parents.address, {"op": "status"}, 60.0).reply["pid"] == os.getpid()
    return message[0] == "True", message[1] == "True", message[2:], still


def test_a_forked_child_starts_its_own_and_leaves_the_parents_alone(ranks: Callable[[int], RankPool]) -> None:
    ((parents_alive, same, (alive, listener), still),) = ranks(1).run(in_a_forked_child)
    assert not parents_alive, "a thread does not live on in a forked child"
    assert not same
    assert alive == "True"
    assert still, "the parent's daemon does not answer any more"
    assert listener not in list_listeners("odc."), "the child's listener is gone with the child"


def test_a_root_may_end_on_the_loops_own_thread(group: HeapGroup, server: Daemon) -> None:
    """The garbage collector runs wherever it likes."""
    server.serve(group.services[0])
    over = threading.Event()
    server._reactor.call(lambda: (server.dismiss(group.services[0]), over.set()))  # type: ignore[func-returns-value]
    assert over.wait(60.0)
    assert ask(server.address, {"op": "status"}, 60.0).reply["roots"] == []


def test_a_root_may_end_where_the_loop_waits_for_a_lock(group: HeapGroup, server: Daemon) -> None:
    """The garbage collector may end a root on a thread that holds the lock of an accumulator, which the loop wants."""
    service, adding, closed = group.services[0], threading.Event(), threading.Event()
    server.serve(service)
    settle(server)
    drain = service.drain
    service.drain = lambda: (adding.set(), drain())[1]  # type: ignore[method-assign, func-returns-value]
    with group.layouts[0].peer(0).mutex(group.units[0]).held(60.0):
        group.push(1)
        server.notify()
        assert adding.wait(60.0)
        wait = server.dismiss(service, closed.set)  # returns: to wait here would take the lock's whole deadline
        assert not closed.wait(0.2), "closed while the loop was adding"
    wait()
    assert closed.is_set()


def test_a_root_may_end_while_the_loop_ends(group: HeapGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that shuts the root down waits until its heap is closed."""
    server, ending, go_on, closed = Daemon(10), threading.Event(), threading.Event(), threading.Event()
    server.serve(group.services[0])
    settle(server)
    assert server._listener is not None
    close = server._listener.close
    monkeypatch.setattr(server._listener, "close", lambda: (ending.set(), go_on.wait(60.0), close()))
    closing = threading.Thread(target=server.close)
    closing.start()
    assert ending.wait(60.0)
    server.dismiss(group.services[0], closed.set)
    go_on.set()
    assert closed.wait(60.0)
    closing.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("others", [0, 2])
def test_a_root_may_end_after_the_loop_has_failed(group: HeapGroup, others: int) -> None:
    """Whatever failed may fail once more, in what is left to be done."""
    server, closed = Daemon(10), threading.Event()

    def fail(others: int) -> None:
        for _ in range(others):
            server._reactor.call(lambda: fail(0))
        raise ZeroDivisionError

    here, there = socket.socketpair()
    with here, there:
        server.serve(group.services[0])
        server.attend(group.services[0], here, lambda: True)  # type: ignore[arg-type]
        settle(server)
        server._reactor.call(lambda: fail(others))
        server._reactor._thread.join()
        server.dismiss(group.services[0], closed.set)()
        assert closed.is_set()
        assert server.doorbell == -1


def test_a_root_may_end_while_the_daemon_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may end an old root, which asks for the daemon, in the middle of a new root's asking."""
    alive, asked = Daemon.alive, list[Daemon]()

    def collects(self: Daemon) -> bool:
        if not asked:
            asked.append(self)
            asked.append(daemon(4))
        return alive(self)

    try:
        first = daemon(4)
        monkeypatch.setattr(Daemon, "alive", collects)
        found: list[Daemon] = []
        asking = threading.Thread(target=lambda: found.append(daemon(4)), daemon=True)
        asking.start()
        asking.join(60.0)
        assert found == [first]
    finally:
        monkeypatch.undo()
        stop_daemon()
