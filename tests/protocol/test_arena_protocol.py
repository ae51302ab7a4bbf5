"""The words of an arena on one host: members in one process, whose waits are watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.members import HeapGroup

from odc.protocol import Word
from odc.protocol.arena_protocol import ArenaWords
from odc.settings import Settings
from odc.trace import MAIN, WAIT, recorder

LONG_NS = 1_000_000  # a wait that is worth a span


@pytest.fixture
def group() -> Iterator[HeapGroup]:
    regions = ArenaWords.requests
    with HeapGroup([], 2, settings=Settings(timeout_s=60.0), regions=lambda grid: regions(1, grid)) as made:
        made.attach()
        yield made


class Waits:
    """Words of member 0, each of whose waits is a long one, which `end` ends."""

    def __init__(self, group: HeapGroup, end: Callable[[], None]) -> None:
        self.board, self.end = group.layouts[0].mine.board, end
        self.words = ArenaWords(group.members[0].protocol, self.look_on)
        self.begun, self.seen = 0, list[int]()

    def look_on(self, member: int) -> bool:
        """On the waiting thread, again and again."""
        self.begun = self.begun or recorder().now()
        self.seen.append(self.board.load(Word.WAITING))
        if recorder().now() - self.begun > LONG_NS:
            self.end()
        return False


@pytest.mark.parametrize("lane", [MAIN, "plan"])
@pytest.mark.parametrize("word", ["STEP", "COPIED"])
def test_a_wait_beside_the_training_thread_is_no_time_of_it_and_not_on_the_board(
    group: HeapGroup, word: str, lane: str
) -> None:
    peer, elsewhere = ArenaWords(group.members[1].protocol), 77
    waits = Waits(group, lambda: peer.show(0, 1, 0, 8, 3, [0]) if word == "STEP" else peer.done(0, 1, 0))
    waits.board.store(Word.WAITING, elsewhere)  # of the training thread, which waits at the same time
    recorder().clear()
    if word == "STEP":
        assert waits.words.await_entry(0, 1, 1, "to put rows", lane) == (1, 0, 8, 3)
    else:
        waits.words.await_copied(0, 1, 1, "to read rows", lane)
    spans = [(span.lane, span.peer) for span in recorder().spans() if span.category == WAIT]
    assert spans == [(lane, group.ranks[1])]
    assert set(waits.seen[1:]) == {1 + group.ranks[1] if lane == MAIN else elsewhere}
    assert waits.board.load(Word.WAITING) == (0 if lane == MAIN else elsewhere)


def test_a_reader_that_skipped_an_entry_lets_its_owner_put_the_next_one(group: HeapGroup) -> None:
    owner = ArenaWords(group.members[1].protocol)
    owner.show(0, 1, 0, 8, 3, [0])
    copied = list[bool]()

    def put_the_next() -> None:
        copied.append(owner.copied(0, 1, 0))
        owner.show(0, 2, 0, 16, 5, [0])

    waits = Waits(group, put_the_next)
    assert not owner.copied(0, 1, 0)
    assert waits.words.await_entry(0, 2, 1, "to put rows") == (2, 0, 16, 5)
    assert copied == [True]
    assert not owner.copied(0, 2, 0), "it was not read yet"
