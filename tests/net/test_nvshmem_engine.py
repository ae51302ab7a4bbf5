"""The engine by NVSHMEM, with two of them in one process and a stand-in for the library over host memory."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from odc import Settings
from odc.errors import OdcError, PeerLostError, WaitTimeoutError
from odc.memory import nvshmem
from odc.net.engines import Engine, connections
from odc.net.engines.connections import Check
from odc.net.engines.nvshmem import NvshmemEngine
from odc.net.network import make_engine

SLAB = 4096


class FakeLibrary:
    """Both ranks' slabs, one after the other: a rank's lies `rank` times `SLAB` after the base."""

    def __init__(self) -> None:
        self.memory = torch.arange(2 * SLAB).remainder(251).to(torch.uint8)
        self.base, self.gets, self.ends = self.memory.data_ptr(), list[tuple[int, int]](), True

    def slab(self, rank: int) -> torch.Tensor:
        return self.memory[rank * SLAB : (rank + 1) * SLAB]

    def holds(self, memory: torch.Tensor) -> bool:
        return 0 <= memory.data_ptr() - self.base <= 2 * SLAB - memory.numel()

    def get(self, into: torch.Tensor, offset: int, rank: int) -> None:
        self.gets.append((offset, rank))
        if self.ends:
            into.copy_(self.memory[offset : offset + into.numel()])


class FakeLanes:
    """Lanes whose work is done as the library does it."""

    def __init__(self, library: FakeLibrary) -> None:
        self._library, self.used = library, list[str]()

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[None]:
        self.used.append(name)
        yield

    def mark(self) -> None:
        return None

    def reached(self, mark: object) -> bool:
        return self._library.ends


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    found = FakeLibrary()
    monkeypatch.setattr(nvshmem, "_started", found)
    monkeypatch.setattr(connections, "READ_CHECK_S", 0.01)
    return found


@pytest.fixture
def engines(library: FakeLibrary) -> Iterator[list[NvshmemEngine]]:
    """Rank 1 exposes the upper half of its slab as "region", and memory of the host as "words"."""
    made: list[NvshmemEngine] = []

    def dial_from(me: int) -> Callable[[int, Check], socket.socket]:
        def dial(rank: int, check: Check) -> socket.socket:
            with socket.create_server(("127.0.0.1", 0)) as listening:
                here = socket.create_connection(listening.getsockname())
                made[rank].adopt(listening.accept()[0], me)
            return here

        return dial

    made += [NvshmemEngine(rank, dial_from(rank), 0.3) for rank in range(2)]
    for one in made:
        one._lanes = FakeLanes(library)  # type: ignore[assignment]
    made[1].expose("region", library.slab(1)[SLAB // 2 :])
    made[1].expose("words", torch.full((100,), 7, dtype=torch.uint8))
    yield made
    for one in made:
        one.close()


def test_from_slab_to_slab_it_is_read_by_nvshmem(engines: list[NvshmemEngine], library: FakeLibrary) -> None:
    into = library.slab(0)[100:200]
    engines[0].read(1, "region", 50, into)
    assert torch.equal(into, library.slab(1)[SLAB // 2 + 50 :][:100])
    assert library.gets == [(SLAB + SLAB // 2 + 50, 1)]
    engines[0].read(1, "region", 0, into[:0])
    engines[0].read(1, "region", SLAB // 2 - 100, into)
    assert len(library.gets) == 2, "nothing is to be read of nothing"


def test_other_memory_is_read_over_tcp(engines: list[NvshmemEngine], library: FakeLibrary) -> None:
    outside, inside = torch.zeros(10, dtype=torch.uint8), library.slab(0)[:10]
    engines[0].read(1, "region", 3, outside)
    assert torch.equal(outside, library.slab(1)[SLAB // 2 + 3 :][:10])
    engines[0].read(1, "words", 0, inside)
    assert inside.tolist() == [7] * 10
    assert library.gets == []


def test_before_the_start_all_memory_is_read_over_tcp(
    engines: list[NvshmemEngine], library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvshmem, "_started", None)
    into = library.slab(0)[:10]
    engines[0].read(1, "region", 0, into)
    assert torch.equal(into, library.slab(1)[SLAB // 2 :][:10]) and library.gets == []


@pytest.mark.parametrize(("region", "offset"), [("region", SLAB // 2 - 9), ("gone", 0), ("nothing", 0)])
def test_what_is_not_exposed_is_refused(
    engines: list[NvshmemEngine], library: FakeLibrary, region: str, offset: int
) -> None:
    engines[1].expose("gone", library.slab(1)[:10])
    engines[1].withdraw("gone")
    with pytest.raises(PeerLostError, match=f"rank 0, reading shards of rank 1: it exposes no .* {region!r}"):
        engines[0].read(1, region, offset, library.slab(0)[:10], what="shards")
    assert library.gets == []


def test_a_read_that_does_not_end_names_its_rank_in_time(engines: list[NvshmemEngine], library: FakeLibrary) -> None:
    """What the library goes on writing to, and the lane that waits for it, are not used again."""
    library.ends, begin = False, time.monotonic()
    with pytest.raises(
        WaitTimeoutError, match=r"rank 0, reading shards of rank 1: it has not ended after 0\.3 s"
    ) as late:
        engines[0].read(1, "region", 0, library.slab(0)[:10], what="shards")
    assert late.value.culprit == 1 and time.monotonic() - begin < 30
    library.ends = True
    engines[0].read(1, "region", 0, library.slab(0)[:10])
    engines[0].read(1, "region", 0, library.slab(0)[:10])
    lanes: Any = engines[0]._lanes
    lost, *later = lanes.used
    assert later == later[:1] * 2 and lost not in later
    with engines[1]._lane() as other:
        assert other not in lanes.used, "lanes of one name are one stream of the process"


def test_a_rank_that_dies_meanwhile_is_lost(engines: list[NvshmemEngine], library: FakeLibrary) -> None:
    engines[0]._connections._timeout_s = 60.0
    library.ends = False
    get = library.get

    def dies(*arguments: Any) -> None:
        get(*arguments)
        engines[1].close()

    library.get = dies  # type: ignore[method-assign]
    with pytest.raises(PeerLostError, match="rank 0, reading memory of rank 1: it closed the connection") as lost:
        engines[0].read(1, "region", 0, library.slab(0)[:10])
    assert lost.value.culprit == 1


def test_a_job_that_was_aborted_ends_the_wait(engines: list[NvshmemEngine], library: FakeLibrary) -> None:
    engines[0]._connections._timeout_s = 60.0
    library.ends = False

    def aborted(doing: str) -> None:
        raise OdcError(f"aborted while {doing}")

    with pytest.raises(OdcError, match="aborted while reading memory of rank 1"):
        engines[0].read(1, "region", 0, library.slab(0)[:10], check=aborted)


@pytest.mark.parametrize(("engine", "kind"), [("auto", NvshmemEngine), ("sockets", Engine)])
def test_the_engine_follows_from_the_memory_unless_one_is_named(engine: Any, kind: type[Engine]) -> None:
    made = make_engine(Settings(memory="nvshmem", engine=engine), 0, lambda rank, check: socket.socket(), "127.0.0.1")
    assert type(made) is kind
    made.close()
