"""What every listener does, Unix or TCP, whatever its clients do: it serves, bounds, times out, and ends."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import resource
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import up_to
from support.listeners import ByHand, Family, Tcp, Unix, reactor
from support.waiting import until

from odc.deadlines import Deadline
from odc.net import listener as module
from odc.net.handshake import Admitted
from odc.net.listener import bind_unix, list_listeners
from odc.net.tcp import bind

FAMILIES = [Unix, Tcp]
HELLO = 108  # bytes of a hello: all that a peer without the secret receives
CLIENTS = 5


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    made: Family = request.param()
    return made


@contextlib.contextmanager
def listening(family: Family, limit_s: float = 1000.0) -> Iterator[Any]:
    with reactor() as loop:
        listener = family.listen(loop, limit_s)
        try:
            yield listener
        finally:
            loop.call(listener.close)


def until_closed(connection: socket.socket) -> bytes:
    """All that comes before the end."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(4096):
            found += data
    return found


def test_clients_are_served_while_others_are_silent_or_stop_halfway(family: Family) -> None:
    with listening(family), contextlib.ExitStack() as stack:
        for number in range(20):
            connection = stack.enter_context(family.connect())
            connection.sendall(family.first[: number % 2 * 3])
        served: list[bool] = []
        clients = [threading.Thread(target=lambda: served.append(family.succeed())) for _ in range(20)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert served == [True] * 20


def test_a_silent_client_is_disconnected_at_its_deadline(family: Family) -> None:
    with listening(family, limit_s=0.05), family.connect() as silent, family.connect() as half:
        half.sendall(family.first[:3])
        assert until_closed(silent) == until_closed(half) == b""


def test_connections_wait_while_many_are_pending_and_none_of_these_is_ended_for_them(family: Family) -> None:
    served: list[bool] = []
    clients = [threading.Thread(target=lambda: served.append(family.succeed()), daemon=True) for _ in range(CLIENTS)]
    with listening(family) as listener, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(family.connect()) for _ in range(module._MOST_PENDING)]
        while len(listener._pending) < module._MOST_PENDING:
            time.sleep(0.001)
        for client in clients:
            client.start()
        time.sleep(0.05)
        assert not served
        next(iter(listener._pending.values())).deadline = Deadline(0.0)
        listener._reactor.call(listener._sweep)
        for client in clients:  # one after the other
            client.join()
        assert served == [True] * CLIENTS
        assert until_closed(silent[0]) == b""
        for one in silent[1:]:
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1)


def test_a_connection_that_cannot_be_used_is_ended_and_the_loop_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    family, refusing = Tcp(), True
    welcome = family._welcome

    def without_descriptors(connection: socket.socket, admitted: Admitted) -> None:
        if refusing:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        welcome(connection, admitted)

    family._welcome = without_descriptors  # type: ignore[method-assign]
    with listening(family):
        assert not family.succeed()
        refusing = False
        assert family.succeed()
    assert "ends a connection that it has accepted: raise this process's limit of open files" in caplog.text


@given(
    chunks=st.lists(st.binary(max_size=200) | st.integers(0, 200).map(lambda n: b"\0\0\0\xff" + b"[" * n), max_size=4),
    like_a_rank=st.booleans(),
    disconnects=st.booleans(),
    family=st.sampled_from(FAMILIES),
)
@settings(max_examples=up_to(200), deadline=None)
def test_nothing_that_a_client_sends_disturbs_the_listener(
    chunks: list[bytes], like_a_rank: bool, disconnects: bool, family: type[Family]
) -> None:
    made = family()
    with listening(made), made.connect() as client:
        with contextlib.suppress(OSError):  # it was refused already
            for chunk in [made.first] * (like_a_rank and family is Tcp) + chunks:
                client.sendall(chunk)
            client.shutdown(socket.SHUT_WR)
        if not disconnects:
            assert len(until_closed(client)) <= HELLO
        assert made.succeed()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """No new descriptor can be opened in this process, also not in another one's place."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_loop_sleeps_while_descriptors_have_run_out_and_connections_wait(family: Family, caplog: Any) -> None:
    loop = ByHand()
    with contextlib.closing(family.listen(loop)), contextlib.ExitStack() as stack:
        for _ in range(CLIENTS):
            stack.enter_context(family.connect())
        with no_descriptor_left():
            for _ in range(3):
                assert loop.turn()
                assert not loop.turn(), "the loop is woken for connections that it cannot accept"
                loop.run_timers()
            assert loop.turn()
        assert caplog.text.count("raise this process's limit of open files (ulimit -n)") == 1
        served: list[bool] = []
        client = threading.Thread(target=lambda: served.append(family.succeed()))
        client.start()
        loop.run_timers()
        while client.is_alive():
            loop.turn()
        assert served == [True]


def test_listeners_leak_no_descriptor(family: Family) -> None:
    def cycle() -> None:
        with listening(family), family.connect():
            assert family.succeed()

    cycle()
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(20):
        cycle()
    until(lambda: set(os.listdir("/proc/self/fd")) <= before)


def fork_beside_a_listener(rank: int, world: int, family: type[Family]) -> list[Any]:
    """What a child that is forked during a conversation, as by a data loader, holds; how the parent goes on."""
    made = family()
    with listening(made) as listener:
        waiting = made.connect()
        assert made.succeed()  # so that the listener has accepted the one before
        (found_fd, find_fd), (go_on, stop) = os.pipe(), os.pipe()
        # Read last: a pending connection that ends meanwhile must not leave its number to a pipe.
        numbers = [listener._socket.fileno(), listener._reactor._selector.fileno(), *listener._pending]
        pid = os.fork()
        if pid == 0:
            os.write(find_fd, json.dumps([fd for fd in numbers if Path(f"/proc/self/fd/{fd}").is_symlink()]).encode())
            os.read(go_on, 1)
            os._exit(0)
        found = [len(numbers) >= 3, json.loads(os.read(found_fd, 4096)), made.succeed()]
        waiting.sendall(made.first)
        found.append(len(waiting.recv(4096)) > 0)
    with pytest.raises(OSError):  # the child does not keep the address alive
        made.connect()
    os.write(stop, b".")
    os.waitpid(pid, 0)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forked_child_closes_its_copies_and_the_listener_stays_open(ranks: Any, family: type[Family]) -> None:
    assert ranks(1).run(fork_beside_a_listener, family) == [[True, [], True, True]]


def test_an_address_can_be_taken_once_and_again_after_close() -> None:
    family = Unix()
    with listening(family), pytest.raises(OSError, match=f"cannot listen at '{family.name}': Address already in use"):
        bind_unix(family.name)
    bind_unix(family.name).close()
    with pytest.raises(OSError):
        bind("192.0.2.77")


@pytest.mark.parametrize("bad", ["", "a b", "a\0b", "a@b", "a\n", "é", "x" * 101])
def test_bad_addresses_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="an address is"):
        bind_unix(bad)


def test_listeners_are_listed_by_prefix_while_they_are_open(tmp_path: Path) -> None:
    family = Unix()
    with listening(family), family.connect():  # which has the same address in the kernel's table
        assert family.succeed()
        assert list_listeners(family.name) == [family.name]
        assert list_listeners(f"{family.name}.c") == []
    assert list_listeners(family.name) == []
    table = tmp_path / "unix"
    table.write_text(
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "00000000: 00000002 00000000 00010000 0001 01 11 @odc.0.1\n"
        "00000000: 00000002 00000000 00010000 0001 01 12 @odc.0.0\n"
        "00000000: 00000003 00000000 00000000 0001 03 13 @odc.0.2\n"
        "00000000: 00000002 00000000 00010000 0001 01 14 odc.0.3\n"
        "00000000: 00000002 00000000 00010000 0001 01 15\n"
    )
    assert list_listeners("odc.", table) == ["odc.0.0", "odc.0.1"]


@pytest.mark.parametrize("address", [b"\xff\xfe", b"\n0: 2 0 no 1 1 9 @odc.none\n", b"\x85 \xa0"])
def test_an_address_of_any_bytes_hides_no_other(address: bytes) -> None:
    """Any process of the machine may listen there."""
    family = Unix()
    with socket.socket(socket.AF_UNIX) as other, listening(family):
        other.bind(b"\0" + uuid.uuid4().bytes + address)
        other.listen()
        assert list_listeners(family.name) == [family.name]
        assert list_listeners("odc.none") == []
