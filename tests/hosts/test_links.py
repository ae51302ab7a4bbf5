"""Links between hosts: how they begin and end, and what a rank that does not read does to them."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import socket
import struct

import pytest
import torch
from support.linked import Linked, connection, two_hosts_unlinked
from support.waiting import until
from torch._subclasses.fake_tensor import FakeTensorMode

from odc.errors import PeerLostError
from odc.hosts import links as module
from odc.memory import Words
from odc.net.liveness import Loss
from odc.net.messages import StoredWord, encode
from odc.protocol import MemberProtocol, Word
from odc.protocol.words import BOARD_WORDS


def test_links_close_while_torch_traces_a_model(linked: Linked) -> None:
    """The garbage collector closes a root at any moment."""
    linked.join()
    linked.group.layouts[0].mine.set_reason("done")
    with FakeTensorMode():
        linked.links[0].close()
    theirs = linked.group.layouts[0].remote(2)
    assert (theirs.board.load(Word.LEFT), theirs.reason) == (1, "done")


def test_a_root_that_is_closed_at_that_moment_does_not_end_a_call_into_another(linked: Linked) -> None:
    """A rank that calls into one notes its progress in all of them, and the daemon closes those that were shut down."""
    linked.join()
    other = Linked(two_hosts_unlinked()).join()
    board = other.group.members[0].protocol.board

    def beside() -> list[Words]:
        other.links[0].close()
        other.group.layouts[0].close()
        return [board]

    protocol = MemberProtocol(linked.group.layouts[0], linked.links[0], beside)
    protocol.touch("testing")
    assert protocol.board.load(Word.PROGRESS) == board.load(Word.PROGRESS) == 1
    other.close()


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


def test_the_end_of_a_wait_that_others_have_seen_is_sent(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank that goes on without odc for long stands in their chains of waits, and another one is blamed."""
    mine, links = linked.join().group.layouts[0].mine.board, linked.links[0]
    theirs = linked.group.layouts[2].remote(0).board

    def store(word: Word, value: int) -> None:
        mine.store(word, value)
        links.stored(word, value)

    store(Word.WAITING, 2)
    links._refresh()
    linked.receive([2], lambda: theirs.load(Word.WAITING) == 2)
    store(Word.WAITING, 0)
    linked.receive([2], lambda: theirs.load(Word.WAITING) == 0)
    sent: list[bytes] = []
    monkeypatch.setattr(links._links[2], "send", sent.append)
    store(Word.WAITING, 2)
    store(Word.WAITING, 0)
    assert not sent, "a wait that no other host has seen"


@pytest.mark.parametrize(("me", "other"), [(0, 2), (2, 0)])
def test_a_rank_that_never_reads_counts_is_named(
    linked: Linked, monkeypatch: pytest.MonkeyPatch, me: int, other: int
) -> None:
    """And not by the rule for a cut network, which may name this rank: the other host answers."""
    links, (here, there) = linked.join().links[me], (linked.group.layouts[0].grid.ranks[one] for one in (me, other))
    monkeypatch.setattr(links._links[other], "room", lambda nbytes: False)
    settings = dataclasses.replace(links._layout.settings, timeout_s=0.1)
    monkeypatch.setattr(links._layout, "settings", settings)
    links.send_counts(torch.tensor([3, 4, 7]))
    ((reason, culprit),) = linked.aborts[me]
    assert reason.startswith(f"rank {there} does not read its link to rank {here} in epoch 0")
    assert reason.endswith(": for 0.1 s it has not read what this host says") and culprit == there


def test_a_rank_whose_link_stays_full_is_named(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernel has taken no more for so long that the call ends."""
    links = linked.join().links[2]

    def full(encoded: bytes) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(links._links[0], "send", full)
    links.stored(Word.DONE, 1)
    ((reason, culprit),) = linked.aborts[2]
    assert reason.startswith("rank 10 does not read its link to rank 16 in epoch 0")
    assert culprit == 10


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
def test_the_same_host_is_named_on_both_sides_of_a_cut(
    linked: Linked, monkeypatch: pytest.MonkeyPatch, me: int, other: int
) -> None:
    link = linked.join().links[me]._links[other]
    monkeypatch.setattr(link, "silent", lambda: True)
    linked.links[me]._end(link, TimeoutError(110, "Connection timed out"))
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
