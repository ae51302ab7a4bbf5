"""Twin of odc/runtime/reading.py, of members on other hosts; tests/handover has those on this one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.ports import free_ports

from odc.errors import LayoutMismatchError, PeerLostError
from odc.protocol import Word
from odc.runtime import RemoteMember, WeightEngine
from odc.runtime.linking import BOARD, READER_WORDS

DIGEST = "d" * 64


class Fake:
    """An engine that reads one heap, and counts."""

    root = "0.a"

    def __init__(self, nbytes: int) -> None:
        self.heap = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.board, self.reason = dict.fromkeys(READER_WORDS, 0), b""
        self.reads: list[tuple[int, int]] = []

    @property
    def sockets(self) -> Fake:
        return self

    def ask(self, rank: int, name: str, **unused: Any) -> bytes:
        assert (rank, name) == (3, "0.a/board")
        return BOARD.pack(*self.board.values(), DIGEST.encode()) + self.reason

    def read(self, rank: int, region: str, offset: int, into: torch.Tensor, **unused: Any) -> None:
        assert (rank, region, into.device.type) == (3, "0.a", "cpu")
        self.reads.append((offset, into.numel()))
        into.copy_(self.heap[offset : offset + into.numel()])


def member(engine: Fake) -> RemoteMember:
    return RemoteMember(3, engine, DIGEST)  # type: ignore[arg-type]


def test_what_is_to_lie_on_a_device_is_read_into_host_memory_first() -> None:
    """The engine would write there in another stream than the one whose turn it is."""
    engine = Fake(64)
    source = member(engine)
    source.copy(8, torch.empty(16, dtype=torch.uint8, device="meta"))
    assert engine.reads == [(8, 16)]


def test_pieces_that_lie_close_together_are_read_together() -> None:
    engine = Fake(12 << 20)
    source, draw = member(engine), random.Random(0)
    pieces = [(100, 50), (150, 7), (200, 1), (5 << 20, 3 << 20), (9 << 20, 10), ((9 << 20) + 5000, 0)]
    draw.shuffle(pieces)
    for _ in range(2):  # what was read before is not given out again
        engine.heap += 1
        engine.reads.clear()
        source.expect(pieces)
        for offset, nbytes in sorted(pieces):
            into = torch.zeros(nbytes, dtype=torch.uint8)
            source.copy(offset, into)
            assert torch.equal(into, engine.heap[offset : offset + nbytes]), (offset, nbytes)
        assert (100, 101) in engine.reads and (5 << 20, 3 << 20) in engine.reads
        assert len(engine.reads) <= 4


def test_what_was_not_expected_is_read_all_the_same() -> None:
    engine = Fake(1000)
    source, into = member(engine), torch.zeros(40, dtype=torch.uint8)
    source.copy(7, into)
    assert torch.equal(into, engine.heap[7:47])


def test_the_end_of_the_job_is_named() -> None:
    engine = Fake(10)
    source = member(engine)
    source.refuse_if_gone("reading")
    engine.board[Word.LEFT] = 1
    with pytest.raises(PeerLostError, match="reader, reading: rank 3 has left the job"):
        source.refuse_if_gone("reading")
    engine.board[Word.ABORT], engine.reason = 1 + 5, b"out of memory"
    with pytest.raises(PeerLostError, match="aborted by rank 5: out of memory") as caught:
        source.refuse_if_gone("reading")
    assert caught.value.culprit == 5


class Interrupted(Fake):
    """Whose connection ends before its answers of these numbers."""

    def __init__(self, lost: set[int]) -> None:
        super().__init__(10)
        self.asked, self.lost = 0, lost

    def ask(self, rank: int, name: str, **unused: Any) -> bytes:
        self.asked += 1
        if self.asked in self.lost:
            raise PeerLostError(f"reader: connection {self.asked} has ended", culprit=rank)
        return super().ask(rank, name)


def test_the_end_of_a_connection_is_not_that_of_the_rank() -> None:
    """As where the network failed, or the reader's host slept, between two reads."""
    engine = Interrupted(lost={2, 4})
    source = member(engine)
    assert source.load() == engine.board
    source.refuse_if_gone("reading")
    assert engine.asked == 5


def test_a_rank_that_cannot_be_reached_again_is_lost() -> None:
    engine = Interrupted(lost={2, 3})
    source = member(engine)
    with pytest.raises(PeerLostError, match="connection 2 has ended"):
        source.load()
    with pytest.raises(PeerLostError, match="connection 1 has ended"):  # an attaching reader need not try twice
        member(Interrupted(lost={1}))


def test_a_rank_that_listens_no_more_has_ended_or_is_elsewhere() -> None:
    """As before every read but the first after the end of a job, which found the end of a connection."""
    engine = WeightEngine("root", b"secret", {3: ("127.0.0.1", free_ports(1)[0])}, 60.0)
    with pytest.raises(
        PeerLostError, match=r"reader, connecting to rank 3 .*; the job may have ended; or, if .* there$"
    ):
        RemoteMember(3, engine, "digest")
    engine.close()


def test_another_heap_is_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="rank 3: its heap is not laid out as the weight handle says"):
        RemoteMember(3, Fake(10), "e" * 64)  # type: ignore[arg-type]
