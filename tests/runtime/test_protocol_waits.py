from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.members import F32, Crew

from odc.errors import PeerLostError
from odc.runtime import Gradient, MemberProtocol, Outbox, Word
from odc.settings import Settings
from odc.trace import WAIT, recorder


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew([[("w", 4, F32)]], 3, settings=Settings(timeout_s=0.1), by_hand=True) as crew:
        crew.attach()
        yield crew


@pytest.fixture
def protocol(crew: Crew) -> MemberProtocol:
    return crew.members[0].protocol


def test_a_peer_is_ready_once_it_has_opened_the_own_epoch(crew: Crew, protocol: MemberProtocol) -> None:
    crew.publish(0)
    with crew.late(r"rank 10 \(epoch 1\), waiting for rank 13 to publish epoch 1"):
        protocol.await_published((1,))
    crew.publish(1)
    protocol.await_published((1,))
    with crew.late("rank 16 to publish epoch 1"):
        protocol.await_published((2,), "push")


def test_what_is_known_of_one_epoch_is_forgotten_in_the_next(crew: Crew, protocol: MemberProtocol) -> None:
    for epoch in (1, 2, 3):
        crew.publish(0)
        for member in (1, 2):
            with crew.late(f"to publish epoch {epoch}"):
                protocol.await_published((member,))
            crew.publish(member)
            protocol.await_published((member,))


def test_what_is_known_is_not_looked_up_again(crew: Crew, protocol: MemberProtocol) -> None:
    """A fetch asks for every unit and owner: the second time must cost next to nothing."""
    crew.publish_all()
    protocol.await_published((1,))
    crew.layouts[1].peer(1).board.store(Word.PUBLISHED, 0)
    protocol.await_published((1,))
    protocol.await_published((2,))
    protocol.await_published((1,))


def test_an_aborted_job_is_not_ready(crew: Crew, protocol: MemberProtocol) -> None:
    crew.publish_all()
    crew.members[0].protocol.abort("over", 10)
    with pytest.raises(PeerLostError, match="waiting for rank 13 to publish epoch 1"):
        protocol.await_published((1,))


def test_a_free_slot_is_not_waited_for_and_a_full_ring_names_its_owner(crew: Crew, protocol: MemberProtocol) -> None:
    crew.publish_all()
    box = Outbox(protocol, 1)
    protocol.await_credit(1, box.credit)
    while box.credit():
        box.post(crew.units[0], 0, 1, F32)
    with crew.late(r"waiting for a free staging slot of rank 13 \(its server"):
        protocol.await_credit(1, box.credit)
    crew.services[1].drain()
    protocol.await_credit(1, box.credit)


def test_waits_of_the_sender_are_recorded_on_its_lane(crew: Crew, protocol: MemberProtocol) -> None:
    crew.publish(0)
    recorder().clear()
    with crew.late():
        protocol.await_published((1,), "push")
    crew.publish(1)
    crew.publish(2)
    for _ in range(crew.layouts[0].ring.slots):
        crew.members[0].pusher.push(crew.units[0], [Gradient(0, torch.ones(12))])
    with crew.late("staging slot"):
        crew.members[0].pusher.push(crew.units[0], [Gradient(0, torch.ones(12))])
    waits = [(span.peer, span.lane) for span in recorder().spans() if span.category == WAIT]
    assert waits == [(13, "push"), (13, "push")]
