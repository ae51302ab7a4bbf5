"""An arena's words over hosts: members of two hosts in one process, whose links are TCP connections of this host."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from odc.errors import PeerLostError
from odc.hosts.links import Links
from odc.memory import Attachment, ShmHeap, Words
from odc.protocol import HeapLayout, RankGrid, Word
from odc.protocol.arena_protocol import ArenaWords
from odc.runtime import Endpoint
from odc.settings import Settings

CHANNELS, HOSTS = 2, (0, 0, 1, 1)  # members 0 and 2 are partners, and 1 and 3
RANKS = (10, 13, 16, 19)


class Arenas:
    """Four members with an arena; those of two hosts know of each other what links carry."""

    def __init__(self) -> None:
        self.layouts: list[HeapLayout] = []
        for me in range(4):
            grid = RankGrid(RANKS, 4, me, HOSTS)
            heap = ShmHeap("words", RANKS, me, self._connect, 60.0)
            for name, nbytes in ArenaWords.requests(CHANNELS, grid):
                heap.allocate(name, nbytes, words=True)
            self.layouts.append(HeapLayout(heap, grid, (), Settings(timeout_s=60.0, accumulate="direct"), "test"))
        self.aborts: list[tuple[str, int]] = []
        self.links = [
            Links(layout, lambda reason, culprit: self.aborts.append((reason, culprit))) for layout in self.layouts
        ]
        self.members = [
            Endpoint(layout, lambda member: None, links=links)
            for layout, links in zip(self.layouts, self.links, strict=True)
        ]
        self.words = [ArenaWords(member.protocol) for member in self.members]
        self._reads, self._filenos, self._mark = dict[int, Callable[[], bool]](), dict[int, int](), 0

    def _connect(self, member: int) -> Attachment:
        heap = self.layouts[member].heap
        return Attachment(os.dup(heap.fd), heap.nbytes, heap.digest)

    def join(self) -> Arenas:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for near, far in ((0, 2), (1, 3)):
                one = socket.create_connection(listener.getsockname())
                other, _ = listener.accept()
                for me, partner, connection in ((near, far, one), (far, near, other)):
                    link = self.links[me].add(partner, connection)
                    assert link is not None
                    self._reads[link.fileno()] = self.links[me].reader(link)
                    self._filenos[me] = link.fileno()
        return self

    def pass_on(self, until: Callable[[], object] | None = None) -> None:
        """Have everybody read until something holds; if nothing is said, until all that was sent has arrived."""
        if until is None:
            self._mark += 1
            for endpoint in self.members:
                endpoint.protocol.board.store(Word.OFFERED, self._mark)  # behind all else in its stream
            until = self._marked
        end = time.monotonic() + 60
        while not until():
            assert time.monotonic() < end
            for fileno in select.select(list(self._reads), [], [], 0.05)[0]:
                if not self._reads[fileno]():
                    del self._reads[fileno]

    def _marked(self) -> bool:
        seen = [self.layouts[me].remote(me ^ 2).board.load(Word.OFFERED) for me in range(4)]
        return seen == [self._mark] * 4

    def hang_up(self, member: int) -> None:
        del self._reads[self._filenos[member]]
        self.links[member].close()

    def close(self) -> None:
        for links in self.links:
            links.close()
        for layout in self.layouts:
            layout.close()


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    made = Arenas()
    yield made
    made.close()


@pytest.mark.parametrize("early", [False, True])
def test_an_entry_is_seen_by_the_readers_host_and_what_it_takes_by_the_owner(arenas: Arenas, early: bool) -> None:
    """`early`: before there is a link, which then begins with it."""
    if not early:
        arenas.join().pass_on()
    arenas.words[0].show(1, 5, 64, 100, 77, [3])
    if early:
        arenas.join()
    arenas.pass_on()
    assert arenas.words[3].await_entry(1, 5, 0, "to put") == (5, 64, 100, 77)
    assert not arenas.words[0].copied(1, 5, 3), "it was not read yet"
    arenas.words[3].done(1, 5, 0)
    arenas.pass_on()
    arenas.layouts[0].remote(3).attach()
    assert arenas.words[0].copied(1, 5, 3)
    assert not arenas.words[0].copied(1, 6, 3) and not arenas.words[0].copied(0, 5, 3)
    arenas.layouts[1].remote(3).attach()
    assert not arenas.words[1].copied(1, 5, 3), "it is another owner's"


class Looked:
    """Words of a mirror, and what another process would see in its first entry after each store."""

    def __init__(self, words: Words, seen: list[tuple[int, ...]]) -> None:
        self._words, self._seen = words, seen

    def store(self, at: int, value: int) -> None:
        self._words.store(at, value)
        self._seen.append(tuple(self._words.load(i) for i in range(4)))


def test_no_reader_sees_a_step_with_the_entry_before_it(arenas: Arenas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers are other processes, and may look between two stores."""
    arenas.join().pass_on()
    first, second = (4, 0, 36, 11), (5, 64, 100, 77)
    arenas.words[0].show(0, *first, [2])
    arenas.pass_on()
    peer, seen = arenas.layouts[2].remote(0), list[tuple[int, ...]]()
    mirror = peer.mirrored
    monkeypatch.setattr(peer, "mirrored", lambda name: Looked(mirror(name), seen))
    arenas.words[0].show(0, *second, [2])
    arenas.pass_on()
    assert len(seen) == 4 and seen[-1] == second
    assert {entry[0] for entry in seen[:-1]} == {4}, seen


def test_an_entry_goes_to_the_hosts_of_its_readers_only(arenas: Arenas) -> None:
    arenas.join().pass_on()
    arenas.words[0].show(0, 1, 0, 10, 3, [1])
    arenas.pass_on()
    assert arenas.layouts[3].remote(0).mirrored("arena/table").load(0) == 0
    assert arenas.words[1].await_entry(0, 1, 0, "to put") == (1, 0, 10, 3)


@pytest.mark.parametrize(("first", "count"), [(4 * CHANNELS, 1), (-1, 1), (4 * CHANNELS - 1, 2)])
def test_words_beyond_an_arena_are_nonsense(arenas: Arenas, first: int, count: int) -> None:
    arenas.join().pass_on()
    arenas.links[0].send_words(1, "arena/table", first, (1,) * count)
    arenas.pass_on(lambda: arenas.aborts)
    assert len(arenas.aborts) == 1 and "speaks nonsense" in arenas.aborts[0][0]


def test_a_death_is_seen_by_ranks_that_the_one_with_the_link_does_not_know(arenas: Arenas) -> None:
    """Member 1 waits for member 2, whose link to member 0 ends; member 0 is attached to nobody."""
    arenas.join().pass_on()
    arenas.layouts[1].remote(2).attach()
    assert not arenas.layouts[0].local(1).attached
    arenas.hang_up(2)
    arenas.pass_on(lambda: arenas.aborts)
    assert arenas.aborts[0][1] == RANKS[2]
    with pytest.raises(PeerLostError, match="aborted by rank 16: rank 16 died in epoch 0") as caught:
        arenas.words[1].await_entry(0, 1, 2, "to put rows")
    assert caught.value.culprit == 16
    assert not arenas.layouts[1].mine.board.load(Word.ABORT)


def test_regions_are_there_over_hosts_only() -> None:
    one, two = RankGrid((0, 1), 2, 0), RankGrid((0, 1), 2, 0, (0, 1))
    assert [name for name, _ in ArenaWords.requests(3, one)] == ["arena/table", "arena/copied"]
    assert dict(ArenaWords.requests(3, two))["mirror/arena/table"] == torch.empty(3, 4, dtype=torch.int64).nbytes
