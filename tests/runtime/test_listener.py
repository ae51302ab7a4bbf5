from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.extent import up_to
from support.listeners import echo, raw, served

from odc.net import listener as listener_module
from odc.net.listener import MAX_FDS, MAX_REQUEST, Listener, PeerCredentials, ask


@pytest.fixture
def name() -> str:
    return f"odc-test.{uuid.uuid4().hex[:12]}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@given(request=st.dictionaries(st.text(max_size=8), JSON, max_size=5))
@settings(max_examples=up_to(50), deadline=None)
def test_what_is_asked_arrives_with_who_asks(request: dict[str, Any]) -> None:
    name = f"odc-test.{uuid.uuid4().hex[:12]}"
    with served(name):
        answer = ask(name, request, 60.0)
    assert answer.reply == {"asked": request, "pid": os.getpid(), "uid": os.geteuid()}
    assert (answer.fds, answer.pid) == ([], os.getpid())


def visit_rank_0(rank: int, world: int, name: str) -> tuple[int, int, int]:
    """Own pid, and what the two sides of a visit are told of each other."""
    if rank == 0:
        with served(name):
            dist.barrier()
            dist.barrier()
        return os.getpid(), 0, 0
    dist.barrier()
    answer = ask(name, {}, 60.0)
    dist.barrier()
    return os.getpid(), answer.reply["pid"], answer.pid


def test_each_process_is_told_the_others_pid(ranks: Any, name: str) -> None:
    (host, *_), (guest, heard, seen) = ranks(2).run(visit_rank_0, name)
    assert (heard, seen) == (guest, host)
    assert host != guest


def test_descriptors_are_handed_over_closed_on_exec(name: str) -> None:
    own = [os.memfd_create("odc-test") for _ in range(3)]
    for number, fd in enumerate(own):
        os.write(fd, b"%d" % number)
    with served(name, lambda request, peer: ({"count": len(own)}, own)):
        answer = ask(name, {}, 60.0)
    assert [os.pread(fd, 8, 0) for fd in answer.fds] == [b"0", b"1", b"2"]
    assert not any(os.get_inheritable(fd) for fd in answer.fds)
    assert not set(answer.fds) & set(own)
    for fd in (*answer.fds, *own):
        os.close(fd)


@pytest.mark.parametrize("size", [1, 60_000, 3_000_000])
def test_long_replies_arrive_whole(name: str, size: int) -> None:
    """The longest does not fit into a socket's buffer; descriptors come once."""
    with open(os.devnull) as file, served(name, lambda request, peer: ({"text": "x" * size}, (file.fileno(),))):
        answer = ask(name, {}, 60.0)
    assert answer.reply == {"text": "x" * size}
    assert len(answer.fds) == 1
    os.close(answer.fds[0])


def test_many_ask_at_once(name: str) -> None:
    seen: list[int] = []

    def ask_for(number: int) -> None:
        seen.append(ask(name, {"n": number}, 60.0).reply["asked"]["n"])

    with served(name):
        threads = [threading.Thread(target=ask_for, args=(number,)) for number in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(seen) == list(range(40))


# bad clients ----------------------------------------------------------------------------------------------------


def test_silent_clients_hold_up_nobody(name: str) -> None:
    listener = Listener(name, echo)
    silent = [raw(name) for _ in range(10)]
    half = raw(name)
    half.sendall(struct.pack("!I", 100) + b'{"a":')
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(ask(name, {"a": 1}, 60.0)))
    client.start()
    while client.is_alive():
        if select.select([listener.fileno()], [], [], 0.05)[0]:
            listener.answer()  # alone in this thread: were it to wait for a silent one, the test would time out
    assert answers[0].reply["asked"] == {"a": 1}
    for connection in (*silent, half):
        connection.close()
    listener.close()


def test_a_client_is_hung_up_on_at_its_deadline(name: str) -> None:
    with served(name, connection_s=0.05):
        late = raw(name)
        ask(name, {}, 60.0)
        time.sleep(0.1)
        ask(name, {}, 60.0)  # the listener looks at its clock when it has something to do
        assert late.recv(1) == b""
        late.close()


def test_clients_are_bounded(name: str) -> None:
    with served(name, connection_s=1000.0):
        before = len(os.listdir("/proc/self/fd"))
        silent = [raw(name) for _ in range(100)]
        assert ask(name, {"a": 1}, 60.0).reply["asked"] == {"a": 1}
        held = len(os.listdir("/proc/self/fd")) - before - len(silent)
        assert held <= listener_module._MAX_CONNECTIONS
        assert silent[0].recv(1) == b"", "the oldest goes first"
        for connection in silent:
            connection.close()


@given(
    chunks=st.lists(
        st.binary(max_size=40)
        | st.builds(lambda body: struct.pack("!I", len(body)) + body, st.binary(max_size=40))
        | st.builds(lambda value: struct.pack("!I", len(json.dumps(value))) + json.dumps(value).encode(), JSON)
        | st.just(struct.pack("!I", MAX_REQUEST + 1)),
        max_size=4,
    ),
    leaves=st.booleans(),
)
@settings(max_examples=up_to(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_a_client_sends_disturbs_the_listener(chunks: list[bytes], leaves: bool) -> None:
    name = f"odc-test.{uuid.uuid4().hex[:12]}"
    listener = Listener(name, echo)
    client = raw(name)
    for chunk in chunks:
        try:
            client.sendall(chunk)
        except BrokenPipeError:
            break
        listener.answer()
    if leaves:
        client.close()
    listener.answer()
    good = raw(name)
    good.sendall(listener_module._frame({"fine": True}))
    listener.answer()
    listener.answer()
    assert b'{"asked": {"fine": true}' in good.recv(4096)
    for connection in (client, good):
        connection.close()
    listener.close()


def test_deeply_nested_json_is_no_way_in(name: str) -> None:
    with served(name):
        client = raw(name)
        body = b"[" * 60_000
        client.sendall(struct.pack("!I", len(body)) + body)
        assert client.recv(1) == b""
        client.close()
        ask(name, {}, 60.0)


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (lambda request, peer: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda request, peer: ({"fd": object()}, ()), "TypeError: Object of type object is not JSON serializable"),
        (lambda request, peer: ({}, [0] * (MAX_FDS + 1)), "ValueError: 17 descriptors are more than the 16"),
    ],
)
def test_a_handler_that_fails_is_told_to_the_visitor(name: str, handler: Any, said: str, caplog: Any) -> None:
    with served(name, handler):
        for _ in range(2):  # the listener stays open
            assert ask(name, {}, 60.0).reply["error"].startswith(said)
    assert f"request of process {os.getpid()} failed" in caplog.text


def test_a_client_that_leaves_before_the_answer(name: str) -> None:
    with served(name, lambda request, peer: ({"text": "x" * 3_000_000}, ())):
        for _ in range(5):
            client = raw(name)
            client.sendall(listener_module._frame({}))
            client.recv(1)
            client.close()
        assert len(ask(name, {}, 60.0).reply["text"]) == 3_000_000


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_other_users_are_neither_heard_nor_trusted(name: str) -> None:
    heard: list[Any] = []

    def handler(request: dict[str, Any], peer: PeerCredentials) -> tuple[dict[str, Any], tuple[int, ...]]:
        heard.append(peer)
        return {}, ()

    # Plain sockets: another user may not be able to read this checkout.
    visit = f"""
import os, socket, sys
os.setresuid(65534, 65534, 65534)
s = socket.socket(socket.AF_UNIX)
s.connect("\\0{name}")
s.settimeout(20)
try:
    s.sendall({listener_module._frame({"a": 1})!r})
    print(s.recv(1))
except (ConnectionResetError, BrokenPipeError):
    print(b"")
"""
    with served(name, handler):
        done = subprocess.run([sys.executable, "-c", visit], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "b''"
        assert heard == []
        assert ask(name, {}, 60.0).reply == {}
    squat = f"""
import os, socket, sys
os.setresuid(65534, 65534, 65534)
s = socket.socket(socket.AF_UNIX)
s.bind("\\0{name}")
s.listen()
print(flush=True)
c = s.accept()[0]
print(c.recv(100), flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", squat], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        with pytest.raises(ConnectionError, match=f"listener '{name}': it belongs to user 65534, not to user 0"):
            ask(name, {"secret": 1}, 60.0)
        assert process.stdout.read().strip() == "b''", "nothing is said to a stranger"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A procfs in which process 7 is in this process's namespaces."""
    for process in ("self", "7"):
        (tmp_path / process / "ns").mkdir(parents=True)
        for kind in ("pid", "user"):
            (tmp_path / process / "ns" / kind).symlink_to(f"{kind}:[4026531836]")
    return tmp_path


@pytest.mark.parametrize("kind", ["pid", "user"])
def test_the_same_user_of_another_container_is_a_stranger(proc: Path, kind: str) -> None:
    peer = PeerCredentials(7, os.geteuid())
    assert peer.refusal(proc) is None
    link = proc / "7" / "ns" / kind
    link.unlink()
    assert peer.refusal(proc) == f"the {kind} namespace of its process 7 cannot be read (No such file or directory)"
    link.symlink_to(f"{kind}:[4026532000]")
    assert str(peer.refusal(proc)).startswith(f"its process 7 is in another {kind} namespace")


def test_without_procfs_a_visible_process_must_do(tmp_path: Path) -> None:
    assert PeerCredentials(7, os.geteuid()).refusal(tmp_path) is None
    assert "another PID namespace" in str(PeerCredentials(0, os.geteuid()).refusal(tmp_path))
    assert "belongs to user" in str(PeerCredentials(7, os.geteuid() + 1).refusal(tmp_path))


def test_a_listener_hears_and_trusts_no_stranger(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides ask the same question; each is asked here while the other would let it pass."""
    heard: list[Any] = []

    def handler(request: dict[str, Any], peer: PeerCredentials) -> tuple[dict[str, Any], tuple[int, ...]]:
        heard.append(request)
        return {}, ()

    with served(name, handler):
        serving = next(thread for thread in threading.enumerate() if thread.name.endswith("(serve)"))

        def stranger_to(side: bool) -> None:
            monkeypatch.setattr(
                PeerCredentials,
                "refusal",
                lambda self: "it is of another container" if (threading.current_thread() is serving) == side else None,
            )

        stranger_to(side=True)
        with pytest.raises(ConnectionError):
            ask(name, {}, 20.0)
        assert heard == []
        stranger_to(side=False)
        with pytest.raises(ConnectionError, match=f"listener '{name}': it is of another container"):
            ask(name, {}, 20.0)
        assert heard == []
        monkeypatch.undo()
        assert ask(name, {}, 20.0).reply == {}
