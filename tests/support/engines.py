"""An engine in a rank process, with a listener for its peers, and the tasks of the conformance suite.

Tasks are functions of `(rank, world, name of the engine, name of the meeting)`. What every rank exposes as "heap" is
`pattern(rank)`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odc.deadlines import Deadline
from odc.errors import PeerLostError, WaitTimeoutError
from odc.memory import HostLanes, Lanes
from odc.net.conversation import converse
from odc.net.engines import PURPOSE, Check, Engine, NixlEngine
from odc.net.engines.connections import Dial
from odc.net.engines.staging import Stages
from odc.net.handshake import answer_handshake, begin_handshake
from support.rank_worker import tell

SECRET = b"of this test"
SIZE = 3_000_017
PATIENCE_S = 600.0  # that a visitor on a busy machine may take


def pattern(rank: int, nbytes: int = SIZE) -> torch.Tensor:
    """Bytes that tell ranks and places apart, uint8 [nbytes]."""
    return (torch.arange(nbytes, dtype=torch.int64) * 7919 % 251 + rank).to(torch.uint8)


class StagesOfHosts(Stages):
    """Has all memory go the way of a device's."""

    def needed(self, memory: torch.Tensor) -> bool:
        return True

    def _make_lanes(self, device: torch.device) -> Lanes:
        return HostLanes()


def make(engine: str, rank: int, dial: Dial, timeout_s: float, address: str) -> Engine:
    """The engine of this name; "staged" are sockets that take the host's memory for a device's."""
    if engine == "nixl":
        return NixlEngine(rank, dial, timeout_s, address)
    return Engine(rank, dial, timeout_s, stages=StagesOfHosts() if engine == "staged" else None)


class Meeting:
    """One rank's listener and engine; peers find it through the process group's store."""

    def __init__(self, rank: int, engine: str, name: str, timeout_s: float = 60.0) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._name, self.rank = name, rank
        self.address = own_address()
        self._listener = socket.create_server((self.address, 0), backlog=64)
        self.engine = make(engine, rank, self._dial, timeout_s, self.address)
        threading.Thread(target=self._listen, daemon=True).start()
        self._store.set(f"{name}/{rank}", f"{self.address}:{self._listener.getsockname()[1]}")

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                threading.Thread(target=self._admit, args=(accepted,), daemon=True).start()

    def _admit(self, accepted: socket.socket) -> None:
        try:
            admitted = converse(accepted, answer_handshake(SECRET, self.rank), Deadline(PATIENCE_S))
        except OSError:
            accepted.close()
        else:
            self.engine.adopt(accepted, admitted.rank)

    def _dial(self, rank: int, check: Check) -> socket.socket:
        host, port = self._store.get(f"{self._name}/{rank}").decode().split(":")
        connection = socket.create_connection((host, int(port)), 2.0)
        try:
            converse(connection, begin_handshake(SECRET, self.rank, PURPOSE), Deadline(PATIENCE_S))
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        self._listener.close()
        self.engine.close()


def own_address() -> str:
    """The address of eth0 in a host of the tests, or of the loopback interface."""
    number = socket.gethostname().removeprefix("host")
    return f"10.68.0.{int(number) + 1}" if number.isdigit() else "127.0.0.1"


@contextlib.contextmanager
def meeting(rank: int, engine: str, name: str, timeout_s: float = 60.0) -> Iterator[Engine]:
    """The engine of this rank, which exposes "heap", once all ranks have theirs."""
    made = Meeting(rank, engine, name, timeout_s)
    made.engine.expose("heap", pattern(rank))
    dist.barrier()
    try:
        yield made.engine
    finally:
        made.close()


def read_on(mine: Engine, into: torch.Tensor, what: str, check: Callable[[str], None] = lambda doing: None) -> None:
    """Read from rank 1 until that raises."""
    while True:
        mine.read(1, "heap", 0, into, what=what, check=check)


def read_everything(rank: int, world: int, engine: str, name: str) -> None:
    """Sizes and offsets, from all peers at a time."""
    with meeting(rank, engine, name) as mine:
        for peer in (other for other in range(world) if other != rank):
            whole = pattern(peer)
            for offset, nbytes in ((0, 0), (0, 1), (SIZE - 1, 1), (SIZE, 0), (13, 4097), (1, 1 << 20), (0, SIZE)):
                into = torch.full((nbytes + 2,), 7, dtype=torch.uint8)
                mine.read(peer, "heap", offset, into[1:-1])
                assert torch.equal(into[1:-1], whole[offset : offset + nbytes]), (peer, offset, nbytes)
                assert into[0] == into[-1] == 7, "bytes beside the destination have changed"
        dist.barrier()


def read_a_lot(rank: int, world: int, engine: str, name: str) -> None:
    """64 MiB, of a region that was exposed after another was read."""
    nbytes = 64 << 20
    with meeting(rank, engine, name) as mine:
        mine.read(1 - rank, "heap", 0, torch.empty(10, dtype=torch.uint8))
        mine.expose("large", torch.full((nbytes,), rank + 1, dtype=torch.uint8))
        dist.barrier()
        into = torch.zeros(nbytes, dtype=torch.uint8)
        mine.read(1 - rank, "large", 0, into)
        assert int(into.min()) == int(into.max()) == 2 - rank
        dist.barrier()


def read_at_once(rank: int, world: int, engine: str, name: str) -> None:
    """Eight threads, each its own places."""
    with meeting(rank, engine, name) as mine:
        whole, wrong = pattern(1 - rank), list[object]()

        def live(number: int) -> None:
            try:
                for turn in range(6):
                    at = (number * 6 + turn) * 50_021
                    into = torch.empty(50_021, dtype=torch.uint8)
                    mine.read(1 - rank, "heap", at, into)
                    if not torch.equal(into, whole[at : at + 50_021]):
                        wrong.append((number, turn))
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=live, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong
        dist.barrier()


def read_what_is_refused(rank: int, world: int, engine: str, name: str) -> None:
    with meeting(rank, engine, name) as mine:
        mine.expose("brief", pattern(9, 100))
        dist.barrier()
        mine.withdraw("brief")
        dist.barrier()
        into = torch.empty(100, dtype=torch.uint8)
        for region, offset in (("heaps", 0), ("brief", 0), ("heap", SIZE - 99), ("heap", 1 << 63)):
            with pytest.raises(PeerLostError, match=f"rank {rank}, reading shards of rank {1 - rank}: .*{region}"):
                mine.read(1 - rank, region, offset, into, what="shards")
            mine.read(1 - rank, "heap", 0, into)
            assert torch.equal(into, pattern(1 - rank)[:100])
        with pytest.raises(ValueError, match="uint8"):
            mine.read(1 - rank, "heap", 0, torch.empty(10))
        with pytest.raises(ValueError, match="exposed already"):
            mine.expose("heap", into)
        dist.barrier()


def ask_for_numbers(rank: int, world: int, engine: str, name: str) -> None:
    """Eight threads, beside one that reads: each number is given once."""
    with meeting(rank, engine, name) as mine:
        numbers, given = itertools.count(), list[int]()
        mine.answer("heap", lambda: next(numbers).to_bytes(8, "big"))
        mine.answer("nothing", bytes)
        dist.barrier()

        def live() -> None:
            given.extend(int.from_bytes(mine.ask(1 - rank, "heap"), "big") for _ in range(25))

        threads = [threading.Thread(target=live) for _ in range(8)]
        for thread in threads:
            thread.start()
        into = torch.empty(100, dtype=torch.uint8)
        mine.read(1 - rank, "heap", 0, into)
        assert torch.equal(into, pattern(1 - rank)[:100]), "a region of that name is another thing"
        for thread in threads:
            thread.join()
        assert sorted(given) == list(range(200))
        assert mine.ask(1 - rank, "nothing") == b""
        dist.barrier()
        mine.withdraw("nothing")
        dist.barrier()
        said = f"rank {rank}, reading a number of rank {1 - rank}: it does not answer 'nothing'"
        with pytest.raises(PeerLostError, match=said):
            mine.ask(1 - rank, "nothing", what="a number")
        with pytest.raises(ValueError, match="answered already"):
            mine.answer("heap", bytes)
        dist.barrier()


def read_until_aborted(rank: int, world: int, engine: str, name: str) -> None:
    """Rank 1 stops itself: who waits for it learns of an abort all the same."""
    with meeting(rank, engine, name) as mine:
        into = torch.empty(SIZE, dtype=torch.uint8)
        mine.read(1 - rank, "heap", 0, into)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return

        def check(doing: str) -> None:
            raise PeerLostError(f"aborted while {doing}")

        with pytest.raises(PeerLostError, match="aborted while reading sums of rank 1"):
            read_on(mine, into, "sums", check)


def read_from_the_dying(rank: int, world: int, engine: str, name: str) -> tuple[str, int | None, float] | None:
    """Rank 1 leaves a child, as a data loader's worker; the test kills it while it is read from."""
    with meeting(rank, engine, name) as mine:
        into = torch.empty(SIZE, dtype=torch.uint8)
        mine.read(1 - rank, "heap", 0, into)
        dist.barrier()
        if rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(20)
                os._exit(0)
            tell(child)
            time.sleep(600)
        tell(None)
        with pytest.raises(PeerLostError) as caught:
            read_on(mine, into, "shards")
        return str(caught.value), caught.value.culprit, time.monotonic()


def read_from_the_stopped(rank: int, world: int, engine: str, name: str) -> float | None:
    """Rank 1 is stopped for a while by the test: the read takes that long, and no longer than it must."""
    nbytes = 64 << 20
    with meeting(rank, engine, name) as mine:
        mine.expose("large", torch.full((nbytes,), rank + 1, dtype=torch.uint8))
        dist.barrier()
        into = torch.zeros(nbytes, dtype=torch.uint8)
        longest = 0.0
        tell(None)
        end = time.monotonic() + 6.0  # both read all the time; one of them is stopped within
        while time.monotonic() < end:
            begin = time.monotonic()
            mine.read(1 - rank, "large", 0, into)
            longest = max(longest, time.monotonic() - begin)
        assert int(into.min()) == int(into.max()) == 2 - rank
        dist.barrier()
        return longest


def read_with_little_patience(rank: int, world: int, engine: str, name: str) -> str | None:
    """Rank 1 stops itself, and is woken by the test."""
    with meeting(rank, engine, name) as mine:
        into = torch.empty(100, dtype=torch.uint8)
        mine.read(1 - rank, "heap", 0, into)
        dist.barrier()
        mine._connections._timeout_s = 1.0
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return None
        tell(None)
        with pytest.raises(WaitTimeoutError) as caught:
            read_on(mine, into, "shards")
        assert caught.value.culprit == 1
        return str(caught.value)
