from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.members import F32, Crew

from odc.errors import PeerLostError
from odc.runtime import Gradient, Outbox, Word
from odc.runtime.ready import Ready
from odc.settings import Settings
from odc.trace import WAIT, recorder


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew([[("w", 4, F32)]], 3, settings=Settings(timeout_s=0.1), by_hand=True) as crew:
        crew.attach()
        yield crew


@pytest.fixture
def ready(crew: Crew) -> Ready:
    return Ready(crew.spaces[0], crew.verbs[0].waiter)


def test_a_peer_is_ready_once_it_has_opened_the_own_epoch(crew: Crew, ready: Ready) -> None:
    crew.publish(0)
    with crew.late(r"rank 10 \(epoch 1\), waiting for rank 13 to publish epoch 1"):
        ready.published(1)
    crew.publish(1)
    ready.published(1)
    with crew.late("rank 16 to publish epoch 1"):
        ready.to_push(2)


def test_what_is_known_of_one_epoch_is_forgotten_in_the_next(crew: Crew, ready: Ready) -> None:
    for epoch in (1, 2, 3):
        crew.publish(0)
        for member in (1, 2):
            with crew.late(f"to publish epoch {epoch}"):
                ready.published(member)
            crew.publish(member)
            ready.published(member)


def test_what_is_known_is_not_looked_up_again(crew: Crew, ready: Ready) -> None:
    """A fetch asks for every unit and owner: the second time must cost next to nothing."""
    crew.publish_all()
    ready.published(1)
    crew.spaces[1].board(1).store(Word.PUBLISHED, 0)
    ready.published(1)
    ready.published(2)
    ready.published(1)


def test_an_aborted_job_is_not_ready(crew: Crew, ready: Ready) -> None:
    crew.publish_all()
    crew.verbs[0].abort("over", 10)
    with pytest.raises(PeerLostError, match="waiting for rank 13 to publish epoch 1"):
        ready.published(1)


def test_a_free_slot_is_not_waited_for_and_a_full_ring_names_its_owner(crew: Crew, ready: Ready) -> None:
    crew.publish_all()
    box = Outbox(crew.spaces[0], 1)
    ready.credit(box)
    while box.credit():
        box.post(crew.units[0], 0, 1, F32)
    with crew.late(r"waiting for a free staging slot of rank 13 \(its server"):
        ready.credit(box)
    crew.services[1].drain()
    ready.credit(box)


def test_waits_of_the_sender_are_recorded_on_its_lane(crew: Crew, ready: Ready) -> None:
    crew.publish(0)
    recorder().clear()
    with crew.late():
        ready.to_push(1)
    crew.publish(1)
    crew.publish(2)
    for _ in range(crew.spaces[0].ring.slots):
        crew.verbs[0].push(crew.units[0], [Gradient(0, torch.ones(12))])
    with crew.late("staging slot"):
        crew.verbs[0].push(crew.units[0], [Gradient(0, torch.ones(12))])
    waits = [(span.peer, span.lane) for span in recorder().spans() if span.category == WAIT]
    assert waits == [(13, "push"), (13, "push")]
