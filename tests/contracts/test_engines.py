"""One conformance suite for all engines, between two hosts and within one (over the loopback interface)."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from support.engines import SIZE, pattern, serving
from support.failing import until_ended
from support.host_ranks import HostRanks, spawn_on_hosts
from support.hosts import Hosts, need_hosts
from support.rank_worker import report
from support.ranks import RankPool

from odc.errors import PeerLostError, UnsupportedError, WaitTimeoutError
from odc.fsdp import default_store
from odc.net.engines import Engine, choose_engine, nixl
from odc.net.engines.nixl import EXTRA, installed, interface_of

ENGINES = (
    "sockets",
    pytest.param("nixl", marks=pytest.mark.skipif(installed() is None, reason=f"needs NIXL: {EXTRA}")),
)
Run = Callable[..., list[object]]
_numbers = itertools.count()


def fresh() -> str:
    """A name under which the engines of a test find each other."""
    return f"engines{next(_numbers)}"


@pytest.fixture(params=["hosts", "loopback"])
def run(request: pytest.FixtureRequest) -> Run:
    """`run(task, engine)` runs a task on two ranks."""
    if request.param == "hosts":
        pool = request.getfixturevalue("host_ranks")(2, 1)
    else:
        pool = request.getfixturevalue("ranks")(2)
    assert isinstance(pool, RankPool)
    return lambda task, engine: pool.run(task, engine, fresh())


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(2) as hosts:
        yield hosts


# reads and numbers ---------------------------------------------------------------------------------------------------


def reads_everything(mine: Engine, rank: int, world: int) -> None:
    """Sizes and offsets, from all peers at a time."""
    for peer in (other for other in range(world) if other != rank):
        whole = pattern(peer)
        for offset, nbytes in ((0, 0), (0, 1), (SIZE - 1, 1), (SIZE, 0), (13, 4097), (1, 1 << 20), (0, SIZE)):
            into = torch.full((nbytes + 2,), 7, dtype=torch.uint8)
            mine.read(peer, "heap", offset, into[1:-1])
            assert torch.equal(into[1:-1], whole[offset : offset + nbytes]), (peer, offset, nbytes)
            assert into[0] == into[-1] == 7, "bytes beside the destination have changed"


def reads_a_lot(mine: Engine, rank: int, world: int) -> None:
    """64 MiB, of a region that was exposed after another was read."""
    nbytes = 64 << 20
    mine.read(1 - rank, "heap", 0, torch.empty(10, dtype=torch.uint8))
    mine.expose("large", torch.full((nbytes,), rank + 1, dtype=torch.uint8))
    dist.barrier()
    into = torch.zeros(nbytes, dtype=torch.uint8)
    mine.read(1 - rank, "large", 0, into)
    assert int(into.min()) == int(into.max()) == 2 - rank


def reads_at_once(mine: Engine, rank: int, world: int) -> None:
    """Eight threads, each its own places."""
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


def reads_two_at_a_time(mine: Engine, rank: int, world: int) -> None:
    """Begun in advance, ended in order; one that is dropped does not disturb the others."""
    whole, size = pattern(1 - rank), 100_003
    places = [torch.full((size,), 7, dtype=torch.uint8) for _ in range(12)]
    begun = deque([mine.begin(1 - rank, "heap", 0, places[0])])
    for number in range(1, 12):
        begun.append(mine.begin(1 - rank, "heap", number * size, places[number], wait=False))
        oldest = begun.popleft()
        assert oldest is not None
        if number == 6:
            oldest.drop()
        else:
            oldest.finish()
    begun.pop().finish()  # type: ignore[union-attr]
    for number in set(range(12)) - {5}:
        assert torch.equal(places[number], whole[number * size : (number + 1) * size]), number
    refused = mine.begin(1 - rank, "heap", SIZE - 1, places[0], what="shards")
    assert refused is not None
    with pytest.raises(PeerLostError, match=f"rank {rank}, reading shards of rank {1 - rank}: it exposes no"):
        refused.finish()


def begins_no_more_than_there_are_connections(mine: Engine, rank: int, world: int) -> None:
    """A thread that has reads going is not made to wait for another's connection."""
    places = [torch.empty(100, dtype=torch.uint8) for _ in range(40)]
    begun = [mine.begin(1 - rank, "heap", 0, place, wait=False) for place in places]
    going = [one for one in begun if one is not None]
    assert 2 <= len(going) < len(begun)
    assert begun[: len(going)] == going, "there was a connection again, and none was given back"
    for one in going:
        one.finish()
    again = mine.begin(1 - rank, "heap", 0, places[0], wait=False)
    assert again is not None
    again.finish()
    assert torch.equal(places[0], pattern(1 - rank)[:100])


def reads_a_name_that_is_used_again(mine: Engine, rank: int, world: int) -> None:
    """For other memory, of another size."""
    for size in (1000, 3000, 2000):
        mine.expose("again", pattern(rank, size) + size // 1000)
        dist.barrier()
        into = torch.zeros(size, dtype=torch.uint8)
        mine.read(1 - rank, "again", 0, into)
        assert torch.equal(into, pattern(1 - rank, size) + size // 1000)
        dist.barrier()
        mine.withdraw("again")
        dist.barrier()


def reads_what_is_refused(mine: Engine, rank: int, world: int) -> None:
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


def asks_for_numbers(mine: Engine, rank: int, world: int) -> None:
    """Eight threads, beside one that reads: each number is given once."""
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
    message = f"rank {rank}, reading a number of rank {1 - rank}: it does not answer 'nothing'"
    with pytest.raises(PeerLostError, match=message):
        mine.ask(1 - rank, "nothing", what="a number")
    with pytest.raises(ValueError, match="answered already"):
        mine.answer("heap", bytes)


def serves_and_reads(rank: int, world: int, engine: str, name: str) -> None:
    with serving(rank, engine, name) as mine:
        for part in (
            reads_everything,
            reads_a_lot,
            reads_at_once,
            reads_two_at_a_time,
            begins_no_more_than_there_are_connections,
            reads_a_name_that_is_used_again,
            reads_what_is_refused,
            asks_for_numbers,
        ):
            part(mine, rank, world)
            dist.barrier()


@pytest.mark.parametrize("engine", [*ENGINES, "staged"])
def test_what_is_served_is_read(run: Run, engine: str) -> None:
    run(serves_and_reads, engine)


# ranks that die, stop, or cannot be reached --------------------------------------------------------------------------


def read_on(mine: Engine, into: torch.Tensor, what: str, check: Callable[[str], None] = lambda doing: None) -> None:
    """Read from rank 1 until that raises."""
    while True:
        mine.read(1, "heap", 0, into, what=what, check=check)


def read_from_the_dying(rank: int, world: int, engine: str, name: str) -> tuple[str, int | None, float] | None:
    """Rank 1 leaves a child, as a data loader's worker; the test kills it while it is read from."""
    with serving(rank, engine, name) as mine:
        into = torch.empty(SIZE, dtype=torch.uint8)
        mine.read(1 - rank, "heap", 0, into)
        dist.barrier()
        if rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(600)  # it outlives the test: its end must not be what is noticed
                os._exit(0)
            report(child)
            time.sleep(600)
        report(None)
        with pytest.raises(PeerLostError) as caught:
            read_on(mine, into, "shards")
        return str(caught.value), caught.value.culprit, time.monotonic()


def read_from_the_stopped(rank: int, world: int, engine: str, name: str) -> float | None:
    """Rank 1 is stopped for a while by the test: the read takes that long, and no longer than it must."""
    nbytes = 64 << 20
    with serving(rank, engine, name) as mine:
        mine.expose("large", torch.full((nbytes,), rank + 1, dtype=torch.uint8))
        dist.barrier()
        into = torch.zeros(nbytes, dtype=torch.uint8)
        longest = 0.0
        report(None)
        store, end = default_store(), time.monotonic() + 120.0
        while not store.check([f"{name}/stopped"]) and time.monotonic() < end:  # both read until one has been stopped
            begin = time.monotonic()
            mine.read(1 - rank, "large", 0, into)
            longest = max(longest, time.monotonic() - begin)
            if longest > 2.0:
                store.set(f"{name}/stopped", "")
        assert int(into.min()) == int(into.max()) == 2 - rank
        dist.barrier()
        return longest


def read_until_aborted(rank: int, world: int, engine: str, name: str) -> None:
    """Rank 1 stops itself: a rank that waits for it learns of an abort all the same."""
    with serving(rank, engine, name) as mine:
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


def read_with_little_patience(rank: int, world: int, engine: str, name: str) -> str | None:
    """Rank 1 stops itself, and is woken by the test."""
    with serving(rank, engine, name) as mine:
        into = torch.empty(100, dtype=torch.uint8)
        mine.read(1 - rank, "heap", 0, into)
        dist.barrier()
        mine._connections._timeout_s = 1.0
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return None
        report(None)
        with pytest.raises(WaitTimeoutError) as caught:
            read_on(mine, into, "shards")
        assert caught.value.culprit == 1
        return str(caught.value)


def ended(job: HostRanks, rank: int) -> object:
    """What the rank returned."""
    until_ended(job, [rank])
    assert job.outcomes[rank].error is None, job.outcomes[rank].describe()
    return job.outcomes[rank].value


@pytest.mark.parametrize("engine", ENGINES)
def test_a_death_during_reads_is_named_though_a_child_lives(two: Hosts, engine: str) -> None:
    with spawn_on_hosts(two, 1, read_from_the_dying, engine, fresh()) as job:
        job.until_reported(1)
        killed = job.kill(1)
        message, culprit, at = ended(job, 0)  # type: ignore[misc]
    assert culprit == 1
    assert "rank 0, reading shards of rank 1: " in message
    print(f"named after {at - killed:.2f} s: {message}")


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_is_not_dead(two: Hosts, engine: str, stopped: int) -> None:
    with spawn_on_hosts(two, 1, read_from_the_stopped, engine, fresh()) as job:
        job.until_reported(1)
        time.sleep(1.0)
        job.signal(stopped, signal.SIGSTOP)
        time.sleep(4.0)
        job.signal(stopped, signal.SIGCONT)
        assert max(ended(job, 0), ended(job, 1)) > 2.0  # type: ignore[type-var]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_is_stopped_for_too_long_is_named(two: Hosts, engine: str) -> None:
    with spawn_on_hosts(two, 1, read_with_little_patience, engine, fresh()) as job:
        message = str(ended(job, 0))
        job.signal(1, signal.SIGCONT)
    late = {"sockets": "nothing has come for 1 s", "nixl": "it has not ended after 1 s"}[engine]
    assert message.startswith(f"rank 0, reading shards of rank 1: {late}; ")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_waits_for_another_learns_of_an_abort(two: Hosts, engine: str) -> None:
    with spawn_on_hosts(two, 1, read_until_aborted, engine, fresh()) as job:
        ended(job, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_a_host_that_cannot_be_reached_is_lost(engine: str) -> None:
    need_hosts()
    with Hosts(2) as hosts, spawn_on_hosts(hosts, 1, read_from_the_dying, engine, fresh()) as job:
        job.until_reported(1)
        hosts.drop(1)
        begin = time.monotonic()
        message, culprit, at = ended(job, 0)  # type: ignore[misc]
    assert culprit == 1
    print(f"named after {at - begin:.2f} s: {message}")


# which engine --------------------------------------------------------------------------------------------------------


def test_plain_tcp_where_there_is_no_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "rdma_devices", list)
    assert choose_engine("auto") == choose_engine("sockets") == "sockets"


def test_nixl_where_it_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(nixl, "rdma_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr(nixl, "installed", lambda: "nixl_cu13")
    assert choose_engine("auto") == choose_engine("nixl") == "nixl"
    assert choose_engine("sockets") == "sockets"
    monkeypatch.setattr(nixl, "installed", lambda: None)
    assert choose_engine("auto") == "sockets"
    assert "mlx5_0" in caplog.text and EXTRA in caplog.text
    with pytest.raises(UnsupportedError, match=r"odc-fsdp\[nixl\]"):
        choose_engine("nixl")


def test_interfaces_are_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None
