"""Links between hosts, and the mirrors that they fill: members of two hosts in one process."""

from __future__ import annotations

import dataclasses
import itertools
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch
from support.linked import HOSTS, Linked, connection
from support.members import F32, HeapGroup
from support.waiting import until
from torch._subclasses.fake_tensor import FakeTensorMode

from odc.errors import PeerLostError
from odc.hosts import links as module
from odc.memory import Words
from odc.net.liveness import Loss
from odc.net.messages import PushCounts, StoredWord, encode
from odc.protocol import Outcome, RootState, Word
from odc.protocol.words import BOARD_WORDS, VersionWord, decode_outcome, encode_outcome, outcome_word
from odc.settings import Settings

LAYOUT = [[("w", 8, F32), ("b", 2, F32)], [("v", 4, F32)]]


@pytest.fixture
def linked() -> Iterator[Linked]:
    """Links of members 0 and 2, not yet joined."""
    group = HeapGroup(LAYOUT, 4, settings=Settings(timeout_s=60.0), hosts=HOSTS)
    group.attach_local()
    made = Linked(group)
    yield made
    made.close()


def test_every_rank_of_a_host_sees_what_one_of_the_other_stores(linked: Linked) -> None:
    linked.join()
    board = linked.group.members[0].protocol.board
    for word in (Word.PUBLISHED, Word.OUTCOME_ODD, Word.DONE, Word.COMPLETE, Word.REDUCED, Word.READ, Word.LEFT):
        board.store(word, 100 + word)
        linked.receive([2], lambda word=word: linked.seen(2, 0, word) == 100 + word)
        assert linked.seen(3, 0, word) == 100 + word, "the mirror is of the whole host"
        assert linked.seen(3, 1, word) == linked.seen(0, 2, word) == 0, "and of this one member"


def test_a_word_wakes_ranks_that_sleep_until_it_is_stored(linked: Linked) -> None:
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
    linked.receive([2], lambda: linked.seen(2, 0, Word.DONE) == 1)
    assert all(one.wait(30.0) for one in woken.values())  # before their sleep ends by itself
    for sleeper in sleepers:
        sleeper.join()


def test_a_link_begins_with_the_state_of_the_rank(linked: Linked) -> None:
    mine = linked.group.layouts[0].mine
    mine.board.store(Word.PUBLISHED, 5)
    mine.set_abandonment(5, "too long")
    mine.board.store(outcome_word(5), encode_outcome(5, Outcome.ABANDONED))
    mine.board.store(Word.DONE, 5)
    linked.join().receive([2], lambda: linked.seen(2, 0, Word.DONE) == 5)
    theirs = linked.group.layouts[3].peer(0)
    assert theirs.abandonment(5) == "too long"
    assert decode_outcome(theirs.board.load(outcome_word(5)), 5) is Outcome.ABANDONED


@pytest.mark.parametrize("moment", range(40))
def test_a_link_begins_while_its_rank_goes_on(moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the rank stores in turn, with each word that is loaded for the link, none comes before its reasons."""
    group = HeapGroup(LAYOUT, 4, settings=Settings(timeout_s=60.0, changes="auto"), hosts=HOSTS)
    group.attach_local()
    linked, mine = Linked(group), group.layouts[0].mine
    explained = encode_outcome(1, Outcome.ABANDONED)
    turns = [
        lambda: [mine.versions(unit).store(VersionWord.CHANGED, 1) for unit in group.units],
        lambda: mine.board.store(Word.PUBLISHED, 1),
        lambda: mine.set_abandonment(1, "too long"),
        lambda: mine.board.store(outcome_word(1), explained),
        lambda: mine.board.store(Word.DONE, 1),
        lambda: mine.set_reason("it must end"),
        lambda: mine.board.store(Word.ABORT, 1),
    ]
    load, calls, stored = Words.load, itertools.count(), list[object]()

    def load_between(words: Words, i: int) -> int:
        if moment <= next(calls) and len(stored) < len(turns):
            stored.append(None)
            turns[len(stored) - 1]()
        return load(words, i)

    monkeypatch.setattr(Words, "load", load_between)
    messages = linked.links[0]._first_messages()
    monkeypatch.setattr(Words, "load", load)
    theirs = group.layouts[2].remote(0)
    for message in messages:
        linked.links[2]._take(0, message, None)
        if theirs.board.load(Word.PUBLISHED):
            assert [theirs.versions(unit).load(VersionWord.CHANGED) for unit in group.units] == [1, 1]
        if theirs.board.load(outcome_word(1)) == explained:
            assert theirs.abandonment(1) == "too long"
        assert theirs.board.load(Word.PUBLISHED) >= theirs.board.load(Word.DONE)
        if theirs.board.load(Word.DONE):
            assert theirs.board.load(outcome_word(1)) == explained
        if theirs.board.load(Word.ABORT):
            assert theirs.reason == "it must end"
    linked.close()


def test_links_close_while_torch_traces_a_model(linked: Linked) -> None:
    """The garbage collector closes a root at any moment."""
    linked.join()
    linked.group.layouts[0].mine.set_reason("done")
    with FakeTensorMode():
        linked.links[0].close()
    theirs = linked.group.layouts[0].remote(2)
    assert (theirs.board.load(Word.LEFT), theirs.reason) == (1, "done")


def test_a_closed_minibatch_is_sent_at_once_with_what_status_shows(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank may not call into odc again for long; else such words are sent now and then."""
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
    linked.receive([2], lambda: linked.seen(2, 0, Word.PUBLISHED) == 3)
    assert linked.seen(3, 0, Word.MICROBATCH) == 0
    board.store(Word.STATE, RootState.CLOSED)
    linked.receive([2], lambda: linked.seen(2, 0, Word.PROGRESS) == 7)
    assert (linked.seen(3, 0, Word.MICROBATCH), linked.seen(3, 0, Word.FETCHED)) == (4, 1 << 40)


def test_texts_and_counts_come_before_the_words_that_they_explain(linked: Linked) -> None:
    linked.join()
    protocol, counts = linked.group.members[0].protocol, torch.tensor([3, 1 << 40, 0])
    linked.group.publish(0)
    linked.links[0].send_counts(counts)
    protocol.explain("a bad sample")
    protocol.close(Outcome.ABANDONED)
    linked.receive([2], lambda: linked.seen(2, 0, Word.DONE) == 1)
    theirs = linked.group.layouts[3].remote(0)
    assert theirs.pushes.tolist() == counts.tolist()
    assert theirs.abandonment(1) == "a bad sample"
    assert linked.group.layouts[3].remote(1).pushes.tolist() == [0, 0, 0]


def test_a_partner_learns_which_sums_it_may_read(linked: Linked) -> None:
    linked.join()
    heard: list[tuple[int, int, dict[int, int]]] = []
    linked.readers[2] = linked.links[2].reader(linked.links[2]._links[0], lambda *sums: heard.append(sums))
    linked.links[0].send_summed(7, {1: 1 << 40, 0: 3})
    linked.receive([2], lambda: bool(heard))
    assert heard == [(0, 7, {1: 1 << 40, 0: 3})]
    linked.links[0].send_summed(8, {2: 1})  # there are units 0 and 1
    linked.receive([2], lambda: bool(linked.aborts[2]))
    assert "ReadableSums beyond" in linked.aborts[2][0][0]


def test_an_abort_reaches_every_rank_of_the_other_host_with_its_reason(linked: Linked) -> None:
    linked.join()
    linked.group.members[1].protocol.abort("rank 10 died", 10)  # a rank without a link, which this rank is attached to
    linked.group.members[0].protocol.abort("rank 13 died", 13)
    assert linked.group.layouts[0].mine.reason == "rank 10 died", "the first reason stays"
    linked.group.layouts[0].mine.board.store(Word.ABORT, 0)
    linked.group.members[0].protocol.abort("rank 13 died", 13)
    linked.receive([2], lambda: bool(linked.aborts[2]))
    assert linked.aborts[2][0] == ("rank 13 died", 13)
    for member in (2, 3):
        mine = linked.group.layouts[member].mine
        assert (mine.board.load(Word.ABORT), mine.reason) == (1 + 13, "rank 13 died")


def test_progress_is_sent_now_and_then_only(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    linked.join()
    sent = list[object]()
    monkeypatch.setattr(linked.links[0], "_send", lambda link, *frames: sent.append(frames))
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    for _ in range(100):
        linked.group.members[0].protocol.touch("testing")
    assert len(sent) == 1
    clock[0] += 1.0
    linked.links[0].refresh()
    assert len(sent) == 2


def test_messages_are_encoded_once_for_all_links(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    links, sent = linked.join().links[0], list[bytes]()
    monkeypatch.setattr(links._links[2], "send", sent.append)
    monkeypatch.setattr(links, "_links", dict.fromkeys((2, 3, 4), links._links[2]))
    for send in (
        lambda: linked.group.layouts[0].mine.board.store(Word.DONE, 1),
        lambda: links.send_counts(torch.tensor([3, 4, 0])),
        lambda: links.send_summed(1, {0: 3}),
        links._refresh,
    ):
        sent.clear()
        send()
        assert len(sent) == 3 and all(one is sent[0] for one in sent)


def test_a_rank_that_does_not_read_for_long_is_not_dead(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends a connection whose other end has had no room for two seconds: there must be some."""
    monkeypatch.setattr(module, "LINK_REFRESH_S", 0.0)
    board, link = linked.join().group.layouts[0].mine.board, linked.links[0]._links[2]
    for _ in range(5000):
        linked.links[0].refresh()
    assert not link.room(0), "far more was to be sent than there is room for"
    until(lambda: not link.unacknowledged())  # of more than there is room for, not before the kernel has ended it
    board.store(Word.DONE, 5)
    linked.receive([2], lambda: linked.seen(2, 0, Word.DONE) == 5)
    board.store(Word.READ, 5)
    linked.receive([2], lambda: linked.seen(2, 0, Word.READ) == 5)
    linked.links[0].refresh()
    assert not linked.aborts[0] and not linked.aborts[2]


def test_counts_wait_for_room_and_come_in_parts(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COUNTS", 2)
    links, room = linked.join().links[0], threading.Event()
    monkeypatch.setattr(links._links[2], "room", lambda nbytes: room.is_set())
    sending = threading.Thread(target=links.send_counts, args=(torch.tensor([3, 1 << 40, 7]),))
    sending.start()
    sending.join(0.2)
    assert sending.is_alive()
    room.set()
    sending.join()
    theirs = linked.group.layouts[3].remote(0)
    linked.receive([2], lambda: theirs.pushes.tolist() == [3, 1 << 40, 7])
    monkeypatch.undo()
    links._send_all(PushCounts(2, (0, 0)))  # there are three
    linked.receive([2], lambda: bool(linked.aborts[2]))
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
    links._links[2].send(encode(StoredWord(Word.PUBLISHED, 1)) * 60_000)
    assert links.unacknowledged() == [2]
    links._links[2].send(encode(StoredWord(Word.DONE, 1)))
    linked.receive([2], lambda: linked.seen(2, 0, Word.DONE) == 1)
    linked.receive([2], lambda: not links.unacknowledged())
    links._links[2].send(encode(StoredWord(Word.PUBLISHED, 1)) * 60_000)
    linked.links[2].close()  # by a reset, as it has not read all
    until(lambda: not links.unacknowledged(), "what no rank will ever read")


@pytest.mark.parametrize("culprit", [None, 13])
def test_a_rank_that_hangs_up_leaves_no_rank_waiting_for_its_mirrors(linked: Linked, culprit: int | None) -> None:
    """A rank of its host reads the other host's words there, and blames the rank that has left."""
    linked.join()
    if culprit is not None:
        linked.group.layouts[0].mine.set_reason("ValueError: no words")
        linked.group.layouts[0].mine.board.store(Word.ABORT, 1 + culprit)
    linked.group.members[0].protocol.leave("")
    linked.links[0].close()
    linked.links[0].close()
    assert linked.seen(1, 2, Word.LEFT if culprit is None else Word.ABORT)
    message = "rank 10 has left the job" if culprit is None else "aborted by rank 13: ValueError: no words"
    with pytest.raises(PeerLostError, match=message):
        linked.group.members[1].protocol.waiter.until(lambda: False, 2, "rank 16 to finish epoch 1")


def test_the_end_of_a_link_is_a_death_unless_the_rank_has_shut_down(linked: Linked) -> None:
    linked.join()
    linked.group.members[0].protocol.leave("")
    linked.links[0].close()
    linked.receive([2], lambda: 2 not in linked.readers)
    assert linked.seen(2, 0, Word.LEFT) == 1
    assert not linked.aborts[2]


def test_a_death_names_the_rank_at_the_other_end(linked: Linked) -> None:
    linked.join()
    linked.group.publish(0)
    linked.receive([2], lambda: linked.seen(2, 0, Word.PUBLISHED) == 1)
    linked.links[0].close()
    linked.receive([2], lambda: bool(linked.aborts[2]))
    assert linked.aborts[2] == [("rank 10 died in epoch 1 (done with 0): its link to rank 16 has ended", 10)]


def test_a_loss_that_the_ring_reports_ends_a_root_without_a_link_to_the_rank(linked: Linked) -> None:
    """A link reports the end of its rank itself, or that the rank had shut down."""
    ring = Loss(10, 10, "rank 10 died: its connection to rank 16, which watches it, has ended")
    linked.services[2].lost(ring)
    assert linked.aborts[2] == [(ring.text(), 10)]
    assert linked.seen(3, 0, Word.ABORT) == 1 + 10, "in the mirror, for ranks that this one is not attached to"


def test_a_loss_that_the_ring_reports_waits_for_the_link_to_the_rank(linked: Linked) -> None:
    linked.join()
    ring = Loss(10, 10, "rank 10 died: its connection to rank 16, which watches it, has ended")
    for loss in (ring, Loss(13, 13, "rank 13 died", "")):  # the latter is no partner of rank 16
        linked.services[2].lost(loss)
    assert not linked.aborts[2]
    linked.links[0].close()
    linked.receive([2], lambda: bool(linked.aborts[2]))
    assert linked.aborts[2] == [("rank 10 died in epoch 0 (done with 0): its link to rank 16 has ended", 10)]


def test_a_rank_that_shut_down_before_it_was_linked_has_left(linked: Linked) -> None:
    """It admits the connection and hangs up without a word of its own; no rank died of that."""
    one, other = connection()
    linked.add(2, 0, one)
    other.close()
    linked.receive([2], lambda: 2 not in linked.readers)
    assert linked.seen(3, 0, Word.LEFT) == 1
    assert not linked.aborts[2]
    with pytest.raises(PeerLostError, match="rank 10 has left the job"):
        linked.group.members[3].protocol.waiter.until(lambda: False, 0, "rank 10 to publish epoch 1")


@pytest.mark.parametrize(("me", "other"), [(2, 0), (0, 2)])
def test_the_same_host_is_named_on_both_sides_of_a_cut(linked: Linked, me: int, other: int) -> None:
    linked.join()
    linked.links[me]._end(linked.links[me]._links[other], TimeoutError(110, "Connection timed out"))
    ((reason, culprit),) = linked.aborts[me]
    assert reason.startswith("the host of ranks 16, 19 cannot be reached any more from that of ranks 10, 13 in epoch 0")
    assert culprit == 16


def test_a_link_that_always_has_more_leaves_the_daemon_time_for_others(linked: Linked) -> None:
    """A daemon that takes long over a word may be sent words faster than it takes them."""
    linked.join()
    link, frame = linked.links[2]._links[0], encode(StoredWord(Word.PROGRESS, 7))
    endless = itertools.chain(itertools.repeat(frame, 1000), [b""])
    link.receive = lambda: next(endless)  # type: ignore[method-assign]
    assert linked.readers[2]()
    assert linked.seen(3, 0, Word.PROGRESS) == 7
    assert not linked.aborts[2], "it reads until nothing more comes"


@pytest.mark.parametrize(
    "message", [struct.pack("!BI", 77, 0), encode(StoredWord(BOARD_WORDS, 1)), encode(StoredWord(-1, 1))]
)
def test_a_message_that_no_rank_sends_ends_the_job(linked: Linked, message: bytes) -> None:
    linked.join()
    linked.links[0]._links[2]._connection.sendall(message)
    linked.receive([2], lambda: bool(linked.aborts[2]))
    assert "speaks nonsense" in linked.aborts[2][0][0]


def test_a_second_link_to_the_same_rank_is_refused(linked: Linked) -> None:
    linked.join()
    one, other = connection()
    with other:
        assert linked.links[0].add(2, one) is None
        assert one.fileno() == -1
