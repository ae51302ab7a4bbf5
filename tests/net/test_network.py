"""Processes that dial each other over TCP: tries again, names the rank that it cannot reach, mixes no two jobs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.listeners import ByHand
from support.ports import free_ports

from odc.deadlines import Deadline
from odc.errors import ConfigError, PeerLostError, UnsupportedError, WaitTimeoutError
from odc.net import JobStore, network
from odc.net.conversation import converse
from odc.net.engines.server import LENGTH
from odc.net.handshake import Admitted, answer_handshake, job_secret
from odc.net.network import HostNetwork, _key
from odc.net.reactor import Reactor
from odc.settings import Settings

Make = Callable[..., "Process"]


class Process:
    """One rank's part in the network, with a loop of its own."""

    def __init__(self, store: Any, rank: int, **settings: Any) -> None:
        self._reactor = Reactor(f"rank {rank}", lambda error: None)
        chosen = Settings(address="127.0.0.1", engine="sockets", **settings)
        self.network = HostNetwork(self._reactor, store, rank, chosen)
        self.network.open(chosen)

    def close(self) -> None:
        self._reactor.stop(60.0)
        self.network.close()


@pytest.fixture
def make() -> Iterator[Make]:
    made = list[Process]()

    def one(store: Any, rank: int, **settings: Any) -> Process:
        made.append(Process(store, rank, **settings))
        return made[-1]

    yield one
    for process in made:
        process.close()


def read(process: Process, rank: int) -> list[int]:
    into = torch.zeros(4, dtype=torch.uint8)
    process.network.engine.read(rank, "heap", 0, into, what="shards")
    return into.tolist()


def admit(connection: socket.socket, network: HostNetwork, purpose: str) -> None:
    """As rank 1 of the network's job, whose rank 0 connects."""
    found = converse(connection, answer_handshake(network._secret, 1), Deadline(60.0))
    assert found == Admitted(0, purpose)


def test_ranks_of_one_job_read_and_connect(make: Make) -> None:
    store = dist.HashStore()
    one, other = make(store, 0), make(store, 1)
    other.network.engine.expose("heap", torch.full((4,), 7, dtype=torch.uint8))
    assert read(one, 1) == [7] * 4
    met, seen = threading.Event(), list[int]()

    def welcome(connection: socket.socket, rank: int) -> None:
        connection.close()
        seen.append(rank)
        met.set()

    other.network.expect("link 0.a", welcome)
    one.network.dial(1, "link 0.a").close()
    assert met.wait(60.0) and seen == [0]
    other.network.expect_no_more("link 0.a")
    with one.network.dial(1, "link 0.a") as connection:  # admitted, and of no use here any more
        connection.settimeout(60.0)
        assert connection.recv(1) == b""


@pytest.mark.parametrize("how", ["another store", "another file"])
def test_ranks_of_two_jobs_do_not_mix(make: Make, tmp_path: Any, how: str) -> None:
    """Even where one is given the other's address, as when a port is reused or a store is shared by mistake."""
    stores = [dist.HashStore(), dist.HashStore()]
    secrets: list[dict[str, str]] = [{}, {}]
    if how == "another file":
        stores[1] = stores[0]
        for number, options in enumerate(secrets):
            file = tmp_path / str(number)
            file.write_text(f"secret {number}")
            options["secret_file"] = str(file)
    mine, theirs = make(stores[0], 0, **secrets[0]), make(stores[1], 1, **secrets[1])
    theirs.network.engine.expose("heap", torch.full((4,), 7, dtype=torch.uint8))
    JobStore(stores[0], 60.0).set(_key(1), json.dumps(theirs.network.address))
    for reach in (lambda: read(mine, 1), lambda: mine.network.dial(1, "link 0.a")):
        with pytest.raises(PeerLostError, match=r"rank 0, .* rank 1.*(secret|another job)") as caught:
            reach()
        assert caught.value.culprit == 1
    own = make(stores[1], 2, **secrets[1])
    assert read(own, 1) == [7] * 4, "the job that was asked goes on"


def test_a_rank_at_another_ones_address_is_refused(make: Make) -> None:
    store = dist.HashStore()
    one, other = make(store, 0), make(store, 1)
    JobStore(store, 60.0).set(_key(2), json.dumps(other.network.address))
    with pytest.raises(PeerLostError, match="connecting to rank 2 at .*: rank 1 answers there"):
        one.network.dial(2, "link 0.a")


def test_the_end_of_the_job_ends_a_read_that_asks_a_silent_store(make: Make) -> None:
    """As where the host of the store is cut off: this rank knows that before any call of the store ends."""
    one, answer = make(dist.HashStore(), 0), threading.Event()

    class Silent:
        def compare_set(self, *_: str) -> bytes:
            answer.wait(60.0)
            return b""

    def check(doing: str) -> None:
        raise PeerLostError(f"rank 0, {doing}: the job was aborted", culprit=1)

    store = Silent()
    one.network.store = JobStore(store, 600.0, 0)
    with pytest.raises(PeerLostError, match="rank 0, reading shards of rank 1: the job was aborted"):
        one.network.engine.read(1, "heap", 0, torch.zeros(4, dtype=torch.uint8), what="shards", check=check)
    answer.set()


def test_a_listener_that_hangs_up_for_once_is_asked_again(make: Make) -> None:
    """This process may have been stopped in the middle of the handshake."""
    store = dist.HashStore()
    one = make(store, 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        JobStore(store, 60.0).set(_key(1), json.dumps(list(listener.getsockname())))

        def serve() -> None:
            for _ in range(2):
                listener.accept()[0].close()
            connection, _ = listener.accept()
            with connection:
                admit(connection, one.network, "link 0.a")
                connection.sendall(b"well")

        server = threading.Thread(target=serve)
        server.start()
        with one.network.dial(1, "link 0.a") as connection:
            assert connection.recv(4) == b"well"
        server.join()


@pytest.mark.parametrize("engine", [False, True])
def test_a_rank_that_is_stopped_for_longer_than_a_handshake_takes_is_asked_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, engine: bool
) -> None:
    """Its host takes the connection all the same."""
    monkeypatch.setattr(network, "CONNECT_S", 0.1)
    store = dist.HashStore()
    one = make(store, 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        JobStore(store, 60.0).set(_key(1), json.dumps(list(listener.getsockname())))
        purpose = "read" if engine else "link 0.a"

        def serve() -> None:
            for _ in range(2):
                with listener.accept()[0] as connection:
                    while connection.recv(1 << 12):  # until it is given up
                        pass
            monkeypatch.setattr(network, "CONNECT_S", 60.0)
            while True:
                with listener.accept()[0] as connection, contextlib.suppress(OSError):  # of one that is given up
                    admit(connection, one.network, purpose)
                    if engine:
                        connection.recv(1 << 12)
                        connection.sendall(LENGTH.pack(4))
                    connection.sendall(b"well")
                    return

        server = threading.Thread(target=serve)
        server.start()
        if engine:
            assert bytes(read(one, 1)) == b"well"
        else:
            with one.network.dial(1, purpose) as connection:
                assert connection.recv(4) == b"well"
        server.join()


def test_a_rank_that_cannot_be_reached_is_named(make: Make) -> None:
    store = dist.HashStore()
    one = make(store, 0)
    (port,) = free_ports(1)
    JobStore(store, 60.0).set(_key(1), json.dumps(["127.0.0.1", port]))
    with pytest.raises(PeerLostError, match=rf"rank 0, connecting to rank 1 at 127.0.0.1:{port}: .*Settings\(address="):
        one.network.dial(1, "link 0.a")
    one.network.store.timeout_s = 0.1
    with pytest.raises(WaitTimeoutError, match="rank 0, waiting for rank 3 to listen for other hosts") as caught:
        one.network.dial(3, "link 0.a")
    assert caught.value.culprit == 3


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        (errno.EADDRNOTAVAIL, r"set Settings\(address=...\) to an address of this host that the others reach"),
        (errno.EMFILE, r"raise this process's limit of open files \(ulimit -n\)"),
        (errno.ENFILE, r"raise this machine's limit of open files \(sysctl fs.file-max\)"),
    ],
)
def test_a_rank_that_cannot_listen_learns_what_helps(code: int, cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if code != errno.EADDRNOTAVAIL:

        def no_socket(*unused: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(network, "bind", no_socket)
    with pytest.raises(
        UnsupportedError, match=rf"rank 5 cannot listen at 192.0.2.77 \(.*{os.strerror(code)}\); {cure}$"
    ):
        HostNetwork(cast(Reactor, ByHand()), dist.HashStore(), 5, Settings(address="192.0.2.77"))


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        (errno.EMFILE, r"raise this process's limit of open files \(ulimit -n\)"),
        (errno.ENFILE, r"raise this machine's limit of open files \(sysctl fs.file-max\)"),
        (errno.EADDRNOTAVAIL, "this machine has no free port left: widen sysctl net.ipv4.ip_local_port_range"),
        (
            errno.ENOBUFS,
            "this machine has no memory for sockets: raise sysctl net.core.wmem_max and net.ipv4.tcp_mem",
        ),
    ],
)
def test_a_rank_without_descriptors_does_not_blame_the_one_it_connects_to(
    make: Make, code: int, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    one = make(store, 0)
    JobStore(store, 60.0).set(_key(1), json.dumps(["127.0.0.1", 9]))

    def no_socket(*unused: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket, "create_connection", no_socket)
    message = rf"rank 0, connecting to rank 1 at 127.0.0.1:9: .*{os.strerror(code)}; {cure}$"
    for reach in (lambda: read(one, 1), lambda: one.network.dial(1, "link 0.a")):
        with pytest.raises(UnsupportedError, match=message) as caught:
            reach()
        assert caught.value.culprit is None


def test_a_process_that_listens_may_open_as_many_files_as_it_needs_and_its_hard_limit_allows(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        make(dist.HashStore(), 0)
        enough = hard if 0 < hard < 65_536 else 65_536
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (enough, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))

        def refuse(*unused: object) -> None:
            raise ValueError("not allowed to raise maximum limit")

        with monkeypatch.context() as patch:
            patch.setattr(resource, "setrlimit", refuse)
            make(dist.HashStore(), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def taken_below_a_free_one() -> Iterator[int]:
    """A port that is taken, and the next is free."""
    while True:
        (port,) = free_ports(1)
        with socket.create_server(("127.0.0.1", port)):
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            yield port
            return


def test_each_rank_takes_one_port_of_a_range(make: Make) -> None:
    with taken_below_a_free_one() as port:
        store, ports = dist.HashStore(), (port, port + 1)
        one = make(store, 0, ports=ports)
        assert one.network.address == ("127.0.0.1", port + 1)
        with pytest.raises(
            UnsupportedError,
            match=rf"rank 1 cannot .* every port from {port} to {port + 1} is taken\); widen the range",
        ):
            make(store, 1, ports=ports)


def test_another_limit_than_the_first_is_refused_and_the_default_is_none(make: Make) -> None:
    one = make(dist.HashStore(), 0, lost_after_s=20.0).network
    engine: Any = one.engine
    assert one.lost_after_s == engine._connections._lost_after_s == engine._server._lost_after_s == 20.0
    one.open(Settings())
    one.open(Settings(lost_after_s=20.0))
    with pytest.raises(UnsupportedError, match="rank 0 listens already, with lost_after_s=20.0 and not 30.0"):
        one.open(Settings(lost_after_s=30.0))


def test_a_listener_that_no_root_uses_yet_suits_all_that_would_listen_alike() -> None:
    """It was made for the watch, by the settings of the first module that was sharded."""
    chosen = Settings(address="127.0.0.1")
    one = HostNetwork(cast(Reactor, ByHand()), dist.HashStore(), 0, chosen)
    before = one.address
    one.open(Settings(lost_after_s=20.0, engine="sockets"))
    assert one.address == before
    assert one.lost_after_s == 20.0
    with pytest.raises(UnsupportedError, match="with address='127.0.0.1' and not '127.0.0.2'"):
        one.open(Settings(address="127.0.0.2"))
    one.close()


def test_a_listener_that_no_root_uses_yet_keeps_what_a_root_leaves_at_the_default() -> None:
    chosen = Settings(address="127.0.0.1", lost_after_s=20.0)
    one = HostNetwork(cast(Reactor, ByHand()), dist.HashStore(), 0, chosen)
    one.open(Settings(engine="sockets"))
    engine: Any = one.engine
    assert one.lost_after_s == engine._connections._lost_after_s == engine._server._lost_after_s == 20.0
    one.close()


def test_a_listener_that_no_root_uses_yet_moves_so_that_a_rank_has_one_port() -> None:
    store, (port,) = dist.HashStore(), free_ports(1)
    one = HostNetwork(cast(Reactor, ByHand()), store, 0, Settings(address="127.0.0.1", ports=(port, port)))
    before = one.address
    one.open(Settings(address="127.0.0.2", ports=(port, port), engine="sockets"))
    assert one.address[0] == "127.0.0.2"
    assert json.loads(store.get(_key(0))) == list(one.address)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(before)
    one.close()


@pytest.fixture
def loop() -> Iterator[Reactor]:
    made = Reactor("rank 0", lambda error: None)
    yield made
    made.stop(60.0)


def test_a_listener_that_moves_takes_its_port_again_though_the_loop_is_busy(loop: Reactor, tmp_path: Path) -> None:
    store, (port,) = dist.HashStore(), free_ports(1)
    one = HostNetwork(loop, store, 0, Settings(address="127.0.0.1", ports=(port, port)))
    secret = tmp_path / "secret"
    secret.write_text("of the job")
    loop.call(lambda: time.sleep(0.3))
    one.open(Settings(address="127.0.0.1", ports=(port, port), secret_file=str(secret), engine="sockets"))
    assert one.address == ("127.0.0.1", port)
    loop.call(one.close)


def test_a_listener_whose_address_cannot_be_stored_gives_its_port_back(loop: Reactor, monkeypatch: Any) -> None:
    (port,) = free_ports(1)
    chosen = Settings(address="127.0.0.1", ports=(port, port))

    late = mock.Mock(side_effect=WaitTimeoutError("the job's key-value store has not answered"))
    with monkeypatch.context() as patch:
        patch.setattr(JobStore, "set", late)
        with pytest.raises(WaitTimeoutError):
            HostNetwork(loop, dist.HashStore(), 0, chosen)
    loop.call(HostNetwork(loop, dist.HashStore(), 0, chosen).close)


def test_a_listener_that_cannot_move_listens_anew_with_the_next_settings(loop: Reactor, tmp_path: Path) -> None:
    secret, chosen = tmp_path / "secret", Settings(address="127.0.0.1")
    one = HostNetwork(loop, dist.HashStore(), 0, chosen)
    wanted = Settings(address="127.0.0.1", secret_file=str(secret), engine="sockets")
    with pytest.raises(ConfigError, match="cannot be read"):
        one.open(wanted)
    secret.write_text("of the job")
    one.open(wanted)
    socket.create_connection(one.address).close()
    assert one._secret == job_secret(one.store, str(secret))
    loop.call(one.close)
