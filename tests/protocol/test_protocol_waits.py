from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.members import F32, HeapGroup
from support.spread import Spread

from odc.errors import PeerLostError
from odc.protocol import Gradient, MemberProtocol, Outbox, Outcome, Word
from odc.protocol.peers.local import PushedWords
from odc.settings import Settings
from odc.trace import WAIT, recorder


@pytest.fixture
def group() -> Iterator[HeapGroup]:
    with HeapGroup([[("w", 4, F32)]], 3, settings=Settings(timeout_s=0.1), by_hand=True) as group:
        group.attach()
        yield group


@pytest.fixture
def protocol(group: HeapGroup) -> MemberProtocol:
    return group.members[0].protocol


def test_a_peer_is_ready_once_it_has_opened_the_own_epoch(group: HeapGroup, protocol: MemberProtocol) -> None:
    group.publish(0)
    with group.late(r"rank 10 \(epoch 1\), waiting for rank 13 to publish epoch 1"):
        protocol.await_published((1,))
    group.publish(1)
    protocol.await_published((1,))
    with group.late("rank 16 to publish epoch 1"):
        protocol.await_published((2,), "push")


def test_what_is_known_of_one_epoch_is_forgotten_in_the_next(group: HeapGroup, protocol: MemberProtocol) -> None:
    for epoch in (1, 2, 3):
        group.publish(0)
        for member in (1, 2):
            with group.late(f"to publish epoch {epoch}"):
                protocol.await_published((member,))
            group.publish(member)
            protocol.await_published((member,))


def test_what_is_known_is_not_looked_up_again(group: HeapGroup, protocol: MemberProtocol) -> None:
    """A fetch asks for every unit and owner: the second time must cost next to nothing."""
    group.publish_all()
    protocol.await_published((1,))
    group.layouts[1].peer(1).board.store(Word.PUBLISHED, 0)
    protocol.await_published((1,))
    protocol.await_published((2,))
    protocol.await_published((1,))


def test_an_aborted_job_is_not_ready(group: HeapGroup, protocol: MemberProtocol) -> None:
    group.publish_all()
    group.members[0].protocol.abort("over", 10)
    with pytest.raises(PeerLostError, match="waiting for rank 13 to publish epoch 1"):
        protocol.await_published((1,))


def test_a_free_slot_is_not_waited_for_and_a_full_ring_names_its_owner(
    group: HeapGroup, protocol: MemberProtocol
) -> None:
    group.publish_all()
    box = Outbox(protocol.layout, 1)
    protocol.await_credit(1, box.credit)
    while box.credit():
        box.post(group.units[0], 0, 1, F32)
    with group.late(r"waiting for a free staging slot of rank 13 \(its server"):
        protocol.await_credit(1, box.credit)
    group.services[1].drain()
    protocol.await_credit(1, box.credit)


def test_waits_of_the_sender_are_recorded_on_its_lane(group: HeapGroup, protocol: MemberProtocol) -> None:
    group.publish(0)
    recorder().clear()
    with group.late():
        protocol.await_published((1,), "push")
    group.publish(1)
    group.publish(2)
    for _ in range(group.layouts[0].ring.slots):
        group.members[0].pusher.push(group.units[0], [Gradient(0, torch.ones(12))])
    with group.late("staging slot"):
        group.members[0].pusher.push(group.units[0], [Gradient(0, torch.ones(12))])
    waits = [(span.peer, span.lane) for span in recorder().spans() if span.category == WAIT]
    assert waits == [(13, "push"), (13, "push")]


def test_who_sleeps_on_a_word_is_woken_and_other_words_wake_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    spread, woken = Spread(), list[int]()
    try:
        monkeypatch.setattr(PushedWords, "wake", lambda self, index: woken.append(index))
        protocol = spread.group.members[0].protocol
        spread.group.publish(0)
        for store, word in (
            (lambda: protocol.close(Outcome.TRAINED), Word.DONE),
            (lambda: protocol.complete(wait=False), Word.COMPLETE),
            (protocol.end_reducing, Word.REDUCED),
            (protocol.read_all, Word.READ),
        ):
            store()
            assert woken[-1] == word
        assert woken[0] == Word.PUBLISHED
        many = len(woken)
        protocol.touch("testing")
        protocol.count(Word.PUSHED, 5)
        assert len(woken) == many
    finally:
        spread.close()
