"""Requests between processes of one host: what arrives, what is refused, and from which processes."""

from __future__ import annotations

import gc
import os
import socket
import struct
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import up_to
from support.listeners import PATIENCE_S, ByHand, Unix, echo, raw, served
from support.waiting import until

from odc.net import listener as listener_module
from odc.net.conversation import MAX_FDS
from odc.net.handshake import PeerCredentials
from odc.net.requests import MAX_REQUEST, ask, frame


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
def test_a_request_arrives_with_the_process_that_sent_it(request: dict[str, Any]) -> None:
    name = f"odc-test.{uuid.uuid4().hex[:12]}"
    with served(name):
        answer = ask(name, request, PATIENCE_S)
    assert answer.reply == {"asked": request, "pid": os.getpid(), "uid": os.geteuid()}
    assert (answer.fds, answer.pid) == ([], os.getpid())


def test_descriptors_are_handed_over_once_and_closed_on_exec(name: str) -> None:
    """Also with a reply that does not fit into a socket's buffer."""
    own = [os.memfd_create("odc-test") for _ in range(3)]
    for number, fd in enumerate(own):
        os.write(fd, b"%d" % number)
    with served(name, lambda request, peer: ({"text": "x" * 3_000_000}, own)):
        answer = ask(name, {}, PATIENCE_S)
    assert len(answer.reply["text"]) == 3_000_000
    assert [os.pread(fd, 8, 0) for fd in answer.fds] == [b"0", b"1", b"2"]
    assert not any(os.get_inheritable(fd) for fd in answer.fds)
    for fd in (*answer.fds, *own):
        os.close(fd)


@pytest.mark.parametrize(
    "body", [b"[" * 60_000, b"[]", b"{{", b"", struct.pack("!I", 7)], ids=["deep", "list", "no JSON", "empty", "bytes"]
)
def test_what_is_no_request_is_not_answered(name: str, body: bytes) -> None:
    with served(name):
        client = raw(name)
        client.sendall(struct.pack("!I", len(body)) + body)
        assert client.recv(1) == b""
        client.close()
        with raw(name) as long:
            long.sendall(struct.pack("!I", MAX_REQUEST + 1))
            assert long.recv(1) == b""
        ask(name, {}, PATIENCE_S)


@pytest.mark.parametrize(
    ("handler", "printed"),
    [
        (lambda request, peer: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda request, peer: ({"fd": object()}, ()), "TypeError: Object of type object is not JSON serializable"),
        (lambda request, peer: ({}, [0] * (MAX_FDS + 1)), "ValueError: 17 descriptors are more than the 16"),
    ],
)
def test_the_client_receives_the_error_of_a_handler(name: str, handler: Any, printed: str, caplog: Any) -> None:
    with served(name, handler):
        for _ in range(2):  # the listener stays open
            assert ask(name, {}, PATIENCE_S).reply["error"].startswith(printed)
    assert f"request of process {os.getpid()} failed" in caplog.text


def test_a_client_may_disconnect_before_the_answer(name: str) -> None:
    with served(name, lambda request, peer: ({"text": "x" * 3_000_000}, ())):
        for _ in range(5):
            with raw(name) as client:
                client.sendall(frame({}))
                client.recv(1)
        assert len(ask(name, {}, PATIENCE_S).reply["text"]) == 3_000_000


# the client's side -----------------------------------------------------------------------------------------------


def test_a_listener_that_is_not_there_or_does_not_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionError, match=name):
        ask(name, {}, PATIENCE_S)
    with pytest.raises(ConnectionError, match="an address is"):
        ask("a b", {}, PATIENCE_S)
    monkeypatch.setattr(listener_module, "_BACKLOG", 0)
    family, loop = Unix(), ByHand()
    listener = family.listen(loop)
    for _ in range(2):
        with pytest.raises(TimeoutError, match=rf"listener '{family.name}' did not answer within 0\.05 s"):
            ask(family.name, {}, 0.05)  # the second finds a full queue of connections
    answered: list[bool] = []
    client = threading.Thread(target=lambda: answered.append(family.succeed()))
    client.start()
    while client.is_alive():
        loop.turn()
    assert answered == [True]
    listener.close()


@pytest.mark.parametrize(
    ("sent", "printed"),
    [
        (b"", "hung up without an answer"),
        (struct.pack("!I", 10) + b"{", "hung up without an answer"),
        (struct.pack("!I", 2) + b"[]", "no JSON object"),
        (struct.pack("!I", 2) + b"{{", "property name"),
        (struct.pack("!I", 1 << 31), "too long"),
        (struct.pack("!I", 20_000) + b"[" * 20_000, "recursion"),
    ],
)
def test_bad_answers_are_connection_errors_and_leak_nothing(name: str, sent: bytes, printed: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(1000)
                if sent:
                    socket.send_fds(connection, [sent], [listener.fileno()])

        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match=printed):
            ask(name, {}, PATIENCE_S)
        thread.join()
        until(lambda: len(os.listdir("/proc/self/fd")) <= before)


# other users and containers --------------------------------------------------------------------------------------

OTHER_USER = """
import os, socket
os.setresuid(65534, 65534, 65534)
s = socket.socket(socket.AF_UNIX)
"""  # plain sockets: another user may not be able to read this checkout


def as_other_user(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", OTHER_USER + code], stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_other_users_are_neither_heard_nor_trusted(name: str) -> None:
    heard: list[Any] = []
    connect = f"""
s.connect("\\0{name}")
s.settimeout(60)
try:
    s.sendall({frame({"a": 1})!r})
    print(s.recv(1))
except (ConnectionResetError, BrokenPipeError):
    print(b"")
"""
    with served(name, lambda request, peer: (heard.append(peer) or {}, ())):
        with as_other_user(connect) as process:
            assert process.communicate()[0].strip() == "b''"
        assert heard == []
        assert ask(name, {}, PATIENCE_S).reply == {}
    listen = f"""
s.bind("\\0{name}")
s.listen()
print(flush=True)
print(s.accept()[0].recv(100), flush=True)
"""
    with as_other_user(listen) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ConnectionError, match=f"listener '{name}': it belongs to user 65534, not to user 0"):
            ask(name, {"secret": 1}, PATIENCE_S)
        assert process.stdout.read().strip() == "b''", "another user's listener receives nothing"


def test_processes_of_another_container_are_refused(tmp_path: Path) -> None:
    peer = PeerCredentials(7, os.geteuid())
    assert peer.refusal(tmp_path) is None, "without procfs a visible process must do"
    assert "another PID namespace" in str(PeerCredentials(0, os.geteuid()).refusal(tmp_path))
    assert "belongs to user" in str(PeerCredentials(7, os.geteuid() + 1).refusal(tmp_path))
    for process in ("self", "7"):
        (tmp_path / process / "ns").mkdir(parents=True)
        for kind in ("pid", "user"):
            (tmp_path / process / "ns" / kind).symlink_to(f"{kind}:[4026531836]")
    assert peer.refusal(tmp_path) is None
    for kind in ("pid", "user"):
        link = tmp_path / "7" / "ns" / kind
        link.unlink()
        gone = f"the {kind} namespace of its process 7 cannot be read (No such file or directory)"
        assert peer.refusal(tmp_path) == gone
        link.symlink_to(f"{kind}:[4026532000]")
        assert str(peer.refusal(tmp_path)).startswith(f"its process 7 is in another {kind} namespace")
        link.unlink()
        link.symlink_to(f"{kind}:[4026531836]")


@pytest.mark.parametrize("side", ["listener", "client"])
def test_each_side_refuses_the_other(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    with served(name, lambda request, peer: (heard.append(request) or {}, ())):
        client = threading.current_thread()

        def refusal(self: PeerCredentials) -> str | None:
            refuses = (threading.current_thread() is client) == (side == "client")
            return "it is of another container" if refuses else None

        monkeypatch.setattr(PeerCredentials, "refusal", refusal)
        printed = f"listener '{name}': it is of another container" if side == "client" else f"listener '{name}': "
        with pytest.raises(ConnectionError, match=printed):
            ask(name, {}, PATIENCE_S)
        assert heard == []
        monkeypatch.undo()
        assert ask(name, {}, PATIENCE_S).reply == {}


def test_the_other_process_is_known_to_both_sides(ranks: Any, name: str) -> None:
    (host, *_), (client, heard, seen) = ranks(2).run(ask_rank_0, name)
    assert (heard, seen) == (client, host)
    assert host != client


def ask_rank_0(rank: int, world: int, name: str) -> tuple[int, int, int]:
    """Own pid, and what the two sides of a request know of each other."""
    import torch.distributed as dist

    if rank == 0:
        with served(name, echo):
            dist.barrier()
            dist.barrier()
        return os.getpid(), 0, 0
    dist.barrier()
    answer = ask(name, {}, PATIENCE_S)
    dist.barrier()
    return os.getpid(), answer.reply["pid"], answer.pid
