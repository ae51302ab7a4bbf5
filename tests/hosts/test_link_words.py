"""What links send, and when, and the mirrors that it fills: members of two hosts in one process."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from support.linked import Linked, two_hosts_unlinked

from odc.hosts import links as module
from odc.memory import Words
from odc.net.messages import PushCounts
from odc.protocol import Outcome, RootState, Word
from odc.protocol.words import VersionWord, decode_outcome, encode_outcome, outcome_word


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
            board.wait_at_least(Word.DONE, 1, 3600.0)
        woken[by].set()

    sleepers = [threading.Thread(target=sleep, args=(by,), daemon=True) for by in (1, 3)]
    for by, sleeper in zip((1, 3), sleepers, strict=True):
        sleeper.start()
        assert asleep[by].wait(60.0)
    linked.group.members[0].protocol.board.store(Word.DONE, 1)
    linked.receive([2], lambda: linked.seen(2, 0, Word.DONE) == 1)
    assert all(one.wait(60.0) for one in woken.values())  # before their sleep ends by itself
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


@pytest.mark.parametrize("ahead", range(3))
def test_a_long_reason_arrives_whatever_its_characters(linked: Linked, ahead: int) -> None:
    """Its place ends inside a character, or behind one."""
    text = "x" * ahead + "é" * 2000
    mine = linked.join().group.layouts[0].mine
    mine.board.store(Word.PUBLISHED, 1)
    mine.set_abandonment(1, text)
    mine.board.store(outcome_word(1), encode_outcome(1, Outcome.ABANDONED))
    mine.set_reason(text)
    mine.board.store(Word.LEFT, 1)
    linked.receive([2], lambda: linked.seen(2, 0, Word.LEFT) == 1 or 2 not in linked.readers)
    assert linked.aborts[2] == []
    theirs = linked.group.layouts[3].peer(0)
    for found in (theirs.abandonment(1), theirs.reason):
        assert text.startswith(found) and 1021 <= len(found.encode()) < 1024


@pytest.mark.parametrize("moment", range(40))
def test_a_link_begins_while_its_rank_goes_on(moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the rank stores in turn, with each word that is loaded for the link, none comes before its reasons."""
    group = two_hosts_unlinked(changes="auto")
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
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
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
