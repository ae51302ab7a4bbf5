"""Twin of odc/hosts/links.py, and of the mirror that it fills: members of two hosts in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from support.members import F32, HeapGroup

from odc.errors import PeerLostError
from odc.hosts import links as module
from odc.hosts.links import Links
from odc.net.messages import PushCounts, StoredWord, encode
from odc.protocol import Outcome, RootState, Word
from odc.protocol.words import BOARD_WORDS, decode_outcome, encode_outcome, outcome_word
from odc.runtime import Endpoint
from odc.settings import Settings

LAYOUT = [[("w", 8, F32), ("b", 2, F32)], [("v", 4, F32)]]
HOSTS = (0, 0, 1, 1)  # members 0 and 2 are partners, and 1 and 3


class Linked:
    """Four members on two hosts; 0 and 2 have links, over TCP of this host."""

    def __init__(self) -> None:
        self.group = HeapGroup(LAYOUT, 4, settings=Settings(timeout_s=60.0), hosts=HOSTS)
        self.aborts: dict[int, list[tuple[str, int]]] = {0: [], 2: []}
        self.links, self.readers, self.sockets = dict[int, Links](), dict[int, Callable[[], bool]](), dict[int, int]()
        self.group.attach_local()
        for me in (0, 2):
            layout = self.group.layouts[me]
            self.links[me] = Links(layout, self._abort(me))
            self.group.members[me] = Endpoint(layout, self.group.notify, links=self.links[me])

    def _abort(self, me: int) -> Callable[[str, int], None]:
        def abort(reason: str, culprit: int) -> None:
            self.aborts[me].append((reason, culprit))
            self.group.members[me].protocol.abort(reason, culprit)

        return abort

    def join(self) -> Linked:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            one = socket.create_connection(listener.getsockname())
            other, _ = listener.accept()
        for me, partner, connection in ((0, 2, one), (2, 0, other)):
            link = self.links[me].add(partner, connection)
            assert link is not None
            self.readers[me], self.sockets[me] = self.links[me].reader(link), link.fileno()
        return self

    def receive(self, me: int, until: Callable[[], bool]) -> bool:
        """Have `me` read its link until something holds; returns what the last read said."""
        end, goes_on = time.monotonic() + 60, True
        while not until():
            assert time.monotonic() < end
            if goes_on and select.select([self.sockets[me]], [], [], 0.05)[0]:
                goes_on = self.readers[me]()
        return goes_on

    def close(self) -> None:
        for one in self.links.values():
            one.close()
        self.group.close()


@pytest.fixture
def linked() -> Iterator[Linked]:
    made = Linked()
    yield made
    made.close()


def seen(linked: Linked, by: int, of: int, word: int) -> int:
    return linked.group.layouts[by].peer(of).board.load(word)


def test_every_rank_of_a_host_sees_what_one_of_the_other_stores(linked: Linked) -> None:
    linked.join()
    board = linked.group.members[0].protocol.board
    for word in (Word.PUBLISHED, Word.OUTCOME_ODD, Word.DONE, Word.COMPLETE, Word.REDUCED, Word.READ, Word.LEFT):
        board.store(word, 100 + word)
        linked.receive(2, lambda word=word: seen(linked, 2, 0, word) == 100 + word)
        assert seen(linked, 3, 0, word) == 100 + word, "the mirror is of the whole host"
        assert seen(linked, 3, 1, word) == seen(linked, 0, 2, word) == 0, "and of this one member"


def test_a_word_wakes_who_sleeps_until_it_is_stored(linked: Linked) -> None:
    """A rank of its own host, and one of the other."""
    linked.join()
    asleep, woken = ({by: threading.Event() for by in (1, 3)} for _ in range(2))

    def sleep(by: int) -> None:
        board = linked.group.layouts[by].peer(0).board
        while board.load(Word.DONE) < 1:
            asleep[by].set()
            board.wait_at_least(Word.DONE, 1, 60.0)
        woken[by].set()

    sleepers = [threading.Thread(target=sleep, args=(by,), daemon=True) for by in (1, 3)]
    for by, sleeper in zip((1, 3), sleepers, strict=True):
        sleeper.start()
        assert asleep[by].wait(60.0)
    linked.group.members[0].protocol.board.store(Word.DONE, 1)
    linked.receive(2, lambda: seen(linked, 2, 0, Word.DONE) == 1)
    assert all(one.wait(30.0) for one in woken.values())  # before their naps end by themselves
    for sleeper in sleepers:
        sleeper.join()


def test_a_link_begins_with_how_the_rank_fares(linked: Linked) -> None:
    mine = linked.group.layouts[0].mine
    mine.board.store(Word.PUBLISHED, 5)
    mine.set_abandonment(5, "too long")
    mine.board.store(outcome_word(5), encode_outcome(5, Outcome.ABANDONED))
    mine.board.store(Word.DONE, 5)
    linked.join().receive(2, lambda: seen(linked, 2, 0, Word.DONE) == 5)
    theirs = linked.group.layouts[3].peer(0)
    assert theirs.abandonment(5) == "too long"
    assert decode_outcome(theirs.board.load(outcome_word(5)), 5) is Outcome.ABANDONED


def test_a_closed_minibatch_is_told_at_once_with_what_status_shows(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank may not call into odc again for long; else such words are told now and then."""
    monkeypatch.setattr(module, "LINK_REFRESH_S", 1e9)
    board = linked.join().group.members[0].protocol.board
    for word, value in (
        (Word.MICROBATCH, 4),
        (Word.FETCHED, 1 << 40),
        (Word.STATE, RootState.OPEN),
        (Word.PROGRESS, 7),
    ):
        board.store(word, value)
    board.store(Word.PUBLISHED, 3)
    linked.receive(2, lambda: seen(linked, 2, 0, Word.PUBLISHED) == 3)
    assert seen(linked, 3, 0, Word.MICROBATCH) == 0
    board.store(Word.STATE, RootState.CLOSED)
    linked.receive(2, lambda: seen(linked, 2, 0, Word.PROGRESS) == 7)
    assert (seen(linked, 3, 0, Word.MICROBATCH), seen(linked, 3, 0, Word.FETCHED)) == (4, 1 << 40)


def test_texts_and_counts_come_before_the_words_that_they_explain(linked: Linked) -> None:
    linked.join()
    protocol, counts = linked.group.members[0].protocol, torch.tensor([3, 1 << 40, 0])
    linked.group.publish(0)
    linked.links[0].send_counts(counts)
    protocol.explain("a bad sample")
    protocol.close(Outcome.ABANDONED)
    linked.receive(2, lambda: seen(linked, 2, 0, Word.DONE) == 1)
    theirs = linked.group.layouts[3].remote(0)
    assert theirs.pushes.tolist() == counts.tolist()
    assert theirs.abandonment(1) == "a bad sample"
    assert linked.group.layouts[3].remote(1).pushes.tolist() == [0, 0, 0]


def test_a_partner_is_told_which_sums_it_may_read(linked: Linked) -> None:
    linked.join()
    heard: list[tuple[int, int, dict[int, int]]] = []
    linked.readers[2] = linked.links[2].reader(linked.links[2]._links[0], lambda *told: heard.append(told))
    linked.links[0].send_summed(7, {1: 1 << 40, 0: 3})
    linked.receive(2, lambda: bool(heard))
    assert heard == [(0, 7, {1: 1 << 40, 0: 3})]
    linked.links[0].send_summed(8, {2: 1})  # there are units 0 and 1
    linked.receive(2, lambda: bool(linked.aborts[2]))
    assert "ReadableSums beyond" in linked.aborts[2][0][0]


def test_an_abort_reaches_every_rank_of_the_other_host_with_its_reason(linked: Linked) -> None:
    linked.join()
    linked.group.members[1].protocol.abort("rank 10 died", 10)  # a rank without a link, which this rank is attached to
    linked.group.members[0].protocol.abort("rank 13 died", 13)
    assert linked.group.layouts[0].mine.reason == "rank 10 died", "the first reason stays"
    linked.group.layouts[0].mine.board.store(Word.ABORT, 0)
    linked.group.members[0].protocol.abort("rank 13 died", 13)
    linked.receive(2, lambda: bool(linked.aborts[2]))
    assert linked.aborts[2][0] == ("rank 13 died", 13)
    for member in (2, 3):
        mine = linked.group.layouts[member].mine
        assert (mine.board.load(Word.ABORT), mine.reason) == (1 + 13, "rank 13 died")


def test_progress_is_told_now_and_then_only(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    linked.join()
    told = list[object]()
    monkeypatch.setattr(linked.links[0], "_send", lambda link, *frames: told.append(frames))
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    for _ in range(100):
        linked.group.members[0].protocol.touch("testing")
    assert len(told) == 1
    clock[0] += 1.0
    linked.links[0].refresh()
    assert len(told) == 2


def test_a_rank_that_does_not_read_for_long_is_not_dead(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends a connection whose other end has had no room for two seconds: there must be some."""
    monkeypatch.setattr(module, "LINK_REFRESH_S", 0.0)
    board, link = linked.join().group.layouts[0].mine.board, linked.links[0]._links[2]
    for _ in range(5000):
        linked.links[0].refresh()
    assert not link.room(0), "far more was to be said than there is room for"
    end = time.monotonic() + 60
    while link.unacknowledged():  # for ever, or until the kernel has ended it, of more than there is room for
        assert time.monotonic() < end
        time.sleep(0.01)
    board.store(Word.DONE, 5)
    linked.receive(2, lambda: seen(linked, 2, 0, Word.DONE) == 5)
    board.store(Word.READ, 5)
    linked.receive(2, lambda: seen(linked, 2, 0, Word.READ) == 5)
    linked.links[0].refresh()
    assert not linked.aborts[0] and not linked.aborts[2]


def test_counts_wait_for_room_and_come_in_parts(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COUNTS", 2)
    links, room = linked.join().links[0], threading.Event()
    monkeypatch.setattr(links._links[2], "room", lambda nbytes: room.is_set())
    telling = threading.Thread(target=links.send_counts, args=(torch.tensor([3, 1 << 40, 7]),))
    telling.start()
    telling.join(0.2)
    assert telling.is_alive()
    room.set()
    telling.join()
    theirs = linked.group.layouts[3].remote(0)
    linked.receive(2, lambda: theirs.pushes.tolist() == [3, 1 << 40, 7])
    monkeypatch.undo()
    links._send_all(PushCounts(2, (0, 0)))  # there are three
    linked.receive(2, lambda: bool(linked.aborts[2]))
    assert "PushCounts beyond" in linked.aborts[2][0][0]


def test_a_rank_that_never_reads_counts_is_named(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    links = linked.join().links[0]
    monkeypatch.setattr(links._links[2], "room", lambda nbytes: False)
    settings = dataclasses.replace(links._layout.settings, timeout_s=0.1)
    monkeypatch.setattr(links._layout, "settings", settings)
    links.send_counts(torch.tensor([3, 4, 7]))
    ((reason, culprit),) = linked.aborts[0]
    assert "for 0.1 s it has not read what this host says" in reason and culprit == 16


def test_a_link_knows_what_has_not_arrived(linked: Linked) -> None:
    links = linked.join().links[0]
    links._links[2]._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
    links._links[2].send(*[StoredWord(Word.PUBLISHED, 1)] * 60_000)
    assert links.unacknowledged() == [2]
    links._links[2].send(StoredWord(Word.DONE, 1))
    linked.receive(2, lambda: seen(linked, 2, 0, Word.DONE) == 1)
    linked.receive(2, lambda: not links.unacknowledged())
    links._links[2].send(*[StoredWord(Word.PUBLISHED, 1)] * 60_000)
    linked.links[2].close()  # by a reset, as it has not read all
    end = time.monotonic() + 60
    while links.unacknowledged():
        assert time.monotonic() < end, "nobody will ever hear it"
        time.sleep(0.01)


@pytest.mark.parametrize("culprit", [None, 13])
def test_who_hangs_up_leaves_nobody_waiting_for_its_mirrors(linked: Linked, culprit: int | None) -> None:
    """A rank of its host looks there for those of the other one, and blames who has left."""
    linked.join()
    if culprit is not None:
        linked.group.layouts[0].mine.set_reason("ValueError: no words")
        linked.group.layouts[0].mine.board.store(Word.ABORT, 1 + culprit)
    linked.group.members[0].protocol.leave("")
    linked.links[0].close()
    linked.links[0].close()
    assert seen(linked, 1, 2, Word.LEFT if culprit is None else Word.ABORT)
    said = "rank 10 has left the job" if culprit is None else "aborted by rank 13: ValueError: no words"
    with pytest.raises(PeerLostError, match=said):
        linked.group.members[1].protocol.waiter.until(lambda: False, 2, "rank 16 to finish epoch 1")


def test_the_end_of_a_link_is_a_death_unless_the_rank_has_shut_down(linked: Linked) -> None:
    linked.join()
    linked.group.members[0].protocol.leave("")
    linked.links[0].close()
    assert linked.receive(2, lambda: seen(linked, 2, 0, Word.LEFT) == 1) in (True, False)
    with contextlib.suppress(OSError):
        linked.readers[2]()
    assert not linked.aborts[2]


def test_a_death_names_the_rank_at_the_other_end(linked: Linked) -> None:
    linked.join()
    linked.group.publish(0)
    linked.receive(2, lambda: seen(linked, 2, 0, Word.PUBLISHED) == 1)
    linked.links[0].close()
    linked.receive(2, lambda: bool(linked.aborts[2]))
    assert linked.aborts[2] == [("rank 10 died in epoch 1 (done with 0): its link to rank 16 has ended", 10)]


def test_a_rank_that_shut_down_before_it_was_linked_has_left(linked: Linked) -> None:
    """It admits the visitor and hangs up, without a word of its own; nobody died of that."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = linked.links[2].add(0, socket.create_connection(listener.getsockname()))
        assert link is not None
        linked.readers[2], linked.sockets[2] = linked.links[2].reader(link), link.fileno()
        listener.accept()[0].close()
    assert not linked.receive(2, lambda: seen(linked, 3, 0, Word.LEFT) == 1)
    assert not linked.aborts[2]
    with pytest.raises(PeerLostError, match="rank 10 has left the job"):
        linked.group.members[3].protocol.waiter.until(lambda: False, 0, "rank 10 to publish epoch 1")


@pytest.mark.parametrize(("me", "other"), [(2, 0), (0, 2)])
def test_the_same_host_is_named_on_both_sides_of_a_cut(linked: Linked, me: int, other: int) -> None:
    linked.join()
    linked.links[me]._lost(linked.links[me]._links[other], TimeoutError(110, "Connection timed out"))
    ((reason, culprit),) = linked.aborts[me]
    assert reason.startswith("the host of ranks 16, 19 cannot be reached any more from that of ranks 10, 13 in epoch 0")
    assert culprit == 16


def test_a_link_that_always_has_more_leaves_the_daemon_time_for_others(linked: Linked) -> None:
    """A daemon that takes long over a word may be told words faster than it takes them."""
    linked.join()
    link, told = linked.links[2]._links[0], encode(StoredWord(Word.PROGRESS, 7))
    endless = itertools.chain(itertools.repeat(told, 1000), [b""])
    link.receive = lambda: next(endless)  # type: ignore[method-assign]
    assert linked.readers[2]()
    assert seen(linked, 3, 0, Word.PROGRESS) == 7
    assert not linked.aborts[2], "it reads until nothing more comes"


@pytest.mark.parametrize(
    "said", [struct.pack("!BI", 77, 0), encode(StoredWord(BOARD_WORDS, 1)), encode(StoredWord(-1, 1))]
)
def test_a_rank_that_speaks_nonsense_ends_the_job(linked: Linked, said: bytes) -> None:
    linked.join()
    linked.links[0]._links[2]._connection.sendall(said)
    linked.receive(2, lambda: bool(linked.aborts[2]))
    assert "speaks nonsense" in linked.aborts[2][0][0]


def test_a_second_link_to_the_same_rank_is_refused(linked: Linked) -> None:
    linked.join()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        second = socket.create_connection(listener.getsockname())
        assert linked.links[0].add(2, second) is None
        assert second.fileno() == -1
