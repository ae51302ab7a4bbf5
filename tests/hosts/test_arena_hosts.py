"""An arena's words over hosts: members of two hosts in one process, whose links are TCP connections of this host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support.linked import HOSTS, Linked
from support.members import HeapGroup

from odc.errors import PeerLostError
from odc.memory import Words
from odc.protocol import RankGrid, Word
from odc.protocol.arena_protocol import ArenaWords
from odc.settings import Settings

CHANNELS = 2


class Arenas(Linked):
    """Four members with the words of an arena, two on each host; `join` links them."""

    def __init__(self) -> None:
        group = HeapGroup(
            [], 4, settings=Settings(timeout_s=60.0, accumulate="direct"), hosts=HOSTS,
            regions=lambda grid: ArenaWords.requests(CHANNELS, grid),
        )  # fmt: skip
        super().__init__(group, range(4))
        self.words = [ArenaWords(group.members[me].protocol) for me in range(4)]
        self._mark = 0

    def pass_on(self, until: Callable[[], object] | None = None) -> None:
        """Read all links until something holds; without a condition, until all that was sent has arrived."""
        if until is None:
            self._mark += 1
            for endpoint in self.group.members:
                endpoint.protocol.board.store(Word.OFFERED, self._mark)  # behind all else in its stream
        self.receive(range(4), until or self._marked)

    def _marked(self) -> bool:
        return [self.seen(me, me ^ 2, Word.OFFERED) for me in range(4)] == [self._mark] * 4


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    made = Arenas()
    yield made
    made.close()


@pytest.fixture
def joined(arenas: Arenas) -> Arenas:
    arenas.join()
    arenas.pass_on()
    return arenas


@pytest.mark.parametrize("early", [False, True])
def test_an_entry_is_seen_by_the_readers_host_and_what_it_takes_by_the_owner(arenas: Arenas, early: bool) -> None:
    """`early`: before there is a link, which then begins with it."""
    if not early:
        arenas.join()
        arenas.pass_on()
    arenas.words[0].show(1, 5, 64, 100, 77, [3])
    if early:
        arenas.join()
    arenas.pass_on()
    assert arenas.words[3].await_entry(1, 5, 0, "to put") == (5, 64, 100, 77)
    assert not arenas.words[0].copied(1, 5, 3), "it was not read yet"
    arenas.words[3].done(1, 5, 0)
    arenas.pass_on()
    arenas.group.layouts[0].remote(3).attach()
    assert arenas.words[0].copied(1, 5, 3)
    assert not arenas.words[0].copied(1, 6, 3) and not arenas.words[0].copied(0, 5, 3)
    arenas.group.layouts[1].remote(3).attach()
    assert not arenas.words[1].copied(1, 5, 3), "it is another owner's"


class Watched:
    """Words of a mirror, and what another process would see in its first entry after each store."""

    def __init__(self, words: Words, seen: list[tuple[int, ...]]) -> None:
        self._words, self._seen = words, seen

    def store(self, at: int, value: int) -> None:
        self._words.store(at, value)
        self._seen.append(tuple(self._words.load(i) for i in range(4)))


def test_no_reader_sees_a_step_with_the_entry_before_it(joined: Arenas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers are other processes, and may look between two stores."""
    first, second = (4, 0, 36, 11), (5, 64, 100, 77)
    joined.words[0].show(0, *first, [2])
    joined.pass_on()
    peer, seen = joined.group.layouts[2].remote(0), list[tuple[int, ...]]()
    mirror = peer.mirrored
    monkeypatch.setattr(peer, "mirrored", lambda name: Watched(mirror(name), seen))
    joined.words[0].show(0, *second, [2])
    joined.pass_on()
    assert len(seen) == 4 and seen[-1] == second
    assert {entry[0] for entry in seen[:-1]} == {4}, seen


def test_an_entry_goes_to_the_hosts_of_its_readers_only(joined: Arenas) -> None:
    joined.words[0].show(0, 1, 0, 10, 3, [1])
    joined.pass_on()
    assert joined.group.layouts[3].remote(0).mirrored("arena/table").load(0) == 0
    assert joined.words[1].await_entry(0, 1, 0, "to put") == (1, 0, 10, 3)


@pytest.mark.parametrize(("first", "count"), [(4 * CHANNELS, 1), (-1, 1), (4 * CHANNELS - 1, 2)])
def test_words_beyond_an_arena_are_nonsense(joined: Arenas, first: int, count: int) -> None:
    joined.links[0].send_words(1, "arena/table", first, (1,) * count)
    joined.pass_on(lambda: joined.aborts[2])
    assert len(joined.aborts[2]) == 1 and "speaks nonsense" in joined.aborts[2][0][0]


def test_a_death_is_seen_by_ranks_that_the_one_with_the_link_does_not_know(joined: Arenas) -> None:
    """Member 1 waits for member 2, whose link to member 0 ends; member 0 is attached to no other."""
    joined.group.layouts[1].remote(2).attach()
    assert not joined.group.layouts[0].local(1).attached
    del joined.readers[2]
    joined.links[2].close()
    joined.pass_on(lambda: joined.aborts[0])
    assert joined.aborts[0][0][1] == 16
    with pytest.raises(PeerLostError, match="aborted by rank 16: rank 16 died in epoch 0") as caught:
        joined.words[1].await_entry(0, 1, 2, "to put rows")
    assert caught.value.culprit == 16
    assert not joined.group.layouts[1].mine.board.load(Word.ABORT)


def test_regions_are_there_over_hosts_only() -> None:
    one, two = RankGrid((0, 1), 2, 0), RankGrid((0, 1), 2, 0, (0, 1))
    assert [name for name, _ in ArenaWords.requests(3, one)] == ["arena/table", "arena/copied"]
    assert dict(ArenaWords.requests(3, two))["mirror/arena/table"] == torch.empty(3, 4, dtype=torch.int64).nbytes
