"""Twin of odc/net/network.py: processes that dial each other; those of two jobs do not mix."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odc.errors import PeerLostError, UnsupportedError, WaitTimeoutError
from odc.net import JobStore, network
from odc.net.admission import admit
from odc.net.engines.server import LENGTH
from odc.net.network import HostNetwork, _key
from odc.settings import Settings

Make = Callable[..., "Process"]


class Process:
    """One rank's part in the network, with a thread that does the daemon's part."""

    def __init__(self, store: Any, rank: int, **settings: Any) -> None:
        self.network = HostNetwork(store, rank, Settings(address="127.0.0.1", engine="sockets", **settings))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.network.reception.answer()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
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


def test_ranks_of_one_job_read_and_meet(make: Make) -> None:
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
    """Even where one is told the other's address, as when a port is reused or a store is shared by mistake."""
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
    where = theirs.network.reception
    JobStore(stores[0], 60.0).set(_key(1), json.dumps([where.address, where.port]))
    for reach in (lambda: read(mine, 1), lambda: mine.network.dial(1, "link 0.a")):
        with pytest.raises(PeerLostError, match=r"rank 0, .* rank 1.*(secret|another job)") as caught:
            reach()
        assert caught.value.culprit == 1
    own = make(stores[1], 2, **secrets[1])
    assert read(own, 1) == [7] * 4, "the job that was visited goes on"


def test_a_rank_at_another_ones_address_is_refused(make: Make) -> None:
    store = dist.HashStore()
    one, other = make(store, 0), make(store, 1)
    where = other.network.reception
    JobStore(store, 60.0).set(_key(2), json.dumps([where.address, where.port]))
    with pytest.raises(PeerLostError, match="connecting to rank 2 at .*: rank 1 answers there"):
        one.network.dial(2, "link 0.a")


def test_a_listener_that_hangs_up_for_once_is_asked_again(make: Make) -> None:
    """It may be overrun by visitors without the secret, or this process was stopped in the midst of its admission."""
    store = dist.HashStore()
    one = make(store, 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        JobStore(store, 60.0).set(_key(1), json.dumps(list(listener.getsockname())))

        def serve() -> None:
            for _ in range(2):
                listener.accept()[0].close()
            connection, _ = listener.accept()
            with connection:
                assert admit(connection, "server", one.network._secret, 1, purpose="link 0.a", timeout_s=60.0) == 0
                connection.sendall(b"well")

        server = threading.Thread(target=serve)
        server.start()
        with one.network.dial(1, "link 0.a") as connection:
            assert connection.recv(4) == b"well"
        server.join()


@pytest.mark.parametrize("engine", [False, True])
def test_a_rank_that_is_stopped_for_longer_than_an_admission_takes_is_asked_again(
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
                    assert admit(connection, "server", one.network._secret, 1, purpose=purpose, timeout_s=60.0) == 0
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


def test_who_cannot_be_reached_is_named(make: Make) -> None:
    store = dist.HashStore()
    one = make(store, 0)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    JobStore(store, 60.0).set(_key(1), json.dumps(["127.0.0.1", port]))
    with pytest.raises(PeerLostError, match=rf"rank 0, connecting to rank 1 at 127.0.0.1:{port}: .*Settings\(address="):
        one.network.dial(1, "link 0.a")
    one.network._store.timeout_s = 0.1
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
def test_a_rank_that_cannot_listen_is_told_what_helps(code: int, cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if code != errno.EADDRNOTAVAIL:

        def reception(*unused: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(network, "Reception", reception)
    with pytest.raises(
        UnsupportedError, match=rf"rank 5 cannot listen at 192.0.2.77 \(.*{os.strerror(code)}\); {cure}$"
    ):
        HostNetwork(dist.HashStore(), 5, Settings(address="192.0.2.77"))


def test_another_limit_than_the_first_is_refused_and_the_default_is_none(make: Make) -> None:
    one = make(dist.HashStore(), 0, lost_after_s=20.0).network
    engine: Any = one.engine
    assert one.lost_after_s == engine._connections._lost_after_s == engine._server._lost_after_s == 20.0
    one.refuse_others(Settings())
    one.refuse_others(Settings(lost_after_s=20.0))
    with pytest.raises(UnsupportedError, match="rank 0 listens already, with lost_after_s=20.0 and not 30.0"):
        one.refuse_others(Settings(lost_after_s=30.0))
