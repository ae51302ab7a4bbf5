"""The visitor's side of a door, its name, and how it ends (`test_door` has what it answers)."""

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
from support.doors import echo, raw, served

from odc.runtime import listener as door_module
from odc.runtime.listener import Door, knock, list_doors


@pytest.fixture
def name() -> str:
    return f"odc-test.{uuid.uuid4().hex[:12]}"


# the visitor's side ----------------------------------------------------------------------------------------------


def test_nobody_there(name: str) -> None:
    with pytest.raises(ConnectionError, match=name):
        knock(name, {}, 60.0)


def test_a_door_that_nobody_answers_at(name: str) -> None:
    door = Door(name, echo)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"door '{name}' did not answer within 0\.1 s"):
        knock(name, {}, 0.1)
    assert time.monotonic() - begin >= 0.1
    door.close()


def test_a_full_queue_is_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "_BACKLOG", 0)
    door = Door(name, echo)
    queued = raw(name)
    with pytest.raises(TimeoutError):
        knock(name, {}, 0.1)
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(knock(name, {}, 60.0)))
    client.start()
    while client.is_alive():
        if select.select([door.fileno()], [], [], 0.01)[0]:
            door.answer()
    assert answers[0].pid == os.getpid()
    queued.close()
    door.close()


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
            knock(name, {}, 60.0)
        thread.join()
        assert len(os.listdir("/proc/self/fd")) == before


# names and life --------------------------------------------------------------------------------------------------


def test_doors_are_listed_by_prefix_while_they_are_open(name: str) -> None:
    with served(f"{name}.b"), served(f"{name}.a"), served(f"x{name}"):
        knock(f"{name}.a", {}, 60.0)
        visitor = raw(f"{name}.a")  # an open connection has the same address in the kernel's table
        assert list_doors(name) == [f"{name}.a", f"{name}.b"]
        assert list_doors(f"{name}.c") == []
        visitor.close()
    assert list_doors(name) == []


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
    assert list_doors("odc.", table) == ["odc.0.0", "odc.0.1"]


@pytest.mark.parametrize("bad", ["", "a b", "a\0b", "a@b", "a\n", "é", "x" * 101])
def test_bad_names_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="a door's name"):
        Door(bad, echo)
    with pytest.raises(ConnectionError):
        knock(bad, {}, 1.0)


def test_a_name_can_be_taken_once_and_again_after_close(name: str) -> None:
    first = Door(name, echo)
    with pytest.raises(OSError, match=f"cannot open door '{name}': Address already in use"):
        Door(name, echo)
    first.close()
    first.close()
    first.answer()  # closed: nothing to do
    Door(name, echo).close()


def test_fifty_doors_leak_nothing() -> None:
    def cycle() -> None:
        name = f"odc-test.{uuid.uuid4().hex[:12]}"
        with served(name):
            visitor = raw(name)
            knock(name, {}, 60.0)
        visitor.close()

    cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        cycle()
    assert len(os.listdir("/proc/self/fd")) == before


def test_out_of_descriptors_a_visitor_is_turned_away_and_the_door_stays_quiet(name: str, caplog: Any) -> None:
    import resource

    door = Door(name, echo)
    visitor = raw(name)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1, hard))
        full = []
        while True:
            try:
                full.append(os.dup(0))
            except OSError:
                break
        door.answer()
        quiet = not select.select([door.fileno()], [], [], 0)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in full:
            os.close(fd)
    assert quiet, "the daemon would be woken without end"
    assert "out of file descriptors" in caplog.text
    assert visitor.recv(1) == b""
    visitor.close()
    door.close()
    with served(name):
        knock(name, {}, 60.0)


def fork_beside_a_door(rank: int, world: int, name: str) -> list[Any]:
    """Forks while a visit is in progress, as a data loader does; what the child holds, what visitors hear."""
    with served(name) as door:
        waiting = raw(name)
        knock(name, {}, 60.0)  # so that the one before is known to the door
        told, tell = os.pipe()
        numbers = [door.fileno(), door._listener.fileno(), door._spare, *list(door._visits)]
        pid = os.fork()
        if pid == 0:
            os.write(tell, json.dumps([fd for fd in numbers if Path(f"/proc/self/fd/{fd}").is_symlink()]).encode())
            time.sleep(60)
            os._exit(0)
        found = [len(numbers) >= 4, json.loads(os.read(told, 4096))]
        found += [knock(name, {"a": n}, 60.0).reply["asked"] for n in range(3)]
        waiting.sendall(door_module._frame({"b": 2}))
        found.append(b'{"b": 2}' in waiting.recv(4096))
        waiting.close()
    found.append(list_doors(name))  # the door is shut; a child that held it would keep the name
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    os.close(told)
    os.close(tell)
    return found


def test_a_forked_child_closes_its_copy_and_the_parents_door_stays_open(ranks: Any, name: str) -> None:
    (found,) = ranks(1).run(fork_beside_a_door, name)
    assert found == [True, [], {"a": 0}, {"a": 1}, {"a": 2}, True, []]
