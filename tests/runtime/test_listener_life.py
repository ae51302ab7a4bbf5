"""The client's side of a listener, its name, and how it ends (`test_listener` has what it answers)."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from support.listeners import echo, raw, served

from odc.net import listener as listener_module
from odc.net.listener import Listener, ask, list_listeners


@pytest.fixture
def name() -> str:
    return f"odc-test.{uuid.uuid4().hex[:12]}"


# the client's side ----------------------------------------------------------------------------------------------


def test_nobody_there(name: str) -> None:
    with pytest.raises(ConnectionError, match=name):
        ask(name, {}, 60.0)


def test_a_listener_that_nobody_answers_at(name: str) -> None:
    listener = Listener(name, echo)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"listener '{name}' did not answer within 0\.1 s"):
        ask(name, {}, 0.1)
    assert time.monotonic() - begin >= 0.1
    listener.close()


def test_a_full_queue_is_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_BACKLOG", 0)
    listener = Listener(name, echo)
    queued = raw(name)
    with pytest.raises(TimeoutError):
        ask(name, {}, 0.1)
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(ask(name, {}, 60.0)))
    client.start()
    while client.is_alive():
        if select.select([listener.fileno()], [], [], 0.01)[0]:
            listener.answer()
    assert answers[0].pid == os.getpid()
    queued.close()
    listener.close()


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"", "hung up without an answer"),
        (struct.pack("!I", 10) + b"{", "hung up without an answer"),
        (struct.pack("!I", 2) + b"[]", "no JSON object"),
        (struct.pack("!I", 2) + b"{{", "property name"),
        (struct.pack("!I", 1 << 31), "too long"),
    ],
)
def test_bad_answers_are_connection_errors_and_leak_nothing(name: str, sent: bytes, said: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(1000)
                if sent:
                    socket.send_fds(connection, [sent], [listener.fileno()])

        before = len(os.listdir("/proc/self/fd"))
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match=said):
            ask(name, {}, 60.0)
        thread.join()
        assert len(os.listdir("/proc/self/fd")) == before


# names and life --------------------------------------------------------------------------------------------------


def test_listeners_are_listed_by_prefix_while_they_are_open(name: str) -> None:
    with served(f"{name}.b"), served(f"{name}.a"), served(f"x{name}"):
        ask(f"{name}.a", {}, 60.0)
        client = raw(f"{name}.a")  # an open connection has the same address in the kernel's table
        assert list_listeners(name) == [f"{name}.a", f"{name}.b"]
        assert list_listeners(f"{name}.c") == []
        client.close()
    assert list_listeners(name) == []


def test_the_kernels_table_is_read_right(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("bad", ["", "a b", "a\0b", "a@b", "a\n", "é", "x" * 101])
def test_bad_names_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="an address is"):
        Listener(bad, echo)
    with pytest.raises(ConnectionError):
        ask(bad, {}, 1.0)


def test_a_name_can_be_taken_once_and_again_after_close(name: str) -> None:
    first = Listener(name, echo)
    with pytest.raises(OSError, match=f"cannot listen at '{name}': Address already in use"):
        Listener(name, echo)
    first.close()
    first.close()
    first.answer()  # closed: nothing to do
    Listener(name, echo).close()


def test_fifty_listeners_leak_nothing() -> None:
    def cycle() -> None:
        name = f"odc-test.{uuid.uuid4().hex[:12]}"
        with served(name):
            client = raw(name)
            ask(name, {}, 60.0)
        client.close()

    cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        cycle()
    assert len(os.listdir("/proc/self/fd")) == before


def fork_beside_a_listener(rank: int, world: int, name: str) -> list[Any]:
    """Forks while a visit is in progress, as a data loader does; what the child holds, what clients hear."""
    with served(name) as listener:
        waiting = raw(name)
        ask(name, {}, 60.0)  # so that the one before is known to the listener
        told, tell = os.pipe()
        assert listener._acceptor is not None
        numbers = [listener.fileno(), listener._socket.fileno(), listener._acceptor._spare, *listener._connections]
        pid = os.fork()
        if pid == 0:
            os.write(tell, json.dumps([fd for fd in numbers if Path(f"/proc/self/fd/{fd}").is_symlink()]).encode())
            time.sleep(60)
            os._exit(0)
        found = [len(numbers) >= 4, json.loads(os.read(told, 4096))]
        found += [ask(name, {"a": n}, 60.0).reply["asked"] for n in range(3)]
        waiting.sendall(listener_module._frame({"b": 2}))
        found.append(b'{"b": 2}' in waiting.recv(4096))
        waiting.close()
    found.append(list_listeners(name))  # the listener is shut; a child that held it would keep the name
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    os.close(told)
    os.close(tell)
    return found


def test_a_forked_child_closes_its_copy_and_the_parents_listener_stays_open(ranks: Any, name: str) -> None:
    (found,) = ranks(1).run(fork_beside_a_listener, name)
    assert found == [True, [], {"a": 0}, {"a": 1}, {"a": 2}, True, []]
